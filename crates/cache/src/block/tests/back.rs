//! Volumes that write back, through the library: what is written is read back before it is in the store, after a stop, and from the store in the
//! end; the marker beside the store says who may serve it.

use std::path::Path;

use larder_base::Rng;

use super::*;
use crate::block::back::{BackConfig, Grain, MarkerAt, Order, Pace};
use crate::block::{Builder, Cache};

const BYTES: u64 = 8 << 20;

fn builder(dir: &Path, back: Option<BackConfig>) -> Builder {
    let path = dir.join("disk");
    if !path.exists() {
        File::create(&path).unwrap().set_len(BYTES).unwrap();
    }
    let builder = Cache::builder(dir.join("cache")).create(ByteSize::mib(192));
    let builder = builder.write_log(ByteSize::mib(96)).state_dir(dir.join("state")).threads(2);
    let builder = builder.volume("disk", &format!("file:{}", path.display())).unwrap();
    match back {
        Some(back) => builder.write_back("disk", back),
        None => builder,
    }
}

fn ordered(pace: Pace) -> BackConfig {
    BackConfig { order: Order::Ordered(Grain::Flush), pace, dirty_max: None }
}

fn store(dir: &Path) -> Vec<u8> {
    std::fs::read(dir.join("disk")).unwrap()
}

#[test]
fn what_is_written_back_is_read_at_once_and_comes_to_the_store_when_it_is_wanted_there() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), Some(ordered(Pace::AtBound))).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(4096, [7; 8192]).wait().unwrap();
    disk.write(5000, [8; 100]).wait().unwrap();
    disk.flush().wait().unwrap();
    let mut wanted = vec![0u8; 16384];
    wanted[4096..12288].fill(7);
    wanted[5000..5100].fill(8);
    assert!(disk.read(0, 16384).wait().unwrap()[..] == wanted[..]);
    assert!(store(dir.path()).iter().all(|&b| b == 0), "nothing is in the store yet");
    let status = cache.core().back_status("disk").unwrap();
    assert_eq!(status.status.dirty, 8192);
    assert!(cache.core().destage("disk", &mut |_| true).unwrap());
    assert!(store(dir.path())[..16384] == wanted[..]);
    assert_eq!(cache.core().back_status("disk").unwrap().status.dirty, 0);
    assert!(disk.read(0, 16384).wait().unwrap()[..] == wanted[..]);
}

#[test]
fn dirty_data_is_there_after_a_stop_and_until_its_cache_is_given_up() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), Some(ordered(Pace::AtBound))).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(0, [1; 4096]).wait().unwrap();
    disk.zero(4096, 4096).wait().unwrap();
    disk.write(8192, [3; 512]).wait().unwrap();
    drop((disk, cache));
    // Without write-back it is refused: its store is older.
    let why = builder(dir.path(), None).open().err().unwrap().to_string();
    assert!(why.contains("holds writes of it"), "{why}");
    for _ in 0..2 {
        let cache = builder(dir.path(), Some(ordered(Pace::AtBound))).open().unwrap();
        let disk = cache.volume("disk").unwrap();
        let read = disk.read(0, 12288).wait().unwrap();
        assert!(read[..4096].iter().all(|&b| b == 1) && read[8192..8704].iter().all(|&b| b == 3));
        assert_eq!(cache.core().back_status("disk").unwrap().status.dirty, 8704);
    }
    // Another cache is refused as well.
    std::fs::rename(dir.path().join("cache"), dir.path().join("away")).unwrap();
    let why = builder(dir.path(), None).open().err().unwrap().to_string();
    assert!(why.contains("larder block recover"), "{why}");
    std::fs::rename(dir.path().join("away"), dir.path().join("cache")).unwrap();
    let cache = builder(dir.path(), Some(ordered(Pace::Async))).open().unwrap();
    assert!(cache.core().destage("disk", &mut |_| true).unwrap());
    assert!(store(dir.path())[..4096].iter().all(|&b| b == 1));
    assert!(cache.detach("disk", &mut |_| true).unwrap());
    drop(cache);
    let cache = builder(dir.path(), None).open().unwrap();
    let read = cache.volume("disk").unwrap().read(0, 12288).wait().unwrap();
    assert!(read[..4096].iter().all(|&b| b == 1) && read[8192..8704].iter().all(|&b| b == 3));
}

#[test]
fn random_operations_are_what_a_plain_file_would_have_done() {
    for (seed, order) in
        [Order::Any, Order::Ordered(Grain::Flush), Order::Ordered(Grain::Completion)]
            .into_iter()
            .enumerate()
    {
        let dir = TempDir::new().unwrap();
        let mut plain = vec![0u8; BYTES as usize];
        let mut rng = Rng::new(seed as u64);
        for round in 0..4 {
            let pace = if round % 2 == 0 { Pace::Async } else { Pace::AtBound };
            let config = BackConfig { order, pace, dirty_max: Some(ByteSize::mib(16)) };
            let cache = builder(dir.path(), Some(config)).open().unwrap();
            let disk = cache.volume("disk").unwrap();
            for _ in 0..400 {
                let at = rng.below(BYTES / 512) * 512;
                let most = if rng.chance(0.05) { 1 << 20 } else { 24 << 10 };
                let len = ((1 + rng.below(most / 512)) * 512).min(BYTES - at);
                let range = at as usize..(at + len) as usize;
                match rng.below(10) {
                    0..5 => {
                        let byte = rng.next_u64() as u8;
                        plain[range].fill(byte);
                        disk.write(at, vec![byte; len as usize]).wait().unwrap();
                    }
                    5 => {
                        plain[range].fill(0);
                        disk.zero(at, len).wait().unwrap();
                    }
                    6 => disk.flush().wait().unwrap(),
                    _ => {
                        let read = disk.read(at, len as usize).wait().unwrap();
                        assert!(read[..] == plain[range], "{order:?} round {round} at {at}");
                    }
                }
            }
            if round == 3 {
                assert!(cache.core().destage("disk", &mut |_| true).unwrap());
                assert!(store(dir.path()) == plain, "{order:?}");
            }
        }
    }
}

#[test]
fn a_volume_without_a_marker_says_so_or_does_without() {
    let dir = TempDir::new().unwrap();
    let back = builder(dir.path(), Some(ordered(Pace::Async)));
    let cache = back.marker("disk", MarkerAt::Nowhere).open().unwrap();
    cache.volume("disk").unwrap().write(0, [1; 4096]).wait().unwrap();
    drop(cache);
    assert!(!dir.path().join("disk.larder").exists());
}
