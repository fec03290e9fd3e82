//! What the crates below the front ends say of them: a crate that knows no command line names no flag, no command and no daemon. It
//! says what is wrong as a type; the front end adds the flag and the remedy.

use crate::ratchet::Ratchet;

/// The crates below the front ends.
pub(crate) const BELOW: &[&str] = &["engine", "cache", "volume", "policy", "format"];

pub(crate) const FRONT_END_WORDS: Ratchet = Ratchet {
    file: "xtask/ratchets/words.txt",
    remedy: "a text below the front ends names no flag, command or daemon: say what is wrong, and let the front end add the remedy",
};

/// How many lines of a file have texts that speak of a front end. Comments and tests are free to.
pub(crate) fn count(path: &str, text: &str) -> usize {
    if path.split(['/', '.']).any(|part| part == "tests" || part.ends_with("_tests")) {
        return 0;
    }
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text);
    text.lines().filter(|line| !line.trim_start().starts_with("//") && speaks(line)).count()
}

/// Whether a line of code has a text that names a flag, a command, or a daemon.
fn speaks(line: &str) -> bool {
    let begins = |text: &str| text.starts_with(|c: char| c.is_ascii_lowercase());
    // After a space, a bracket or a quote: arithmetic has neither a letter behind two signs nor a backtick.
    let flag = line.match_indices("--").any(|(at, _)| {
        let before = line[..at].chars().next_back();
        begins(&line[at + 2..]) && before.is_none_or(|c| " (\"'`".contains(c))
    });
    let short = line.match_indices("(-").any(|(at, _)| {
        let mut after = line[at + 2..].chars();
        after.next().is_some_and(|c| c.is_ascii_alphabetic())
            && after.next().is_some_and(|c| ")(,".contains(c))
            && line[..at].contains(['"', ' '])
            && line.contains('"')
    });
    let command = ["`larder ", "larder block ", "larder kv "].iter().any(|c| line.contains(c));
    let daemon = line.contains('"') && words(line).any(|word| word == "daemon");
    flag || short || command || daemon
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_name_a_front_end_are_counted() {
        for line in [
            r#"        "give it less (--flash-size), or run several""#,
            r#"    #[error("more than {most}: lower it (-m)")]"#,
            r#"  fail("start the daemon again")"#,
            "             forget what was (`larder block drop`)\"",
            r#"         with --format-flash""#,
        ] {
            assert_eq!(count("a/b.rs", line), 1, "{line}");
            assert_eq!(count("a/tests.rs", line), 0, "{line}");
            assert_eq!(count("a/tests/x.rs", line), 0, "{line}");
            assert_eq!(count("a/b.rs", &format!("// {line}")), 0, "{line}");
            assert_eq!(count("a/b.rs", &format!("#[cfg(test)]\nmod tests {{\n{line}\n")), 0);
        }
        for line in ["let x = a - -b;", "let y = (-x).abs();", "mod daemon;", "let n = i--1;"] {
            assert_eq!(count("a/b.rs", line), 0, "{line}");
        }
    }
}
