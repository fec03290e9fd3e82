//! What is said of a command line that cannot be meant: one sentence that names the flag, its value and the remedy, where clap
//! says several lines and, of a number, no remedy.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, Error, value_parser};

use crate::list::said;

/// Values that no range of a flag has, the largest of both kinds of whole numbers.
const LARGEST: [i128; 2] = [i64::MAX as i128, u64::MAX as i128];

/// A flag, or an argument without one, whose value was refused.
struct Wrong {
    /// As it is typed: `--threads`, or `SIZE` for an argument without a flag.
    name: String,
    value: String,
    /// What is wrong, and what to write instead.
    reason: String,
}

impl Wrong {
    /// What `error` says of a value, if it is about one. `command` is the one that has the flag.
    fn of(command: &Command, error: &Error) -> Option<Wrong> {
        let text = |kind| match error.get(kind)? {
            ContextValue::String(text) => Some(text.clone()),
            _ => None,
        };
        if !matches!(error.kind(), ErrorKind::ValueValidation | ErrorKind::InvalidValue) {
            return None;
        }
        let shown = text(ContextKind::InvalidArg)?;
        let value = text(ContextKind::InvalidValue).unwrap_or_default();
        let name = shown.trim_start_matches(['<', '[']);
        let name = name.split([' ', '[', '<', '=', '>', ']']).next().unwrap_or(name).to_owned();
        let reason = match error.get(ContextKind::ValidValue) {
            Some(ContextValue::Strings(all)) if !all.is_empty() => {
                format!("choose one of {}", all.join(", "))
            }
            _ => match std::error::Error::source(error) {
                Some(source) => reason(command, &name, &source.to_string()),
                None => format!("a value is missing: write {shown}"),
            },
        };
        Some(Wrong { name, value, reason })
    }

    /// The value, and what is wrong with it.
    fn of_value(&self) -> String {
        // What a parser says of itself may begin with the value.
        let value = format!("'{}'", self.value);
        match self.reason.strip_prefix(&value).is_some_and(|rest| rest.starts_with(' ')) {
            true => self.reason.clone(),
            false => format!("{value}: {}", self.reason),
        }
    }
}

/// The reason as a remedy: what the standard library and clap say of numbers is none.
fn reason(command: &Command, name: &str, said: &str) -> String {
    if let Some(range) = range_of(said) {
        return range;
    }
    let whole = ["invalid digit found in string", "cannot parse integer from empty string"];
    let large = ["number too large to fit", "number too small to fit", "number would be zero"];
    if whole.contains(&said) || large.iter().any(|begins| said.starts_with(begins)) {
        return allowed(command, name);
    }
    match said {
        "invalid float literal" | "cannot parse float from empty string" => {
            "write a number, as in 1.5".to_owned()
        }
        _ => said.to_owned(),
    }
}

/// What whole numbers a flag takes: it is asked for one that is too large, then for none.
fn allowed(command: &Command, name: &str) -> String {
    let alone = command.clone().no_binary_name(true).subcommand_required(false);
    let is_it = |arg: &Arg| {
        let mut names = arg.get_value_names().unwrap_or_default().iter();
        names.any(|n| n.as_str() == name) || arg.get_id().as_str() == name
    };
    // Whatever stands before an argument without a flag.
    let before = command.get_positionals().take_while(|arg| !is_it(arg)).count();
    let alone = alone.mut_args(|arg| match arg.is_positional() && !is_it(&arg) {
        true => arg.required(false).value_parser(value_parser!(String)),
        false => arg.required(false),
    });
    for number in LARGEST.into_iter().chain([0]) {
        let words = match name.starts_with('-') {
            true => vec![format!("{name}={number}")],
            false => {
                let mut words = vec!["x".to_owned(); before];
                words.push(number.to_string());
                words
            }
        };
        let Err(error) = alone.clone().try_get_matches_from(words) else { continue };
        let source = std::error::Error::source(&error).map(ToString::to_string);
        if let Some(range) = source.as_deref().and_then(range_of) {
            return range;
        }
    }
    format!("write a whole number from 0 to {}", u64::MAX)
}

