//! Settings as a TOML file.

use clap::{ArgAction, ArgMatches, Command};

use crate::list::{self, SettingsList, description, key_of, takes_value};

/// Columns of a printed file.
const WIDTH: usize = 118;

/// `values`, by their keys, as a file that `--config` reads: each under its description, those that have none commented out.
pub fn print<T: SettingsList>(values: &toml::Table) -> String {
    let mut out = String::new();
    let name = T::COMMAND;
    comment(
        &mut out,
        &format!(
            "The effective configuration of `{name}`, as --config FILE reads it. `{name} --help` shows the flags."
        ),
    );
    let flags = list::command::<T>();
    // TOML wants tables after all else.
    let mut tables = Vec::new();
    for flag in flags.get_arguments() {
        let Some(key) = key_of(flag) else { continue };
        let help = description(flag);
        let value = values.get(key);
        if flag.is_hide_set() && value.is_none_or(|v| v.as_bool() == Some(false)) {
            continue;
        }
        if let Some(toml::Value::Table(table)) = value {
            tables.push((key, help, Some(table)));
            continue;
        }
        out.push('\n');
        comment(&mut out, &help);
        match value.filter(|v| v.as_array().is_none_or(|list| !list.is_empty())) {
            Some(value) => out.push_str(&format!("{key} = {value}\n")),
            None => out.push_str(&format!("# {key} =\n")),
        }
    }
    for table in T::TABLES {
        if !flags.get_arguments().any(|f| key_of(f) == Some(table.key)) {
            let value = values.get(table.key).and_then(toml::Value::as_table);
            tables.push((table.key, table.help.to_owned(), value));
        }
    }
    for (key, help, table) in tables {
        out.push('\n');
        comment(&mut out, &help);
        match table {
            Some(table) => T::print_table(&mut out, key, table),
            None => out.push_str(&format!("# [{key}]\n")),
        }
    }
    out
}

/// What is given, as it is given, by keys.
pub(crate) fn as_given(flags: &Command, matches: &ArgMatches) -> toml::Table {
    let mut out = toml::Table::new();
    for flag in flags.get_arguments() {
        let Some(key) = key_of(flag) else { continue };
        let id = flag.get_id().as_str();
        if !takes_value(flag) {
            out.insert(key.to_owned(), matches.get_flag(id).into());
            continue;
        }
        let mut values = matches.get_raw(id).into_iter().flatten();
        let mut values = values.by_ref().map(|value| literal(&value.to_string_lossy()));
        let value = match flag.get_action() {
            ArgAction::Append => Some(toml::Value::Array(values.collect())),
            _ => values.next(),
        };
        if let Some(value) = value {
            out.insert(key.to_owned(), value);
        }
    }
    out
}

/// A number where it reads back as it is, else a string.
fn literal(text: &str) -> toml::Value {
    if let Some(number) = text.parse::<i64>().ok().filter(|n| n.to_string() == text) {
        return number.into();
    }
    let float = text.parse::<f64>().ok().filter(|n| text.contains('.') && n.to_string() == text);
    float.map_or_else(|| text.into(), toml::Value::from)
}

pub(crate) fn comment(out: &mut String, text: &str) {
    let mut line = String::from("#");
    for word in text.split_whitespace() {
        if line.len() + 1 + word.len() > WIDTH {
            out.push_str(&line);
            out.push('\n');
            line = String::from("#");
        }
        line.push(' ');
        line.push_str(word);
    }
    out.push_str(&line);
    out.push('\n');
}
