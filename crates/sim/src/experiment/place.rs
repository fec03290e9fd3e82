//! Where in a text something is wrong.
//!
//! A table that is read by its `kind` is read as a whole before its keys are: the error of a key then points to the table's
//! header. The key is found by leaving lines out: without the right one the error is gone.

use serde::de::DeserializeOwned;

/// What is said of a table whose lines are all right: one is not there.
const MISSING: &str = "missing field";

/// The key by which a table is read.
const KIND: &str = "kind";

/// The line that `error` is about, from 1. `T` is what was to be read from `text`.
pub(crate) fn line_of<T: DeserializeOwned>(text: &str, error: &toml::de::Error) -> usize {
    let start = error.span().map_or(0, |span| span.start.min(text.len()));
    let pointed = text.as_bytes()[..start].iter().filter(|&&b| b == b'\n').count();
    let lines: Vec<&str> = text.split('\n').collect();
    let is_header = lines.get(pointed).is_some_and(|line| line.trim_start().starts_with('['));
    if !is_header || error.message().starts_with(MISSING) {
        return 1 + pointed;
    }
    let begin = |e: &toml::de::Error| e.span().map(|span| span.start);
    // Of a table before the one that is wrong, a needed line that is left out is missed as well: the last counts.
    let (mut kind, mut needed) = (None, None);
    for at in pointed + 1..lines.len() {
        if !lines[at].contains('=') {
            continue;
        }
        let mut without = lines.clone();
        without[at] = "";
        let without = without.join("\n");
        // (A line of a list that goes over several is none that can be left out.)
        if toml::from_str::<toml::Table>(&without).is_err() {
            continue;
        }
        match toml::from_str::<T>(&without) {
            // (Another table may have the same mistake.)
            Err(e) if e.message() == error.message() && begin(&e) == begin(error) => {}
            Err(e) if e.message().starts_with(MISSING) => {
                let key = lines[at].split('=').next().unwrap_or_default();
                let key = key.rsplit('.').next().unwrap_or_default().trim();
                if key == KIND {
                    // The line that says what the table is: without it nothing of the table is read.
                    kind = Some(at);
                } else if e.message() == format!("{MISSING} `{key}`") {
                    // Nothing else was wrong.
                    needed = Some(at);
                }
            }
            _ => return 1 + at,
        }
    }
    let header = |at: usize| lines[..at].iter().rposition(|l| l.trim_start().starts_with("[["));
    match (needed, kind) {
        (Some(needed), Some(kind)) if header(kind).is_some_and(|header| needed < header) => {
            1 + kind
        }
        (Some(needed), _) => 1 + needed,
        (None, kind) => 1 + kind.unwrap_or(pointed),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Experiment;

    #[test]
    fn the_line_of_a_mistake_is_that_of_its_key() {
        let text = "\
title = \"t\"
[workload]
trace = \"gen:zipf\"

[[cache]]
kind = \"hybrid\"
name = \"a\"
dram = \"4m\"
flash = \"28m\"

[[cache]]
kind = \"hybrid\"
name = \"b\"
dram = \"4m\"
admission.policy = \"ghost\"
flash = \"28m\"
";
        for (from, to, line) in [
            ("trace = ", "trce = ", 3),
            ("dram = \"4m\"\nflash = \"28m\"", "dram = true\nflash = \"28m\"", 8),
            ("flash = \"28m\"", "flash = \"28x\"", 9),
            ("name = \"b\"", "nam = \"b\"", 13),
            ("admission.policy", "admission.polcy", 15),
            ("kind = \"hybrid\"\nname = \"b\"", "kind = \"hybird\"\nname = \"b\"", 12),
        ] {
            let wrong = text.replacen(from, to, 1);
            assert_ne!(wrong, text);
            let error = Experiment::parse(&wrong, "f").unwrap_err().to_string();
            assert!(error.starts_with(&format!("'f' line {line}: ")), "{to}: {error}");
        }
    }
}