/// What clap says of a number outside of its range (`0 is not in 1..=64`), as a remedy.
fn range_of(said: &str) -> Option<String> {
    let (_, range) = said.split_once(" is not in ")?;
    let (from, to) = range.split_once("..")?;
    let (from, to) = (from.parse::<i128>(), to.trim_start_matches('=').parse::<i128>());
    match (from, to) {
        (Ok(from), Ok(to)) if LARGEST.contains(&to) => {
            Some(format!("write a whole number, at least {from}"))
        }
        (Ok(from), Ok(to)) => Some(format!("write a whole number from {from} to {to}")),
        (Ok(from), Err(_)) => Some(format!("write a whole number, at least {from}")),
        _ => None,
    }
}

/// What clap says of a command line, in one sentence. `command` is the one whose flags were read, `typed` how it is typed.
pub fn refusal(command: &Command, typed: &str, error: &Error) -> String {
    if let Some(wrong) = Wrong::of(command, error) {
        let of_value = wrong.of_value();
        return format!("{} {of_value}", wrong.name);
    }
    let mut text = said(error);
    let shown = error.render().to_string();
    for tip in shown.lines().filter_map(|line| line.trim().strip_prefix("tip: ")) {
        text.push_str("; ");
        text.push_str(tip);
    }
    format!("{text}; `{typed} --help` shows what it takes")
}

/// The same of one value, whose flag is named beside it.
pub(crate) fn refusal_of_value(command: &Command, error: &Error) -> String {
    Wrong::of(command, error).map_or_else(|| said(error), |wrong| wrong.of_value())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_its_value_and_the_remedy_are_named() {
        let size = |text: &str| -> Result<u64, String> {
            text.parse().map_err(|_| format!("'{text}' is not a size: write a number of bytes"))
        };
        let command = Command::new("x")
            .no_binary_name(true)
            .arg(
                Arg::new("n")
                    .long("threads")
                    .short('t')
                    .value_parser(value_parser!(u16).range(1..=64)),
            )
            .arg(Arg::new("m").long("most").value_parser(value_parser!(u64).range(1..)))
            .arg(Arg::new("u").long("any").value_parser(value_parser!(u64)))
            .arg(Arg::new("s").long("share").value_parser(value_parser!(f64)))
            .arg(Arg::new("z").long("size").value_parser(size))
            .arg(Arg::new("w").long("write").value_parser(["a", "b"]))
            .arg(Arg::new("p").long("path").value_parser(value_parser!(std::path::PathBuf)));
        for (word, wanted) in [
            ("-t=0", "--threads '0': write a whole number from 1 to 64"),
            ("--threads=x", "--threads 'x': write a whole number from 1 to 64"),
            ("--threads=", "--threads '': write a whole number from 1 to 64"),
            ("--threads=-1", "--threads '-1': write a whole number from 1 to 64"),
            (
                "--threads=99999999999999999999",
                "--threads '99999999999999999999': write a whole number from 1 to 64",
            ),
            ("--most=0", "--most '0': write a whole number, at least 1"),
            ("--most=x", "--most 'x': write a whole number, at least 1"),
            ("--any=-1", "--any '-1': write a whole number from 0 to 18446744073709551615"),
            ("--share=x", "--share 'x': write a number, as in 1.5"),
            ("--size=x", "--size 'x' is not a size: write a number of bytes"),
            ("--write=c", "--write 'c': choose one of a, b"),
            ("--path=", "--path '': a value is missing: write --path <p>"),
            (
                "--pth=5",
                "unexpected argument '--pth' found; a similar argument exists: '--path'; `x --help` shows what it takes",
            ),
        ] {
            let error = command.clone().try_get_matches_from([word]).unwrap_err();
            assert_eq!(refusal(&command, "x", &error), wanted);
        }
    }

    #[test]
    fn of_several_arguments_the_one_that_is_wrong_is_asked() {
        let command = Command::new("x")
            .no_binary_name(true)
            .arg(Arg::new("from").value_name("FROM").required(true).value_parser(value_parser!(u8)))
            .arg(Arg::new("to").required(true).value_parser(value_parser!(u16).range(1..=64)));
        for (words, wanted) in [
            (["x", "1"], "FROM 'x': write a whole number from 0 to 255"),
            (["1", "x"], "to 'x': write a whole number from 1 to 64"),
            (["1", "65"], "to '65': write a whole number from 1 to 64"),
        ] {
            let error = command.clone().try_get_matches_from(words).unwrap_err();
            assert_eq!(refusal(&command, "x", &error), wanted);
        }
    }
}
