//! Reports as one HTML file: figures that can be hovered and zoomed, and every number of them in a table.
//!
//! The file needs nothing from the network: style, script and data are in it. Figures are drawn by `plot.js` as SVG; without
//! a script the tables still say everything.

mod build;
mod grid;
mod mrc;

use std::fmt::Write as _;

use serde::Serialize;

pub use build::{Kinds, figures};
pub use grid::{Column, Field, Grid, shown};
pub use mrc::miss_ratio_curves;

/// How the values of an axis are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// A bare number.
    Plain,
    /// Whole things.
    Count,
    /// A share, shown as percent.
    Ratio,
    /// Bytes, in powers of 1024.
    Bytes,
    /// Seconds.
    Seconds,
}

/// An axis.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Axis {
    /// What it counts.
    pub label: String,
    /// How its values are written.
    pub unit: Unit,
    /// Whether it is logarithmic; values of zero and less are then left out.
    pub log: bool,
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// Marks alone.
    Points,
    /// Marks joined in the order of x.
    Line,
    /// A front: steps from each point to the next, dashed, without marks.
    Front,
}

/// One point of a series.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Along the axis across.
    pub x: f64,
    /// Along the axis upward.
    pub y: f64,
    /// Least and greatest y, of several seeds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<(f64, f64)>,
    /// What it is, beyond the name of its series.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub label: String,
}

/// Points that belong together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// How it is drawn.
    pub shape: Shape,
    /// Its colour and the form of its marks: the same for one cache over the whole report.
    pub mark: usize,
    /// Which of the series of that cache in this figure.
    pub variant: usize,
    /// The points.
    pub points: Vec<Point>,
}

/// A figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plot {
    /// Its heading.
    pub title: String,
    /// How to read it.
    pub note: String,
    /// The axis across.
    pub x: Axis,
    /// The axis upward.
    pub y: Axis,
    /// What is drawn.
    pub series: Vec<Series>,
}

/// A table of text. Cells that are numbers stand to the right, and are written short: bytes in units (columns `dram`, `flash`
/// and those that end with `_bytes`), others with five digits. All digits are in the cell's title.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Its heading.
    pub title: String,
    /// Names of the columns.
    pub columns: Vec<String>,
    /// Rows, each as long as `columns`.
    pub rows: Vec<Vec<String>>,
}

/// A report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Its heading.
    pub title: String,
    /// Where the numbers come from: version, seed, trace, configuration.
    pub facts: Vec<(String, String)>,
    /// Figures.
    pub plots: Vec<Plot>,
    /// Tables.
    pub tables: Vec<Table>,
}

/// Text as it may stand in HTML, in elements and in quoted attributes.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

impl Report {
    /// The report as an HTML document.
    ///
    /// # Errors
    /// A number that JSON cannot carry, which [`figures`] never makes.
    pub fn html(&self) -> Result<String, serde_json::Error> {
        // In a script element `<` could end it, wherever it stands in a string.
        let data = serde_json::to_string(&self.plots)?.replace('<', "\\u003c");
        let mut body = String::new();
        // Writing to a String cannot fail.
        let _ = write!(body, "<header><h1>{}</h1></header>\n<main>\n", escape(&self.title));
        for (i, plot) in self.plots.iter().enumerate() {
            let title = escape(&plot.title);
            let note = escape(&plot.note);
            let _ = writeln!(
                body,
                "<section class=\"plot\"><h2>{title}</h2><p>{note}</p><figure id=\"plot-{i}\" aria-label=\"{title}\">\
                 <noscript>Figures need JavaScript; the tables below have all numbers.</noscript></figure></section>"
            );
        }
        for table in &self.tables {
            table.write(&mut body);
        }
        if !self.facts.is_empty() {
            body.push_str(
                "<section><h2>Where this comes from</h2><table class=\"facts\"><tbody>\n",
            );
            for (name, value) in &self.facts {
                let (name, value) = (escape(name), escape(value));
                let _ = writeln!(
                    body,
                    "<tr><th scope=\"row\">{name}</th><td><pre>{value}</pre></td></tr>"
                );
            }
            body.push_str("</tbody></table></section>\n");
        }
        body.push_str("</main>");
        let title = escape(&self.title);
        let (style, script) = (include_str!("page.css"), include_str!("plot.js"));
        Ok(format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
             <link rel=\"icon\" href=\"data:,\">\n<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n\
             {body}\n<script type=\"application/json\" id=\"data\">{data}</script>\n<script>\n{script}</script>\n\
             </body>\n</html>\n"
        ))
    }
}

