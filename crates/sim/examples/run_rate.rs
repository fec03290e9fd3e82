//! Rate and memory of `larder sim run`: `run_rate EXPERIMENT.toml [OUT.json]`, on one thread, the reader included. What came
//! out, as `larder sim run --json` prints it, goes to the second file, to be compared with another version's.
#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark reads the clock; nothing of it is in the simulator"
)]

use std::time::Instant;

use larder_sim::experiment::{Experiment, run};

/// Processor time of this process so far, in seconds, where the system tells it.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(") ").next().unwrap_or_default();
    let ticks = |i: usize| after_name.split(' ').nth(i).and_then(|t| t.parse::<f64>().ok());
    // Fields 14 and 15: user and system time, in hundredths.
    (ticks(11).unwrap_or(0.0) + ticks(12).unwrap_or(0.0)) / 100.0
}

/// The most memory that the process held, bytes.
fn most_memory() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmHWM")).unwrap_or_default();
    let kib = line.split_whitespace().nth(1).and_then(|n| n.parse::<f64>().ok());
    kib.unwrap_or(0.0) * 1024.0
}

fn main() {
    let Some(file) = std::env::args().nth(1) else {
        eprintln!("run_rate EXPERIMENT.toml [OUT.json]");
        std::process::exit(2);
    };
    let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{file}: {e}"));
    let experiment = Experiment::parse(&text, &file).unwrap_or_else(|e| panic!("{e}"));
    let started = Instant::now();
    let outcome = run(&experiment, 1, |_, _| ()).unwrap_or_else(|e| panic!("{e}"));
    let (wall, cpu) = (started.elapsed().as_secs_f64(), processor_seconds());
    if let Some(to) = std::env::args().nth(2) {
        let text = serde_json::to_string(&outcome).unwrap_or_else(|e| panic!("{to}: {e}"));
        std::fs::write(&to, text).unwrap_or_else(|e| panic!("{to}: {e}"));
    }
    let requests = outcome.workload.requests as f64 * outcome.caches.len() as f64;
    println!(
        "{requests:.0} requests, {:.3} million/s of processor time, {:.3} by the clock",
        requests / cpu / 1e6,
        requests / wall / 1e6
    );
    println!("{:.1} MB at most in the process", most_memory() / 1e6);
    for c in &outcome.caches {
        let objects = c.dram_objects.unwrap_or(0) + c.flash_objects.unwrap_or(0);
        println!(
            "{}: hit ratio {:.4}, {objects} objects tracked ({} in DRAM), {:.1} B of simulator memory for each",
            c.name,
            c.hit_ratio,
            c.dram_objects.unwrap_or(0),
            c.simulator_bytes_per_object.unwrap_or(0.0)
        );
    }
}
