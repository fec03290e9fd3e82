use super::*;

const LEAST: &str = r#"
[workload]
trace = "gen:zipf?objects=1000&requests=10000"
[[cache]]
kind = "hybrid"
dram = "1m"
flash = "8m"
"#;

#[test]
fn defaults_are_filled_in_and_read_back() {
    let pages = LEAST.replace("trace", "pages = \"4k\"\ntrace");
    assert_eq!(Experiment::parse(&pages, "pages.toml").unwrap().workload.pages, Some(4096));
    let sizes = LEAST.replace("trace", "value_sizes = \"lognormal:300\"\ntrace");
    let sized = Experiment::parse(&sizes, "sizes.toml").unwrap();
    assert_eq!(sized.workload.value_sizes.unwrap().to_string(), "lognormal:300:1");
    assert_eq!(Experiment::parse(&toml::to_string(&sized).unwrap(), "again").unwrap(), sized);
    let e = Experiment::parse(LEAST, "least.toml").unwrap();
    assert_eq!((e.seed, e.caches[0].name(), e.caches[0].flash()), (1, "hybrid", 8 << 20));
    let text = toml::to_string(&e).unwrap();
    assert_eq!(Experiment::parse(&text, "again").unwrap(), e, "{text}");
    let holland = e.timing;
    assert_eq!((holland.flash_read_us, holland.backend_slow_us), (88.0, 7_952.0));
}

/// `memory` is what a server is told: it has its shards and its bounds, and everything is in it.
#[test]
fn memory_is_divided_as_a_server_divides_it() {
    let text = LEAST.replace("dram = \"1m\"", "memory = \"4m\"").replace("8m", "16m");
    let e = Experiment::parse(&text, "memory.toml").unwrap();
    let outcome = run(&e, 1, |_, _| {}).unwrap();
    let c = &outcome.caches[0];
    assert_eq!(c.dram, 4 << 20);
    assert!(c.metadata_bytes.unwrap() > 500 << 10, "{c:?}");
    let small = Experiment::parse(&text.replace("16m", "8m"), "small.toml").unwrap();
    let e = run(&small, 1, |_, _| {}).unwrap_err().to_string();
    assert!(e.contains("cache 'hybrid': flash 8 MiB must be at least 16 MiB"), "{e}");
}

#[test]
fn what_cannot_be_meant_is_named() {
    let with = |more: &str| format!("{LEAST}{more}");
    let cases: &[(String, &str)] = &[
        (with("drma = 1\n"), "line 8: unknown field `drma`"),
        (with("[cache.admission]\npolicy = \"lru\"\n"), "unknown variant `lru`"),
        (with("[[cache]]\nkind = \"magic\"\n"), "unknown variant `magic`"),
        (with("[[cache]]\nkind = \"victim\"\n"), "missing field `dram`"),
        (with("[[cache]]\nkind = \"hybrid\"\ndram = 1\nflash = 1\n"), "cache.name is 'hybrid'"),
        (
            with("[[cache]]\nkind = \"ripq\"\nflash = \"100k\"\n"),
            "cache 'ripq' flash is 100 KiB over 8",
        ),
        (with("[[cache]]\nkind = \"fifo-log\"\nflash = \"1m\"\n"), "missing field `dram`"),
        (with("clock_bits = 3\n"), "cache 'hybrid' clock_bits is 3"),
        (with("memory = \"4m\"\n"), "cache 'hybrid' dram is 1 MiB: give memory"),
        (LEAST.replace("dram = \"1m\"\n", ""), "cache 'hybrid' memory is missing: give memory"),
        (with("max_item = \"64k\"\n"), "cache 'hybrid' max_item is given: goes with memory alone"),
        (
            LEAST.replace("dram = \"1m\"", "memory = \"4m\"\nshards = 2"),
            "cache 'hybrid' shards is given: goes with dram alone",
        ),
        (with("[ssd]\nvictim = \"lru\"\n"), "unknown victim policy 'lru'"),
        (with("[ssd]\npage = \"3k\"\n"), "ssd.page is 3 KiB"),
        (with("[ssd]\nover_provisioning = 0\n"), "ssd.over_provisioning is 0"),
        (with("[timing]\nbackend_fast_share = 1.5\n"), "timing.backend_fast_share is 1.5"),
        (with("[timing]\ndram_us = nan\n"), "timing.dram_us is NaN"),
        (with("[timing]\nchannels = 0\n"), "timing.channels is 0"),
        (with("[report]\ninterval = 0\n"), "report.interval is 0"),
        (
            with("[expect.ripq]\nclwa_of_sets = { max = 1 }\n"),
            "expect is 'ripq': name a cache: hybrid",
        ),
        (
            with("[expect.hybrid]\nstore_share = { max = 1 }\n"),
            "expect.hybrid names 'store_share', which cache 'hybrid' of kind hybrid does not have.",
        ),
        (LEAST.replace("trace", "warmup = 5\nlimit = 5\ntrace"), "workload.warmup is 5"),
        (LEAST.replace("trace", "format = \"excel\"\ntrace"), "excel"),
        (LEAST.replace("trace", "rate = 0\ntrace"), "workload.rate is 0"),
        (LEAST.replace("trace", "rate = 1e300\ntrace"), "workload.rate is 1e300: give"),
        (LEAST.replace("trace", "limit = 0\ntrace"), "workload.limit is 0: give at least 1"),
        (
            LEAST.replace("trace", "value_sizes = \"normal:3\"\ntrace"),
            "'normal:3' is no distribution of sizes",
        ),
        (LEAST.replace("trace", "pages = \"5k\"\ntrace"), "workload.pages is 5120: a page is"),
        ("[workload]\ntrace = \"x\"\ncache = []\n".to_owned(), "unknown field `cache`"),
        ("cache = []\n[workload]\ntrace = \"x\"\n".to_owned(), "at least one [[cache]]"),
        ("sed = 1\n".to_owned(), "line 1: unknown field `sed`"),
    ];
    for (text, words) in cases {
        let e = Experiment::parse(text, "x.toml").unwrap_err();
        assert!(e.to_string().contains(words), "'{e}' lacks '{words}'");
        assert!(e.is_usage() && !e.to_string().contains('\n'), "{e}");
    }
}

