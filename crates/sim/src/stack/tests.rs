use larder_trace::{Options, open};

use super::*;

fn config(architecture: Architecture, ram: &str, flash: &str) -> Config {
    Config {
        architecture,
        ram_blocks: 64,
        flash_blocks: 512,
        ram_policy: ram.parse().unwrap(),
        flash_policy: flash.parse().unwrap(),
        timing: Timing::default(),
        restart: None,
        seed: 1,
    }
}

fn figures(config: &Config, threads: u16, trace: &str) -> Figures {
    let options = Options { pages: Some(4096), ..Options::default() };
    let mut reader = open(trace, &options).unwrap().reader;
    run(config, threads, 20_000, &mut *reader, |_, _| ()).unwrap()
}

/// 2 MiB of a 64 MiB volume are the working set: as much as the flash, eight times the RAM.
const SMALL: &str = "gen:fileserver?size=64m&set=2m&requests=40000&outside=0.2&writes=0.3";

#[test]
fn latencies_are_the_closed_forms_where_nothing_waits() {
    let us = |ns: Nanos| ns.0 as f64 / 1000.0;
    let mut stack = Stack::new(&config(Architecture::Naive, "a", "a"));
    let mut misses = 0.0;
    let blocks = 40_000;
    for block in 0..blocks {
        // A second apart, so that nothing waits.
        let now = Nanos::from_secs(block + 1);
        let (done, source) = stack.read(now, block);
        assert_eq!(source, Source::Filer);
        misses += us(done.saturating_sub(now));
    }
    // 2 x 8.2 + 32.8 + 0.9 x 92 + 0.1 x 7,952, and RAM.
    let mean = misses / blocks as f64;
    assert!((mean - 927.6).abs() < 0.04 * 927.6, "{mean}");
    let now = Nanos::from_secs(blocks + 10);
    assert_eq!(stack.read(now, blocks - 1), (now + Nanos(400), Source::Ram));
    let from_flash = now + Nanos::from_micros(88) + Nanos(400);
    assert_eq!(stack.read(now, blocks - 400), (from_flash, Source::Flash));
    // Writes wait for as much as their policies say.
    let write = |architecture, ram: &str, flash: &str| {
        let mut stack = Stack::new(&config(architecture, ram, flash));
        us(stack.write(Nanos::ZERO, 1))
    };
    let filer = 2.0 * 8.2 + 32.768 + 92.0;
    for (architecture, ram, flash, wanted) in [
        (Architecture::Naive, "n", "n", 0.4),
        (Architecture::Naive, "a", "s", 0.4),
        (Architecture::Naive, "s", "n", 0.4 + 21.0),
        (Architecture::Naive, "s", "a", 0.4 + 21.0),
        (Architecture::Naive, "s", "s", 0.4 + 21.0 + filer),
        (Architecture::Lookaside, "s", "n", 0.4 + filer),
        (Architecture::Lookaside, "a", "n", 0.4),
        (Architecture::Unified, "p5", "s", 0.4),
        (Architecture::Unified, "s", "n", 0.4 + filer),
    ] {
        let found = write(architecture, ram, flash);
        assert!((found - wanted).abs() < 1e-6, "{architecture:?} {ram} {flash}: {found} {wanted}");
    }
}

#[test]
fn flash_is_a_win_and_the_policy_of_writing_hardly_matters() {
    let mut without = config(Architecture::Naive, "a", "a");
    without.flash_blocks = 0;
    let none = figures(&without, 8, SMALL);
    assert_eq!((none.counts.hits_flash, none.counts.flash_writes), (0, 0));
    for architecture in Architecture::ALL {
        let with = figures(&config(architecture, "a", "a"), 8, SMALL);
        assert!(
            with.read_mean_us < 0.75 * none.read_mean_us,
            "{architecture:?}: {with:?} {none:?}"
        );
        for (ram, flash) in [("n", "a"), ("p1", "p1"), ("a", "n"), ("p5", "a")] {
            let other = figures(&config(architecture, ram, flash), 8, SMALL);
            let ratio = other.read_mean_us / with.read_mean_us;
            assert!((0.7..1.5).contains(&ratio), "{architecture:?} {ram} {flash}: {ratio}");
        }
    }
}

