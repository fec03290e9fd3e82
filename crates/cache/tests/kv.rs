//! The key-value cache as a program that embeds it uses it.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a test of a library with threads has threads and clocks"
)]

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use larder_base::{ByteSize, Rng};
use larder_cache::kv::{Builder, Cache, Closed, LONGEST_KEY, NotStored};

/// A runtime of one future: the calling thread sleeps until it is woken.
struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

fn small(dir: &std::path::Path) -> Builder {
    Cache::builder()
        .memory(ByteSize(4 << 20))
        .flash(dir, ByteSize(32 << 20))
        .object_size(2048)
        .max_object(64 << 10)
        .admission("all")
}

fn value(n: u64) -> Vec<u8> {
    let mut bytes = vec![0; 1_000 + (n % 2_000) as usize];
    Rng::new(n).fill(&mut bytes);
    bytes
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Inserts as fast as the cleaner can take it to flash.
fn fill(cache: &Cache, keys: std::ops::Range<u64>) {
    for n in keys {
        cache.insert(n.to_le_bytes(), value(n), None).unwrap();
        if n % 64 == 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[test]
fn what_is_on_flash_is_found_by_threads_and_by_futures() {
    let dir = tempfile::tempdir().unwrap();
    let cache = small(dir.path()).open().unwrap();
    fill(&cache, 0..8_000);
    let stats = cache.stats();
    let flash = stats.flash.unwrap();
    assert!(flash.objects_written > 2_000, "{} objects on flash", flash.objects_written);
    let hits = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for t in 0..4 {
            let (cache, hits) = (cache.clone(), &hits);
            scope.spawn(move || {
                for n in (0..8_000u64).filter(|n| n % 4 == t) {
                    let found = match n % 3 {
                        0 => cache.get(n.to_le_bytes()).wait().map(|v| v.to_vec()),
                        1 => block_on(cache.get(n.to_le_bytes())).map(|v| v.to_vec()),
                        _ => block_on(cache.get_with(n.to_le_bytes(), <[u8]>::to_vec)),
                    };
                    if let Some(found) = found {
                        assert_eq!(found, value(n), "key {n}");
                        hits.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let reads = cache.stats().flash.unwrap().reads;
    assert!(reads > 1_000, "{reads} reads of flash");
    assert!(hits.load(Ordering::Relaxed) > 5_000, "{hits:?} hits");
    cache.close();
}

#[test]
fn it_is_warm_after_it_was_closed_and_after_the_last_handle_went() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..2 {
        let cache = small(dir.path()).open().unwrap();
        if round == 0 {
            fill(&cache, 0..8_000);
            cache.close();
        } else {
            assert!(cache.opened().kept > 2_000, "{} objects were kept", cache.opened().kept);
        }
        // In the second round it closes by going.
    }
    let cache = small(dir.path()).open().unwrap();
    assert!(cache.opened().kept > 2_000);
    let found = (0..8_000u64).filter(|n| {
        let found = cache.get(n.to_le_bytes()).wait();
        found.is_some_and(|v| {
            assert_eq!(v, value(*n));
            true
        })
    });
    assert!(found.count() > 2_000);
}

#[test]
fn a_closed_cache_finds_and_stores_nothing_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let cache = small(dir.path()).open().unwrap();
    let other = cache.clone();
    cache.insert("k", "v", None).unwrap();
    other.close();
    other.close();
    assert!(cache.is_closed());
    assert_eq!(cache.get("k").wait(), None);
    assert_eq!(cache.insert("k", "w", None), Err(NotStored::Closed));
    assert_eq!(cache.remove("k"), Err(Closed));
    assert_eq!(cache.clear(), Err(Closed));
}

#[test]
fn requests_in_the_middle_of_a_close_leave_nothing_that_comes_back_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let mut latest = vec![0u64; 500];
    for round in 1..6u64 {
        let cache = small(dir.path()).open().unwrap();
        for (n, version) in latest.iter().enumerate() {
            if let Some(found) = cache.get((n as u64).to_le_bytes()).wait() {
                let found = u64::from_le_bytes(found[..8].try_into().unwrap());
                assert_eq!(found, *version, "key {n} of round {round}");
            }
        }
        let writer = {
            let cache = cache.clone();
            let mut latest = latest.clone();
            std::thread::spawn(move || {
                for i in 0.. {
                    let n = (i * 7) % 500;
                    let version = round << 32 | i as u64;
                    let mut bytes = version.to_le_bytes().to_vec();
                    bytes.resize(3_000, 1);
                    match cache.insert((n as u64).to_le_bytes(), bytes, None) {
                        Ok(()) => latest[n] = version,
                        Err(NotStored::Closed) => break,
                        // It is gone; no version is right.
                        Err(_) => latest[n] = u64::MAX,
                    }
                }
                latest
            })
        };
        std::thread::sleep(Duration::from_millis(200));
        cache.close();
        latest = writer.join().unwrap();
    }
}

#[test]
fn a_panic_while_a_value_is_shown_reaches_who_waits_and_harms_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let cache = small(dir.path()).open().unwrap();
    fill(&cache, 0..8_000);
    let mut panics = 0;
    for n in 0..8_000u64 {
        let shown = cache.get_with(n.to_le_bytes(), |_| panic!("as the test wants"));
        let waited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| shown.wait()));
        panics += u64::from(waited.is_err());
    }
    assert!(panics > 5_000, "{panics}");
    cache.insert("k", "v", None).unwrap();
    assert_eq!(cache.get("k").wait().as_deref(), Some(&b"v"[..]));
}

#[test]
fn a_call_from_within_a_shown_value_is_refused_at_once() {
    let cache = Cache::builder().memory(ByteSize(4 << 20)).open().unwrap();
    cache.insert("k", "v", None).unwrap();
    let inner = cache.clone();
    let shown = cache.get_with("k", move |_| inner.insert("other", "v", None));
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| shown.wait()));
    let why = *panic.unwrap_err().downcast::<&str>().unwrap();
    assert!(why.contains("from the closure of get_with"), "{why}");
    let inner = cache.clone();
    let shown = cache.get_with("k", move |_| inner.stats());
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| shown.wait())).is_err());
    assert_eq!(cache.get("k").wait().as_deref(), Some(&b"v"[..]));
}

