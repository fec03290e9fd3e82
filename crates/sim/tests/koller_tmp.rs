use larder_sim::experiment::{Experiment, run};
#[test]
fn koller_tmp() {
    for file in ["koller-write-back", "koller-write-back-far"] {
        let path = format!("{}/../../experiments/{file}.toml", env!("CARGO_MANIFEST_DIR"));
        let e = Experiment::parse(&std::fs::read_to_string(path).unwrap(), file).unwrap();
        let o = run(&e, 2, |_, _| {}).unwrap();
        println!("{file}");
        for c in &o.caches {
            let b = c.block.as_ref().unwrap();
            println!(
                "{:26} rps {:8.0} write mean {:8.1} p99 {:9.1} flush mean {:9.1} hit {:.3} stale mean {:7.3} max {:7.3} dirty {} max {} stalls {} stalled {:.3} slowed {:.3} clwa {:?} log {} destaged {} storeW {} storeB {} flushes {} written {}",
                c.name,
                b.requests_per_second,
                c.latency.write.mean_us,
                c.latency.write.p99_us,
                b.flush.mean_us,
                c.hit_ratio,
                b.staleness_mean_s,
                b.staleness_max_s,
                b.dirty_bytes >> 20,
                b.dirty_bytes_max >> 20,
                b.stalls,
                b.stalled_share,
                b.slowed_share,
                b.clwa_of_writes,
                b.log_bytes >> 20,
                b.destaged_bytes >> 20,
                b.store_writes,
                b.store_write_bytes >> 20,
                b.store_flushes,
                b.written_bytes >> 20
            );
        }
        for x in &o.expectations {
            println!("{x:?}");
        }
    }
}
