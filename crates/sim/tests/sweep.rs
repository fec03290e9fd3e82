//! Sweeps: results that do not depend on threads, warm-up, deletes, sampling, and the one-pass LRU curve.

use larder_base::Rng;
use larder_policy::eviction::{EvictionKind, Unit};
use larder_sim::mrc::{Filter, Found, Item, Job, Said, Sampler, Sweep, SweepError, sweep};
use larder_trace::TraceError;

fn items(seed: u64, len: usize, objects: u64, deletes: f64) -> Vec<Item> {
    let mut rng = Rng::new(seed);
    (0..len)
        .map(|_| {
            // About 1 / rank: the product of uniform draws.
            let id = (objects as f64).powf(rng.unit()) as u64;
            let removes = rng.chance(deletes);
            Item { removes, ..Item::get(id << 12, 100 + (id * 37 % 900) as u32) }
        })
        .collect()
}

fn plan(kinds: &[EvictionKind], sizes: &[u64], unit: Unit, threads: usize) -> Sweep {
    let jobs = kinds
        .iter()
        .flat_map(|&policy| {
            sizes.iter().map(move |&size| Job { policy, size, admission: Filter::All })
        })
        .collect();
    Sweep { jobs, unit, warmup: 0, threads, seed: 1, sample: None, curve: false }
}

fn run(items: &[Item], plan: &Sweep) -> Found {
    let open = || Ok(items.iter().copied().map(Ok::<Item, TraceError>));
    sweep(open, plan, |_, _| ()).unwrap()
}

#[test]
fn threads_change_nothing() {
    let items = items(1, 400_000, 50_000, 0.01);
    for unit in [Unit::Objects, Unit::Bytes] {
        let sizes: &[u64] =
            if unit == Unit::Objects { &[100, 5_000] } else { &[100_000, 3_000_000] };
        let mut one = plan(&EvictionKind::ALL, sizes, unit, 1);
        let mut many = plan(&EvictionKind::ALL, sizes, unit, 5);
        assert_eq!(run(&items, &one).rows, run(&items, &many).rows);
        one.sample = Sampler::new(0.2, 3);
        many.sample = one.sample;
        assert_eq!(run(&items, &one).rows, run(&items, &many).rows);
    }
}

#[test]
fn the_curve_is_lru_at_every_size() {
    let items = items(2, 300_000, 20_000, 0.0);
    let sizes = [1, 2, 10, 99, 1_000, 7_777, 50_000];
    let mut plan = plan(&[EvictionKind::Lru], &sizes, Unit::Objects, 2);
    plan.curve = true;
    plan.warmup = 12_345;
    let found = run(&items, &plan);
    let curve = found.curve.unwrap();
    for row in &found.rows {
        assert_eq!(curve.row(row.size), larder_sim::mrc::Row { curve: true, ..row.clone() });
        assert_eq!(row.requests, 300_000 - 12_345);
    }
}

#[test]
fn warm_up_is_not_counted_and_deletes_are_not_requests() {
    let get = |id| Item::get(id, 10);
    let items = [get(1), get(2), get(1), Item { removes: true, ..get(1) }, get(1), get(2)];
    let mut plan = plan(&[EvictionKind::Lru], &[10], Unit::Objects, 1);
    let all = run(&items, &plan).rows[0].clone();
    assert_eq!((all.requests, all.misses, all.request_bytes, all.miss_bytes), (5, 3, 50, 30));
    plan.warmup = 3;
    let late = run(&items, &plan).rows[0].clone();
    assert_eq!((late.requests, late.misses), (2, 1));
    plan.warmup = 100;
    // A miss ratio of nothing is none.
    for (items, counted) in [(&items[..], 5), (&[][..], 0)] {
        let open = || Ok(items.iter().copied().map(Ok::<Item, TraceError>));
        let refused = sweep(open, &plan, |_, _| ()).unwrap_err();
        assert!(
            matches!(refused, SweepError::NothingCounted { warmup: 100, requests } if requests == counted),
            "{refused}"
        );
    }
}

#[test]
fn samples_come_near_and_know_how_near() {
    let items = items(4, 1_000_000, 300_000, 0.0);
    let kinds = [EvictionKind::Lru, EvictionKind::Sieve];
    let mut plan = plan(&kinds, &[3_000, 30_000], Unit::Objects, 2);
    let exact = run(&items, &plan).rows;
    plan.sample = Sampler::new(0.1, 9);
    let sampled = run(&items, &plan).rows;
    for (exact, sampled) in exact.iter().zip(&sampled) {
        let error = sampled.miss_ratio_error.unwrap();
        let off = (exact.miss_ratio - sampled.miss_ratio).abs();
        let what = format!("{} {}: off {off:.4}, said {error:.4}", exact.policy, exact.size);
        assert!(off < 4.0 * error && off < 0.03 && error < 0.03, "{what}");
        assert_eq!(exact.requests, sampled.requests);
        assert_eq!(exact.request_bytes, sampled.request_bytes);
    }
}

