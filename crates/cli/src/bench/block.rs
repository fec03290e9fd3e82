//! `larder bench block-admission`.

use std::path::PathBuf;

use clap::Parser;
use larder_sim::lab::block_levels::{
    BLOCK_CONTENDERS, BLOCK_WORKLOADS, BlockPoint, BlockWorkload, block_footprint, block_point,
    block_settings, most_hits,
};

use super::share::{self, share_out};
use super::{between, progress};
use crate::error::CliError;
use crate::out::print_json;
use crate::table::Columns;

#[derive(Debug, Parser)]
#[command(after_help = "\
Each policy is simulated over a grid of its settings (as larder sim block would: LRU, full
placement, lines of 4 KiB, write-through); its figure is the most hits that mixtures of
these have at the level. The first third of a workload warms up.

Examples:
  larder bench block-admission
  larder bench block-admission --workloads cloudphysics,backup --levels 1,0.1")]
pub(super) struct BlockArgs {
    /// Workloads, separated by commas; all whose traces are there by default (--list-workloads describes them).
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    workloads: Vec<String>,
    /// Print what the workloads are, and end.
    #[arg(long)]
    list_workloads: bool,
    /// Policies beside 'all', separated by commas; all by default.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    policies: Vec<String>,
    /// Caches, as shares of the bytes that a workload touches, separated by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0.1,0.3")]
    caches: Vec<f64>,
    /// Bytes written, as shares of what the policy all writes, separated by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,0.3,0.1,0.03")]
    levels: Vec<f64>,
    /// Where shared traces lie (cloudphysics/…, msr/…).
    #[arg(long, value_name = "DIR", default_value = "../shared/traces")]
    traces: PathBuf,
    /// Threads; all cores when not given.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Print what each setting did as JSON.
    #[arg(long)]
    json: bool,
}

fn workloads(args: &BlockArgs) -> Result<Vec<BlockWorkload>, CliError> {
    let mut found = Vec::new();
    for name in &args.workloads {
        found.push(BlockWorkload::named(name).ok_or_else(|| {
            let known: Vec<&str> = BLOCK_WORKLOADS.iter().map(|w| w.name).collect();
            let known = known.join(", ");
            CliError::Usage(format!("--workloads: '{name}' is none of {known}"))
        })?);
    }
    if !found.is_empty() {
        return Ok(found);
    }
    for w in BLOCK_WORKLOADS {
        match w.needs(&args.traces) {
            Some(path) if !path.exists() => {
                noteln!("larder: {} left out: {} is not there (--traces)", w.name, path.display());
            }
            _ => found.push(w),
        }
    }
    Ok(found)
}

/// The policies that are compared; `all` is always among them, as levels are shares of what it writes.
fn policies(args: &BlockArgs) -> Result<Vec<&'static str>, CliError> {
    for name in &args.policies {
        if !BLOCK_CONTENDERS.contains(&name.as_str()) {
            let known = BLOCK_CONTENDERS.join(", ");
            return Err(CliError::Usage(format!("--policies: '{name}' is none of {known}")));
        }
    }
    let asked =
        |p: &&str| *p == "all" || args.policies.is_empty() || args.policies.iter().any(|a| a == p);
    Ok(BLOCK_CONTENDERS.into_iter().filter(asked).collect())
}

