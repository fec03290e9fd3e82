//! Volumes that write back under a write budget.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use larder_base::{ByteSize, Nanos};
use larder_policy::budget::WriteBudgetConfig;
use tempfile::TempDir;

use crate::block::Cache;
use crate::block::back::{BackConfig, BackWish, Pace};

const BYTES: u64 = 16 << 20;

/// A budget of 1 MB a second, a minute of which may be saved up; nothing is there at first.
fn open(dir: &Path) -> Cache {
    let path = dir.join("disk");
    std::fs::File::create(&path).unwrap().set_len(BYTES).unwrap();
    let budget = WriteBudgetConfig {
        tbw: Some(ByteSize(1_000_000 * 31_557_600)),
        years: 1.0,
        device_write_amplification: 1.0,
        burst_hours: 1.0 / 60.0,
        first_fill: false,
        ..WriteBudgetConfig::default()
    };
    let builder = Cache::builder(dir.join("cache")).create(ByteSize::mib(192));
    let builder = builder.write_log(ByteSize::mib(96)).state_dir(dir.join("state")).threads(2);
    let builder = builder.volume("disk", &format!("file:{}", path.display())).unwrap();
    let back = BackConfig { pace: Pace::AtBound, ..BackConfig::default() };
    builder.write_back("disk", back).write_budget(budget).open().unwrap()
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn what_the_log_writes_counts_as_written_to_flash() {
    let dir = TempDir::new().unwrap();
    let cache = open(dir.path());
    let disk = cache.volume("disk").unwrap();
    let spent = || cache.core().node_limits.limits.spent();
    let before = spent();
    for at in 0..16 {
        disk.write(at << 16, vec![1; 1 << 16]).wait().unwrap();
    }
    let written = spent() - before;
    assert!((1 << 20..1 << 21).contains(&written), "{written}");
}

/// Clients write and read meanwhile, and everything is there.
#[test]
fn a_volume_goes_through_when_the_write_budget_is_spent_and_comes_back_when_there_is_some() {
    const PART: u64 = 1 << 20;
    let dir = TempDir::new().unwrap();
    let cache = open(dir.path());
    let (core, stop) = (cache.core(), AtomicBool::new(false));
    let limits = &core.node_limits.limits;
    let back = || core.back_status("disk").is_some();
    // (Time goes on as fast as the test likes: the budget is asked of a later one.)
    let later = std::cell::Cell::new(0);
    let earn = |seconds| {
        // Step by step: the budget saves up no more than a minute at once.
        for _ in 0..seconds / 20 {
            later.set(later.get() + 20);
            let _ = limits.charge(core.now() + Nanos::from_secs(later.get()), 0);
        }
    };
    earn(60);
    assert!(back());
    /// Clients end, also where the test fails.
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let parts: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let ends = Stop(&stop);
        let clients: Vec<_> = (0..2u64)
            .map(|n| {
                let (disk, stop) = (cache.volume("disk").unwrap(), &stop);
                scope.spawn(move || {
                    let mut part = vec![0u8; PART as usize];
                    for i in 0u64.. {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        let (at, fill) = (i * 37 % 256 * 4096, (i % 251) as u8 + 1);
                        part[at as usize..][..4096].fill(fill);
                        disk.write(n * PART + at, vec![fill; 4096]).wait().unwrap();
                        let read = disk.read(n * PART + at, 4096).wait().unwrap();
                        assert!(read.iter().all(|&b| b == fill), "client {n}, {i}");
                        // What is cached is written to flash too: less than the budget has.
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    part
                })
            })
            .collect();
        for _ in 0..2 {
            let _ = limits.charge(core.now(), 400_000_000);
            until("it is written through", || !back() && core.saves("disk").is_some());
            // The operator cannot have it write back now.
            let wish = BackWish { back: core.saves("disk"), ..BackWish::default() };
            let why = cache.change_over("disk", &wish, &mut |_| true).unwrap_err().to_string();
            assert!(why.contains("the write budget is used up"), "{why}");
            earn(340);
            std::thread::sleep(Duration::from_millis(300));
            assert!(!back(), "there is not enough yet");
            earn(10_000);
            until("it writes back", back);
            until("it is told", || core.saves("disk").is_none());
            assert_eq!(core.back_status("disk").unwrap().config.pace, Pace::AtBound);
        }
        let _ = limits.charge(core.now(), 1 << 40);
        until("it is written through again", || !back() && core.saves("disk").is_some());
        drop(ends);
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    let store = std::fs::read(dir.path().join("disk")).unwrap();
    for (n, part) in parts.iter().enumerate() {
        assert!(store[n * PART as usize..][..PART as usize] == part[..], "client {n}");
    }
    // The operator has it write through: it stays so.
    assert!(cache.change_over("disk", &BackWish::default(), &mut |_| true).unwrap());
    assert!(core.saves("disk").is_none());
    assert!(cache.change_over("disk", &BackWish::default(), &mut |_| true).unwrap());
}
