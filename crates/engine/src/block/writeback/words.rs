//! How write-back is said: `back:ORDER[,grain=GRAIN][,destage=WHEN]`, to a server, over its control socket, and to a simulation.

use std::fmt;
use std::str::FromStr;

use larder_base::Nanos;

use super::destager::Pace;
use super::throttle::Age;
use super::volume_log::{Cuts, Grain, Order};

/// What every write-back mode begins with.
pub const BACK: &str = "back:";
/// The whole of it, for messages.
pub const FORM: &str = "back:any, back:journaled[,cut=flushes|marks[,on-full=wait|cut]] or back:ordered[,grain=flush|completion][,destage=async|periodic:SECONDS|none]";

const ORDERS: &str = "choose any, ordered or journaled";
const GRAINS: &str = "choose flush or completion";
const CUTS: &str = "choose flushes or marks";
const FULLS: &str = "choose wait or cut";
const PACES: &str = "choose async, periodic:SECONDS or none";
/// Most seconds between two windows: a day.
const MOST_SECONDS: u64 = 86_400;
/// What is dirty may become so old where nothing is said, seconds.
const USUAL_AGE: u64 = 60;

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
    /// A place to end an epoch that there is not.
    #[error("cut='{0}' is no place where an epoch may end: {CUTS}")]
    Cut(String),
    /// Epochs of an order that has none.
    #[error("{0}= is of order 'journaled' alone: leave it out, or choose back:journaled")]
    NotJournaled(&'static str),
    /// Something to do in a full log that there is not.
    #[error("on-full='{0}' is nothing to do when no mark comes: {FULLS}")]
    OnFull(String),
    /// What to do without marks where it is not marks that count.
    #[error("on-full= is of cut=marks alone: leave it out, or write cut=marks")]
    OnFullOfFlushes,
    /// A bound on age, and destaging that waits for the log to fill up.
    #[error(
        "with destage=none data stay dirty until a volume holds half of its bound, so no limit on their age can be kept: leave one of the two out, or choose \
         destage=async or destage=periodic:SECONDS"
    )]
    AgeOfNone,
    /// No age.
    #[error(
        "'{0}' is no age: write whole seconds between 1 and {MOST_SECONDS}, as SECONDS or SECONDS,hard"
    )]
    Age(String),
    /// A time to destage that there is not.
    #[error("destage='{0}' is no time to destage: {PACES}")]
    Pace(String),
    /// A period that cannot be.
    #[error(
        "destage=periodic:{0}: write whole seconds between 1 and {MOST_SECONDS}, or choose destage=async"
    )]
    Period(String),
    /// A key that there is not.
    #[error("'{0}' is no part of a write-back mode: known are grain=, cut=, on-full= and destage=")]
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
        let (mut grain, mut pace, mut cut, mut full) = (None, None, None, None);
        for part in parts {
            match part.split_once('=') {
                Some(("grain", said)) => once(&mut grain, "grain", read_grain(said)?)?,
                Some(("cut", said)) => once(&mut cut, "cut", read_cut(said)?)?,
                Some(("on-full", said)) => once(&mut full, "on-full", read_full(said)?)?,
                Some(("destage", said)) => once(&mut pace, "destage", read_pace(said)?)?,
                _ => return Err(NotBack::Key(part.to_owned())),
            }
        }
        let cuts = match (cut.unwrap_or_default(), full) {
            (Cuts::Flushes, Some(_)) if order == "journaled" => {
                return Err(NotBack::OnFullOfFlushes);
            }
            (Cuts::Marks, Some(true)) => Cuts::MarksOrFull,
            (cut, _) => cut,
        };
        let order = match (order, grain) {
            ("any" | "ordered", _) if cut.is_some() => return Err(NotBack::NotJournaled("cut")),
            ("any" | "ordered", _) if full.is_some() => {
                return Err(NotBack::NotJournaled("on-full"));
            }
            ("any", None) => Order::Any,
            ("journaled", None) => Order::Journaled(cuts),
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

fn read_cut(said: &str) -> Result<Cuts, NotBack> {
    match said {
        "flushes" => Ok(Cuts::Flushes),
        "marks" => Ok(Cuts::Marks),
        _ => Err(NotBack::Cut(said.to_owned())),
    }
}

fn read_full(said: &str) -> Result<bool, NotBack> {
    match said {
        "wait" => Ok(false),
        "cut" => Ok(true),
        _ => Err(NotBack::OnFull(said.to_owned())),
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
        f.write_str(match self.order {
            Order::Journaled(Cuts::Marks) => ",cut=marks",
            Order::Journaled(Cuts::MarksOrFull) => ",cut=marks,on-full=cut",
            _ => "",
        })?;
        match self.pace {
            Pace::Async => Ok(()),
            Pace::Periodic(every) => write!(f, ",destage=periodic:{}", every.0 / 1_000_000_000),
            Pace::AtBound => f.write_str(",destage=none"),
        }
    }
}

impl Mode {
    /// How old dirty data of such a volume may become: as it is said, else 60 s, or two periods of the destage if that is more.
    ///
    /// # Errors
    /// When one is said, and data stay dirty until the log is full.
    pub fn age(&self, said: Option<Age>) -> Result<Option<Age>, NotBack> {
        let usual = Nanos::from_secs(USUAL_AGE);
        match (self.pace, said) {
            (Pace::AtBound, Some(_)) => Err(NotBack::AgeOfNone),
            (Pace::AtBound, None) => Ok(None),
            (_, Some(age)) => Ok(Some(age)),
            (Pace::Async, None) => Ok(Some(Age { most: usual, hard: false })),
            (Pace::Periodic(every), None) => {
                Ok(Some(Age { most: usual.max(Nanos(every.0 * 2)), hard: false }))
            }
        }
    }
}

/// `SECONDS`, or `SECONDS,hard`.
impl FromStr for Age {
    type Err = NotBack;

    fn from_str(text: &str) -> Result<Age, NotBack> {
        let (seconds, hard) = match text.split_once(',') {
            Some((seconds, "hard")) => (seconds, true),
            Some(_) => return Err(NotBack::Age(text.to_owned())),
            None => (text, false),
        };
        match seconds.parse() {
            Ok(n @ 1..=MOST_SECONDS) => Ok(Age { most: Nanos::from_secs(n), hard }),
            _ => Err(NotBack::Age(text.to_owned())),
        }
    }
}

impl fmt::Display for Age {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hard = if self.hard { ",hard" } else { "" };
        write!(f, "{}{hard}", self.most.0 / 1_000_000_000)
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
            "back:journaled,cut=marks",
            "back:journaled,cut=marks,on-full=cut,destage=none",
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
        let config: Mode = "back:journaled,on-full=wait,cut=marks".parse().unwrap();
        assert_eq!(config.to_string(), "back:journaled,cut=marks");
        let config: Mode = "back:journaled,cut=flushes".parse().unwrap();
        assert_eq!(config.to_string(), "back:journaled");
    }

    #[test]
    fn an_age_is_sixty_seconds_unless_it_is_said_or_cannot_be_kept() {
        let age = |mode: &str, said: Option<&str>| {
            let said = said.map(|said| said.parse().unwrap());
            mode.parse::<Mode>().unwrap().age(said).map(|age| age.map(|age| age.to_string()))
        };
        assert_eq!(age("back:any", None).unwrap().as_deref(), Some("60"));
        assert_eq!(age("back:any", Some("5,hard")).unwrap().as_deref(), Some("5,hard"));
        assert_eq!(age("back:any,destage=periodic:10", None).unwrap().as_deref(), Some("60"));
        assert_eq!(age("back:any,destage=periodic:45", None).unwrap().as_deref(), Some("90"));
        assert_eq!(age("back:any,destage=none", None).unwrap(), None);
        let why = age("back:any,destage=none", Some("5")).unwrap_err().to_string();
        assert!(why.contains("destage=none") && why.contains("destage=async"), "{why}");
        for text in ["", "0", "5,", "5,soft", "1.5", "86401", ",hard", "-1"] {
            let why = text.parse::<Age>().unwrap_err().to_string();
            assert!(why.contains(text) && why.contains("SECONDS,hard"), "{why}");
        }
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
            ("back:ordered,cut=marks", &["cut=", "'journaled' alone"]),
            ("back:any,on-full=cut", &["on-full=", "'journaled' alone"]),
            ("back:journaled,on-full=cut", &["on-full=", "of cut=marks alone"]),
            ("back:journaled,cut=mark", &["cut='mark'", "flushes or marks"]),
            ("back:journaled,cut=marks,on-full=stop", &["on-full='stop'", "wait or cut"]),
            ("back:journaled,cut=marks,cut=marks", &["cut= is said twice"]),
            ("back:ordered,age=7", &["'age=7'", "grain=, cut=, on-full= and destage="]),
            ("back:ordered,", &["''", "grain=, cut=, on-full= and destage="]),
            ("back:ordered,grain=flush,grain=flush", &["grain= is said twice"]),
        ] {
            let why = text.parse::<Mode>().unwrap_err().to_string();
            assert!(words.iter().all(|word| why.contains(word)), "{text}: {why}");
        }
    }
}