const SIDE_BY_SIDE: &str = r#"
title = "a small mix"
seed = 7
[workload]
trace = "gen:memcachier?objects=4000&requests=60000&rate=2000"
warmup = 20000
[[cache]]
kind = "hybrid"
dram = "256k"
flash = "1m"
[cache.admission]
policy = "all"
[[cache]]
kind = "hybrid"
name = "rejecting"
dram = "256k"
flash = "1m"
clock_bits = 1
clock_mode = "increment"
admission.policy = "reject_first"
[[cache]]
kind = "victim"
dram = "256k"
flash = "1m"
[[cache]]
kind = "ripq"
flash = "1m"
block = "32k"
[[cache]]
kind = "set-associative"
dram = "256k"
flash = "1m"
[[cache]]
kind = "fifo-log"
dram = "256k"
flash = "1m"
region = "64k"
admission = "reject_first"
[report]
interval = 2
[expect.hybrid]
hit_ratio = { min = 0.2, max = 0.9 }
[expect.order]
clwa_of_sets = ["rejecting", "hybrid"]
"#;

fn side_by_side(threads: usize) -> Outcome {
    let e = Experiment::parse(SIDE_BY_SIDE, "side.toml").unwrap();
    let mut seen = 0;
    let outcome = run(&e, threads, |_, requests| seen = requests).unwrap();
    assert_eq!(seen, 60_000);
    outcome
}

#[test]
fn the_same_seed_gives_the_same_bytes_on_any_number_of_threads() {
    let one = serde_json::to_string(&side_by_side(1)).unwrap();
    assert_eq!(one, serde_json::to_string(&side_by_side(3)).unwrap());
    let mut e = Experiment::parse(SIDE_BY_SIDE, "side.toml").unwrap();
    e.seed = 8;
    let other = run(&e, 1, |_, _| {}).unwrap();
    let hash = |o: &Outcome| o.workload.trace_hash.clone();
    assert_eq!(hash(&side_by_side(2)), hash(&other), "the trace is the same");
    assert_ne!(one, serde_json::to_string(&other).unwrap());
}

