//! `larder bench equal-writes`: who misses least for the same bytes written to flash, over a list of cells.

use std::path::{Path, PathBuf};

use clap::{Parser, ValueEnum};
use larder_base::ByteSize;
use larder_sim::lab::equal_writes::{AtBudget, Outcome, Role, Table};
use larder_sim::lab::kv_study::Spread;

use super::progress;
use super::share::{self, share_out};
use crate::error::CliError;
use crate::out::print_json;
use crate::table::Columns;

/// The list that `--table` stands for.
const LIST: &str = include_str!("../../../../experiments/equal-writes.toml");

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Which {
    /// Traces on which our settings were chosen.
    Tuned,
    /// Traces on which results are claimed.
    Claimed,
}

#[derive(Debug, Parser)]
#[command(after_help = "\
A cell is TRACE:FLASH:MEMORY: flash in percent of the bytes of all objects, all memory (as
larder kv -m) in percent of flash. Each cell runs at every budget of the list.

Examples:
  larder bench equal-writes --list
  larder bench equal-writes --traces DIR --cells scarab:10:12.5,zipf09
  larder bench equal-writes --traces DIR --role claimed --json >claimed.json")]
pub(super) struct EqualWritesArgs {
    /// The list of cells, TOML; experiments/equal-writes.toml when not given.
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Where shared traces lie.
    #[arg(long, value_name = "DIR", default_value = "../shared/traces")]
    traces: PathBuf,
    /// These cells alone, separated by commas: TRACE, TRACE:FLASH or TRACE:FLASH:MEMORY.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    cells: Vec<String>,
    /// The traces of one role alone.
    #[arg(long, value_enum, value_name = "ROLE")]
    role: Option<Which>,
    /// Most seeds for each cell; the list says how many a trace has.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    seeds: u64,
    /// Threads; all cores when not given. Each holds a trace in memory, some 130 bytes a request.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Print the cells, and end.
    #[arg(long)]
    list: bool,
    /// Print every cell and seed as JSON.
    #[arg(long)]
    json: bool,
}

fn table(path: Option<&Path>) -> Result<Table, CliError> {
    let usage = |text: String| CliError::Usage(text);
    let Some(path) = path else {
        return Table::parse(LIST, "experiments/equal-writes.toml")
            .map_err(|e| usage(e.to_string()));
    };
    let file = path.display().to_string();
    let text =
        std::fs::read_to_string(path).map_err(|e| usage(format!("--table '{file}': {e}")))?;
    Table::parse(&text, &file).map_err(|e| usage(e.to_string()))
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Tuned => "tuned",
        Role::Claimed => "claimed",
    }
}

pub(super) fn run(args: &EqualWritesArgs) -> Result<(), CliError> {
    let table = table(args.table.as_deref())?;
    let mut cells =
        table.chosen(&args.cells).map_err(|e| CliError::Usage(format!("--cells: {e}")))?;
    let role = args.role.map(|role| match role {
        Which::Tuned => Role::Tuned,
        Which::Claimed => Role::Claimed,
    });
    let role_of = |trace: &str| table.trace(trace).map_or(Role::Tuned, |t| t.role);
    cells.retain(|cell| role.is_none_or(|role| role_of(&cell.trace) == role));
    if args.list {
        let mut t = Columns::new(2, 1, ["cell", "role"]);
        for cell in &cells {
            t.row([cell.name(), role_name(role_of(&cell.trace)).to_owned()]);
        }
        t.print()?;
        return Ok(());
    }
    cells.retain(|cell| {
        let needs = table.trace(&cell.trace).and_then(|t| t.needs(&args.traces));
        let there = needs.as_ref().is_none_or(|path| path.exists());
        if let (false, Some(path)) = (there, needs) {
            noteln!("larder: {} left out: {} is not there (--traces)", cell.name(), path.display());
        }
        there
    });
    if cells.is_empty() {
        return Err(CliError::Usage("no cell is left to run: --list names all".to_owned()));
    }
    let seeds = |trace: &str| table.trace(trace).map_or(1, |t| t.seeds.min(args.seeds));
    let work: Vec<_> =
        cells.iter().flat_map(|cell| (1..=seeds(&cell.trace)).map(move |s| (cell, s))).collect();
    let threads = share::threads(args.threads)?;
    let bar = progress(work.len() as u64 * table.steps());
    let outcomes = share_out(threads, &work, |&(cell, seed)| {
        let name = cell.name();
        let mut steps = 0;
        let mut step = |what: &'static str| {
            bar.set_message(format!("{name} {what}"));
            bar.inc(1);
            steps += 1;
        };
        let outcome = table.measure(cell, &args.traces, seed, &mut step);
        // A server that does not start has no runs.
        bar.inc(table.steps().saturating_sub(steps));
        outcome.map_err(|e| format!("{name}: {e}"))
    });
    bar.finish_and_clear();
    let outcomes: Vec<Outcome> = outcomes?;
    if args.json {
        return print_json(&outcomes);
    }
    print(&table, &outcomes)
}

/// The median of a figure over the seeds of a cell, in percent.
fn percent(cell: &[&AtBudget], figure: impl Fn(&AtBudget) -> Option<f64>) -> String {
    let of = cell.iter().filter_map(|at| figure(at));
    Spread::of(of).map_or("-".to_owned(), |s| format!("{:.2}", s.median * 100.0))
}

