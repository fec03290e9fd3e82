//! `larder sim advise`: which DRAM, flash and admission meet a target at least cost.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use clap::Parser;
use larder_base::{ByteSize, Endurance, Short};
use larder_policy::admission::{AdmissionConfig, FlashinessConfig, Objective, PolicyName};
use larder_sim::advise::{
    AdviseError, Measured, Model, Question, Sample, Search, Told, Wave, WriteLimit,
};
use larder_trace::{CsvColumns, Format, Hashed, Options, Trace, ValueSizes};
use serde::Serialize;
use signal_hook::consts::SIGINT;

use super::origin::{Origin, configuration};
use super::watch::Watch;
use crate::error::CliError;
use crate::out::{print as print_text, print_json};
use crate::table::{Columns, print_prose};
use crate::trace::{Settings, note_skipped, parse_format, parse_page, parse_rate, trace_error};

/// Shown under the flags.
const EXAMPLES: &str = "\
It needs a trace, a target (--target-hit-ratio or --target-miss-ratio), the drive's
endurance (--drive-tbw) and two prices (--dram-cost, --flash-cost).

Examples:
  larder sim advise --trace prod.zst --drive-tbw 600 --years 5 \\
      --dram-cost 4 --flash-cost 0.1 --target-hit-ratio 0.85
  larder sim advise --drive-tbw 600 --dram-cost 4 --flash-cost 0.1 \\
      --target-miss-ratio 0.4 --json \\
      --trace 'gen:zipf?objects=20000&requests=60000&skew=0.9&rate=1000'";

#[derive(Debug, Parser)]
#[command(after_help = EXAMPLES)]
pub(super) struct AdviseArgs {
    #[command(flatten)]
    input: TraceFlags,
    /// Endurance of the drive: what may be written to it in its life, in terabytes (10^12 bytes), as drives are rated.
    #[arg(long, value_name = "TB", help_heading = "Target, drive and prices")]
    drive_tbw: Endurance,
    /// Years that the drive is to last.
    #[arg(
        long,
        value_name = "YEARS",
        default_value_t = 5.0,
        help_heading = "Target, drive and prices"
    )]
    years: f64,
    /// Cost of a gigabyte (10^9 bytes) of DRAM, in any currency.
    #[arg(long, value_name = "COST", help_heading = "Target, drive and prices")]
    dram_cost: f64,
    /// Cost of a gigabyte of flash, in the same.
    #[arg(long, value_name = "COST", help_heading = "Target, drive and prices")]
    flash_cost: f64,
    /// Target: the share of the reads that the cache is to answer, above 0 and below 1. This or --target-miss-ratio.
    #[arg(
        long,
        value_name = "SHARE",
        required_unless_present = "target_miss_ratio",
        help_heading = "Target, drive and prices"
    )]
    target_hit_ratio: Option<f64>,
    /// Target: the share of the reads that the cache may miss, above 0 and below 1. This or --target-hit-ratio.
    #[arg(
        long,
        value_name = "SHARE",
        required_unless_present = "target_hit_ratio",
        conflicts_with = "target_hit_ratio",
        help_heading = "Target, drive and prices"
    )]
    target_miss_ratio: Option<f64>,
    /// Most flash that can be bought, such as the drive's capacity.
    #[arg(long, value_name = "SIZE")]
    drive_capacity: Option<ByteSize>,
    /// Bytes that the drive programs for each byte written to it; segments are written whole and in order.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.1)]
    device_write_amplification: f64,
    /// DRAM sizes to begin with, separated by commas, with everything in them, as larder kv -m has it: objects, index, admission and
    /// buffers; by default quarters of quarters of all objects' bytes.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    dram: Vec<ByteSize>,
    /// Flash sizes likewise; 0 is a cache without flash.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    flash: Vec<ByteSize>,
    /// Admission policies to try, separated by commas; flashiness at several rates of writes.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "expected_reads,flashiness,reject_first,ghost,write_rate,all"
    )]
    policies: Vec<String>,
    /// Which hits flashiness seeks where a write budget or a rate is held: requests or bytes. The target counts requests.
    #[arg(long, value_name = "WHICH", default_value = "requests")]
    admission_objective: Objective,
    /// Times the reads that a write costs which it has to be worth, for flashiness; 0 for none.
    #[arg(long, value_name = "FACTOR", default_value_t = 0.0)]
    price: f32,
    /// Requests that are simulated, at most: of a longer trace, all requests of a share of its objects.
    #[arg(long, value_name = "N", default_value_t = 400_000)]
    sample_requests: u64,
    /// Seed of the sample and of all draws.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Threads; all cores when not given. The answer does not depend on it.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Print as JSON: question, answer, runner_up, and all that was measured.
    #[arg(long)]
    json: bool,
}