pub(super) fn run(args: &BlockArgs) -> Result<(), CliError> {
    if args.list_workloads {
        let mut t = Columns::new(1, 3, ["workload", "settings chosen on it", "what it is"]);
        for w in BLOCK_WORKLOADS {
            t.row([w.name, if w.chosen_on { "yes" } else { "no" }, w.about]);
        }
        return t.print();
    }
    let (workloads, policies) = (workloads(args)?, policies(args)?);
    args.caches.iter().try_for_each(|&c| between("--caches", c, 0.001, 4.0))?;
    args.levels.iter().try_for_each(|&l| between("--levels", l, 0.001, 1.0))?;
    let threads = share::threads(args.threads)?;
    let jobs: Vec<(f64, &'static str, String)> = args
        .caches
        .iter()
        .flat_map(|&cache| policies.iter().map(move |&policy| (cache, policy)))
        .flat_map(|(cache, policy)| {
            block_settings(policy).into_iter().map(move |setting| (cache, policy, setting))
        })
        .collect();
    let bar = progress((jobs.len() * workloads.len()) as u64);
    let mut points = Vec::new();
    for workload in &workloads {
        bar.set_message(workload.name);
        let requests = workload.requests(&args.traces);
        let requests = requests.map_err(|e| CliError::Runtime(e.to_string()))?;
        let touched = block_footprint(&requests);
        points.extend(share_out(threads, &jobs, |(cache, policy, setting)| {
            let point = block_point(workload, &requests, touched, *cache, (policy, setting));
            bar.inc(1);
            point
        })?);
    }
    bar.finish_and_clear();
    if args.json {
        return print_json(&points);
    }
    print_levels(args, &workloads, &policies, &points)
}

/// Hits at equal writes: a row per workload, cache and level, a column per policy.
fn print_levels(
    args: &BlockArgs,
    workloads: &[BlockWorkload],
    policies: &[&'static str],
    points: &[BlockPoint],
) -> Result<(), CliError> {
    let mut header = vec!["workload", "cache", "writes"];
    header.extend(policies);
    let mut t = Columns::new(3, 3, header);
    // How far each is behind the first, on workloads on which settings were chosen and on the others.
    let mut behind = [vec![Vec::new(); policies.len()], vec![Vec::new(); policies.len()]];
    for w in workloads {
        for &cache in &args.caches {
            let of = |policy: &str| -> Vec<(u64, f64)> {
                points
                    .iter()
                    .filter(|p| p.workload == w.name && p.cache == cache && p.policy == policy)
                    .map(|p| (p.flash_bytes, p.line_hit_ratio * 100.0))
                    .collect()
            };
            let all = of("all").first().map_or(0, |p| p.0);
            for &level in &args.levels {
                let hits: Vec<f64> =
                    policies.iter().map(|p| most_hits(&of(p), all, level)).collect();
                let most = hits.iter().fold(0.0, |a: f64, &b| a.max(b));
                // Where next to nothing is read again there is nothing to compare.
                if most < LEAST_HITS {
                    continue;
                }
                let behind = &mut behind[usize::from(!w.chosen_on)];
                for (behind, hit) in behind.iter_mut().zip(&hits) {
                    behind.push(most - hit);
                }
                let mut row =
                    vec![w.name.to_owned(), format!("{:.0} %", cache * 100.0), level.to_string()];
                row.extend(
                    hits.iter().map(|&hit| {
                        format!("{hit:.1}{}", if hit > most - 0.05 { " *" } else { "" })
                    }),
                );
                t.row(row);
            }
        }
    }
    for (behind, which) in behind.iter().zip(["settings chosen on", "the others"]) {
        let cells = behind.first().map_or(0, Vec::len);
        if cells == 0 {
            continue;
        }
        let mut row = |name: &str, figure: &dyn Fn(&[f64]) -> String| {
            let mut row = vec![which.to_owned(), String::new(), name.to_owned()];
            row.extend(behind.iter().map(|b| figure(b)));
            t.row(row);
        };
        row(&format!("within 0.5 in, of {cells}"), &|b| {
            b.iter().filter(|&&b| b <= 0.5).count().to_string()
        });
        row("within 1 in", &|b| b.iter().filter(|&&b| b <= 1.0).count().to_string());
        row("behind, mean", &|b| format!("{:.2}", b.iter().sum::<f64>() / b.len() as f64));
        row("behind, most", &|b| format!("{:.2}", b.iter().fold(0.0, |a: f64, &b| a.max(b))));
    }
    proseln!(
        "Lines read that hit, in percent, at equal bytes written to flash (writes: share of what 'all' writes); * the first, \
         or within 0.05 points of it"
    )?;
    t.print()
}

/// In percent.
const LEAST_HITS: f64 = 0.05;