#[test]
fn belady_is_never_beaten_and_reads_the_same_trace_twice() {
    let items = items(5, 200_000, 5_000, 0.0);
    let found = run(&items, &plan(&EvictionKind::ALL, &[700], Unit::Objects, 2));
    let belady = found.rows.iter().find(|r| r.policy == "belady").unwrap().misses;
    assert!(found.rows.iter().all(|r| r.misses >= belady), "{:?}", found.rows);

    let mut readings = 0;
    let plan = plan(&[EvictionKind::Belady], &[10], Unit::Objects, 1);
    let growing = || {
        readings += 1;
        Ok(items[..1_000 * readings].iter().copied().map(Ok::<Item, TraceError>))
    };
    assert!(matches!(sweep(growing, &plan, |_, _| ()), Err(SweepError::Changed)));
}

#[test]
fn errors_of_the_trace_stop_the_sweep() {
    let plan = plan(&[EvictionKind::Lru], &[10], Unit::Objects, 2);
    let open = || {
        let bad = larder_trace::open("/nonexistent/trace", &larder_trace::Options::default()).err();
        let get = Item::get(1, 1);
        Ok([Ok(get), Err(bad.unwrap())].into_iter())
    };
    assert!(matches!(sweep(open, &plan, |_, _| ()), Err(SweepError::Trace(_))));
}

#[test]
fn memory_stays_under_64_bytes_an_object() {
    let items: Vec<Item> = (0..600_000).map(|i| Item::get(i * 7919, 1)).collect();
    for kind in
        [EvictionKind::Lru, EvictionKind::S3Fifo(larder_policy::eviction::S3FifoRelease::R2024)]
    {
        // Everything fits: all objects are tracked by the policy as well.
        let found = run(&items, &plan(&[kind], &[2_000_000], Unit::Objects, 1));
        let each = found.memory_bytes as f64 / found.objects as f64;
        assert!(each < 64.0, "{kind}: {each:.1} bytes an object");
    }
}

#[test]
fn filters_keep_one_time_objects_out() {
    // Half of the requests are for objects that never come back.
    let mut rng = Rng::new(8);
    let items: Vec<Item> = (0..200_000)
        .map(|i| {
            let id = if rng.chance(0.5) { 1_000_000 + i } else { rng.below(2_000) };
            Item::get(id, 1)
        })
        .collect();
    let mut plan = plan(&[EvictionKind::Fifo], &[1_500], Unit::Objects, 2);
    let job = plan.jobs[0];
    let filters = [Filter::Probability(0.0), Filter::Probability(0.1), Filter::RejectFirst];
    plan.jobs.extend(filters.map(|admission| Job { admission, ..job }));
    let rows = run(&items, &plan).rows;
    assert_eq!(rows, run(&items, &plan).rows, "the same seed, the same draws");
    let ratios: Vec<f64> = rows.iter().map(|r| r.miss_ratio).collect();
    assert_eq!(ratios[1], 1.0);
    // A FIFO holds the same mix of objects whatever share of the misses is admitted.
    assert!(ratios[2] != ratios[0] && (ratios[2] - ratios[0]).abs() < 0.02, "{ratios:?}");
    assert!(ratios[3] < ratios[0] - 0.1, "{ratios:?}");
    assert_eq!(rows[0].admission, None);
    assert_eq!(rows[3].admission.as_deref(), Some("reject_first"));
    for filter in filters {
        assert_eq!(filter.to_string().parse(), Ok(filter));
    }
    assert!("probability:2".parse::<Filter>().is_err());
}

/// What `larder kv --capture` writes of a cache that is filled by its clients: a get without a size, then a set.
#[test]
fn a_store_is_charged_though_a_read_named_the_object_first() {
    let mut capture = Vec::new();
    for round in 0..3u64 {
        for id in 0..1000u64 {
            let key = Item::get(id, 10);
            if round == 0 {
                capture.push(Item { said: Said::Nothing, ..key });
                capture.push(Item { said: Said::Stored, size: 1000, ..key });
            } else {
                capture.push(Item { size: 1000, ..key });
            }
        }
    }
    let sizes = [10_000, 500_000, 4_000_000];
    let found = run(&capture, &plan(&EvictionKind::ALL, &sizes, Unit::Bytes, 2));
    for rows in found.rows.chunks(3) {
        let [small, half, all] = rows else { panic!("three sizes") };
        // The thousand first reads miss, all others hit where there is room.
        assert_eq!((all.requests, all.misses), (4000, 1000), "{all:?}");
        assert_eq!(all.request_bytes, 1000 * 3 * 1000 + 10_000, "{all:?}");
        assert!(small.misses > 2900 && half.misses > 1400, "{small:?} {half:?}");
        // What a later size would be is known by then: a read without one is of as many bytes.
        assert!(half.byte_miss_ratio > 0.2, "{half:?}");
    }
    let gone = [
        Item { said: Said::Stored, ..Item::get(1, 300) },
        Item { said: Said::Stored, ..Item::get(2, 300) },
        Item { said: Said::Stored, ..Item::get(1, 600) },
        Item { said: Said::Nothing, ..Item::get(2, 10) },
    ];
    let found = run(&gone, &plan(&[EvictionKind::Lru, EvictionKind::Fifo], &[700], Unit::Bytes, 1));
    for row in &found.rows {
        // The third, larger, drives the second out; the fourth is a read of 300 bytes.
        assert_eq!((row.misses, row.miss_bytes, row.request_bytes), (3, 900, 1500), "{row:?}");
    }
}
