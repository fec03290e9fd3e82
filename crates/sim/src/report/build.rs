//! Which figures a table of results makes.

use std::collections::{BTreeMap, BTreeSet};

use super::{Axis, Field, Grid, Plot, Point, Series, Shape, Unit};

/// Which columns of the results say what.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kinds {
    /// Columns that were varied, in order; the caches' `name` comes besides.
    pub axes: Vec<String>,
}

/// Series of one figure over time, at most: more cannot be told apart.
const MOST_SERIES: usize = 16;
/// Figures of one kind drawn one for each size, at most.
const MOST_FACETS: usize = 12;
/// The axis of seeds: runs that differ in it alone are one point.
const SEED: &str = "seed";

/// The figures of a sweep or a run: fronts of misses against writes, curves over sizes, wear, latency, and figures over
/// time. `results` has a row for each cache of each cell, `series` one for each point in time.
pub fn figures(results: &Grid, series: &Grid, kinds: &Kinds) -> Vec<Plot> {
    let view = View::new(results, kinds);
    let mut plots = Vec::new();
    for (facet, rows) in view.facets(&view.facet_columns()) {
        plots.extend(view.curves(&facet, &rows));
    }
    let fronts = view.by_size(kinds);
    for (facet, rows) in &fronts {
        plots.extend(view.front(facet, rows));
    }
    for (facet, rows) in view.facets(&view.facet_columns()) {
        plots.extend(view.wear(&facet, &rows));
        plots.extend(view.latency(&facet, &rows));
    }
    plots.extend(over_time(series, kinds, view.names));
    plots
}

struct View<'a> {
    grid: &'a Grid,
    /// Varied columns of which each value gives a series of its own.
    told_apart: Vec<String>,
    /// Varied columns of numbers, other than sizes of the cache: their values label points.
    labels: Vec<String>,
    workloads: Vec<String>,
    /// Caches by name, whose places here are their marks in every figure.
    names: Vec<String>,
}

