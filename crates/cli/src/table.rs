//! Tables for people: as wide as they are where there is room, and in parts below each other where there is not.

use std::io::IsTerminal;

use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};

use crate::error::CliError;

/// Columns of standard output: of the terminal, or what `COLUMNS` says where it is none. `None` where nobody said: a file
/// and a pipe take any width.
pub(crate) fn width() -> Option<usize> {
    let out = std::io::stdout();
    let columns = if out.is_terminal() {
        rustix::termios::tcgetwinsize(&out).ok().map(|size| usize::from(size.ws_col))
    } else {
        std::env::var("COLUMNS").ok().and_then(|text| text.parse().ok())
    };
    columns.filter(|&n| n >= NARROWEST)
}

/// Whether a line of so many characters is longer than standard output's.
pub(crate) fn is_too_wide(characters: usize) -> bool {
    width().is_some_and(|columns| columns < characters)
}

/// Below this no table is readable, and a terminal of no columns is none.
const NARROWEST: usize = 40;

/// Characters beside the text of a cell: a space on either side, and one between two columns.
const PADDING: usize = 3;

/// A table whose first columns say what a row is.
#[derive(Debug)]
pub(crate) struct Columns {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
    keys: usize,
    text: usize,
}

/// Columns that are shown together, and whether the rows are numbered to be found again.
#[derive(Debug, PartialEq)]
struct Part {
    columns: Vec<usize>,
    numbered: bool,
}

impl Columns {
    /// The first `keys` columns name a row and are repeated in every part; the first `text` stand to the left, the others,
    /// numbers, to the right.
    pub(crate) fn new<T: Into<String>>(
        keys: usize,
        text: usize,
        header: impl IntoIterator<Item = T>,
    ) -> Columns {
        let header = header.into_iter().map(Into::into).collect();
        Columns { header, rows: Vec::new(), keys, text }
    }

    /// Adds a row, as long as the header.
    pub(crate) fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// Whether it has no row.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Prints it to standard output.
    ///
    /// # Errors
    /// As [`print`](crate::out::print).
    pub(crate) fn print(&self) -> Result<(), CliError> {
        crate::out::print(&self.text(width()))
    }

    /// What [`print`](Columns::print) prints, without the last line break.
    pub(crate) fn to_text(&self) -> String {
        self.text(width()).trim_end_matches('\n').to_owned()
    }

    /// The table as lines of at most `limit` characters, as far as one column beside a number fits.
    pub(crate) fn text(&self, limit: Option<usize>) -> String {
        let mut header = self.header.clone();
        let Some(limit) = limit else {
            let columns = (0..header.len()).collect();
            return self.part(&header, &Part { columns, numbered: false }, None);
        };
        // There is nothing behind the last column.
        let limit = limit + 1;
        let cells: Vec<usize> = (0..header.len())
            .map(|c| self.rows.iter().map(|row| wide(&row[c])).max().unwrap_or(0))
            .collect();
        let widths = |header: &[String]| -> Vec<usize> {
            header.iter().zip(&cells).map(|(h, &c)| wide(h).max(c) + PADDING).collect()
        };
        if widths(&header).iter().sum::<usize>() > limit {
            header.iter_mut().zip(&cells).for_each(|(h, &c)| *h = folded(h, c));
        }
        let number = self.rows.len().to_string().len() + PADDING;
        let widths = widths(&header);
        let shown = |part: &Part| {
            let names = if part.numbered { number } else { 0 };
            let wide = names + part.columns.iter().map(|&c| widths[c]).sum::<usize>();
            self.part(&header, part, (wide > limit).then_some(limit - 1))
        };
        parts(&widths, self.keys, number, limit).iter().map(shown).collect()
    }

