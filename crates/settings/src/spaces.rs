//! White space around values on a command line.
//!
//! Who writes a flag and its value into one argument (`"-m 512"`, as charts of Kubernetes do) gives the value ` 512`: that is how
//! getopt reads it, and `strtol`, which memcached reads numbers with, skips the space. clap would refuse it, or read it otherwise.

use std::any::TypeId;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Arg, Command};

use crate::list::takes_value;

/// The words with each value as it is meant: white space around a value is no part of it. A path may begin or end with white space,
/// so it loses only what stands between a flag's letter and the path in one word.
#[must_use]
pub fn without_spaces(
    command: &Command,
    words: impl IntoIterator<Item = OsString>,
) -> Vec<OsString> {
    let mut out: Vec<OsString> = Vec::new();
    // The flag whose value is the next word.
    let mut waiting: Option<&Arg> = None;
    let mut all_plain = false;
    for word in words {
        let Some(text) = word.to_str() else {
            waiting = None;
            out.push(word);
            continue;
        };
        if let Some(flag) = waiting.take() {
            out.push(trimmed(flag, text).into());
        } else if all_plain || text == "--" {
            all_plain = true;
            out.push(word);
        } else if let Some(long) = text.strip_prefix("--") {
            let (name, value) = long.split_once('=').map_or((long, None), |(n, v)| (n, Some(v)));
            match (command.get_arguments().find(|a| has_name(a, name) && takes_value(a)), value) {
                (Some(flag), Some(value)) => {
                    out.push(format!("--{name}={}", trimmed(flag, value)).into());
                }
                (flag, _) => {
                    waiting = flag;
                    out.push(word);
                }
            }
        } else {
            match text.strip_prefix('-').and_then(|letters| first_value(command, letters)) {
                Some((flag, at)) => {
                    let (letters, value) = text.split_at(1 + at);
                    if value.is_empty() {
                        waiting = Some(flag);
                        out.push(word);
                    } else {
                        out.push(joined(flag, letters, value).unwrap_or(word));
                    }
                }
                None => out.push(word),
            }
        }
    }
    out
}

/// The first of these letters that takes a value, and where what is behind it begins.
fn first_value<'a>(command: &'a Command, letters: &str) -> Option<(&'a Arg, usize)> {
    for (at, letter) in letters.char_indices() {
        let flag = command.get_arguments().find(|a| has_letter(a, letter))?;
        if takes_value(flag) {
            return Some((flag, at + letter.len_utf8()));
        }
    }
    None
}

/// Letters and a value in one word, if that has white space that is not meant.
fn joined(flag: &Arg, letters: &str, value: &str) -> Option<OsString> {
    let meant = trimmed(flag, value.trim_start());
    (meant != value && !meant.is_empty()).then(|| format!("{letters}={meant}").into())
}

fn trimmed<'a>(flag: &Arg, value: &'a str) -> &'a str {
    let is_path = flag.get_value_parser().type_id() == TypeId::of::<PathBuf>();
    if is_path { value } else { value.trim() }
}

fn has_name(flag: &Arg, name: &str) -> bool {
    flag.get_long() == Some(name)
        || flag.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
}

fn has_letter(flag: &Arg, letter: char) -> bool {
    flag.get_short() == Some(letter)
        || flag.get_all_short_aliases().is_some_and(|letters| letters.contains(&letter))
}

#[cfg(test)]
mod tests {
    use clap::{ArgAction, value_parser};

    use super::*;

    fn meant(words: &[&str]) -> Vec<String> {
        let flag = |letter, name: &'static str| Arg::new(name).short(letter).long(name);
        let command = Command::new("x")
            .arg(flag('m', "memory").value_parser(value_parser!(u32)))
            .arg(flag('u', "user").alias("owner"))
            .arg(flag('e', "file").value_parser(value_parser!(PathBuf)))
            .arg(flag('v', "verbose").action(ArgAction::Count));
        let words = words.iter().map(OsString::from);
        let out = without_spaces(&command, words).into_iter();
        out.map(|word| word.into_string().unwrap()).collect()
    }

    #[test]
    fn values_have_no_white_space_around_them() {
        for (words, wanted) in [
            (&["-m 512"][..], &["-m=512"][..]),
            (&["-m\t512 "], &["-m=512"]),
            (&["-m", " 512"], &["-m", "512"]),
            (&["-vm 512"], &["-vm=512"]),
            (&["--memory= 512 "], &["--memory=512"]),
            (&["--memory", "512\n"], &["--memory", "512"]),
            (&["-m -1"], &["-m=-1"]),
            (&["-u 11211", "-vv"], &["-u=11211", "-vv"]),
            (&["--owner= x"], &["--owner=x"]),
            (&["-u =x"], &["-u==x"]),
        ] {
            assert_eq!(meant(words), wanted, "{words:?}");
        }
    }

    #[test]
    fn what_has_none_or_is_a_path_stays_as_it_is() {
        for words in [
            &["x", "-m512", "-m", "512", "-m=512", "--memory=512"][..],
            &["-e", " /a ", "--file= /a", "-e/a "],
            &["--", "-m 512"],
            &["-m "],
            &["-x 5", "- m", "--unknown= 5", "-v 5"],
        ] {
            assert_eq!(meant(words), words);
        }
        assert_eq!(meant(&["-e /a "]), ["-e=/a "]);
    }
}
