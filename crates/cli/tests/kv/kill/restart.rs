//! Restarts under load: by `kill -9`, by SIGTERM and a restart of the machine, by a power cut.

use std::time::Duration;

use larder_base::Rng;

use crate::load::{Mix, Notebook, under_load};
use crate::server::{Server, Site};

/// Little DRAM and not much more flash: everything comes by flash, and segments are reclaimed all the time.
const SMALL: &[&str] =
    &["-m", "2", "-I", "16k", "-t", "2", "--flash-size", "16m", "--admission", "all"];
const MIX: Mix = Mix { few: 48, many: 30_000, most: 6_000, counters: 0, pause: true };

/// One life of a server under load, which `end` brings to an end.
fn life(
    site: &Site,
    book: &Notebook,
    seed: u64,
    end: impl FnOnce(Server) -> String,
    flush: bool,
) -> (String, u32) {
    let server = site.start(SMALL);
    let mut client = server.connect();
    let there = book.sweep(&mut client, &MIX).unwrap();
    book.check();
    let mut rng = Rng::new(seed);
    let socket = server.socket().to_owned();
    let connect =
        || crate::client::Client::new(std::os::unix::net::UnixStream::connect(&socket).unwrap());
    let log = under_load(book, MIX, 6, seed, connect, || {
        std::thread::sleep(Duration::from_millis(rng.range(400, 1_600)));
        if flush {
            book.flush(&mut client).unwrap();
            std::thread::sleep(Duration::from_millis(rng.below(50)));
        }
        // However slow the machine: a life in which flash is not read proves nothing.
        let timeout = std::time::Instant::now() + Duration::from_secs(20);
        while client.stats("")["get_extstore"].parse::<u64>().unwrap() == 0 {
            assert!(
                std::time::Instant::now() < timeout,
                "flash was not read: {:?}",
                client.stats("")
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        end(server)
    });
    (log, there)
}

#[test]
fn after_kill_9_nothing_is_older_than_what_was_acknowledged() {
    let (site, book) = (Site::new(), Notebook::new());
    let (mut warm, mut kept) = (0, 0);
    for seed in 0..6 {
        let (log, there) = life(&site, &book, seed, Server::kill, seed % 3 == 2);
        warm += u32::from(log.contains("index found in memory"));
        kept += there;
        assert_eq!(log.contains("cold: "), seed == 0, "{log}");
    }
    book.check();
    assert!(warm == 5 && kept > 100 && book.reads() > 10_000, "{warm} {kept} {}", book.reads());
}

#[test]
fn after_sigterm_and_a_restart_of_the_machine_the_checkpoint_is_as_good() {
    let (site, book) = (Site::new(), Notebook::new());
    let mut kept = 0;
    for seed in 10..14 {
        let (log, there) = life(&site, &book, seed, Server::stop, seed == 12);
        assert!(log.contains("checkpoint written"), "{log}");
        let warm = log.contains("index read from the checkpoint");
        assert_eq!(warm, seed > 10, "{log}");
        kept += there;
        site.lose_shared_memory();
    }
    book.check();
    assert!(kept > 100, "{kept}");
}

#[test]
fn after_a_power_cut_nothing_is_there_and_nothing_is_wrong() {
    let (site, book) = (Site::new(), Notebook::new());
    for seed in 20..23 {
        let (log, there) = life(&site, &book, seed, Server::kill, false);
        assert!(log.contains("cold: ") && there == 0, "{there}: {log}");
        site.lose_shared_memory();
    }
    book.check();
}

/// Which bytes on flash are whose is known to the next process, and so is what an application's number stands for.
#[test]
fn applications_and_their_bytes_on_flash_outlive_kill_9() {
    let site = Site::new();
    let mut before: Option<Vec<u64>> = None;
    for round in 0..3 {
        let server = site.start(SMALL);
        let mut client = server.connect();
        // Named in another order in each life.
        let apps = ["one", "two", "three"];
        for i in 0..apps.len() {
            client.get(&format!("{}:-", apps[(i + round) % apps.len()]));
        }
        let bytes = |client: &mut crate::client::Client| {
            apps.map(|app| client.stat(&format!("larder_app_{app}_flash_bytes"))).to_vec()
        };
        if let Some(before) = &before {
            let now = bytes(&mut client);
            // What was published or reclaimed between the last look and the kill: some segments.
            let near = |a: u64, b: u64| a.abs_diff(b) <= 1 << 20;
            assert!(before.iter().zip(&now).all(|(a, b)| near(*a, *b)), "{before:?} {now:?}");
        }
        // The third stores twice as much as each of the others.
        for i in 0..24_000 {
            let app = apps[[0, 1, 2, 2][i % 4]];
            client.set(&format!("{app}:{round}-{i}"), &[b'x'; 300]);
        }
        let now = bytes(&mut client);
        assert!(now.iter().all(|b| *b > 200_000) && now[2] > now[0] + now[0] / 4, "{now:?}");
        before = Some(now);
        server.kill();
    }
}

/// Where segments are large beside the DRAM left for objects, they must be written half full.
#[test]
fn flash_is_used_although_dram_is_smaller_than_a_segment() {
    let site = Site::new();
    let server = site.start(SMALL);
    let mut client = server.connect();
    for i in 0..20_000 {
        assert_eq!(client.set(&format!("object-{i}"), &[b'x'; 500]), "STORED");
    }
    let stats = client.stats("");
    let number = |name: &str| stats[name].parse::<u64>().unwrap();
    assert!(number("extstore_objects_written") > 2_000, "{stats:?}");
    assert!(number("evictions") < 17_000, "{stats:?}");
}

/// A shard calls the cleaner once, until it has come. One that was not short any more when it came (a request had evicted,
/// a client had deleted) could never call again: the cleaner slept while everything was evicted from DRAM.
#[test]
fn a_shard_that_helped_itself_can_call_the_cleaner_again() {
    let site = Site::new();
    let server = site.start(SMALL);
    let book = Notebook::forgetful();
    let mut client = server.connect();
    under_load(
        &book,
        MIX,
        4,
        3,
        || server.connect(),
        || {
            std::thread::sleep(Duration::from_secs(3));
        },
    );
    let stats = client.stats("");
    let number = |name: &str| stats[name].parse::<u64>().unwrap();
    let (sets, written) = (number("cmd_set"), number("extstore_objects_written"));
    assert!(written > sets / 8 && written > number("evictions") / 2, "{sets} {stats:?}");
}

#[test]
fn lives_of_all_kinds_in_any_order() {
    let (site, book) = (Site::new(), Notebook::new());
    let mut rng = Rng::new(77);
    for seed in 30..36 {
        let kill = rng.chance(0.5);
        life(&site, &book, seed, if kill { Server::kill } else { Server::stop }, rng.chance(0.2));
        if rng.chance(0.3) {
            site.lose_shared_memory();
        }
    }
    book.check();
}