#[test]
fn architectures_keep_their_promises_under_every_policy() {
    for architecture in Architecture::ALL {
        for ram in ["s", "a", "p1", "n"] {
            for flash in ["s", "a", "p1", "n"] {
                let config = config(architecture, ram, flash);
                let mut stack = Stack::new(&config);
                let mut rng = larder_base::Rng::new(3);
                let mut now = Nanos::ZERO;
                let mut written = 0;
                for _ in 0..20_000 {
                    now = now + Nanos::from_micros(300);
                    let block = rng.below(rng.clone().range(1, 1500));
                    let done = if rng.chance(0.4) {
                        written += 1;
                        stack.write(now, block)
                    } else {
                        stack.read(now, block).0
                    };
                    assert!(done > now);
                }
                stack.validate(1500).unwrap();
                let c = stack.counts();
                assert_eq!(c.reads + c.writes, 20_000);
                assert_eq!(c.filer_reads, c.reads - c.hits_dram - c.hits_flash);
                // Writing through writes everything; nothing writes more than that.
                let through = |p: &str| p == "s" || p == "a";
                let all = match architecture {
                    Architecture::Lookaside => through(ram),
                    _ => through(ram) && through(flash),
                };
                assert!(c.filer_writes <= written, "{architecture:?} {ram} {flash}");
                assert_eq!(c.filer_writes == written, all, "{architecture:?} {ram} {flash}");
            }
        }
    }
}

/// A block on flash that is written while RAM has lost it stays as long as one that is read.
#[test]
fn a_write_makes_a_block_on_flash_the_most_recent() {
    for architecture in [Architecture::Naive, Architecture::Lookaside] {
        let config = Config { ram_blocks: 1, flash_blocks: 3, ..config(architecture, "a", "a") };
        let mut stack = Stack::new(&config);
        let mut times = (1..).map(Nanos::from_secs);
        let mut next = || times.next().unwrap_or_default();
        for block in [1, 2, 3] {
            stack.read(next(), block);
        }
        stack.write(next(), 1);
        // The oldest is 2.
        stack.read(next(), 4);
        assert_eq!(stack.read(next(), 1).1, Source::Flash, "{architecture:?}");
    }
}

#[test]
fn runs_repeat_and_names_are_read() {
    let config = config(Architecture::Unified, "p1", "n");
    assert_eq!(figures(&config, 4, SMALL), figures(&config, 4, SMALL));
    for text in ["s", "a", "n", "p30"] {
        assert_eq!(text.parse::<Policy>().unwrap().to_string(), text);
    }
    for text in ["", "p", "p0", "px", "sync"] {
        assert!(text.parse::<Policy>().unwrap_err().contains("p30"));
    }
    assert!("direct".parse::<Architecture>().unwrap_err().contains("lookaside"));
}

/// Clients of one filer that share a working set of 8 MiB or have one each, both of which their flash holds.
fn shared(hosts: u32, shared: u32, writes: f64, set: &str) -> Figures {
    let trace = format!(
        "gen:fileserver?size=64m&set={set}&hosts={hosts}&shared={shared}&requests=60000&outside=0.2&writes={writes}"
    );
    let mut config = config(Architecture::Naive, "a", "a");
    config.flash_blocks = 4096;
    figures(&config, 4, &trace)
}

/// Holland's figures in shape: more writes, and larger caches of what is shared, take more copies away, and reads wait
/// longer for it.
#[test]
fn consistency_matters_when_hosts_share_data() {
    let share = |f: &Figures| f.shared.invalidating_writes as f64 / f.counts.writes as f64;
    let one = shared(1, 1, 0.3, "8m");
    assert_eq!((one.hosts, one.shared), (1, Shared::default()));
    let (some, more) = (shared(4, 1, 0.1, "8m"), shared(4, 1, 0.5, "8m"));
    let own = shared(4, 0, 0.3, "4m");
    assert_eq!((some.hosts, more.hosts), (4, 4));
    assert!(more.shared.invalidations > 2 * some.shared.invalidations, "{some:?} {more:?}");
    assert!(more.read_mean_us > 1.1 * some.read_mean_us, "{some:?} {more:?}");
    assert!(share(&some) > 0.3, "most of what is written is cached elsewhere: {some:?}");
    assert!(share(&own) < 0.5 * share(&more), "{own:?} {more:?}");
    // What no longer fits is not there to be taken away.
    let large = shared(4, 1, 0.1, "48m");
    assert!(share(&large) < share(&some), "{large:?} {some:?}");
    // Asynchronous write-through leaves nothing dirty; a syncer does.
    assert_eq!(more.shared.recalls, 0);
    let mut late = config(Architecture::Naive, "p5", "p5");
    late.flash_blocks = 4096;
    let trace = "gen:fileserver?size=64m&set=8m&hosts=4&shared=1&requests=60000&writes=0.3";
    let late = figures(&late, 4, trace);
    assert!(late.shared.recalls > 100, "{late:?}");
}

