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
    let e = Experiment::parse(LEAST, "least.toml").unwrap();
    assert_eq!((e.seed, e.caches[0].name(), e.caches[0].flash()), (1, "hybrid", 8 << 20));
    let text = toml::to_string(&e).unwrap();
    assert_eq!(Experiment::parse(&text, "again").unwrap(), e, "{text}");
    let holland = e.timing;
    assert_eq!((holland.flash_read_us, holland.backend_slow_us), (88.0, 7_952.0));
}

#[test]
fn what_cannot_be_meant_is_named() {
    let with = |more: &str| format!("{LEAST}{more}");
    let cases: &[(String, &str)] = &[
        (with("drma = 1\n"), "line 4: unknown field `drma`"),
        (with("[cache.admission]\npolicy = \"lru\"\n"), "unknown variant `lru`"),
        (with("[[cache]]\nkind = \"magic\"\n"), "unknown variant `magic`"),
        (with("[[cache]]\nkind = \"victim\"\n"), "missing field `dram`"),
        (with("[[cache]]\nkind = \"hybrid\"\ndram = 1\nflash = 1\n"), "cache.name is 'hybrid'"),
        (
            with("[[cache]]\nkind = \"ripq\"\nflash = \"100k\"\n"),
            "cache 'ripq' flash is 100 KiB over 8",
        ),
        (with("clock_bits = 3\n"), "cache 'hybrid' clock_bits is 3"),
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
        (LEAST.replace("trace", "warmup = 5\nlimit = 5\ntrace"), "workload.warmup is 5"),
        (LEAST.replace("trace", "format = \"excel\"\ntrace"), "excel"),
        (LEAST.replace("trace", "rate = 0\ntrace"), "workload.rate is 0"),
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