/// The trace, as a flag: everything else is one too.
#[derive(Debug, clap::Args)]
struct TraceFlags {
    /// A file (gz, xz, zst or plain), - for standard input, or gen:KIND?option=value&… (see larder trace formats).
    #[arg(long, value_name = "TRACE")]
    trace: String,
    /// The format; told from the contents when not given.
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Columns of a csv file: time-col=1,obj-id-col=2,obj-size-col=3,op-col=…,has-header=1,delimiter=,
    #[arg(long, value_name = "LIST", value_parser = CsvColumns::parse)]
    columns: Option<CsvColumns>,
    /// Pass over malformed records and count them.
    #[arg(long)]
    skip_bad: bool,
    /// Requests per second that give times to a trace without them.
    #[arg(long, value_name = "REQUESTS", value_parser = parse_rate)]
    rate: Option<f64>,
    /// Sizes of values by key in place of the trace's own, for traces of keys alone: lognormal:MEAN or lognormal:MEAN:SIGMA, as in
    /// lognormal:300.
    #[arg(long, value_name = "DISTRIBUTION")]
    value_sizes: Option<ValueSizes>,
    /// Split block I/O into pages, 4 KiB unless a size is given.
    #[arg(long, value_name = "SIZE", num_args = 0..=1, require_equals = true, default_missing_value = "4k", value_parser = parse_page)]
    pages: Option<u32>,
    /// Stop after N requests, at least 1.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
}

impl TraceFlags {
    fn options(&self) -> Options {
        Options {
            format: self.format,
            skip_bad: self.skip_bad,
            columns: self.columns.clone(),
            rate: self.rate,
            value_sizes: self.value_sizes,
            pages: self.pages,
            limit: self.limit,
        }
    }

    fn open(&self) -> Result<Trace, CliError> {
        larder_trace::open(&self.trace, &self.options()).map_err(trace_error)
    }
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    #[serde(flatten)]
    origin: &'a Origin,
    requests: u64,
    /// Share of the objects that was simulated.
    sample_rate: f64,
    sampled_requests: usize,
    /// Whether the search came to its end.
    complete: bool,
    /// Bytes and number of all objects, as estimated.
    footprint_bytes: u64,
    objects: u64,
    question: &'a Question,
    /// Pairs of sizes that were not tried, since no server takes them or the sample cannot tell them.
    refused: usize,
    answer: Option<&'a Measured>,
    runner_up: Option<&'a Measured>,
    measured: Vec<&'a Measured>,
}

fn usage(text: impl Into<String>) -> CliError {
    CliError::Usage(text.into())
}

fn above_zero(flag: &str, value: f64, most: f64) -> Result<f64, CliError> {
    if value > 0.0 && value <= most {
        return Ok(value);
    }
    Err(usage(format!("{flag}: '{}': above 0 and at most {}", Short(value), Short(most))))
}

fn question(args: &AdviseArgs) -> Result<Question, CliError> {
    let (flag, share, target) = match (args.target_hit_ratio, args.target_miss_ratio) {
        (Some(hit), _) => ("--target-hit-ratio", hit, hit),
        (None, Some(miss)) => ("--target-miss-ratio", miss, 1.0 - miss),
        (None, None) => {
            return Err(usage("--target-hit-ratio SHARE or --target-miss-ratio SHARE is needed"));
        }
    };
    if !(share > 0.0 && share < 1.0) {
        return Err(usage(format!("{flag}: '{}': between 0 and 1, as 0.8", Short(share))));
    }
    let dwa = args.device_write_amplification;
    if !(1.0..=100.0).contains(&dwa) {
        return Err(usage(format!(
            "--device-write-amplification: '{}': between 1 and 100",
            Short(dwa)
        )));
    }
    if !(0.0..=10.0).contains(&args.price) {
        return Err(usage(format!(
            "--price: '{}': between 0 and 10",
            Short(f64::from(args.price))
        )));
    }
    Ok(Question {
        target_hit_ratio: target,
        dram_cost: above_zero("--dram-cost", args.dram_cost, 1e12)?,
        flash_cost: above_zero("--flash-cost", args.flash_cost, 1e12)?,
        endurance_bytes: args.drive_tbw.bytes,
        years: above_zero("--years", args.years, 100.0)?,
        device_write_amplification: dwa,
        most_flash: args.drive_capacity.map(|c| c.0),
        admission_objective: args.admission_objective,
        price: args.price,
        seed: args.seed,
    })
}

