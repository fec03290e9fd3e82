//! `larder kv` and objects of many segments, over kills, stops and overwrites.

use std::fs::File;
use std::time::{Duration, Instant};

use larder_base::Rng;

use crate::client::Client;
use crate::server::Site;

const MIB: usize = 1 << 20;
const ARGS: &[&str] =
    &["-m", "64", "-I", "16m", "--flash-size", "256m", "--admission", "all", "-t", "2"];

fn value(key: usize, version: usize, len: usize) -> Vec<u8> {
    let mut value = vec![(key * 7 + version) as u8; len];
    let edge = len.min(1000);
    Rng::new((key * 1000 + version) as u64).fill(&mut value[..edge]);
    value
}

fn name(key: usize) -> String {
    format!("large-{key}")
}

fn of_flash(client: &mut Client, name: &str) -> u64 {
    client.stats("")[name].parse().unwrap()
}

fn wait_for_flash(client: &mut Client, bytes: usize) {
    let start = Instant::now();
    while of_flash(client, "extstore_bytes_written") < bytes as u64 {
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", client.stats(" larder"));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Objects of 1 to 15 MiB: most of what does not fit into DRAM is found, what is found is the latest, and a kill or a stop costs what was in
/// DRAM and no more.
#[test]
fn large_objects_are_found_over_kills_and_stops() {
    let site = Site::new();
    let mut rng = Rng::new(11);
    let mut latest: Vec<(usize, usize)> = Vec::new();
    for ends in ["kill", "stop", "kill"] {
        let server = site.start(ARGS);
        assert!(server.log().contains("flash takes objects of up to 16 MiB"), "{}", server.log());
        let mut client = server.connect();
        let kept = latest.iter().enumerate().filter(|(key, (version, len))| {
            let got = client.get(&name(*key));
            assert!(
                got.as_ref().is_none_or(|got| *got == value(*key, *version, *len)),
                "{key} of version {version}, {len} bytes"
            );
            got.is_some()
        });
        let kept = kept.count();
        // 64 MiB may have been in DRAM, and what was there twice.
        let sent: usize = latest.iter().map(|(_, len)| len).sum();
        assert!(
            latest.is_empty() || sent > 100 * MIB && kept * 3 > latest.len(),
            "{kept} of {}",
            latest.len()
        );
        for key in 0..18 {
            let len = MIB + rng.below(14 * MIB as u64) as usize;
            let version = latest.get(key).map_or(0, |(version, _)| version + 1);
            assert_eq!(client.set(&name(key), &value(key, version, len)), "STORED");
            match latest.get_mut(key) {
                Some(of) => *of = (version, len),
                None => latest.push((version, len)),
            }
        }
        wait_for_flash(&mut client, 48 * MIB);
        let found = (0..18).filter(|&key| {
            let (version, len) = latest[key];
            let got = client.get(&name(key));
            assert!(got.as_ref().is_none_or(|got| *got == value(key, version, len)), "{key}");
            got.is_some()
        });
        let found = found.count();
        assert!(found >= 15, "{found} of 18: {:?}", client.stats(" larder"));
        assert_eq!(of_flash(&mut client, "badcrc_from_extstore"), 0);
        match ends {
            "kill" => server.kill(),
            _ => server.stop(),
        };
    }
}

/// What flash cannot hold is said at the start, counted by reason, and told.
#[test]
fn what_is_too_large_for_flash_is_said() {
    let site = Site::new();
    let args = &["-m", "64", "-I", "16m", "--flash-size", "64m", "--admission", "all"];
    let server = site.start(args);
    let mut client = server.connect();
    let log = server.log();
    assert!(log.contains("larger ones, of up to 16 MiB, are kept in DRAM alone"), "{log}");
    for key in 0..8 {
        assert_eq!(client.set(&name(key), &vec![1; 12 * MIB]), "STORED");
    }
    let start = Instant::now();
    while !server.log().contains("A larger flash takes them") {
        assert!(start.elapsed() < Duration::from_secs(30), "{}", server.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(client.stat("larder_admission_rejected_size") > 0);
    server.stop();
}

/// The flash of a large drive, before little memory: a sparse file says that it has 8 TiB. Segments have longer numbers then, the index takes
/// no more than a quarter of the memory at first, and a kill leaves what was on flash.
#[test]
fn flash_of_8_tib_is_used_with_1_gib_of_memory() {
    let site = Site::new();
    File::create(site.flash()).unwrap().set_len(8 << 40).unwrap();
    let args = &["-m", "1024", "-I", "2m", "--admission", "all"];
    let server = site.start(args);
    assert!(server.log().contains("8.0 TiB in use"), "{}", server.log());
    let mut client = server.connect();
    let index = client.stat("larder_memory_flash_index_bytes");
    assert!(index <= 257 << 20, "{index}");
    for key in 0..700 {
        assert_eq!(client.set(&name(key), &value(key, 0, MIB)), "STORED");
    }
    wait_for_flash(&mut client, 256 * MIB);
    let answered = |client: &mut Client| {
        let right = |&key: &usize| match client.get(&name(key)) {
            Some(got) => got == value(key, 0, MIB) || panic!("{key}"),
            None => false,
        };
        (0..700).filter(right).count()
    };
    let found = answered(&mut client);
    assert!(found >= 686, "{found} of 700");
    server.kill();
    let server = site.start(args);
    let found = answered(&mut server.connect());
    // What was in DRAM is lost.
    assert!(found > 200, "{found} of 700 behind a kill: {}", server.log());
    server.stop();
}