#[test]
fn the_last_handle_may_go_in_a_shown_value() {
    let dir = tempfile::tempdir().unwrap();
    let cache = small(dir.path()).open().unwrap();
    fill(&cache, 0..8_000);
    for n in 0..8_000u64 {
        let inner = cache.clone();
        drop(cache.get_with(n.to_le_bytes(), move |_| drop(inner)));
    }
    let inner = cache.clone();
    cache.insert("k", "v", None).unwrap();
    let shown = cache.get_with("k", move |_| drop(inner));
    drop(cache);
    shown.wait();
    // It closes behind: then the directory can be used again.
    eventually("it closes", || small(dir.path()).open().is_ok());
}

#[test]
fn lookups_that_nobody_waits_for_end_by_themselves() {
    let dir = tempfile::tempdir().unwrap();
    let cache = small(dir.path()).threads(1).open().unwrap();
    fill(&cache, 0..8_000);
    let shown = Arc::new(AtomicU64::new(0));
    for n in 0..8_000u64 {
        let theirs = shown.clone();
        drop(cache.get_with(n.to_le_bytes(), move |_| theirs.fetch_add(1, Ordering::Relaxed)));
    }
    cache.close();
    assert!(shown.load(Ordering::Relaxed) > 1_000);
    assert_eq!(Arc::strong_count(&shown), 1, "nothing is left of them");
}

#[test]
fn objects_expire_and_sizes_are_limits() {
    let cache = Cache::builder().memory(ByteSize(4 << 20)).max_object(10_000).open().unwrap();
    cache.insert("short", "v", Some(Duration::from_millis(1))).unwrap();
    cache.insert("long", "v", Some(Duration::from_secs(3600))).unwrap();
    cache.clock().debug_advance(2);
    assert_eq!(cache.get("short").wait(), None);
    assert!(cache.get("long").wait().is_some());
    cache.insert("long", "old", None).unwrap();
    assert_eq!(cache.insert("long", vec![0; 20_000], None), Err(NotStored::TooLarge));
    assert_eq!(cache.get("long").wait(), None, "an old value does not stay behind a new one");
    assert_eq!(cache.insert("", "v", None), Err(NotStored::Key(0)));
    assert_eq!(cache.insert([0; LONGEST_KEY + 1], "v", None), Err(NotStored::Key(251)));
    assert!(cache.insert([0; LONGEST_KEY], "v", None).is_ok());
    cache.insert("k", "v", None).unwrap();
    cache.clear().unwrap();
    assert_eq!(cache.get("k").wait(), None);
}

#[test]
fn what_cannot_be_opened_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |builder: Builder| builder.open().unwrap_err().to_string();
    assert!(refused(small(dir.path()).admission("best")).contains("best"));
    let little = refused(Cache::builder().memory(ByteSize(1000)));
    assert!(little.contains("memory 1000 B must be at least"), "{little}");
    let little = refused(small(dir.path()).flash(dir.path(), ByteSize(1000)));
    assert!(little.contains("flash 1000 B must be at least"), "{little}");
    let held = small(dir.path()).open().unwrap();
    let why = refused(small(dir.path()));
    assert!(why.contains(&dir.path().display().to_string()), "{why}");
    drop(held);
}

/// Sizes of objects on flash that a server does not take, the library does not take either.
#[test]
fn what_objects_on_flash_are_said_to_have_is_within_bounds() {
    let dir = tempfile::tempdir().unwrap();
    for bytes in [63, (16 << 20) + 1] {
        let said = small(dir.path()).object_size(bytes).open().unwrap_err().to_string();
        assert!(said.contains("must be between 64 bytes and 16 MiB"), "{bytes}: {said}");
    }
    small(dir.path()).object_size(16 << 20).open().unwrap();
}

#[test]
fn without_threads_the_program_does_what_is_due() {
    let dir = tempfile::tempdir().unwrap();
    let cache = small(dir.path()).threads(0).open().unwrap();
    for n in 0..8_000u64 {
        cache.insert(n.to_le_bytes(), value(n), None).unwrap();
        cache.turn().unwrap();
    }
    let found = (0..8_000u64).filter(|n| {
        let found = block_on(cache.get(n.to_le_bytes()));
        found.is_some_and(|v| {
            assert_eq!(v, value(*n));
            true
        })
    });
    // All fits on flash. What is missing was in the way of a write before there was a segment of it.
    assert!(found.count() > 7_500);
    assert!(cache.stats().flash.unwrap().reads > 1_000);
    cache.close();
    assert_eq!(cache.turn(), None);
    drop(cache);
    assert!(small(dir.path()).open().unwrap().opened().kept > 2_000);
}