#[test]
fn figures_add_up() {
    let outcome = side_by_side(2);
    assert_eq!(outcome.caches.len(), 6);
    assert!(outcome.expectations.iter().all(|c| c.met), "{:?}", outcome.expectations);
    let facts = &outcome.workload;
    assert_eq!(facts.requests, 60_000);
    assert_eq!(facts.reads + facts.writes + facts.removals, facts.requests);
    assert!(!facts.times_from_rate && facts.trace_hash.len() == 16);
    for c in &outcome.caches {
        assert_eq!(c.requests, 40_000, "{}", c.name);
        assert_eq!(c.reads, outcome.caches[0].reads);
        assert!((c.hit_ratio + c.miss_ratio - 1.0).abs() < 1e-12);
        assert!((c.dram_hit_ratio + c.flash_hit_ratio - c.hit_ratio).abs() < 1e-12);
        assert_eq!(c.read_bytes, c.hit_bytes + c.miss_bytes);
        assert!(c.set_bytes > c.miss_bytes && c.clwa_of_misses > c.clwa_of_sets, "{}", c.name);
        let l = &c.latency;
        assert_eq!(l.all.count, c.requests);
        assert_eq!(
            (l.read.count, l.hit_dram.count, l.hit_flash.count),
            (c.reads, c.hits_dram, c.hits_flash)
        );
        assert!((l.hit_dram.max_us - 0.4).abs() < 0.001 || c.hits_dram == 0);
        assert!(l.hit_flash.p50_us >= 88.0 && l.miss.p50_us > 108.0 && l.miss.p999_us > 7_900.0);
        // The closed form is 898 µs; the standard error of so many misses is 19.
        assert!((830.0..970.0).contains(&l.miss.mean_us), "{}: {}", c.name, l.miss.mean_us);
        assert!(c.flash_utilisation > 0.0 && c.backend_utilisation > 0.0);
        assert_eq!(c.series.iter().map(|p| p.requests).sum::<u64>(), c.requests);
        assert_eq!(c.series.iter().map(|p| p.flash_bytes).sum::<u64>(), c.flash_bytes);
        let (dlwa, life) = (c.dlwa.unwrap(), c.life_years.unwrap());
        let wanted = match c.kind.as_str() {
            "set-associative" => 1.2..9.0,
            // A page for each object, at random.
            "victim" => 20.0..200.0,
            // Blocks as large as the drive's, in no order.
            "ripq" => 1.0..4.0,
            _ => 1.0..1.2,
        };
        assert!(wanted.contains(&dlwa), "{}: {dlwa}", c.name);
        // 1 drive write per day for 5 years, spent at this rate.
        let endurance = 5.0 * 365.25 * (1 << 20) as f64;
        let years = endurance / (c.flash_bytes_per_second * dlwa) / (365.25 * 86_400.0);
        assert!((life / years - 1.0).abs() < 1e-9, "{life} {years}");
        assert!(c.wear.unwrap().erases > 0, "{}", c.name);
        assert_eq!(
            c.metadata_per_flash_object.is_some(),
            !matches!(c.kind.as_str(), "ripq" | "victim")
        );
        // A hit in the log's write buffer reads no flash.
        let least = if c.kind == "fifo-log" { 0.8 } else { 1.0 };
        assert!(c.flash_reads_per_hit.unwrap() >= least, "{}", c.name);
        let each = c.simulator_bytes_per_object;
        assert_eq!(each.is_some(), c.kind == "hybrid");
    }
}

/// What expectations may name of a kind is what its outcome says, no more and no less.
#[test]
fn figures_of_a_kind_are_those_of_its_outcome() {
    let more = "[[cache]]\nkind = \"flashield-paper\"\ndram = \"256k\"\nflash = \"1m\"\nsegment = \"64k\"\n";
    let text = SIDE_BY_SIDE
        .replace("requests=60000", "requests=60000&writes=0.05")
        .replace("[report]", &format!("{more}[report]"));
    let e = Experiment::parse(&text, "all.toml").unwrap();
    let outcome = run(&e, 2, |_, _| {}).unwrap();
    assert_eq!(outcome.caches.len(), 7);
    for (c, spec) in outcome.caches.iter().zip(&e.caches) {
        let found: Vec<String> = c.figures().into_keys().collect();
        assert_eq!(found, figures_of(spec.kind()), "{}", c.name);
        assert_eq!(c.metric("latency_read_p99_us"), Some(c.latency.read.p99_us));
        assert_eq!(c.metric("wear_most"), c.wear.map(|w| f64::from(w.most)));
        assert_eq!(c.metric("flash_fill"), c.flash_fill);
        assert_eq!(c.metric("line_hit_ratio"), None, "of block caches alone");
    }
}

