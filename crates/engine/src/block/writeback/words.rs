//! How write-back is said: `back:ORDER[,grain=GRAIN][,destage=WHEN]`, to a server, over its control socket, and to a simulation.

use std::fmt;
use std::str::FromStr;

use larder_base::Nanos;

use super::destager::Pace;
use super::volume_log::{Cuts, Grain, Order};

/// What every write-back mode begins with.
pub const BACK: &str = "back:";
/// The whole of it, for messages.
pub const FORM: &str = "back:any, back:journaled or back:ordered[,grain=flush|completion][,destage=async|periodic:SECONDS|none]";

const ORDERS: &str = "choose any, ordered or journaled";
const GRAINS: &str = "choose flush or completion";
const PACES: &str = "choose async, periodic:SECONDS or none";
/// Most seconds between two windows: a day.
const MOST_SECONDS: u64 = 86_400;

/// In which order, and when, what was written comes to a volume's store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// In which order.
    pub order: Order,
    /// When.
    pub pace: Pace,
}

impl Default for Mode {
    fn default() -> Mode {
        Mode { order: Order::Ordered(Grain::Flush), pace: Pace::Async }
    }
}

/// Why a text says no write-back.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotBack {
    /// It does not begin with [`BACK`].
    #[error("'{0}' does not say how to write back: write {FORM}")]
    Form(String),
    /// An order that there is not.
    #[error("'{0}' is no order of write-back: {ORDERS}")]
    Order(String),
    /// A grain that there is not.
    #[error("grain='{0}' is no grain: {GRAINS}")]
    Grain(String),
    /// A grain of an order that has none.
    #[error("grain= is of order 'ordered' alone: leave it out, or choose back:ordered")]
    GrainOfAny,
    /// A time to destage that there is not.
    #[error("destage='{0}' is no time to destage: {PACES}")]
    Pace(String),
    /// A period that cannot be.
    #[error(
        "destage=periodic:{0}: write whole seconds between 1 and {MOST_SECONDS}, or choose destage=async"
    )]
    Period(String),
    /// A key that there is not.
    #[error("'{0}' is no part of a write-back mode: known are grain= and destage=")]
    Key(String),
    /// A key that is there already.
    #[error("{0}= is said twice: write it once")]
    Twice(&'static str),
}

impl FromStr for Mode {
    type Err = NotBack;

    fn from_str(text: &str) -> Result<Mode, NotBack> {
        let rest = text.strip_prefix(BACK).ok_or_else(|| NotBack::Form(text.to_owned()))?;
        let mut parts = rest.split(',');
        let order = parts.next().unwrap_or_default();
        let (mut grain, mut pace) = (None, None);
        for part in parts {
            match part.split_once('=') {
                Some(("grain", said)) => once(&mut grain, "grain", read_grain(said)?)?,
                Some(("destage", said)) => once(&mut pace, "destage", read_pace(said)?)?,
                _ => return Err(NotBack::Key(part.to_owned())),
            }
        }
        let order = match (order, grain) {
            ("any", None) => Order::Any,
            ("journaled", None) => Order::Journaled(Cuts::Flushes),
            ("any" | "journaled", Some(_)) => return Err(NotBack::GrainOfAny),
            ("ordered", grain) => Order::Ordered(grain.unwrap_or_default()),
            _ => return Err(NotBack::Order(order.to_owned())),
        };
        Ok(Mode { order, pace: pace.unwrap_or_default() })
    }
}

fn once<T>(have: &mut Option<T>, key: &'static str, said: T) -> Result<(), NotBack> {
    match have.replace(said) {
        None => Ok(()),
        Some(_) => Err(NotBack::Twice(key)),
    }
}

fn read_grain(said: &str) -> Result<Grain, NotBack> {
    match said {
        "flush" => Ok(Grain::Flush),
        "completion" => Ok(Grain::Completion),
        _ => Err(NotBack::Grain(said.to_owned())),
    }
}

fn read_pace(said: &str) -> Result<Pace, NotBack> {
    match (said, said.strip_prefix("periodic:")) {
        ("async", _) => Ok(Pace::Async),
        ("none", _) => Ok(Pace::AtBound),
        (_, Some(seconds)) => match seconds.parse() {
            Ok(n @ 1..=MOST_SECONDS) => Ok(Pace::Periodic(Nanos::from_secs(n))),
            _ => Err(NotBack::Period(seconds.to_owned())),
        },
        _ => Err(NotBack::Pace(said.to_owned())),
    }
}

/// As it is read; what holds anyway is left out.
impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(BACK)?;
        f.write_str(order_name(self.order))?;
        if let Order::Ordered(Grain::Completion) = self.order {
            f.write_str(",grain=completion")?;
        }
        match self.pace {
            Pace::Async => Ok(()),
            Pace::Periodic(every) => write!(f, ",destage=periodic:{}", every.0 / 1_000_000_000),
            Pace::AtBound => f.write_str(",destage=none"),
        }
    }
}

/// The name of an order.
pub fn order_name(order: Order) -> &'static str {
    match order {
        Order::Any => "any",
        Order::Ordered(_) => "ordered",
        Order::Journaled(_) => "journaled",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read_and_said_again() {
        for text in [
            "back:any",
            "back:journaled",
            "back:journaled,destage=periodic:5",
            "back:ordered",
            "back:ordered,grain=completion",
            "back:any,destage=none",
            "back:ordered,grain=completion,destage=periodic:30",
        ] {
            let config: Mode = text.parse().unwrap();
            assert_eq!(config.to_string(), text);
        }
        let config: Mode = "back:ordered,destage=async,grain=flush".parse().unwrap();
        assert_eq!(config, Mode::default());
        assert_eq!(config.to_string(), "back:ordered");
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_what_can() {
        for (text, words) in [
            ("hdd-ssd", &["hdd-ssd", "back:ordered"][..]),
            ("back:", &["no order", "any, ordered or journaled"]),
            ("back:journal", &["'journal'", "any, ordered or journaled"]),
            ("back:journaled,grain=flush", &["grain=", "'ordered' alone"]),
            ("back:Ordered", &["'Ordered'"]),
            ("back:any,grain=flush", &["grain=", "'ordered' alone"]),
            ("back:ordered,grain=line", &["grain='line'", "flush or completion"]),
            ("back:ordered,destage=later", &["destage='later'", "periodic:SECONDS"]),
            ("back:ordered,destage=periodic", &["destage='periodic'", "periodic:SECONDS"]),
            ("back:any,destage=periodic:0", &["periodic:0", "between 1 and 86400"]),
            ("back:any,destage=periodic:1.5", &["periodic:1.5", "whole seconds"]),
            ("back:any,destage=periodic:86401", &["between 1 and 86400"]),
            ("back:ordered,cut=marks", &["'cut=marks'", "grain= and destage="]),
            ("back:ordered,", &["''", "grain= and destage="]),
            ("back:ordered,grain=flush,grain=flush", &["grain= is said twice"]),
        ] {
            let why = text.parse::<Mode>().unwrap_err().to_string();
            assert!(words.iter().all(|word| why.contains(word)), "{text}: {why}");
        }
    }
}
