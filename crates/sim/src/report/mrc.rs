//! Miss-ratio curves as a report.

use larder_policy::eviction::Unit as SizeUnit;

use super::{Axis, Plot, Point, Report, Series, Shape, Table, Unit};
use crate::mrc::Row;

/// The report of rows of `larder sim mrc`: curves by request and by byte, and a table. Ranges are 1.96 standard errors of
/// sampled runs.
pub fn miss_ratio_curves(
    title: &str,
    rows: &[Row],
    unit: SizeUnit,
    facts: Vec<(String, String)>,
) -> Report {
    let name = |row: &Row| match &row.admission {
        None if row.curve => format!("{}, exact curve", row.policy),
        None => row.policy.to_owned(),
        Some(admission) => format!("{} + {admission}", row.policy),
    };
    let curves = |what: fn(&Row) -> (f64, Option<f64>)| {
        let mut all: Vec<Series> = Vec::new();
        for row in rows {
            let (y, error) = what(row);
            let range = error.map(|e| ((y - 1.96 * e).max(0.0), (y + 1.96 * e).min(1.0)));
            let point = Point { x: row.size as f64, y, range, label: String::new() };
            let name = name(row);
            match all.iter_mut().find(|s| s.name == name) {
                Some(series) => series.points.push(point),
                None => {
                    let mark = all.len();
                    all.push(Series {
                        name,
                        shape: Shape::Line,
                        mark,
                        variant: 0,
                        points: vec![point],
                    });
                }
            }
        }
        all.iter_mut().for_each(|s| s.points.sort_by(|a, b| a.x.total_cmp(&b.x)));
        all
    };
    let x = match unit {
        SizeUnit::Objects => Axis { label: "objects".into(), unit: Unit::Count, log: true },
        SizeUnit::Bytes => Axis { label: "cache size".into(), unit: Unit::Bytes, log: true },
    };
    let y = |label: &str| Axis { label: label.to_owned(), unit: Unit::Ratio, log: false };
    let plots = vec![
        Plot {
            title: "Miss ratio by size".to_owned(),
            note: "Requests not answered, of all requests.".to_owned(),
            x: x.clone(),
            y: y("miss ratio"),
            series: curves(|r| (r.miss_ratio, r.miss_ratio_error)),
        },
        Plot {
            title: "Byte miss ratio by size".to_owned(),
            note: "Bytes of requests not answered, of the bytes of all requests.".to_owned(),
            x,
            y: y("byte miss ratio"),
            series: curves(|r| (r.byte_miss_ratio, None)),
        },
    ];
    let columns = [
        "policy",
        if unit == SizeUnit::Bytes { "size_bytes" } else { "size" },
        "requests",
        "misses",
        "miss_ratio",
        "request_bytes",
        "miss_bytes",
        "byte_miss_ratio",
    ];
    let table = Table {
        title: "Results".to_owned(),
        columns: columns.map(str::to_owned).to_vec(),
        rows: rows
            .iter()
            .map(|r| {
                vec![
                    name(r),
                    r.size.to_string(),
                    r.requests.to_string(),
                    r.misses.to_string(),
                    r.miss_ratio.to_string(),
                    r.request_bytes.to_string(),
                    r.miss_bytes.to_string(),
                    r.byte_miss_ratio.to_string(),
                ]
            })
            .collect(),
    };
    Report { title: title.to_owned(), facts, plots, tables: vec![table] }
}