#[test]
fn hosts_never_disagree() {
    for architecture in Architecture::ALL {
        for (ram, flash) in [("a", "a"), ("n", "n"), ("p1", "n"), ("s", "p1")] {
            let config = config(architecture, ram, flash);
            let mut hosts = hosts::Hosts::new(&config, 2);
            let mut rng = larder_base::Rng::new(8);
            for i in 0..12_000 {
                let block = rng.below(rng.clone().range(1, 900));
                hosts.ask(rng.below(3) as u16, block, rng.chance(0.6));
                if i == 6000 {
                    hosts.restart(Restart {
                        after: 6000,
                        warm: architecture != Architecture::Naive,
                    });
                }
                if i % 1000 == 0 {
                    hosts.validate().unwrap();
                }
            }
            hosts.validate().unwrap();
            let (counts, shared) = (hosts.counts(), hosts.shared());
            assert_eq!(counts.reads + counts.writes, 12_000);
            assert!(shared.invalidations >= shared.invalidating_writes);
            assert!(shared.invalidating_writes > 100 && hosts.filer_seconds() > 0.0);
        }
    }
}

/// Persistence: nice, and not critical. A warm start reads from flash at once, a cold one comes to the same in the end.
#[test]
fn a_warm_start_is_better_than_a_cold_one_for_a_while() {
    let trace = "gen:fileserver?size=64m&set=8m&requests=80000&outside=0.2&writes=0.3";
    for architecture in Architecture::ALL {
        let run = |restart, requests: u64| {
            let config = Config { restart, flash_blocks: 4096, ..config(architecture, "a", "a") };
            let options =
                Options { pages: Some(4096), limit: Some(requests), ..Options::default() };
            let mut reader = open(trace, &options).unwrap().reader;
            run(&config, 8, 20_000, &mut *reader, |_, _| ()).unwrap()
        };
        let restart = |warm| Some(Restart { after: 20_000, warm });
        let soon = |warm| run(restart(warm), 21_000);
        let (warm, cold) = (soon(true), soon(false));
        assert!(
            warm.counts.hits_flash > 2 * cold.counts.hits_flash,
            "{architecture:?} {warm:?} {cold:?}"
        );
        assert!(warm.read_mean_us < 0.8 * cold.read_mean_us, "{architecture:?} {warm:?} {cold:?}");
        let (never, cold) = (run(None, 80_000), run(restart(false), 80_000));
        assert!(
            cold.read_mean_us < 1.15 * never.read_mean_us,
            "{architecture:?} {never:?} {cold:?}"
        );
    }
}

/// Flash takes load off the filer.
#[test]
fn the_filer_works_less_behind_flash() {
    let none = Config { flash_blocks: 0, ..config(Architecture::Naive, "a", "a") };
    let (none, with) =
        (figures(&none, 8, SMALL), figures(&config(Architecture::Naive, "a", "a"), 8, SMALL));
    let reads = |f: &Figures| f.counts.filer_reads as f64 / f.counts.reads as f64;
    assert!(reads(&with) < 0.7 * reads(&none), "{none:?} {with:?}");
    // The mean number at work is work over time: 8 threads cannot keep more than so many reads, and writes nobody waits for.
    let work = none.counts.filer_reads as f64 * 878e-6 + none.counts.filer_writes as f64 * 92e-6;
    assert!((none.filer_load * none.seconds / work - 1.0).abs() < 0.1, "{none:?}");
}
