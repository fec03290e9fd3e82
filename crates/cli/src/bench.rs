//! `larder bench`: what the design claims, measured without a server or a device.

mod block;
mod equal_writes;
mod share;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use indicatif::ProgressBar;
use larder_base::ByteSize;
use larder_format::Geometry;
use larder_lab::{index, packing};
use larder_policy::admission::{AdmissionConfig, Objective, POLICY_NAMES, PolicyName};
use larder_policy::learn::ClassWeights;
use larder_sim::kv::workload::{WORKLOADS, Workload};
use larder_sim::lab::kv_study::{Contender, Outcome, Plan, Spread};

use crate::error::CliError;
use crate::out::print_json;
use crate::table::Columns;
use share::share_out;

/// Measure the flash index, the packing of segments, and admission policies.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Memory per object, flash reads per hit and miss, and losses of the flash index in steady state.
    Index(IndexArgs),
    /// How much of the flash becomes records, against the bytes offered.
    Packing(PackingArgs),
    /// Hit ratios of the admission policies at equal bytes written to flash.
    Admission(AdmissionArgs),
    /// Who misses least for the same bytes written to flash: ours by its defaults, its other policies, other designs, and an offline
    /// heuristic, over a list of cells.
    EqualWrites(equal_writes::EqualWritesArgs),
    /// Lines read that hit under the admission policies of the block cache, at equal bytes written to flash.
    #[command(name = "block-admission")]
    Lines(block::BlockArgs),
}

pub(crate) fn run(args: Args) -> Result<(), CliError> {
    match args.command {
        Command::Index(args) => bench_index(&args),
        Command::Packing(args) => bench_packing(&args),
        Command::Admission(args) => bench_admission(&args),
        Command::EqualWrites(args) => equal_writes::run(&args),
        Command::Lines(args) => block::run(&args),
    }
}

/// Progress over `total` steps.
fn progress(total: u64) -> ProgressBar {
    let bar = crate::progress::bar(total);
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}

// ---- index ----