impl<'a> View<'a> {
    fn new(grid: &'a Grid, kinds: &Kinds) -> View<'a> {
        let mut view =
            View { grid, told_apart: vec![], labels: vec![], workloads: vec![], names: vec![] };
        for axis in kinds.axes.iter().filter(|a| *a != SEED) {
            let last = axis.rsplit('.').next().unwrap_or(axis);
            if axis.starts_with("workload.") {
                view.workloads.push(axis.clone());
            } else if last == "flash" || last == "dram" {
                // The results say sizes in columns of their own, in bytes.
            } else if view.all_numbers(axis) {
                view.labels.push(axis.clone());
            } else {
                view.told_apart.push(axis.clone());
            }
        }
        view.told_apart.push("name".to_owned());
        let varied = std::mem::take(&mut view.told_apart);
        view.told_apart = varied.into_iter().filter(|c| view.distinct(c) > 1).collect();
        view.name_caches(Vec::new());
        view
    }

    /// Gives every cache its place, those of `known` first.
    fn name_caches(&mut self, known: Vec<String>) {
        self.names = known;
        for row in 0..self.grid.rows.len() {
            let name = self.series_name(row, &[]);
            if !self.names.contains(&name) {
                self.names.push(name);
            }
        }
    }

    /// Rows by workload, and by the sizes that the sweep varies where that is not too many: more flash or DRAM always helps,
    /// so that they are compared within a size. Caches of a single run are of one comparison, whatever their sizes.
    fn by_size(&self, kinds: &Kinds) -> Vec<(String, Vec<usize>)> {
        let mut columns = self.facet_columns();
        for size in ["dram", "flash"] {
            let varied = kinds.axes.iter().any(|a| a.rsplit('.').next() == Some(size));
            if varied && self.distinct(size) > 1 && !columns.contains(&size.to_owned()) {
                columns.push(size.to_owned());
            }
        }
        let facets = self.facets(&columns);
        if facets.len() > MOST_FACETS { self.facets(&self.facet_columns()) } else { facets }
    }

    fn facet_columns(&self) -> Vec<String> {
        self.workloads.clone()
    }

    fn field(&self, row: usize, column: &str) -> &Field {
        self.grid.column(column).map_or(&Field::Nothing, |at| &self.grid.rows[row][at])
    }

    fn number(&self, row: usize, column: &str) -> Option<f64> {
        self.field(row, column).number().filter(|x| x.is_finite())
    }

    fn all_numbers(&self, column: &str) -> bool {
        (0..self.grid.rows.len()).all(|row| self.field(row, column).number().is_some())
    }

    fn distinct(&self, column: &str) -> usize {
        let all: BTreeSet<String> =
            (0..self.grid.rows.len()).map(|row| self.field(row, column).text()).collect();
        all.len()
    }

    /// Rows by their values in `columns`, in the order in which they come.
    fn facets(&self, columns: &[String]) -> Vec<(String, Vec<usize>)> {
        let mut order: Vec<(String, Vec<usize>)> = Vec::new();
        for row in 0..self.grid.rows.len() {
            let name = self.words(row, columns);
            match order.iter_mut().find(|(n, _)| *n == name) {
                Some((_, rows)) => rows.push(row),
                None => order.push((name, vec![row])),
            }
        }
        order
    }

    /// The values of `columns` in words; sizes as sizes.
    fn words(&self, row: usize, columns: &[String]) -> String {
        let all: Vec<String> = columns
            .iter()
            .filter(|c| *self.field(row, c) != Field::Nothing)
            .map(|c| match (c.as_str(), self.field(row, c)) {
                ("dram" | "flash", Field::Whole(n)) => {
                    format!("{c} {}", larder_base::ByteSize(*n as u64))
                }
                ("workload.trace", field) => field.text(),
                (c, field) => {
                    let text = field.text();
                    if field.number().is_some() { format!("{c}={text}") } else { text }
                }
            })
            .collect();
        all.join(" · ")
    }

    fn series_name(&self, row: usize, more: &[&str]) -> String {
        let mut columns = self.told_apart.clone();
        columns.extend(more.iter().map(|c| (*c).to_owned()));
        let name = self.words(row, &columns);
        if name.is_empty() { self.field(row, "name").text() } else { name }
    }

    /// Series of points (x, y), those of several seeds as one: their means, and the range of y. `apart` are columns whose
    /// values make series, `labelled` those that tell points of a series from each other.
    fn series(
        &self,
        rows: &[usize],
        (x, y): (&str, &str),
        shape: Shape,
        apart: &[&str],
        labelled: &[&str],
    ) -> Vec<Series> {
        let mut order: Vec<(String, usize)> = Vec::new();
        let mut groups: BTreeMap<(String, String), Vec<(f64, f64)>> = BTreeMap::new();
        let mut labels: Vec<(String, String)> = Vec::new();
        let mut columns = self.labels.clone();
        columns.extend(labelled.iter().map(|c| (*c).to_owned()));
        for &row in rows {
            let (Some(px), Some(py)) = (self.number(row, x), self.number(row, y)) else { continue };
            let name = self.series_name(row, apart);
            let mut label = self.words(row, &columns);
            if shape == Shape::Line {
                // Points along a line are told apart by x too.
                label = format!("{label}\u{0}{px:?}");
            }
            if !order.iter().any(|(known, _)| *known == name) {
                let cache = self.series_name(row, &[]);
                let mark = self.names.iter().position(|n| *n == cache).unwrap_or(0);
                order.push((name.clone(), mark));
            }
            let key = (name, label);
            if !groups.contains_key(&key) {
                labels.push(key.clone());
            }
            groups.entry(key).or_default().push((px, py));
        }
        let mut all: Vec<Series> = Vec::new();
        for (name, mark) in order {
            let variant = all.iter().filter(|s| s.mark == mark).count();
            all.push(Series { name, shape, mark, variant, points: Vec::new() });
        }
        for key in labels {
            let found = &groups[&key];
            let count = found.len() as f64;
            let least = found.iter().map(|p| p.1).fold(f64::INFINITY, f64::min);
            let most = found.iter().map(|p| p.1).fold(f64::NEG_INFINITY, f64::max);
            let mean = |of: fn(&(f64, f64)) -> f64| found.iter().map(of).sum::<f64>() / count;
            let single = found.len() == 1;
            let label = key.1.split('\u{0}').next().unwrap_or_default().to_owned();
            let point = Point {
                x: if single { found[0].0 } else { mean(|p| p.0) },
                y: if single { found[0].1 } else { mean(|p| p.1) },
                range: (!single).then_some((least, most)),
                label,
            };
            if let Some(series) = all.iter_mut().find(|s| s.name == key.0) {
                series.points.push(point);
            }
        }
        if shape == Shape::Line {
            all.iter_mut().for_each(|s| s.points.sort_by(|a, b| a.x.total_cmp(&b.x)));
        }
        all
    }

    fn titled(&self, what: &str, facet: &str) -> String {
        if facet.is_empty() { what.to_owned() } else { format!("{what}: {facet}") }
    }

    fn seeds_note(&self) -> &'static str {
        if self.distinct(SEED) > 1 {
            " A mark is the mean over seeds, its bar the least and the greatest."
        } else {
            ""
        }
    }

