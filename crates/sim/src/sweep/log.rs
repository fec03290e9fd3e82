//! The file of finished cells: one line of JSON each, in the order in which they finished.
//!
//! A line is written whole and synced before the next cell's, so a kill loses only what was running. What a kill leaves of a
//! line is passed over when the file is read, and cut off before more is written. Each line ends with a checksum of what is
//! before it: a cell whose line was damaged, or changed by hand, is not finished.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A finished cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// The cell's [key](super::Cell::key).
    pub key: String,
    /// The axes' values, for people.
    pub cell: String,
    /// What came out: an [`Outcome`](crate::experiment::Outcome), as it reads back from `text`.
    pub outcome: serde_json::Value,
    /// The line as it stands in the file, its end included.
    #[serde(skip)]
    pub text: String,
}

impl Line {
    /// The line of a cell. Its outcome is what reads back from the text: so a sweep gives the same whether its cells were run just
    /// now or read from the file.
    ///
    /// # Errors
    /// A number that JSON cannot carry.
    pub fn new(
        key: String,
        cell: String,
        outcome: serde_json::Value,
    ) -> Result<Line, serde_json::Error> {
        let stated = Line { key, cell, outcome, text: String::new() };
        let bare = serde_json::to_string(&stated)?;
        let line: Line = serde_json::from_str(&bare)?;
        let text = match bare.strip_suffix('}') {
            Some(body) => format!("{body}{}\n", checksum(body)),
            None => bare + "\n",
        };
        Ok(Line { text, ..line })
    }
}

/// How a line of this `body` ends.
fn checksum(body: &str) -> String {
    format!(r#","crc32c":"{:08x}"}}"#, crc32c::crc32c(body.as_bytes()))
}

/// Whether a line is as it was written.
fn is_sound(text: &str) -> bool {
    let text = text.trim_end_matches('\n');
    let body = text.len().checked_sub(checksum("").len()).and_then(|at| text.split_at_checked(at));
    body.is_some_and(|(body, end)| checksum(body) == end)
}

/// What a file of finished cells holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finished {
    /// Lines by key.
    pub lines: BTreeMap<String, Line>,
    /// Bytes of the file up to the end of its last whole line: what follows is torn.
    pub whole: u64,
    /// Lines that are none of this program's, by number from 1: they do not look like a cell's, and no other line of the file
    /// is a cell.
    pub foreign: Vec<usize>,
    /// Lines of cells whose checksum is not right or that cannot be read, by number from 1: the cells are not finished.
    pub damaged: Vec<usize>,
}

/// How every line begins.
const BEGIN: &[u8] = br#"{"key":""#;

/// Whether damage may have made this of a cell's line: its beginning or its checksum is still there.
fn was_a_cell(raw: &[u8]) -> bool {
    let end = br#","crc32c":""#;
    let begins = raw.iter().zip(BEGIN).all(|(a, b)| a == b);
    begins || raw.windows(end.len()).any(|w| w == end)
}