impl Table {
    fn write(&self, out: &mut String) {
        let title = escape(&self.title);
        let _ = write!(
            out,
            "<section><h2>{title}</h2><div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{title}\">\
             <table class=\"data\"><thead><tr>"
        );
        for column in &self.columns {
            let _ = write!(out, "<th scope=\"col\">{}</th>", escape(column));
        }
        out.push_str("</tr></thead><tbody>\n");
        for row in &self.rows {
            out.push_str("<tr>");
            for (column, cell) in self.columns.iter().zip(row) {
                let _ = match short(column, cell) {
                    Some(text) => {
                        write!(out, "<td class=\"n\" title=\"{}\">{text}</td>", escape(cell))
                    }
                    None => write!(out, "<td>{}</td>", escape(cell)),
                };
            }
            out.push_str("</tr>\n");
        }
        out.push_str("</tbody></table></div></section>\n");
    }
}

/// A number of a table as people read it; none where it is not a number.
fn short(column: &str, cell: &str) -> Option<String> {
    let number: f64 = cell.parse().ok().filter(|x: &f64| x.is_finite())?;
    if column == "dram" || column == "flash" || column.ends_with("_bytes") {
        return Some(larder_base::ByteSize(number.max(0.0) as u64).to_string());
    }
    let digits = cell.bytes().filter(u8::is_ascii_digit).count();
    if number == number.trunc() && number.abs() < 1e15 || digits <= 5 {
        return Some(cell.to_owned());
    }
    if !(1e-3..1e6).contains(&number.abs()) {
        return Some(format!("{number:.4e}"));
    }
    let whole = number.abs().log10().floor() as i32;
    let text = format!("{number:.*}", (4 - whole).max(0) as usize);
    Some(match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let axis = |label: &str, log| Axis { label: label.into(), unit: Unit::Bytes, log };
        let point = Point { x: 1.0, y: 0.25, range: None, label: "a</script>b".into() };
        let series = Series {
            name: "<lru>".into(),
            shape: Shape::Line,
            mark: 0,
            variant: 0,
            points: vec![point],
        };
        Report {
            title: "a & b".into(),
            facts: vec![("trace".into(), "x<b>y\"'".into())],
            plots: vec![Plot {
                title: "t".into(),
                note: "<i>".into(),
                x: axis("size", true),
                y: axis("miss", false),
                series: vec![series],
            }],
            tables: vec![Table {
                title: "rows".into(),
                columns: vec!["policy".into(), "miss_ratio".into()],
                rows: vec![vec!["lru".into(), "0.25".into()]],
            }],
        }
    }

    #[test]
    fn what_it_is_given_cannot_leave_its_place() {
        let html = report().html().unwrap();
        assert_eq!(html.matches("</script>").count(), 2, "{html}");
        assert!(html.contains("a\\u003c/script>b") && html.contains("\\u003clru>"));
        assert!(html.contains("<title>a &amp; b</title>"));
        assert!(html.contains("y&quot;&#39;"));
        assert!(html.contains("<td class=\"n\" title=\"0.25\">0.25</td>"));
        assert!(html.contains("<td>lru</td>"));
    }

    #[test]
    fn numbers_are_short_and_bytes_have_units() {
        for (column, cell, text) in [
            ("miss_ratio", "0.12345678901234567", "0.12346"),
            ("miss_ratio", "0.5", "0.5"),
            ("life_years", "69869.8123", "69870"),
            ("dlwa", "1.0000000000000002", "1"),
            ("dlwa", "0.00001234567", "1.2346e-5"),
            ("requests", "12345678", "12345678"),
            ("flash", "1048576", "1 MiB"),
            ("written_bytes", "1536", "1.5 KiB"),
        ] {
            assert_eq!(short(column, cell).as_deref(), Some(text), "{column} {cell}");
        }
        assert_eq!((short("name", "lru"), short("name", "nan")), (None, None));
    }

    #[test]
    fn nothing_is_fetched() {
        let html = report().html().unwrap();
        for word in ["http:", "https:", " src=", "@import", "url(\""] {
            // The name of SVG's elements is an address that nobody fetches.
            let text = html.replace("http://www.w3.org/2000/svg", "");
            assert!(!text.contains(word), "{word}");
        }
    }
}
