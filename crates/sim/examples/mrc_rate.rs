//! Rate and memory of `larder sim mrc` on a trace: `mrc_rate TRACE SIZE THREADS POLICY…`.
//!
//! Prints requests per second for one run of each policy alone, and for all policies at eight sizes in one sweep, the
//! reader included; and, reader excluded, from the difference between a sweep of eight equal runs and of one.
#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark reads the clock; nothing of it is in the simulator"
)]

use std::time::Instant;

use larder_policy::eviction::{EvictionKind, Unit};
use larder_sim::mrc::{Filter, Found, Items, Job, Sweep, sweep};
use larder_trace::Options;

fn timed(trace: &str, jobs: Vec<Job>, threads: usize) -> (f64, Found) {
    let plan = Sweep {
        jobs,
        unit: Unit::Objects,
        warmup: 0,
        threads,
        seed: 1,
        sample: None,
        curve: false,
    };
    let options = Options::default();
    let started = Instant::now();
    let open = || Ok(Items::new(larder_trace::open(trace, &options)?.reader));
    let found = sweep(open, &plan, |_, _| ()).unwrap_or_else(|e| panic!("{e}"));
    (started.elapsed().as_secs_f64(), found)
}

/// Processor time of this process so far, in seconds, where the system tells it.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(") ").next().unwrap_or_default();
    let ticks = |i: usize| after_name.split(' ').nth(i).and_then(|t| t.parse::<f64>().ok());
    // Fields 14 and 15: user and system time, in hundredths.
    (ticks(11).unwrap_or(0.0) + ticks(12).unwrap_or(0.0)) / 100.0
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [trace, size, threads, policies @ ..] = &arguments[..] else {
        eprintln!("mrc_rate TRACE SIZE THREADS POLICY...");
        std::process::exit(2);
    };
    let size: u64 = size.parse().expect("a size in objects");
    let threads: usize = threads.parse().expect("a number of threads");
    for name in policies {
        let policy: EvictionKind = name.parse().unwrap_or_else(|e| panic!("{e}"));
        let cpu = processor_seconds();
        let (one, found) = timed(trace, vec![Job { policy, size, admission: Filter::All }], 1);
        let cpu = processor_seconds() - cpu;
        let requests = found.rows[0].requests as f64;
        let (eight, _) = timed(trace, vec![Job { policy, size, admission: Filter::All }; 8], 1);
        println!(
            "{name} {size}: miss ratio {:.4}, {:.2} M/s ({:.2} per processor second), {:.2} M/s without the \
             reader; {} objects, {:.1} MiB, {:.1} B an object",
            found.rows[0].miss_ratio,
            requests / one / 1e6,
            requests / cpu / 1e6,
            requests / ((eight - one) / 7.0) / 1e6,
            found.objects,
            found.memory_bytes as f64 / 1048576.0,
            found.memory_bytes as f64 / found.objects as f64
        );
        let jobs = (0..8)
            .map(|i| Job { policy, size: (size >> i).max(20), admission: Filter::All })
            .collect();
        let cpu = processor_seconds();
        let (sweep, found) = timed(trace, jobs, threads);
        let cpu = processor_seconds() - cpu;
        println!(
            "{name} at eight sizes, {threads} threads: {:.2} M/s of each, {:.2} M/s in all ({:.2} per processor \
             second), {:.1} B an object",
            requests / sweep / 1e6,
            8.0 * requests / sweep / 1e6,
            8.0 * requests / cpu / 1e6,
            found.memory_bytes as f64 / found.objects as f64
        );
    }
}