    /// Where even the names of rows are longer than `limit`, cells are folded to it.
    fn part(&self, header: &[String], part: &Part, limit: Option<usize>) -> String {
        let line = || LineStyle::none().fill('─').junction('─');
        let mut table = Table::new();
        table.load_style(
            TableStyle::new().top_border(line()).header_separator(line()).bottom_border(line()),
        );
        if let Some(limit) = limit {
            table.set_content_arrangement(ContentArrangement::Dynamic).set_width(limit as u16);
        }
        let number = |text: String| part.numbered.then_some(text).into_iter();
        let of = |cells: &[String]| -> Vec<String> {
            part.columns.iter().map(|&c| cells[c].clone()).collect()
        };
        table.set_header(number("#".to_owned()).chain(of(header)));
        for (i, row) in self.rows.iter().enumerate() {
            table.add_row(number((i + 1).to_string()).chain(of(row)));
        }
        let numbered = usize::from(part.numbered);
        for (at, column) in table.column_iter_mut().enumerate() {
            if at < numbered || part.columns[at - numbered] >= self.text {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        format!("{table}\n")
    }
}

/// Characters of the longest line.
fn wide(text: &str) -> usize {
    text.lines().map(|line| line.chars().count()).max().unwrap_or(0)
}

/// A heading in lines no longer than `cells`, or than its longest word.
fn folded(heading: &str, cells: usize) -> String {
    let words = heading.split(' ');
    let most = words.clone().map(wide).max().unwrap_or(0).max(cells);
    wrapped(words, most)
}

/// Words in lines of at most `most` characters, where a word is no longer.
fn wrapped<'a>(words: impl Iterator<Item = &'a str>, most: usize) -> String {
    let mut out = String::new();
    let mut used = 0;
    for word in words {
        let n = wide(word);
        match used {
            0 => {}
            _ if used + 1 + n <= most => {
                out.push(' ');
                used += 1;
            }
            _ => {
                out.push('\n');
                used = 0;
            }
        }
        out.push_str(word);
        used += n;
    }
    out
}

/// Prints a remark of several words, in lines as wide as standard output.
///
/// # Errors
/// As [`print`](crate::out::print).
pub(crate) fn print_words(words: &[String]) -> Result<(), CliError> {
    let text = wrapped(words.iter().map(String::as_str), width().unwrap_or(120));
    outln!("{text}")
}

/// Prints lines for people: what is longer than standard output is wide goes on below, `hang` characters in.
///
/// # Errors
/// As [`print`](crate::out::print).
pub(crate) fn print_prose(text: &str, hang: usize) -> Result<(), CliError> {
    outln!("{}", prose(text, hang, width()))
}

/// Lines of at most `limit` characters, as far as words are no longer; what does not fit goes on `hang` characters in.
fn prose(text: &str, hang: usize, limit: Option<usize>) -> String {
    let limit = limit.unwrap_or(usize::MAX);
    let hang = if hang > limit / 2 { 2 } else { hang };
    let fold = |line: &str| {
        if wide(line) <= limit {
            return line.to_owned();
        }
        // What stands in the hang, a name perhaps, stays as it is.
        let begin = line.char_indices().nth(hang).map_or(line.len(), |(at, _)| at);
        let begin = if line[..begin].trim_end().contains(' ') { 0 } else { begin };
        let (first, rest) = line.split_at(begin);
        let room = if begin == 0 { limit } else { limit - hang };
        let mut words = rest.split(' ').filter(|w| !w.is_empty());
        let (mut out, mut used) = (first.to_owned(), 0);
        let mut room = room;
        for word in words.by_ref() {
            let n = wide(word);
            if used > 0 && used + 1 + n > room {
                out.push('\n');
                out.push_str(&" ".repeat(hang));
                (used, room) = (0, limit - hang);
            } else if used > 0 {
                out.push(' ');
                used += 1;
            }
            out.push_str(word);
            used += n;
        }
        out
    };
    text.split('\n').map(fold).collect::<Vec<_>>().join("\n")
}

/// Which columns of these widths, padding included, stand together.
fn parts(widths: &[usize], keys: usize, number: usize, limit: usize) -> Vec<Part> {
    let all: Vec<usize> = (0..widths.len()).collect();
    if widths.iter().sum::<usize>() <= limit {
        return vec![Part { columns: all, numbered: false }];
    }
    let (names, figures) = all.split_at(keys);
    let named: usize = names.iter().map(|&c| widths[c]).sum();
    let widest = figures.iter().map(|&c| widths[c]).max().unwrap_or(0);
    // Names that leave little room stand once, beside numbers.
    let numbered = named * 5 > limit * 3 || named + widest > limit;
    let (mut parts, mut part, mut used) =
        (Vec::new(), names.to_vec(), named + if numbered { number } else { 0 });
    let empty = if numbered { 0 } else { keys };
    for &c in figures {
        if used + widths[c] > limit && part.len() > empty {
            parts.push(Part { columns: part, numbered });
            (part, used) = match numbered {
                true => (Vec::new(), number),
                false => (names.to_vec(), named),
            };
        }
        part.push(c);
        used += widths[c];
    }
    parts.push(Part { columns: part, numbered });
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Columns {
        let mut table = Columns::new(2, 1, ["policy", "size", "miss ratio", "bytes missed of all"]);
        table.row(["lru", "10", "0.5", "0.25"]);
        table.row(["s3fifo", "1000", "0.45", "0.125"]);
        table
    }

    fn widest(text: &str) -> usize {
        text.lines().map(|l| l.chars().count()).max().unwrap()
    }

    #[test]
    fn it_is_whole_where_there_is_room() {
        let (free, roomy) = (table().text(None), table().text(Some(120)));
        assert_eq!(free, roomy);
        assert_eq!(free.lines().count(), 6, "{free}");
        assert!(free.contains("bytes missed of all"));
    }

    #[test]
    fn headings_fold_before_columns_part() {
        let text = table().text(Some(46));
        assert!(widest(&text) <= 46, "{text}");
        let words: Vec<&str> = text.split_whitespace().collect();
        assert!(words.contains(&"missed") && !text.contains("missed of all"), "{text}");
        assert_eq!(text.matches("s3fifo").count(), 1, "one part:\n{text}");
    }

    #[test]
    fn parts_repeat_what_names_a_row() {
        let mut table = table();
        table.header.extend(["one more figure".to_owned(), "another".to_owned()]);
        table.rows.iter_mut().for_each(|r| r.extend(["1234567890".to_owned(), "7".to_owned()]));
        let text = table.text(Some(40));
        assert!(widest(&text) <= 40, "{text}");
        assert_eq!(text.matches("s3fifo").count(), 2, "{text}");
        for word in ["0.125", "1234567890", "another"] {
            let rows = if word == "1234567890" { 2 } else { 1 };
            assert_eq!(
                text.matches(word).count(),
                rows,
                "{word}
{text}"
            );
        }
    }

    #[test]
    fn long_names_stand_once_beside_numbers() {
        let mut table = Columns::new(1, 1, ["admission", "hits", "misses", "written"]);
        let name = "sseqr(window=32,length=4m)+tc(threshold=2)";
        for _ in 0..2 {
            table.row([name, "0.5", "12345", "12345.5 MiB"]);
        }
        let text = table.text(Some(60));
        assert!(widest(&text) <= 60, "{text}");
        assert_eq!(text.matches(name).count(), 2, "once for each row:\n{text}");
        assert_eq!(text.matches("12345.5 MiB").count(), 2, "{text}");
        assert_eq!(text.lines().filter(|l| l.trim_start().starts_with('2')).count(), 2, "{text}");
    }

    #[test]
    fn names_longer_than_a_line_fold() {
        let mut table = Columns::new(1, 1, ["admission", "hits"]);
        table.row(["sseqr(window=32,length=4m)+tc(threshold=2)+two_lbs(frequent=3)", "0.5"]);
        let text = table.text(Some(48));
        assert!(widest(&text) <= 48, "{text}");
        assert!(text.contains("0.5"), "{text}");
    }

    #[test]
    fn prose_goes_on_below() {
        let text = "requests       12 (and a remark of several words)\nshort";
        let folded = "requests       12 (and a remark of\n               several words)\nshort";
        assert_eq!(prose(text, 15, Some(34)), folded);
        assert_eq!(prose(text, 15, None), text);
        assert_eq!(prose("one two three", 2, Some(8)), "one two\n  three");
        assert_eq!(
            prose("  a sentence that is long", 2, Some(12)),
            "  a sentence\n  that is\n  long"
        );
        let word = "a-word-longer-than-the-line";
        assert_eq!(prose(word, 2, Some(10)), word);
    }

    #[test]
    fn words_fill_lines() {
        assert_eq!(wrapped("a bb ccc d".split(' '), 4), "a bb\nccc\nd");
        assert_eq!(wrapped("long-word a".split(' '), 4), "long-word\na");
    }
}