fn policies(names: &[String]) -> Result<Vec<PolicyName>, CliError> {
    let mut all = Vec::new();
    for name in names {
        let config = AdmissionConfig::from_name(name);
        let policy = config.map_err(|e| usage(format!("--policies: {e}")))?.policy;
        if !all.contains(&policy) {
            all.push(policy);
        }
    }
    Ok(all)
}

fn advise_error(e: &AdviseError) -> CliError {
    usage(e.to_string())
}

/// Whether the user has asked for the end. The second time ends the process at once.
fn interrupts() -> Result<Arc<AtomicBool>, CliError> {
    let asked = Arc::new(AtomicBool::new(false));
    let failed = |e: std::io::Error| CliError::Runtime(format!("signal handlers: {e}"));
    signal_hook::flag::register_conditional_shutdown(SIGINT, 130, asked.clone()).map_err(failed)?;
    signal_hook::flag::register(SIGINT, asked.clone()).map_err(failed)?;
    Ok(asked)
}

/// What was asked, by the flags' names and as they take it (of the two targets, the one that was given).
#[derive(Serialize)]
struct Asked<'a> {
    drive_tbw: Endurance,
    years: f64,
    dram_cost: f64,
    flash_cost: f64,
    target_hit_ratio: Option<f64>,
    target_miss_ratio: Option<f64>,
    drive_capacity: Option<ByteSize>,
    device_write_amplification: f64,
    dram: &'a [ByteSize],
    flash: &'a [ByteSize],
    policies: Vec<&'static str>,
    admission_objective: Objective,
    price: f32,
    sample_requests: u64,
}

fn read(
    args: &AdviseArgs,
    policies: &[PolicyName],
    stop: &AtomicBool,
) -> Result<(Model, Origin), CliError> {
    if !(1000..=1 << 28).contains(&args.sample_requests) {
        let n = args.sample_requests;
        return Err(usage(format!("--sample-requests: '{n}': between 1000 and {}", 1 << 28)));
    }
    let trace = args.input.open()?;
    let settings = Settings::new(&args.input.options(), trace.format);
    let (mut reader, hash) = Hashed::over(trace.reader);
    let mut sample = Sample::new(args.sample_requests as usize, args.seed);
    let mut watch = Watch::new(1);
    let mut requests = 0u64;
    while let Some(request) = reader.next() {
        sample.push(&request.map_err(trace_error)?);
        requests += 1;
        if requests.is_multiple_of(1 << 16) {
            watch.tick(&*reader, requests);
            if stop.load(Ordering::Relaxed) {
                watch.finish();
                let text =
                    format!("interrupted after {requests} requests were read: nothing tried");
                return Err(CliError::Interrupted(text));
            }
        }
    }
    watch.finish();
    note_skipped(&*reader);
    let model = Model::new(sample).map_err(|e| advise_error(&e))?;
    let asked = Asked {
        drive_tbw: args.drive_tbw,
        years: args.years,
        dram_cost: args.dram_cost,
        flash_cost: args.flash_cost,
        target_hit_ratio: args.target_hit_ratio,
        target_miss_ratio: args.target_miss_ratio,
        drive_capacity: args.drive_capacity,
        device_write_amplification: args.device_write_amplification,
        dram: &args.dram,
        flash: &args.flash,
        policies: policies.iter().map(|p| p.as_str()).collect(),
        admission_objective: args.admission_objective,
        price: args.price,
        sample_requests: args.sample_requests,
    };
    let asked = configuration(Some(&settings), &asked)?;
    Ok((model, Origin::new(args.seed, &args.input.trace, &hash, asked)))
}

/// What came of one candidate.
type Tried = Result<Vec<Measured>, AdviseError>;

fn measure(
    model: &Model,
    question: &Question,
    wave: &Wave,
    threads: usize,
    stop: &AtomicBool,
    each: &(dyn Fn() + Sync),
) -> Result<Vec<Measured>, AdviseError> {
    let next = AtomicUsize::new(0);
    let found: Mutex<Vec<Option<Tried>>> = Mutex::new(wave.iter().map(|_| None).collect());
    std::thread::scope(|scope| {
        for _ in 0..threads.min(wave.len()) {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&candidate) = wave.get(at) else { return };
                    let result = model.measure(question, candidate);
                    found.lock().unwrap_or_else(PoisonError::into_inner)[at] = Some(result);
                    each();
                }
            });
        }
    });
    let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    let all: Result<Vec<Vec<Measured>>, AdviseError> = found.into_iter().flatten().collect();
    Ok(all?.into_iter().flatten().collect())
}

