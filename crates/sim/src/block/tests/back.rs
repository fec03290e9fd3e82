//! Volumes that write back, against what can be worked out by hand.

use super::*;

const PAGE: u64 = 4096;

/// A drive that takes next to no time, so that what is measured is the store.
fn quick() -> Timing {
    Timing {
        flash_read_us: 1.0,
        flash_program_us: 1.0,
        flash_erase_us: 0.0,
        flash_flush_us: 1.0,
        network_packet_us: 0.0,
        network_bit_ns: 0.0,
        backend_fast_share: 1.0,
        ..Timing::default()
    }
}

fn back(write: &str, more: &str) -> Block {
    let text = format!(
        "flash = \"128m\"\nwrite_log = \"32m\"\nvolume = \"64m\"\nwrite = '{write}'\nreadahead = 0\nshards = 1\n{more}"
    );
    toml::from_str(&text).unwrap()
}

fn sim_of(spec: &Block, timing: &Timing, write_us: f64, flush_us: f64) -> BlockSim {
    let drive = |bytes| Drive::new(&DriveSpec::default(), timing, bytes, 1);
    let store = Store { write_us, flush_us: Some(flush_us), ..Store::default() };
    BlockSim::new(spec, &store, timing, drive, 7).unwrap()
}

/// Pages of the volume at random, written one after the other by `depth` clients.
fn writes(seed: u64) -> impl Iterator<Item = Request> {
    let mut rng = Rng::new(seed);
    std::iter::repeat_with(move || write(rng.below(1 << 14) * PAGE, PAGE))
}

#[test]
fn a_write_is_answered_when_the_log_has_it_and_comes_to_the_store_afterwards() {
    let mut sim = sim_of(&back("back:ordered", ""), &Timing::default(), 1000.0, 1000.0);
    let s = 1_000_000;
    let a = run(&mut sim, [at(s, write(0, PAGE)), at(2 * s, read(0, PAGE))]);
    assert!((micros(&a[0]) - 21.0).abs() < 1.0, "{}", micros(&a[0]));
    assert!(!a[0].reached_store && !a[1].reached_store);
    assert!(sim.drain());
    let sums = sim.sums();
    assert_eq!((sums.store.writes, sums.store.write_bytes, sums.store.flushes), (1, PAGE, 1));
    assert!(sums.log_bytes_written >= PAGE && sim.ages().dirty == 0, "{sums:?}");
}

/// `ordered,grain=completion` sustains D/(Ts+Tf): of the design's table, a client of each depth before a store of each speed.
#[test]
fn a_window_is_as_wide_as_the_client_is_deep() {
    for ms in [1.0, 10.0] {
        for depth in [1u32, 16, 64] {
            let more = format!("load = \"closed\"\ndepth = {depth}\ndirty_max = \"2m\"");
            let spec = back("back:ordered,grain=completion", &more);
            let mut sim = sim_of(&spec, &quick(), ms * 1000.0, ms * 1000.0);
            let wanted = f64::from(depth) / (2.0 * ms / 1000.0);
            let mut requests = writes(1);
            let mut answered = Vec::new();
            let mut number = 0;
            // The throttle measures the store over some seconds.
            let mut until = |sim: &mut BlockSim, answered: &mut Vec<Answered>, seconds: u64| {
                while sim.now() < Nanos::from_secs(seconds) {
                    sim.request(number, &requests.next().unwrap(), answered).unwrap();
                    number += 1;
                }
            };
            until(&mut sim, &mut answered, 20);
            answered.clear();
            let before = (sim.sums(), sim.now());
            until(&mut sim, &mut answered, 40);
            let seconds = sim.now().saturating_sub(before.1).as_secs_f64();
            let rate = answered.len() as f64 / seconds;
            let destaged = (sim.sums().store.writes - before.0.store.writes) as f64 / seconds;
            println!(
                "{ms} ms, depth {depth}: {rate:.0}/s answered, {destaged:.0}/s destaged, of {wanted:.0}"
            );
            assert!(
                (rate / wanted - 1.0).abs() < 0.05,
                "{ms} ms, depth {depth}: {rate} of {wanted}"
            );
            let mut waits: Vec<f64> = answered.iter().map(|a| micros(a) / 1e6).collect();
            waits.sort_by(f64::total_cmp);
            let p99 = waits[waits.len() * 99 / 100];
            assert!(p99 <= 5.0 * f64::from(depth) / rate, "{ms} ms, depth {depth}: {p99} s");
        }
    }
}