    /// Miss ratio over the size of the cache, where sizes vary.
    fn curves(&self, facet: &str, rows: &[usize]) -> Option<Plot> {
        let distinct = |column: &str| {
            let all: BTreeSet<String> =
                rows.iter().map(|&row| self.field(row, column).text()).collect();
            all.len()
        };
        let (x, other) = match (distinct("flash"), distinct("dram")) {
            (2.., _) => ("flash", "dram"),
            (_, 2..) => ("dram", "flash"),
            _ => return None,
        };
        let mut apart: Vec<&str> = if distinct(other) > 1 { vec![other] } else { vec![] };
        apart.extend(self.labels.iter().map(String::as_str));
        Some(Plot {
            title: self.titled("Miss ratio by size", facet),
            note: format!("Reads not answered, of all reads.{}", self.seeds_note()),
            x: Axis { label: format!("{x} size"), unit: Unit::Bytes, log: true },
            y: Axis { label: "miss ratio".to_owned(), unit: Unit::Ratio, log: false },
            series: self.series(rows, (x, "miss_ratio"), Shape::Line, &apart, &[]),
        })
    }

    /// Misses against writes, with the front of what nothing else beats in both.
    fn front(&self, facet: &str, rows: &[usize]) -> Option<Plot> {
        let at = ("flash_bytes", "miss_ratio");
        let mut series = self.series(rows, at, Shape::Points, &[], &["dram", "flash"]);
        let points: Vec<&Point> = series.iter().flat_map(|s| &s.points).collect();
        if points.is_empty() {
            return None;
        }
        let front = pareto(points.iter().map(|p| (p.x, p.y)));
        let points = front
            .into_iter()
            .map(|(x, y)| Point { x, y, range: None, label: String::new() })
            .collect();
        let (name, shape) = ("front".to_owned(), Shape::Front);
        series.push(Series { name, shape, mark: 0, variant: 0, points });
        Some(Plot {
            title: self.titled("Misses against flash writes", facet),
            note: format!(
                "Down and left is better; the front is what nothing else beats in both.{}",
                self.seeds_note()
            ),
            x: Axis { label: "bytes written to flash".to_owned(), unit: Unit::Bytes, log: false },
            y: Axis { label: "miss ratio".to_owned(), unit: Unit::Ratio, log: false },
            series,
        })
    }

    /// Years of drive life against misses.
    fn wear(&self, facet: &str, rows: &[usize]) -> Option<Plot> {
        let at = ("miss_ratio", "life_years");
        let series = self.series(rows, at, Shape::Points, &[], &["dram", "flash"]);
        series.iter().any(|s| !s.points.is_empty()).then(|| Plot {
            title: self.titled("Wear: drive life against misses", facet),
            note: format!(
                "Years that the drive's endurance lasts at this rate of writes and write amplification; up and left is \
                 better.{}",
                self.seeds_note()
            ),
            x: Axis { label: "miss ratio".to_owned(), unit: Unit::Ratio, log: false },
            y: Axis { label: "drive life, years".to_owned(), unit: Unit::Plain, log: true },
            series,
        })
    }