pub(super) fn run(args: &AdviseArgs) -> Result<(), CliError> {
    let question = question(args)?;
    let policies = policies(&args.policies)?;
    let threads = match args.threads {
        Some(0) => return Err(usage("--threads '0': write a whole number, at least 1")),
        Some(n) => n,
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let stop = interrupts()?;
    let (model, origin) = read(args, &policies, &stop)?;
    let sizes = |list: &[ByteSize]| list.iter().map(|s| s.0).collect::<Vec<u64>>();
    let (dram, flash) = (sizes(&args.dram), sizes(&args.flash));
    let mut search =
        Search::new(&model, &question, &dram, &flash, &policies).map_err(|e| advise_error(&e))?;
    let bar = crate::progress::bar(search.left() as u64);
    let began = Instant::now();
    let done = AtomicUsize::new(0);
    loop {
        let wave = search.next_wave();
        if wave.is_empty() || stop.load(Ordering::Relaxed) {
            break;
        }
        let left = search.left() + wave.len();
        let before = done.load(Ordering::Relaxed);
        let each = || {
            let n = done.fetch_add(1, Ordering::Relaxed) + 1;
            let seconds = began.elapsed().as_secs_f64();
            let left = (left + before).saturating_sub(n);
            bar.set_length((n + left) as u64);
            bar.set_position(n as u64);
            let rate = n as f64 * model.sample().requests().len() as f64 / seconds.max(1e-3);
            bar.set_message(format!("{n} of at most {} tried  {rate:.0} requests/s", n + left));
        };
        let measured = measure(&model, &question, &wave, threads, &stop, &each);
        search.take(measured.map_err(|e| advise_error(&e))?);
    }
    bar.finish_and_clear();
    let complete = !stop.load(Ordering::Relaxed);
    if args.json {
        let sample = model.sample();
        print_json(&Answer {
            origin: &origin,
            requests: sample.seen(),
            sample_rate: sample.rate(),
            sampled_requests: sample.requests().len(),
            complete,
            footprint_bytes: model.footprint(),
            objects: model.objects(),
            question: &question,
            refused: search.refused().map_or(0, |(pairs, _)| pairs),
            answer: search.answer(),
            runner_up: search.runner_up(),
            measured: search.measured(),
        })?;
    } else {
        print(&origin, &model, &question, &search)?;
    }
    if !complete {
        return Err(CliError::Interrupted(format!(
            "interrupted after {} trials: {}",
            done.into_inner(),
            if search.answer().is_some() {
                "the answer is the best so far"
            } else {
                "none of them is an answer"
            }
        )));
    }
    match (search.answer(), search.nearest()) {
        (Some(_), _) => Ok(()),
        (None, Some(m)) => {
            let error = m.error_text().map_or(String::new(), |e| format!(" ± {e}"));
            let limit = m
                .write_limit
                .map_or(String::new(), |l| format!(" (writes held by {})", limit_text(l)));
            Err(CliError::Runtime(format!(
                "nothing tried meets a hit ratio of {:.4} for {} years; the nearest is {:.4}{error}, with {} of DRAM, {} of flash and {}{limit}",
                question.target_hit_ratio,
                question.years,
                m.hit_ratio,
                ByteSize(m.dram),
                ByteSize(m.flash),
                m.policy
            )))
        }
        (None, None) => Err(CliError::Runtime("nothing could be tried".to_owned())),
    }
}

/// A cost with four digits that count, however small.
fn cost(cost: f64) -> String {
    let places = if cost > 0.0 { (3.0 - cost.log10().floor()).clamp(0.0, 12.0) } else { 0.0 };
    format!("{cost:.0$}", places as usize)
}

/// What holds a candidate's writes, in a cell of the table.
fn limit_text(limit: WriteLimit) -> String {
    match limit {
        WriteLimit::Budget => "budget".to_owned(),
        WriteLimit::Rate(bytes) => format!("{}/s", ByteSize(bytes)),
        WriteLimit::Threshold => "threshold".to_owned(),
    }
}

/// What a server is told, as its configuration file has it: sizes first, then the drive's life and admission; neither without flash.
fn settings(Told { server, admission, budget }: &Told) -> String {
    let mut out = format!("memory-limit = {}\n", server.memory);
    if server.flash == 0 {
        return out + "flash = \"none\"\n";
    }
    out += &format!("flash-size = {}\nflash-object-size = {}\n", server.flash, server.object);
    if let Some(endurance) = budget.tbw {
        let terabytes = endurance.0 as f64 / 1e12;
        out += &format!(
            "endurance-tbw = {terabytes:?}\nendurance-years = {:?}\ndevice-write-amplification = {:?}\nburst-hours = {:?}\n",
            budget.years, budget.device_write_amplification, budget.burst_hours
        );
    }
    let policy = admission.policy.as_str();
    let FlashinessConfig { objective, bytes_per_second, price, .. } = admission.flashiness;
    if objective != Objective::default() {
        out += &format!("admission-objective = \"{}\"\n", objective.as_str());
    }
    let mut parameters = String::new();
    if bytes_per_second.0 > 0 {
        parameters += &format!("bytes_per_second = {}\n", bytes_per_second.0);
    }
    if price > 0.0 {
        parameters += &format!("price = {price:?}\n");
    }
    match &parameters[..] {
        "" => format!("{out}admission = \"{policy}\"\n"),
        _ => {
            format!("{out}[admission]\npolicy = \"{policy}\"\n[admission.flashiness]\n{parameters}")
        }
    }
}

fn print(origin: &Origin, model: &Model, q: &Question, search: &Search) -> Result<(), CliError> {
    let sample = model.sample();
    let out = format!(
        "{}: {} requests, about {} objects of {}; {} requests of {:.4} % of the objects simulated\n\
         wanted: hit ratio {:.4}; drive of {} written, {} years\n",
        origin.line(),
        sample.seen(),
        model.objects(),
        ByteSize(model.footprint()),
        sample.requests().len(),
        sample.rate() * 100.0,
        q.target_hit_ratio,
        Endurance { bytes: q.endurance_bytes },
        q.years
    );
    let mut header = vec![
        "",
        "DRAM",
        "flash",
        "admission",
        "writes held by",
        "cost",
        "hit ratio",
        "± error",
        "margin, hit ratio",
        "writes/s",
        "drive life, years",
        "margin, years",
    ];
    let by_bytes = q.admission_objective == Objective::Bytes;
    if by_bytes {
        header.push("byte miss ratio");
    }
    let mut table = Columns::new(5, 1, header);
    let mut row = |what: &str, m: &Measured| {
        let life = m.life_years.map_or("no writes".to_owned(), |y| {
            let held = if m.budget_binds { " (held)" } else { "" };
            format!("{y:.1}{held}")
        });
        let mut cells = vec![
            what.to_owned(),
            ByteSize(m.dram).to_string(),
            ByteSize(m.flash).to_string(),
            m.policy.to_owned(),
            m.write_limit.map_or("-".to_owned(), limit_text),
            cost(m.cost),
            format!("{:.4}", m.hit_ratio),
            m.error_text().unwrap_or_else(|| "-".to_owned()),
            format!("{:+.4}", m.hit_ratio_margin),
            ByteSize(m.flash_bytes_per_second as u64).to_string(),
            life,
            m.life_years.map_or("-".to_owned(), |y| format!("{:+.1}", y - q.years)),
        ];
        if by_bytes {
            cells.push(format!("{:.4}", m.byte_miss_ratio));
        }
        table.row(cells);
    };
    let (answer, other) = (search.answer(), search.runner_up());
    if let Some(m) = answer {
        row("answer", m);
    }
    // The best of another kind first, then whatever else would do, by cost; then what would not.
    let kind = match (answer, other) {
        (Some(a), Some(o)) if a.policy != o.policy => "alternative, other policy",
        _ => "alternative, other sizes",
    };
    if let Some(m) = other {
        row(kind, m);
    }
    let mut rest = search.measured();
    rest.retain(|m| Some(*m) != answer && Some(*m) != other);
    rest.sort_by(|a, b| b.meets.cmp(&a.meets).then(a.cost.total_cmp(&b.cost)));
    for m in rest {
        row(if m.meets { "alternative" } else { "misses the target" }, m);
    }
    print_prose(out.trim_end(), 2)?;
    table.print()?;
    origin.print_configuration()?;
    let mut out = String::new();
    out += match answer {
        Some(_) => {
            "answer: what meets the target at least cost; alternatives meet it too, and cost as much or more; what misses the target is no choice\n"
        }
        None => "nothing that was tried meets the target: none of the rows is a choice\n",
    };
    if let Some((pairs, why)) = search.refused() {
        out += &format!("{pairs} of the pairs of sizes were not tried: {why}\n");
    }
    out += "held: the write budget turns writes away so that the drive lasts; threshold: no budget, the classifier alone\n";
    if let (Some(a), Some(b)) = (answer, other)
        && a.equals(b)
    {
        out += &format!(
            "the answer and its first alternative are equal: {} and {} did the same here\n",
            a.policy, b.policy
        );
    }
    let same = search.measured();
    let same = same.iter().filter(|m| {
        m.write_limit == Some(WriteLimit::Budget)
            && m.policy == "flashiness"
            && same.iter().any(|n| n.policy == "all" && n.equals(m))
    });
    let same = same.count();
    if same > 0 {
        out += &format!(
            "{same} of the rows of flashiness under the budget equal those of all: the budget is more than there is to write, \
             so it chooses nothing; see its other rates\n"
        );
    }
    print_prose(out.trim_end(), 2)?;
    match answer.map(|m| settings(&m.told)) {
        Some(settings) => {
            print_text(&format!("the answer as settings of larder kv --config:\n\n{settings}"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use larder_kv::config::{Config, FlashConfig, Machine, Settings};
    use larder_policy::admission::POLICY_NAMES;
    use larder_policy::budget::WriteBudgetConfig;
    use larder_sim::advise::Candidate;
    use larder_sim::kv::Server;

    use super::*;

    /// What a server makes of these settings.
    fn taken(text: &str) -> Config {
        let settings: Settings = larder_settings::of_file(text, Path::new("larder.toml"))
            .unwrap_or_else(|e| panic!("{e}\n{text}"));
        let machine = Machine {
            memory: 16 << 30,
            cpus: 4,
            state_dir: "/nowhere".into(),
            state_dir_is_named: true,
            listen: None,
            free_space: |_| Some(100 << 30),
            can_hold_files: |_| Ok(()),
        };
        Config::resolve(settings, &machine).unwrap_or_else(|e| panic!("{e}\n{text}"))
    }

    /// Whatever is simulated otherwise than a server does it that is told nothing is among the settings: a server that is told them has the
    /// same admission and the same budget.
    #[test]
    fn a_server_that_is_told_the_settings_does_what_was_simulated() {
        let trace = "gen:zipf?objects=1000&requests=3000&skew=0.9&rate=1&value=400";
        let reader = larder_trace::open(trace, &Options::default()).unwrap().reader;
        let mut sample = Sample::new(10_000, 1);
        reader.for_each(|request| sample.push(&request.unwrap()));
        let model = Model::new(sample).unwrap();
        let limits = [WriteLimit::Budget, WriteLimit::Rate(1 << 20), WriteLimit::Threshold];
        let mut shorter = 0u32;
        for (name, limit) in POLICY_NAMES.iter().flat_map(|n| limits.map(|l| (n, l))) {
            for (objective, price) in [(Objective::Requests, 0.0), (Objective::Bytes, 0.5)] {
                let policy = AdmissionConfig::from_name(name).unwrap().policy;
                let candidate = Candidate { dram: 1 << 30, flash: 8 << 30, policy };
                let question = Question {
                    target_hit_ratio: 0.5,
                    dram_cost: 1.0,
                    flash_cost: 1.0,
                    endurance_bytes: 600_000_000_000_000,
                    years: 3.5,
                    device_write_amplification: 1.25,
                    most_flash: None,
                    admission_objective: objective,
                    price,
                    seed: 1,
                };
                let told = model.told(&question, candidate, limit);
                let text = settings(&told);
                let config = taken(&text);
                assert_eq!(config.admission, told.admission, "{text}");
                let FlashConfig { size, object_size, budget, .. } = config.flash.unwrap();
                assert_eq!(budget, told.budget, "{text}");
                let Server { memory, flash, object, max_item } = told.server;
                let sizes = (config.memory, size, object_size, config.max_item_size);
                assert_eq!(sizes, (memory, Some(flash), object, max_item), "{text}");
                // (A trace of an hour does not live on a server's six hours of savings.)
                shorter += u32::from(budget.burst_hours < WriteBudgetConfig::default().burst_hours);
            }
        }
        assert_eq!(shorter as usize, 2 * 2 * POLICY_NAMES.len());
    }
}
