//! `cargo xtask tidy`: what a reader should not meet in the repository.

use std::path::Path;
use std::process::Command;

use crate::Findings;

/// A file of code or prose longer than this has more than one subject.
const LINES_AT_MOST: usize = 1_000;

/// Kinds of file that people write; data, pictures and lock files are left alone.
const WRITTEN: &[&str] =
    &["rs", "toml", "md", "sh", "bash", "py", "html", "js", "css", "yml", "yaml", ""];

/// Words that have no place in the repository, and why. In two parts each, so that this file passes its own check.
const WORDS: &[(&str, &str, &str)] = &[
    ("TO", "DO", "unfinished work is an issue, not a comment"),
    ("FIX", "ME", "unfinished work is an issue, not a comment"),
    ("X", "XX", "unfinished work is an issue, not a comment"),
    ("/wo", "rk/", "a path of one machine"),
    ("/ro", "ot/", "a path of one machine"),
    ("/ho", "me/", "a path of one machine"),
    ("deb.", "debian.org", "a registry's host: the client's settings know it"),
    ("py", "pi.org", "a registry's host: the client's settings know it"),
    ("index.", "crates.io", "a registry's host: the client's settings know it"),
];

pub(crate) fn check(root: &Path) -> Result<Findings, String> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .map_err(|e| format!("cannot start git ls-files: {e}"))?;
    if !output.status.success() {
        return Err(format!(
            "git ls-files failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ));
    }
    let listing = String::from_utf8_lossy(&output.stdout);
    let mut found = Findings::new();
    for name in listing.split('\0').filter(|n| !n.is_empty()) {
        let path = Path::new(name);
        let kind = path.extension().map_or("", |e| e.to_str().unwrap_or("?"));
        let licence = name.starts_with("LICENSE");
        if !WRITTEN.contains(&kind)
            || licence
            || path.file_name().is_some_and(|n| n == "Cargo.lock")
        {
            continue;
        }
        // A file removed from the work tree but not yet from git's index has nothing to read.
        let Ok(bytes) = std::fs::read(root.join(path)) else { continue };
        let Ok(text) = std::str::from_utf8(&bytes) else {
            found.push(format!("{name}: is not UTF-8"));
            continue;
        };
        found.extend(findings(name, text));
    }
    Ok(found)
}

fn findings(name: &str, text: &str) -> Findings {
    let mut found = Findings::new();
    let lines = text.lines().count();
    if lines > LINES_AT_MOST {
        found.push(format!("{name}: {lines} lines; divide it (at most {LINES_AT_MOST})"));
    }
    if !text.is_empty() && !text.ends_with('\n') {
        found.push(format!("{name}: the last line does not end"));
    }
    for (number, line) in text.lines().enumerate() {
        let number = number + 1;
        for (head, tail, why) in WORDS {
            let word = format!("{head}{tail}");
            if stands_in(line, &word) {
                found.push(format!("{name}:{number}: `{word}`: {why}"));
            }
        }
        if line.ends_with([' ', '\t']) {
            found.push(format!("{name}:{number}: white space at the end of the line"));
        }
    }
    found
}

/// Whether a line holds a word, and not only a longer word that begins or ends with it.
fn stands_in(line: &str, word: &str) -> bool {
    let letter = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        let opens = !word.starts_with(letter) || !before.is_some_and(letter);
        let closes = !word.ends_with(letter) || !after.is_some_and(letter);
        opens && closes
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(at: usize) -> String {
        format!("{}{}", WORDS[at].0, WORDS[at].1)
    }

    #[test]
    fn a_clean_file_passes() {
        assert_eq!(findings("a.rs", "//! Fine.\n\nfn main() {}\n"), Findings::new());
    }

    #[test]
    fn every_word_is_found_where_it_stands() {
        for at in 0..WORDS.len() {
            let text = format!("// one\n// {} two\n", word(at));
            let found = findings("a.rs", &text);
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(found[0].starts_with("a.rs:2: "), "{found:?}");
        }
    }

    #[test]
    fn a_longer_word_is_another_word() {
        assert!(!stands_in("the TODOS of a day", &word(0)));
        assert!(!stands_in("FRAMEWORK/", &word(3)));
        assert!(!stands_in("https://index.example/", &word(WORDS.len() - 1)));
    }

    #[test]
    fn length_endings_and_trailing_space_are_found() {
        let long = "line\n".repeat(LINES_AT_MOST + 1);
        assert_eq!(
            findings("a.rs", &long),
            [format!("a.rs: {} lines; divide it (at most {LINES_AT_MOST})", 1_001)]
        );
        assert_eq!(findings("a.rs", "open"), ["a.rs: the last line does not end"]);
        assert_eq!(findings("a.rs", "a \n"), ["a.rs:1: white space at the end of the line"]);
    }
}