    /// Tail latency against misses.
    fn latency(&self, facet: &str, rows: &[usize]) -> Option<Plot> {
        let at = ("miss_ratio", "latency_read_mean_us");
        let series = self.series(rows, at, Shape::Points, &[], &["dram", "flash"]);
        series.iter().any(|s| !s.points.is_empty()).then(|| Plot {
            title: self.titled("Mean latency of reads against misses", facet),
            note: format!("From the timing model.{}", self.seeds_note()),
            x: Axis { label: "miss ratio".to_owned(), unit: Unit::Ratio, log: false },
            y: Axis { label: "mean latency, µs".to_owned(), unit: Unit::Plain, log: false },
            series,
        })
    }
}

/// Of points (x, y), those that no other is at most equal to in both and below in one, by rising x.
pub(super) fn pareto(points: impl IntoIterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let mut all: Vec<(f64, f64)> = points.into_iter().collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let mut front: Vec<(f64, f64)> = Vec::new();
    for (x, y) in all {
        if front.last().is_none_or(|last| y < last.1) {
            front.push((x, y));
        }
    }
    front
}

/// From this share on an interval counts as whole: the last request comes a little before its end.
const WHOLE: f64 = 0.9;

/// Hit ratio, writes and write amplification over time, a figure for each workload and size: a line for each cache, the mean
/// over seeds. `names` are those of the caches in the other figures.
fn over_time(series: &Grid, kinds: &Kinds, names: Vec<String>) -> Vec<Plot> {
    let mut view = View::new(series, kinds);
    view.name_caches(names);
    let facets = view.by_size(kinds);
    let figures = [
        ("hit_ratio", "Hit ratio over time", "hit ratio", Unit::Ratio),
        ("flash_bytes", "Flash writes over time", "bytes written to flash", Unit::Bytes),
        ("dlwa", "Device-level write amplification over time", "DLWA", Unit::Plain),
        (
            "latency_read_p99_us",
            "Tail latency of reads over time",
            "99th percentile, µs",
            Unit::Plain,
        ),
    ];
    let mut plots = Vec::new();
    for (column, title, label, unit) in figures {
        for (facet, rows) in &facets {
            // The last interval of a run is mostly cut short by its end: its sums would look like a fall.
            let whole =
                |&row: &usize| view.number(row, "interval_share").is_none_or(|s| s >= WHOLE);
            let rows: &Vec<usize> = &rows.iter().copied().filter(whole).collect();
            let text =
                |c: &str| rows.iter().map(|&r| view.field(r, c).text()).collect::<BTreeSet<_>>();
            // What the facets leave together and a line cannot show is in its name.
            let mut apart: Vec<&str> = view.labels.iter().map(String::as_str).collect();
            let varied = |size: &str| kinds.axes.iter().any(|a| a.rsplit('.').next() == Some(size));
            let sizes = ["dram", "flash"].into_iter().filter(|size| varied(size));
            apart.extend(sizes.filter(|size| text(size).len() > 1));
            let mut lines = view.series(rows, ("time", column), Shape::Line, &apart, &[]);
            lines.retain(|s| !s.points.is_empty());
            if lines.is_empty() {
                continue;
            }
            let mut note = format!(
                "Each point is what happened in the interval that ends there; an interval that the run's end cut short is left out.{}",
                view.seeds_note()
            );
            if lines.len() > MOST_SERIES {
                note += &format!(
                    " The first {MOST_SERIES} of {} lines; the file of series has all.",
                    lines.len()
                );
                lines.truncate(MOST_SERIES);
            }
            plots.push(Plot {
                title: view.titled(title, facet),
                note,
                x: Axis { label: "virtual time".to_owned(), unit: Unit::Seconds, log: false },
                y: Axis { label: label.to_owned(), unit, log: false },
                series: lines,
            });
        }
    }
    plots
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_base::Rng;
    use serde_json::json;

    #[test]
    fn nothing_beats_the_front() {
        let mut rng = Rng::new(4);
        for _ in 0..300 {
            let points: Vec<(f64, f64)> = (0..1 + rng.below(30))
                .map(|_| (rng.below(9) as f64, rng.below(9) as f64))
                .collect();
            let beaten = |p: &(f64, f64)| {
                points.iter().any(|q| q.0 <= p.0 && q.1 <= p.1 && (q.0 < p.0 || q.1 < p.1))
            };
            let mut naive: Vec<(f64, f64)> =
                points.iter().filter(|p| !beaten(p)).copied().collect();
            naive.sort_by(|a, b| a.0.total_cmp(&b.0));
            naive.dedup();
            assert_eq!(pareto(points.iter().copied()), naive, "{points:?}");
        }
    }

    fn results() -> Grid {
        let mut grid = Grid::default();
        for trace in ["a", "b"] {
            for (i, policy) in ["ghost", "all"].iter().enumerate() {
                for flash in [1u64 << 20, 4 << 20] {
                    for seed in 1..=2i64 {
                        let axes = [
                            ("workload.trace".to_owned(), Field::Text(trace.into())),
                            ("cache.admission.policy".to_owned(), Field::Text((*policy).into())),
                            ("cache.flash".to_owned(), Field::Text(format!("{}m", flash >> 20))),
                            ("seed".to_owned(), Field::Whole(seed)),
                        ];
                        let miss = 0.5 - flash as f64 / 1e8 + seed as f64 / 100.0;
                        let value = json!({ "name": "hybrid", "flash": flash, "dram": 65536,
                            "miss_ratio": miss, "flash_bytes": 1000 * (i + 1), "life_years": null });
                        grid.push(&axes, &value);
                    }
                }
            }
        }
        grid
    }

    #[test]
    fn seeds_are_one_point_and_workloads_a_figure_each() {
        let axes = ["workload.trace", "cache.admission.policy", "cache.flash", "seed"];
        let kinds = Kinds { axes: axes.map(str::to_owned).to_vec() };
        let plots = figures(&results(), &Grid::default(), &kinds);
        let titles: Vec<&str> = plots.iter().map(|p| p.title.as_str()).collect();
        assert_eq!(titles.iter().filter(|t| t.starts_with("Miss ratio by size")).count(), 2);
        assert_eq!(titles.iter().filter(|t| t.starts_with("Misses against")).count(), 4);
        assert!(titles.contains(&"Misses against flash writes: b · flash 4 MiB"), "{titles:?}");
        let curve = &plots[0];
        let names: Vec<&str> = curve.series.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["ghost", "all"]);
        assert_eq!(curve.series[0].points.len(), 2);
        let p = &curve.series[0].points[0];
        let least = 0.5 - 1048576.0 / 1e8 + 0.01;
        assert_eq!((p.x, p.range), (1048576.0, Some((least, least + 0.01))));
        assert!((p.y - least - 0.005).abs() < 1e-12);
        // Both write what they write and miss alike: only who writes less is on the front.
        let front = plots.iter().find(|p| p.title.starts_with("Misses")).unwrap();
        let drawn = front.series.last().unwrap();
        assert_eq!((drawn.shape, drawn.points.len()), (Shape::Front, 1));
        assert_eq!(drawn.points[0].x, 1000.0);
    }

    #[test]
    fn a_cache_has_one_mark_in_every_figure() {
        let mut series = Grid::default();
        for policy in ["all", "ghost"] {
            for t in 1..=2 {
                let axes = [
                    ("cache.admission.policy".to_owned(), Field::Text(policy.into())),
                    ("cache.flash".to_owned(), Field::Text("1m".into())),
                ];
                series.push(
                    &axes,
                    &json!({ "name": "hybrid", "dram": 65536, "flash": 1 << 20, "time": t, "hit_ratio": 0.1 }),
                );
            }
        }
        let axes = ["workload.trace", "cache.admission.policy", "cache.flash", "seed"];
        let kinds = Kinds { axes: axes.map(str::to_owned).to_vec() };
        let plots = figures(&results(), &series, &kinds);
        assert!(plots.iter().any(|p| p.title.starts_with("Hit ratio over time")));
        let marks: BTreeSet<(&str, usize)> = plots
            .iter()
            .flat_map(|p| &p.series)
            .filter(|s| s.shape != Shape::Front)
            .map(|s| (s.name.as_str(), s.mark))
            .collect();
        assert_eq!(marks.into_iter().collect::<Vec<_>>(), [("all", 1), ("ghost", 0)]);
    }

    #[test]
    fn one_run_has_one_front_whatever_the_sizes() {
        let mut grid = Grid::default();
        for (name, flash, miss) in [("a", 1 << 20, 0.5), ("b", 2 << 20, 0.4), ("c", 2 << 20, 0.6)] {
            let value = json!({ "name": name, "flash": flash, "dram": 65536, "miss_ratio": miss,
                "flash_bytes": (miss * 10.0) as u64 });
            grid.push(&[], &value);
        }
        let plots = figures(&grid, &Grid::default(), &Kinds::default());
        let fronts: Vec<&Plot> =
            plots.iter().filter(|p| p.title.starts_with("Misses against")).collect();
        assert_eq!(fronts.len(), 1);
        assert_eq!(
            (fronts[0].title.as_str(), fronts[0].series.len()),
            ("Misses against flash writes", 4)
        );
        let marks: Vec<usize> = fronts[0].series[..3].iter().map(|s| s.mark).collect();
        assert_eq!(marks, [0, 1, 2]);
    }

    #[test]
    fn time_has_a_line_for_each_cache_and_a_figure_for_each_size() {
        let mut series = Grid::default();
        for (flash, name) in [("1m", "x"), ("2m", "x"), ("1m", "y"), ("2m", "y")] {
            for seed in 1..=20i64 {
                for t in 1..=3 {
                    let axes = [
                        ("cache.flash".to_owned(), Field::Text(flash.into())),
                        ("seed".to_owned(), Field::Whole(seed)),
                    ];
                    let bytes = if flash == "1m" { 1 << 20 } else { 2 << 20 };
                    let hits = 0.1 * f64::from(t) + seed as f64 / 100.0;
                    let value = json!({ "name": name, "flash": bytes, "dram": 65536, "time": t, "hit_ratio": hits });
                    series.push(&axes, &value);
                }
            }
        }
        let kinds = Kinds { axes: vec!["cache.flash".into(), "seed".into()] };
        let plots = figures(&Grid::default(), &series, &kinds);
        let titles: Vec<&str> = plots.iter().map(|p| p.title.as_str()).collect();
        let wanted = ["Hit ratio over time: flash 1 MiB", "Hit ratio over time: flash 2 MiB"];
        assert_eq!(titles, wanted);
        let lines: Vec<&str> = plots[0].series.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(lines, ["x", "y"]);
        let point = &plots[0].series[0].points[1];
        assert!((point.y - 0.305).abs() < 1e-12, "the mean over seeds: {point:?}");
        let (least, most) = point.range.unwrap();
        assert!((least - 0.21).abs() < 1e-12 && (most - 0.4).abs() < 1e-12, "{point:?}");
        assert!(plots[0].note.contains("mean over seeds"));
    }

    #[test]
    fn an_interval_that_the_end_cut_short_is_not_drawn() {
        let mut series = Grid::default();
        for (t, share) in [(1, 1.0), (2, 0.999), (3, 0.4)] {
            let value =
                json!({ "name": "x", "time": t, "interval_share": share, "flash_bytes": 100 });
            series.push(&[], &value);
        }
        let plots = figures(&Grid::default(), &series, &Kinds::default());
        let times: Vec<f64> = plots[0].series[0].points.iter().map(|p| p.x).collect();
        assert_eq!(times, [1.0, 2.0]);
    }

    #[test]
    fn more_lines_than_can_be_told_apart_are_left_out_and_said() {
        let mut series = Grid::default();
        for cache in 0..20 {
            series.push(&[], &json!({ "name": format!("c{cache}"), "time": 1, "hit_ratio": 0.5 }));
        }
        let plots = figures(&Grid::default(), &series, &Kinds::default());
        assert_eq!(plots[0].series.len(), MOST_SERIES);
        assert!(plots[0].note.contains("16 of 20"));
    }
}
