//! Lists of what should not be and still is: nothing may be added, and what has gone must be taken off.

use std::collections::BTreeMap;
use std::path::Path;

use crate::Findings;

/// A list in a file beside the checks.
pub(crate) struct Ratchet {
    /// Its file, from the workspace's folder on.
    pub(crate) file: &'static str,
    /// What a line that is not in it means, and what to do.
    pub(crate) remedy: &'static str,
}

/// Lines, each with how many there are of what it names.
pub(crate) type Counted = BTreeMap<String, usize>;

impl Ratchet {
    /// Compares what is with the list.
    ///
    /// # Errors
    /// When the list cannot be read.
    pub(crate) fn check(&self, root: &Path, is: &Counted) -> Result<Findings, String> {
        Ok(self.compare(&parse(self.file, &read(root, self.file)?)?, is))
    }

    fn compare(&self, listed: &Counted, is: &Counted) -> Findings {
        let file = self.file;
        let mut found = Findings::new();
        for (line, &count) in is {
            let before = listed.get(line).copied().unwrap_or(0);
            if count > before {
                let more = if before == 0 { "new" } else { "more than before" };
                let (count, before) = (times(count), times(before));
                found.push(format!(
                    "{line}: {more} ({count}, {file} has {before}): {}",
                    self.remedy
                ));
            }
        }
        for (line, &before) in listed {
            let count = is.get(line).copied().unwrap_or(0);
            if count < before {
                found.push(format!(
                    "{line}: {} in {file}, and {} now: shorten the list (cargo xtask edges --shrink)",
                    times(before),
                    times(count)
                ));
            }
        }
        found
    }

    /// Takes off the list what has gone. Adds nothing.
    ///
    /// # Errors
    /// When the list cannot be read or written.
    pub(crate) fn shrink(&self, root: &Path, is: &Counted) -> Result<(), String> {
        let text = read(root, self.file)?;
        let after = shrunk(&text, &parse(self.file, &text)?, is);
        std::fs::write(root.join(self.file), after).map_err(|e| format!("{}: {e}", self.file))
    }
}

fn shrunk(text: &str, listed: &Counted, is: &Counted) -> String {
    let mut after: String =
        text.lines().filter(|line| line.starts_with('#')).flat_map(|l| [l, "\n"]).collect();
    for (line, &before) in listed {
        match is.get(line).copied().unwrap_or(0).min(before) {
            0 => {}
            1 => after.push_str(&format!("{line}\n")),
            count => after.push_str(&format!("{line} x{count}\n")),
        }
    }
    after
}

fn times(count: usize) -> String {
    match count {
        0 => "none".to_owned(),
        count => format!("{count}"),
    }
}

fn read(root: &Path, file: &str) -> Result<String, String> {
    std::fs::read_to_string(root.join(file)).map_err(|e| format!("{file}: {e}"))
}

/// A list's lines; ` x3` at the end says that there are three.
fn parse(file: &str, text: &str) -> Result<Counted, String> {
    let mut listed = Counted::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (line, count) = match line.rsplit_once(" x") {
            Some((line, count)) => {
                let bad = |_| format!("{file}: '{line} x{count}': a number follows the x");
                (line, count.parse().map_err(bad)?)
            }
            None => (line, 1),
        };
        if listed.insert(line.to_owned(), count).is_some() {
            return Err(format!("{file}: '{line}' is listed twice: leave one"));
        }
    }
    Ok(listed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATCHET: Ratchet = Ratchet { file: "list.txt", remedy: "do without" };

    fn counted(text: &str) -> Counted {
        parse("list.txt", text).unwrap()
    }

    #[test]
    fn what_is_listed_passes() {
        let list = counted("# why\na -> b\nc.rs Name x3\n");
        assert_eq!(RATCHET.compare(&list, &list), Findings::new());
    }

    #[test]
    fn what_is_new_or_more_is_found() {
        let list = counted("c.rs Name x3\n");
        assert_eq!(
            RATCHET.compare(&list, &counted("a -> b\nc.rs Name x4\n")),
            [
                "a -> b: new (1, list.txt has none): do without",
                "c.rs Name: more than before (4, list.txt has 3): do without"
            ]
        );
    }

    #[test]
    fn what_has_gone_must_be_taken_off() {
        let (text, is) =
            ("# why\na -> b\nc.rs Name x3\nd -> e\n", counted("c.rs Name x2\nd -> e\n"));
        let found = RATCHET.compare(&counted(text), &is);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found.iter().all(|line| line.contains("shorten the list")), "{found:?}");
        assert_eq!(shrunk(text, &counted(text), &is), "# why\nc.rs Name x2\nd -> e\n");
        // It never adds.
        assert_eq!(shrunk("", &counted(""), &is), "");
        assert_eq!(shrunk("d -> e\n", &counted("d -> e\n"), &counted("d -> e x9\n")), "d -> e\n");
    }

    #[test]
    fn a_list_that_says_two_things_is_refused() {
        assert!(parse("list.txt", "a\na x2\n").is_err());
        assert!(parse("list.txt", "a xx\n").is_err());
    }
}