/// The lane's own counts are the engine's.
#[test]
fn the_hybrid_counts_as_the_engine_does() {
    use crate::kv::{CacheConfig, HybridCache, Sizes, study_of};
    let spec = "gen:zipf?objects=5000&requests=40000&writes=0.05&deletes=0.01&rate=1000";
    let text = format!(
        "[workload]\ntrace = \"{spec}\"\n[[cache]]\nkind = \"hybrid\"\ndram = \"256k\"\nflash = \"1m\"\n"
    );
    let c = run(&Experiment::parse(&text, "x").unwrap(), 1, |_, _| {}).unwrap().caches.remove(0);
    let config =
        CacheConfig { sizes: Sizes::Study(study_of(256 << 10, 1 << 20)), ..CacheConfig::default() };
    let mut cache = HybridCache::new(&config).unwrap();
    for r in larder_trace::open(spec, &larder_trace::Options::default()).unwrap().reader {
        cache.request(&r.unwrap());
    }
    let counters = cache.counters();
    assert_eq!((c.requests, c.reads), (counters.requests, counters.gets));
    assert_eq!((c.hits_dram, c.hits_flash), (counters.hits_dram, counters.hits_flash));
    assert_eq!((c.flash_bytes, c.flash_reads), (counters.flash_bytes, Some(counters.flash_reads)));
    assert!(c.flash_bytes > 0 && c.hits_flash > 0);
}

#[test]
fn traces_that_cannot_be_run_are_refused() {
    let with = |trace: &str, warmup: u64| {
        let text = LEAST.replace(
            "trace = \"gen:zipf?objects=1000&requests=10000\"",
            &format!("trace = \"{trace}\"\nwarmup = {warmup}"),
        );
        let e = run(&Experiment::parse(&text, "x").unwrap(), 2, |_, _| {}).unwrap_err();
        assert!(e.is_usage(), "{e}");
        e.to_string()
    };
    assert!(with("/nonexistent", 0).contains("cannot open trace '/nonexistent'"));
    assert!(with("gen:nothing", 0).contains("nothing"));
    let short = with("gen:zipf?requests=100", 100);
    assert!(short.contains("workload.warmup is 100") && short.contains("100 requests"), "{short}");
    let small = LEAST.replace("dram = \"1m\"", "dram = 1000");
    let e = run(&Experiment::parse(&small, "x").unwrap(), 1, |_, _| {}).unwrap_err().to_string();
    assert!(e.starts_with("cache 'hybrid': dram is 1000"), "{e}");
}

/// Bytes changed, left out, doubled and put elsewhere: an experiment or one line that says why not, never a panic.
#[test]
fn mangled_experiments_are_read_or_refused() {
    const ODD: &[u8] = b"0123456789.-_=[]{}\"'\n\x00kmgtnaif\xff";
    let mut rng = larder_base::Rng::new(11);
    let mut read = 0;
    for _ in 0..3000 {
        let mut bytes = SIDE_BY_SIDE.as_bytes().to_vec();
        for _ in 0..rng.range(1, 4) {
            let at = rng.below(bytes.len() as u64) as usize;
            let end = (at + rng.range(1, 30) as usize).min(bytes.len());
            match rng.below(4) {
                0 => bytes[at] = ODD[rng.below(ODD.len() as u64) as usize],
                1 => drop(bytes.drain(at..end)),
                2 => {
                    let doubled = bytes[at..end].to_vec();
                    bytes.splice(at..at, doubled);
                }
                _ => {
                    let moved: Vec<u8> = bytes.drain(at..end).collect();
                    let to = rng.below(bytes.len() as u64 + 1) as usize;
                    bytes.splice(to..to, moved);
                }
            }
        }
        match Experiment::parse(&String::from_utf8_lossy(&bytes), "mangled.toml") {
            Ok(e) => {
                read += 1;
                // What was read can be written and read again.
                let text = toml::to_string(&e).unwrap();
                assert_eq!(Experiment::parse(&text, "again").unwrap(), e, "{text}");
            }
            Err(e) => assert!(e.is_usage() && e.to_string().lines().count() == 1, "{e}"),
        }
    }
    assert!((30..2970).contains(&read), "{read} of 3000 were read");
}