/// Reads the file's bytes. The last of several lines of a key counts.
pub fn read(bytes: &[u8]) -> Finished {
    let mut finished = Finished::default();
    let mut at = 0;
    // Neither a cell's nor anything that was one, as far as can be seen.
    let mut strange = Vec::new();
    for (number, raw) in bytes.split_inclusive(|&b| b == b'\n').enumerate() {
        if raw.last() != Some(&b'\n') {
            // Torn, and cut off; but the text of another file is not to be cut off.
            if !was_a_cell(raw) && finished.lines.is_empty() {
                finished.foreign.push(number + 1);
            }
            break;
        }
        at += raw.len();
        finished.whole = at as u64;
        if raw.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let line = std::str::from_utf8(raw)
            .ok()
            .and_then(|text| Some((text, serde_json::from_str::<Line>(text).ok()?)));
        match line {
            Some((text, _)) if !is_sound(text) => finished.damaged.push(number + 1),
            Some((text, line)) => {
                finished.lines.insert(line.key.clone(), Line { text: text.to_owned(), ..line });
            }
            None if was_a_cell(raw) => finished.damaged.push(number + 1),
            None => strange.push(number + 1),
        }
    }
    // In a file that has cells they are damaged ones.
    let of = if finished.lines.is_empty() { &mut finished.foreign } else { &mut finished.damaged };
    of.extend(strange);
    of.sort_unstable();
    finished
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_base::Rng;

    fn line(i: u64) -> Line {
        let outcome = serde_json::json!({ "hit_ratio": i as f64 / 7.0, "name": "a\nb" });
        Line::new(format!("{i:032x}"), format!("seed={i}"), outcome).unwrap()
    }

    #[test]
    fn a_file_cut_anywhere_gives_its_whole_lines() {
        let texts: Vec<String> = (0..5).map(|i| line(i).text).collect();
        let file = texts.concat();
        for cut in 0..=file.len() {
            let found = read(&file.as_bytes()[..cut]);
            let mut whole = 0;
            let mut count = 0;
            while count < 5 && whole + texts[count].len() <= cut {
                whole += texts[count].len();
                count += 1;
            }
            assert_eq!((found.lines.len(), found.whole), (count, whole as u64), "cut at {cut}");
            assert!(found.foreign.is_empty());
            assert!((0..count as u64).all(|i| found.lines[&line(i).key] == line(i)));
        }
    }

    #[test]
    fn a_changed_line_is_no_finished_cell() {
        let sound = line(1).text;
        for (old, new) in [
            ("\"hit_ratio\":0.14", "\"hit_ratio\":7.14"),
            ("\"cell\":\"seed=1\"", "\"cell\":\"seed=2\""),
            ("\"crc32c\":\"", "\"crc32c\":\"x"),
        ] {
            let changed = sound.replacen(old, new, 1);
            assert_ne!(changed, sound, "{old}");
            let found = read(format!("{}{changed}{}", line(0).text, line(2).text).as_bytes());
            assert_eq!(
                (found.lines.len(), found.damaged, found.foreign),
                (2, vec![2], vec![]),
                "{new}"
            );
        }
        let bare = r#"{"key":"00","cell":"seed=1","outcome":{}}"#.to_owned() + "\n";
        let found = read(bare.as_bytes());
        assert_eq!((found.lines.len(), found.damaged), (0, vec![1]));
    }

    #[test]
    fn a_line_that_is_no_json_is_damaged_where_there_are_cells() {
        let sound = line(1).text;
        let half = format!("{}\n", &sound[..sound.len() / 2]);
        let other_half = &sound[sound.len() / 2..];
        for bad in [half.as_str(), other_half, "rubbish\n", "\u{0}\u{0}\n"] {
            let found = read(format!("{}{bad}{}", line(0).text, line(2).text).as_bytes());
            assert_eq!(
                (found.lines.len(), found.damaged, found.foreign),
                (2, vec![2], vec![]),
                "{bad}"
            );
        }
        // The only line, and still to be seen as one.
        for bad in [half.as_str(), other_half] {
            let found = read(bad.as_bytes());
            assert_eq!((found.damaged, found.foreign), (vec![1], vec![]), "{bad}");
        }
        // Another file, with and without an end of its last line.
        for (other, lines) in
            [("notes\nmore\n", vec![1, 2]), ("notes", vec![1]), ("a\nb", vec![1, 2])]
        {
            let found = read(other.as_bytes());
            assert_eq!((found.damaged, found.foreign), (vec![], lines), "{other}");
        }
    }

    #[test]
    fn numbers_read_back_as_they_were() {
        let mut rng = Rng::new(9);
        for _ in 0..20_000 {
            let x = f64::from_bits(rng.next_u64());
            if x.is_finite() {
                let line = Line::new("k".into(), "c".into(), serde_json::json!(x)).unwrap();
                assert_eq!(line.outcome.as_f64(), Some(x), "{x:e}");
            }
        }
    }

    #[test]
    fn anything_can_be_read() {
        let file: String = (0..4).map(|i| line(i).text).collect();
        let mut rng = Rng::new(5);
        for _ in 0..3000 {
            let mut bytes = file.clone().into_bytes();
            for _ in 0..1 + rng.below(8) {
                let at = rng.below(bytes.len() as u64) as usize;
                bytes[at] = rng.next_u64() as u8;
            }
            let found = read(&bytes);
            assert!(found.whole <= bytes.len() as u64);
            assert!(found.lines.len() + found.foreign.len() + found.damaged.len() <= 4 + 8);
            assert!(
                found
                    .lines
                    .iter()
                    .all(|(key, found)| (0..4).any(|i| line(i).key == *key && line(i) == *found))
            );
        }
        let found = read(b"{}\n\n[1]\n");
        assert_eq!((found.foreign, found.whole), (vec![1, 3], 8));
    }
}