fn print(table: &Table, outcomes: &[Outcome]) -> Result<(), CliError> {
    let names: Vec<&str> = outcomes
        .iter()
        .find_map(|o| o.budgets.first())
        .map(|at| at.rivals.iter().map(|r| r.name).collect())
        .unwrap_or_default();
    let by_requests: Figure = (|at| at.ours.requests, |at, i| at.rivals[i].requests, true);
    let by_bytes: Figure = (|at| at.ours.bytes, |at, i| at.rivals[i].bytes, false);
    for (title, figure) in [("number", by_requests), ("bytes", by_bytes)] {
        print_misses(table, outcomes, &names, title, figure)?;
    }
    print_not_started(outcomes)
}

/// The cells in which no server starts, each with the memory with which one would.
fn print_not_started(outcomes: &[Outcome]) -> Result<(), CliError> {
    let header = ["cell", "flash", "memory", "least", "a server does not start, because"];
    let mut none = Columns::new(1, 1, header);
    let (mut cells, mut not) = (0, 0);
    for o in outcomes.iter().filter(|o| o.seed == 1) {
        cells += 1;
        if let Some(why) = &o.does_not_start {
            let [flash, memory] = [o.flash, o.memory].map(|bytes| ByteSize(bytes).to_string());
            let least = o.least_memory.map_or("-".to_owned(), |least| ByteSize(least).to_string());
            none.row([o.cell.name(), flash, memory, least, why.clone()]);
            not += 1;
        }
    }
    if not == 0 {
        return Ok(());
    }
    none.print()?;
    proseln!(
        "{not} of {cells} cells do not start a server (least: the memory with which it starts; - where the flash is too small for any)"
    )
}

/// Misses of ours, misses of a rival, and whether the oracle sought this kind.
type Figure = (fn(&AtBudget) -> f64, fn(&AtBudget, usize) -> Option<f64>, bool);

fn print_misses(
    table: &Table,
    outcomes: &[Outcome],
    names: &[&str],
    title: &str,
    (ours, rival, oracle): Figure,
) -> Result<(), CliError> {
    let mut header = vec!["cell", "role", "budget", "ours", "written", "behind", "best"];
    header.extend(names);
    if oracle {
        header.push("oracle");
    }
    let mut t = Columns::new(3, 1, header);
    let mut tally = [Tally::default(); 2];
    for cell in table.cells() {
        let of: Vec<&Outcome> = outcomes.iter().filter(|o| o.cell == cell).collect();
        for (i, level) in table.budgets.iter().enumerate() {
            let at: Vec<&AtBudget> = of.iter().filter_map(|o| o.budgets.get(i)).collect();
            let Some(first) = of.first().filter(|_| !at.is_empty()) else { continue };
            // A budget of almost nothing may be none.
            let written = |at: &AtBudget| at.ours.written as f64 / at.budget.max(1) as f64;
            let written = Spread::of(at.iter().map(|at| written(at))).map_or(0.0, |s| s.median);
            let median = |figure: &dyn Fn(&AtBudget) -> Option<f64>| {
                Spread::of(at.iter().filter_map(|at| figure(at))).map(|s| s.median)
            };
            let best = (0..names.len())
                .filter_map(|i| median(&|at| rival(at, i)).map(|misses| (misses, names[i])))
                .min_by(|a, b| a.0.total_cmp(&b.0));
            let kept = written <= larder_sim::lab::equal_writes::SLACK;
            let behind = median(&|at| Some(ours(at))).zip(best).map(|(o, b)| (o - b.0) * 100.0);
            tally[usize::from(first.role == Role::Claimed)].add(behind.filter(|_| kept), kept);
            let mut row = vec![
                cell.name(),
                role_name(first.role).to_owned(),
                format!("{level}"),
                percent(&at, |at| Some(ours(at))),
                format!("{written:.2}"),
                behind.map_or("-".to_owned(), |b| format!("{b:+.2}")),
                best.map_or("-", |b| b.1).to_owned(),
            ];
            row.extend((0..names.len()).map(|i| percent(&at, |at| rival(at, i))));
            if oracle {
                row.push(percent(&at, |at| Some(at.oracle.requests)));
            }
            t.row(row);
        }
    }
    if tally.iter().all(|t| t.cells == 0) {
        return Ok(());
    }
    proseln!(
        "Misses by {title} in percent of all reads after the first third, at equal bytes written to flash (budget: share of what 'all' \
         writes; written: of the budget, by ours, at most 1.02). Rivals: the lower hull of their settings at 1.02 x the budget. behind: \
         points over the best rival. The oracle is an offline heuristic that knows the next reads."
    )?;
    t.print()?;
    for (role, t) in [Role::Tuned, Role::Claimed].into_iter().zip(tally).filter(|t| t.1.cells > 0) {
        let Tally { cells, first, near, over, most } = t;
        let most = most.map_or("-".to_owned(), |most| format!("{most:+.2}"));
        proseln!(
            "{}: {cells} cells at a budget: ours first in {first}, first or within half a point in {near}, at most {most} points behind, more \
             written than the budget in {over}",
            role_name(role)
        )?;
    }
    Ok(())
}

/// How ours does over the cells of one role, each at each budget.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    cells: u32,
    first: u32,
    near: u32,
    over: u32,
    /// Points behind the best of the others.
    most: Option<f64>,
}

impl Tally {
    /// `behind` is none where the budget was not kept, or no other kept to it.
    fn add(&mut self, behind: Option<f64>, kept: bool) {
        self.cells += 1;
        self.over += u32::from(!kept);
        if let Some(behind) = behind {
            self.first += u32::from(behind <= 0.0);
            self.near += u32::from(behind <= 0.5);
            self.most = Some(self.most.map_or(behind, |most| most.max(behind)));
        }
    }
}