/// Two applications ask for alike much. What the engine gives them follows from their shares, by the names of the server's file.
#[test]
fn applications_get_their_shares_and_are_told_apart() {
    let text = |table: &str| {
        format!(
            "[workload]\ntrace = \"gen:memcachier?objects=4000&requests=60000&rate=2000\"\nwarmup = 20000\n\
             [[cache]]\nkind = \"hybrid\"\ndram = \"256k\"\nflash = \"1m\"\nadmission.policy = \"all\"\n{table}"
        )
    };
    let run_with = |table: &str| {
        let e = Experiment::parse(&text(table), "apps.toml").unwrap();
        run(&e, 1, |_, _| {}).unwrap().caches.remove(0)
    };
    let plain = run_with("");
    assert!(plain.applications.is_empty(), "nobody asked: {:?}", plain.applications);
    let told = run_with("applications = {}\n");
    assert_eq!((plain.hits_dram, plain.hits_flash), (told.hits_dram, told.hits_flash));
    let sum = |f: fn(&AppFigures) -> u64| told.applications.values().map(f).sum::<u64>();
    assert_eq!(sum(|a| a.reads), told.reads);
    assert_eq!(sum(|a| a.hits_dram), told.hits_dram);
    assert_eq!(sum(|a| a.hits_flash), told.hits_flash);
    let most = told.applications.iter().max_by(|a, b| a.1.dram_share.total_cmp(&b.1.dram_share));
    let (most, before) = most.unwrap();
    let less = run_with(&format!(
        "application_names = {{ {most} = \"web\" }}\n[cache.applications.shares]\nweb = {{ ceiling = 0.1 }}\n\
         [expect.hybrid]\napplications_web_dram_share = {{ max = 0.5 }}\n"
    ));
    let web = &less.applications["web"];
    // What is over the ceiling stays until CLOCK comes to it: at any one time the share may be several times that (0.18 to 0.42 at the
    // ends of runs of other lengths). Over the run it tells in the hits.
    assert!(before.dram_share > 0.3, "{before:?}");
    assert!(3 * web.hits_dram < 2 * before.hits_dram, "{web:?} {before:?}");
    assert!(web.flash_share < 0.15, "{web:?}");
    let least = told.applications.iter().min_by(|a, b| a.1.dram_share.total_cmp(&b.1.dram_share));
    let (least, before) = least.unwrap();
    let more = run_with(&format!("[cache.applications.shares.{least}]\nfloor = 0.5\n"));
    let after = &more.applications[least];
    assert!(after.dram_share > before.dram_share, "{after:?} {before:?}");
    assert_eq!(more.metric(&format!("applications_{least}_hit_ratio")), Some(after.hit_ratio));
}

/// In the server's words.
#[test]
fn applications_that_cannot_be_are_refused() {
    let shares = "[cache.applications.shares]\n";
    for (text, words) in [
        (
            format!("{shares}1 = {{ floor = 0.5, ceiling = 0.2 }}\n"),
            "cache 'hybrid': applications.shares.1: the floor 0.5 is above the ceiling 0.2",
        ),
        (
            format!("{shares}1 = {{ floor = 0.6 }}\n2 = {{ floor = 0.6 }}\n"),
            "the floors under applications.shares add up to 1.2",
        ),
        (
            format!("{shares}1 = {{ ceiling = 1.5 }}\n"),
            "applications.shares.1.ceiling is 1.5: it must be between 0 and 1",
        ),
        (format!("{shares}1 = {{ flor = 0.1 }}\n"), "unknown field `flor`"),
        (format!("{shares}\"a:b\" = {{ floor = 0.1 }}\n"), "application 'a:b': a name has 1 to 64"),
        (
            format!("{shares}web = {{ floor = 0.1 }}\n"),
            "cache 'hybrid' applications.shares is 'web': no application of a trace is called so",
        ),
        (
            format!("application_names = {{ 1 = \"web\" }}\n{shares}1 = {{ floor = 0.1 }}\n"),
            "applications.shares is '1': no application",
        ),
        ("application_names = { web = \"1\" }\n".to_owned(), "application_names is web = '1'"),
        ("application_names = { 1 = \"\" }\n".to_owned(), "application '': a name has"),
    ] {
        let e = Experiment::parse(&format!("{LEAST}{text}"), "x.toml").unwrap_err();
        assert!(e.to_string().contains(words) && e.is_usage(), "{text}: '{e}' lacks '{words}'");
    }
}