#[derive(Debug, Parser)]
struct IndexArgs {
    /// Live objects on flash.
    #[arg(long, value_name = "N", default_value_t = 10_000_000)]
    objects: u64,
    /// How often the whole flash is written anew.
    #[arg(long, value_name = "N", default_value_t = 5)]
    turnovers: u32,
    /// Shards, each with its index: 1 to 256, a power of two.
    #[arg(long, value_name = "N", default_value_t = 16)]
    shards: u32,
    /// Segments that the flash is divided into, 2 to 4095.
    #[arg(long, value_name = "N", default_value_t = 256)]
    segments: u16,
    /// Share of the writes that overwrite a live object, 0 to 0.9.
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    overwrites: f64,
    /// Share of the objects that are large (wide entries), 0 to 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    wide: f64,
    /// Look-ups of present and of absent keys after the turnovers.
    #[arg(long, value_name = "N", default_value_t = 2_000_000)]
    probes: u64,
    /// Seed.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

fn bench_index(args: &IndexArgs) -> Result<(), CliError> {
    let config = index::BenchConfig {
        objects: args.objects,
        turnovers: args.turnovers,
        shards: args.shards,
        segments: args.segments,
        overwrites: args.overwrites,
        wide: args.wide,
        probes: args.probes,
        seed: args.seed,
        ..Default::default()
    };
    let mut unreadable = None;
    let mut resident = || {
        larder_runtime::machine::resident_memory().unwrap_or_else(|e| {
            unreadable = Some(e);
            0
        })
    };
    let mut nanos = thread_nanos;
    let mut meters = index::Meters { resident: &mut resident, nanos: Some(&mut nanos) };
    let bar = progress(1000);
    bar.set_message(format!("{} objects", args.objects));
    let report = index::run(config, &mut meters, &mut |share| {
        bar.set_position((share * 1000.0) as u64);
    });
    bar.finish_and_clear();
    let report = report.map_err(|e| CliError::Usage(e.to_string()))?;
    if let Some(e) = unreadable {
        let problem = "resident memory cannot be measured: /proc/self/statm";
        return Err(CliError::Runtime(format!("{problem}: {e}")));
    }
    if args.json {
        return print_json(&report);
    }
    let mut t = Columns::new(1, 1, ["figure", "value"]);
    let mut row = |name: &str, value: String| {
        t.row([name.to_owned(), value]);
    };
    row("live objects", report.objects.to_string());
    row("resident bytes per object", format!("{:.3}", report.bytes_per_object_resident));
    row("accounted bytes per object", format!("{:.3}", report.bytes_per_object_accounted));
    row("load of the slots", format!("{:.2} %", report.load * 100.0));
    row("flash reads per hit", format!("{:.4}", report.flash_reads_per_hit));
    row("flash reads per miss", format!("{:.4}", report.flash_reads_per_miss));
    row("insertions", report.insertions.to_string());
    row(
        "forced evictions",
        format!("{} ({:.5} %)", report.forced_evictions, report.forced_share * 100.0),
    );
    row("overwrites", report.overwrites.to_string());
    row("innocent entries put back", report.innocents_restored.to_string());
    row("innocent entries lost", report.innocents_lost.to_string());
    row("unexplained losses", report.unexplained_losses.to_string());
    let time = |ns: Option<f64>| ns.map_or("-".to_owned(), |n| format!("{n:.0} ns"));
    row("CPU time per look-up, present", time(report.nanos_per_probe_hit));
    row("CPU time per look-up, absent", time(report.nanos_per_probe_miss));
    row("CPU time per write", time(report.nanos_per_write));
    t.print()?;
    Ok(())
}

/// CPU time of the calling thread, in nanoseconds.
fn thread_nanos() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

// ---- packing ----

#[derive(Debug, Parser)]
struct PackingArgs {
    /// Bytes of the flash device, by which the size of a segment is chosen.
    #[arg(long, value_name = "SIZE", default_value = "64g")]
    flash_size: ByteSize,
    /// Segments filled for each figure; by default as many as make it steady.
    #[arg(long, value_name = "N")]
    segments: Option<u32>,
    /// Seed.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

fn bench_packing(args: &PackingArgs) -> Result<(), CliError> {
    let usage = |e: &dyn std::fmt::Display| CliError::Usage(format!("--flash-size: {e}"));
    let geometry = Geometry::plan(args.flash_size.0).map_err(|e| usage(&e))?;
    let mut config = packing::PackingConfig::standard(geometry);
    config.seed = args.seed;
    match args.segments {
        Some(0) => return Err(CliError::Usage("--segments: '0': at least 1".to_owned())),
        Some(n) => config.segments = n,
        None => {}
    }
    let bar = progress(1000);
    let report = packing::run(&config, &mut |share| {
        bar.set_position((share * 1000.0) as u64);
    });
    bar.finish_and_clear();
    if args.json {
        return print_json(&report);
    }
    proseln!(
        "flash of {}, segments of {}",
        ByteSize(report.device_bytes),
        ByteSize(u64::from(report.segment_bytes))
    )?;
    let mut t = Columns::new(
        3,
        3,
        [
            "sizes",
            "mode",
            "choice",
            "functions",
            "offered",
            "of segment",
            "of device",
            "record B",
            "header B",
            "padding B",
            "unused B",
            "tries",
            "refused",
        ],
    );
    for r in &report.rows {
        t.row([
            r.sizes.clone(),
            format!("{:?}", r.mode).to_lowercase(),
            r.choice.to_owned(),
            r.functions.to_string(),
            format!("{:.2}", r.offered),
            format!("{:.2} %", r.utilisation * 100.0),
            format!("{:.2} %", r.device_utilisation * 100.0),
            format!("{:.1}", r.record_bytes),
            format!("{:.2}", r.header_bytes),
            format!("{:.2}", r.padding_bytes),
            format!("{:.2}", r.unused_bytes),
            format!("{:.2}", r.tries),
            format!("{:.3}", r.refused),
        ]);
    }
    t.print()?;
    Ok(())
}

// ---- admission ----

#[derive(Debug, Parser)]
struct AdmissionArgs {
    /// Workloads, separated by commas; all whose traces are there by default (--list-workloads describes them).
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    workloads: Vec<String>,
    /// Print what the workloads are, and end.
    #[arg(long)]
    list_workloads: bool,
    /// Policies, separated by commas, ripq, and oracle (an offline heuristic that knows the next reads, as larder sim oracle); all
    /// by default.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    policies: Vec<String>,
    /// Seeds: each workload runs with seeds 1 to N.
    #[arg(long, value_name = "N", default_value_t = 5)]
    seeds: u64,
    /// Requests per run; a third of them warms up.
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    requests: u64,
    /// DRAM and flash together, as a share of the bytes of all objects.
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    cache: f64,
    /// Shares of DRAM in that, separated by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0.125")]
    dram: Vec<f64>,
    /// Bytes written, as shares of what the policy all writes, separated by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0.3,0.1")]
    levels: Vec<f64>,
    /// Which hits flashiness seeks at equal writes: requests or bytes.
    #[arg(long, value_name = "WHICH", default_value = "requests")]
    objective: Objective,
    /// flashiness.size_exponent of the runs at equal writes, 0 to 2; by default 0.5 for requests and 0 for bytes.
    #[arg(long, value_name = "X")]
    size_exponent: Option<f32>,
    /// flashiness.price of the runs at equal writes: an object goes to flash only if it is worth this many times what it
    /// displaces.
    #[arg(long, value_name = "TIMES", default_value_t = 0.0)]
    price: f32,
    /// In the runs by defaults, fill the empty flash with whatever leaves DRAM, as the server does by its default; policies
    /// alone decide without.
    #[arg(long)]
    first_fill: bool,
    /// How the classes weigh in the training of classifiers: balanced, equal, or how many times a negative sample a positive
    /// one weighs.
    #[arg(long, value_name = "WEIGHTS", default_value = "balanced", value_parser = parse_weights)]
    class_weights: ClassWeights,
    /// Values are this many times as large.
    #[arg(long, value_name = "N", default_value_t = 1)]
    size_scale: u32,
    /// Count the bytes written while the caches warm up too, rather than after it.
    #[arg(long)]
    count_filling: bool,
    /// Leave out the runs by defaults.
    #[arg(long)]
    no_free_runs: bool,
    /// Runs in search of one parameter, at most.
    #[arg(long, value_name = "N", default_value_t = 8)]
    most_runs: u32,
    /// Where shared traces lie (kv/…, cachelib/…).
    #[arg(long, value_name = "DIR", default_value = "../shared/traces")]
    traces: PathBuf,
    /// Threads; all cores when not given.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Print every run as JSON.
    #[arg(long)]
    json: bool,
}

fn parse_weights(text: &str) -> Result<ClassWeights, String> {
    match text {
        "balanced" => Ok(ClassWeights::Balanced),
        "equal" => Ok(ClassWeights::Equal),
        other => match other.parse::<f32>() {
            Ok(w) if w.is_finite() && w > 0.0 => Ok(ClassWeights::Positive(w)),
            _ => Err("write balanced, equal, or a number above 0".to_owned()),
        },
    }
}

fn between(flag: &str, value: f64, low: f64, high: f64) -> Result<(), CliError> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(CliError::Usage(format!("{flag}: '{value}': between {low} and {high}")))
}

fn plan(args: &AdmissionArgs) -> Result<Plan, CliError> {
    let mut workloads = Vec::new();
    for name in &args.workloads {
        workloads.push(Workload::named(name).ok_or_else(|| {
            let known: Vec<&str> = WORKLOADS.iter().map(|w| w.name).collect();
            let known = known.join(", ");
            CliError::Usage(format!("--workloads: '{name}' is none of {known}"))
        })?);
    }
    if workloads.is_empty() {
        for w in WORKLOADS {
            match w.needs(&args.traces) {
                Some(path) if !path.exists() => {
                    noteln!(
                        "larder: {} left out: {} is not there (--traces)",
                        w.name,
                        path.display()
                    );
                }
                _ => workloads.push(w),
            }
        }
    }
    let mut policies: Vec<PolicyName> = Vec::new();
    let mut ripq = args.policies.is_empty();
    let mut oracle = args.policies.is_empty();
    let names: Vec<&str> = if args.policies.is_empty() {
        POLICY_NAMES.to_vec()
    } else {
        args.policies.iter().map(String::as_str).collect()
    };
    for name in names {
        match name {
            "ripq" => ripq = true,
            "oracle" => oracle = true,
            _ => {
                let config = AdmissionConfig::from_name(name);
                let config = config.map_err(|e| CliError::Usage(format!("--policies: {e}")))?;
                policies.push(config.policy);
            }
        }
    }
    between("--seeds", args.seeds as f64, 1.0, 1e6)?;
    between("--requests", args.requests as f64, 1e4, 1e9)?;
    between("--cache", args.cache, 0.001, 4.0)?;
    args.dram.iter().try_for_each(|&s| between("--dram", s, 0.0001, 0.9))?;
    args.levels.iter().try_for_each(|&l| between("--levels", l, 0.001, 1.0))?;
    args.size_exponent.map_or(Ok(()), |e| between("--size-exponent", f64::from(e), 0.0, 2.0))?;
    between("--price", f64::from(args.price), 0.0, 10.0)?;
    between("--size-scale", f64::from(args.size_scale), 1.0, 1024.0)?;
    between("--most-runs", f64::from(args.most_runs), 1.0, 100.0)?;
    Ok(Plan {
        workloads,
        seeds: args.seeds,
        requests: args.requests,
        cache_share: args.cache,
        dram_shares: args.dram.clone(),
        levels: args.levels.clone(),
        policies,
        ripq,
        oracle,
        free_runs: !args.no_free_runs,
        size_scale: args.size_scale,
        class_weights: args.class_weights,
        count_filling: args.count_filling,
        tolerance: 0.01,
        most_runs: args.most_runs,
        traces: args.traces.clone(),
        objective: args.objective,
        size_exponent: args.size_exponent,
        price: args.price,
        first_fill: args.first_fill,
    })
}

fn bench_admission(args: &AdmissionArgs) -> Result<(), CliError> {
    if args.list_workloads {
        let mut t = Columns::new(1, 2, ["workload", "what it is"]);
        for w in WORKLOADS {
            t.row([w.name, w.about]);
        }
        t.print()?;
        return Ok(());
    }
    let plan = plan(args)?;
    let threads = share::threads(args.threads)?;
    let groups = plan.groups();
    let bar = progress(plan.steps());
    let outcomes = share_out(threads, &groups, |&group| {
        let mut step = |o: &Outcome| {
            bar.set_message(format!("{} {}", o.workload, o.policy));
            bar.inc(1);
        };
        plan.run(group, &mut step, Some(thread_nanos)).map_err(|e| e.to_string())
    });
    bar.finish_and_clear();
    let outcomes: Vec<Outcome> = outcomes?.into_iter().flatten().collect();
    if args.json {
        return print_json(&outcomes);
    }
    for &dram in &plan.dram_shares {
        proseln!("DRAM {:.3} % of the cache", dram * 100.0)?;
        print_levels(&plan, &outcomes, dram, "Hit ratio", |o| o.hit_ratio)?;
        print_levels(&plan, &outcomes, dram, "Byte hit ratio", |o| o.byte_hit_ratio)?;
        if plan.free_runs {
            print_free(&plan, &outcomes, dram)?;
        }
    }
    Ok(())
}

/// Hit ratios at equal writes: a row per workload and level, a column per policy.
fn print_levels(
    plan: &Plan,
    outcomes: &[Outcome],
    dram: f64,
    name: &str,
    figure: fn(&Outcome) -> f64,
) -> Result<(), CliError> {
    let all = Contender::Policy(PolicyName::All);
    let tuned: Vec<Contender> = plan.contenders().into_iter().filter(|&p| p != all).collect();
    let mut header = vec!["workload".to_owned(), "writes".to_owned()];
    header.extend(tuned.iter().map(|p| p.as_str().to_owned()));
    let mut t = Columns::new(2, 1, header);
    let mut wins = vec![0u32; tuned.len()];
    let mut behind = vec![Vec::new(); tuned.len()];
    for w in &plan.workloads {
        for &level in &plan.levels {
            let cells: Vec<(Option<Spread>, Option<Spread>)> = tuned
                .iter()
                .map(|p| {
                    let of = |f: fn(&Outcome) -> f64| {
                        Spread::of(
                            outcomes
                                .iter()
                                .filter(|o| {
                                    o.workload == w.name
                                        && o.dram_share == dram
                                        && o.policy == p.as_str()
                                        && o.level == Some(level)
                                })
                                .map(f),
                        )
                    };
                    (of(figure), of(|o| o.writes))
                })
                .collect();
            let at_level = |writes: &Option<Spread>| {
                writes.is_some_and(|s| (s.median - 1.0).abs() <= plan.tolerance)
            };
            // Who writes less and hits more is not beaten by whoever fills the level.
            let at_most =
                |writes: &Option<Spread>| writes.is_some_and(|s| s.median <= 1.0 + plan.tolerance);
            // Nobody competes with who knows the future.
            let competes = |i: usize| tuned[i] != Contender::Oracle;
            let best = cells
                .iter()
                .enumerate()
                .filter(|(i, (_, writes))| competes(*i) && at_most(writes))
                .filter_map(|(_, (hits, _))| hits.map(|h| h.median))
                .fold(0.0, f64::max);
            let mut row = vec![w.name.to_owned(), format!("{level:.2}")];
            for (i, (hits, writes)) in cells.iter().enumerate() {
                let (Some(h), Some(wr)) = (hits, writes) else {
                    row.push("-".to_owned());
                    continue;
                };
                let first = competes(i) && at_most(writes) && h.median >= best;
                wins[i] += u32::from(first);
                let mut mark = if first { " *".to_owned() } else { String::new() };
                if at_level(writes) {
                    behind[i].push((best - h.median) * 100.0);
                } else {
                    mark += &format!(" ({:.2} x)", wr.median);
                }
                row.push(format!(
                    "{:.2} ±{:.2}{mark}",
                    h.median * 100.0,
                    (h.greatest - h.least) * 50.0
                ));
            }
            t.row(row);
        }
    }
    let mut first = vec!["first".to_owned(), String::new()];
    first.extend(tuned.iter().zip(&wins).map(|(p, wins)| match p {
        Contender::Oracle => "-".to_owned(),
        _ => wins.to_string(),
    }));
    t.row(first);
    let mut mean = vec!["behind the first, mean".to_owned(), String::new()];
    mean.extend(behind.iter().map(|b| {
        if b.is_empty() {
            "-".to_owned()
        } else {
            format!("{:.2}", b.iter().sum::<f64>() / b.len() as f64)
        }
    }));
    t.row(mean);
    proseln!(
        "{name} in percent at equal bytes written to flash (writes: share of what 'all' writes); median of {} seeds \
         and half the range; * the most of the policies that write at most that; (n x) could not be brought to the level and writes n times that",
        plan.seeds
    )?;
    t.print()?;
    Ok(())
}

/// What each policy does by its defaults.
fn print_free(plan: &Plan, outcomes: &[Outcome], dram: f64) -> Result<(), CliError> {
    let mut t = Columns::new(
        2,
        2,
        [
            "workload",
            "policy",
            "hit %",
            "DRAM hit %",
            "byte hit %",
            "hit % from the start",
            "fills from the start",
            "writes / all",
            "CLWA",
            "CLWA of misses",
            "unread writes %",
            "precision",
            "recall",
            "admission bytes",
            "CPU ns / request",
        ],
    );
    for w in &plan.workloads {
        for p in plan.contenders().into_iter().filter(|p| p.has_defaults()) {
            let of = |f: fn(&Outcome) -> Option<f64>| {
                let free = outcomes.iter().filter(|o| {
                    o.workload == w.name
                        && o.dram_share == dram
                        && o.policy == p.as_str()
                        && o.level.is_none()
                });
                Spread::of(free.filter_map(f)).map(|s| s.median)
            };
            let percent =
                |x: Option<f64>| x.map_or("-".to_owned(), |x| format!("{:.2}", x * 100.0));
            let plain = |x: Option<f64>| x.map_or("-".to_owned(), |x| format!("{x:.3}"));
            let whole = |x: Option<f64>| x.map_or("-".to_owned(), |x| format!("{x:.0}"));
            t.row([
                w.name.to_owned(),
                p.as_str().to_owned(),
                percent(of(|o| Some(o.hit_ratio))),
                percent(of(|o| Some(o.dram_hit_ratio))),
                percent(of(|o| Some(o.byte_hit_ratio))),
                percent(of(|o| Some(o.hit_ratio_from_start))),
                plain(of(|o| Some(o.fills))),
                plain(of(|o| Some(o.writes))),
                plain(of(|o| Some(o.clwa_of_sets))),
                plain(of(|o| Some(o.clwa_of_misses))),
                percent(of(|o| Some(o.unread))),
                plain(of(|o| o.precision)),
                plain(of(|o| o.recall)),
                whole(of(|o| Some(o.admission_bytes as f64))),
                whole(of(|o| o.nanos_per_request)),
            ]);
        }
    }
    proseln!(
        "By their defaults (write_rate has none without a budget: a quarter of what 'all' writes stands in)"
    )?;
    t.print()?;
    Ok(())
}
