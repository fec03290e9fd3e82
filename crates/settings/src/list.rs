//! A list of settings, as clap knows it.

use clap::{Arg, ArgAction, Args, Command};

use crate::Misplaced;

/// What a server may be told. Each argument with a long name is a flag and a key of the file; its description, default and check
/// are clap's.
pub trait SettingsList: Args {
    /// The command, as it is typed.
    const COMMAND: &'static str;

    /// Keys of the file that may be tables.
    const TABLES: &'static [Table] = &[];

    /// Takes what the tables of a file say, under what is set already.
    ///
    /// # Errors
    /// Where it is wrong.
    fn read_tables(&mut self, _text: &str) -> Result<(), Misplaced> {
        Ok(())
    }

    /// How a number of the file is typed. A flag that counts in a unit of its own says here what the file's numbers count.
    fn number(_key: &str, number: i64) -> String {
        number.to_string()
    }

    /// Writes a table as it stands in a file, its header first.
    fn print_table(out: &mut String, key: &str, table: &toml::Table) {
        out.push_str(&format!("[{key}]\n{table}"));
    }
}

/// A key whose value is a table.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// The key.
    pub key: &'static str,
    /// What it is for. Of a key that has a flag too the flag's description is shown.
    pub help: &'static str,
    /// It as it stands in a file, for the reference page.
    pub example: fn() -> String,
}

/// The settings where nothing is said. (Of a list whose required settings are none.)
///
/// # Panics
/// If one is required.
pub fn defaults<T: Args>() -> T {
    let command = T::augment_args(Command::new("settings").no_binary_name(true));
    let matches = command.try_get_matches_from(std::iter::empty::<&str>());
    matches.and_then(|m| T::from_arg_matches(&m)).expect("nothing is required")
}

/// An argument whose default is made elsewhere, with that default in its description.
#[must_use]
pub fn default_is(arg: Arg, default: &str) -> Arg {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    arg.help(format!("{help} [default: {default}]"))
}

pub(crate) fn command<T: SettingsList>() -> Command {
    let command = Command::new(T::COMMAND).no_binary_name(true).disable_help_flag(true);
    T::augment_args(command.disable_version_flag(true))
}

pub(crate) fn takes_value(flag: &Arg) -> bool {
    matches!(flag.get_action(), ArgAction::Set | ArgAction::Append)
}

/// The name of a flag in the file; `None` of one for the command line alone. A flag that says no is a key that says yes.
pub(crate) fn key_of(flag: &Arg) -> Option<&str> {
    let long = flag.get_long()?;
    match flag.get_action() {
        ArgAction::SetFalse => Some(long.strip_prefix("no-").unwrap_or(long)),
        ArgAction::SetTrue | ArgAction::Set | ArgAction::Append => Some(long),
        _ => None,
    }
}

/// What a setting is for. A flag that says no describes what its key means when it is false.
pub(crate) fn description(flag: &Arg) -> String {
    let help = flag.get_help().map(ToString::to_string).unwrap_or_default();
    let mut letters = help.chars();
    match (flag.get_action(), letters.next()) {
        (ArgAction::SetFalse, Some(first)) => {
            format!("If false: {}{}", first.to_lowercase(), letters.as_str())
        }
        _ => help,
    }
}

/// The word that sets a flag without a value to `wanted`; none where it is that anyway.
pub(crate) fn switch(flag: &Arg, wanted: bool) -> Option<String> {
    let says = matches!(flag.get_action(), ArgAction::SetTrue);
    (wanted == says).then(|| format!("--{}", flag.get_long().unwrap_or_default()))
}

/// Flags that may be given several times with a NAME before the value: in the file, also a table.
pub(crate) fn is_named(flag: &Arg) -> bool {
    matches!(flag.get_action(), ArgAction::Append)
        && flag.get_value_names().is_some_and(|names| {
            names.iter().any(|n| n.starts_with("NAME=") || n.starts_with("[NAME=]"))
        })
}

/// What clap says, in one line.
pub(crate) fn said(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let lines = text.lines().map(str::trim).take_while(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" ")
}
