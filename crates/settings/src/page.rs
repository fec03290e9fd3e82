//! The reference page of a server's settings.

use clap::{Arg, ArgAction, Command};

use crate::list::{self, SettingsList, description, key_of, takes_value};

/// All flags of `command`, whose settings are `T`, as a page of Markdown: by heading, each with its key, its default and its
/// description. `remake` is the command that writes the page.
pub fn page<T: SettingsList>(command: &Command, remake: &str) -> String {
    let name = T::COMMAND;
    let mut out = format!(
        "# Settings of `{name}`\n\n\
         <!-- Made from the list in the code by `{remake}`: do not edit. -->\n\n\
         A setting is a flag and a key of the TOML file that `--config FILE` names. Flags win over the file.\n\
         `{name} --print-config` prints what is in effect as such a file.\n"
    );
    let list = list::command::<T>();
    let keys: Vec<(&str, &str)> =
        list.get_arguments().filter_map(|f| Some((f.get_id().as_str(), key_of(f)?))).collect();
    let mut headings: Vec<Option<&str>> = Vec::new();
    let flags = || command.get_arguments().filter(|f| !f.is_hide_set());
    for flag in flags() {
        if !headings.contains(&flag.get_help_heading()) {
            headings.push(flag.get_help_heading());
        }
    }
    for heading in headings {
        out.push_str(&format!(
            "\n## {}\n\n| key | flag | default | |\n| --- | --- | --- | --- |\n",
            heading.unwrap_or("Service")
        ));
        for flag in flags().filter(|f| f.get_help_heading() == heading) {
            let key = keys.iter().find(|(id, _)| *id == flag.get_id().as_str());
            row(&mut out, key.map(|(_, key)| *key), flag);
        }
    }
    if !T::TABLES.is_empty() {
        out.push_str("\n## Tables of the file\n");
    }
    for table in T::TABLES {
        let flag = list.get_arguments().find(|f| key_of(f) == Some(table.key));
        let help = flag.and_then(Arg::get_help).map_or(table.help.to_owned(), |h| h.to_string());
        let (help, _) = split_default(&help);
        out.push_str(&format!("\n`{}`: {help}.\n\n```toml\n{}```\n", table.key, (table.example)()));
    }
    out
}

fn row(out: &mut String, key: Option<&str>, flag: &Arg) {
    let help = description(flag);
    let (help, told) = split_default(&help);
    let mut names: Vec<String> = flag.get_short().map(|s| format!("`-{s}`")).into_iter().collect();
    let value = if takes_value(flag) {
        let names = flag.get_value_names().unwrap_or_default();
        names.iter().map(|n| format!(" {n}")).collect()
    } else {
        String::new()
    };
    names.extend(flag.get_long().map(|long| format!("`--{long}{value}`")));
    for alias in flag.get_visible_aliases().unwrap_or_default() {
        names.push(format!("`--{alias}`"));
    }
    let default = match flag.get_action() {
        ArgAction::SetTrue if key.is_some() => "false".to_owned(),
        ArgAction::SetFalse => "true".to_owned(),
        _ => match flag.get_default_values() {
            [] => told.to_owned(),
            values => values.iter().map(|v| v.to_string_lossy()).collect::<Vec<_>>().join(", "),
        },
    };
    let choices = flag.get_possible_values();
    let choices = if takes_value(flag) && !choices.is_empty() {
        let names: Vec<&str> = choices.iter().map(clap::builder::PossibleValue::get_name).collect();
        format!(" ({})", names.join(", "))
    } else {
        String::new()
    };
    let key = key.map_or("–".to_owned(), |key| format!("`{key}`"));
    let cells = [key, names.join(", "), default, format!("{help}{choices}")];
    let cells: Vec<String> =
        cells.iter().map(|c| c.replace('|', "\\|").replace('<', "&lt;")).collect();
    out.push_str(&format!("| {} |\n", cells.join(" | ")));
}

/// A description, and the default that it states at its end.
fn split_default(help: &str) -> (&str, &str) {
    match help.rsplit_once(" [default: ") {
        Some((text, default)) => (text, default.strip_suffix(']').unwrap_or(default)),
        None => (help, ""),
    }
}
