//! Several connections on few keys, everything by way of flash: no answer is older than an acknowledged write.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::load::{Mix, Notebook, under_load};
use crate::server::Site;

fn run(mix: Mix, more: &[&str], seed: u64, connections: u64) {
    let site = Site::new();
    let mut args = vec!["-m", "2", "-I", "16k", "--flash-size", "16m", "--admission", "all"];
    args.extend(more);
    let server = site.start(&args);
    let book = Notebook::new();
    let socket = server.socket().to_owned();
    let connect = || Client::new(UnixStream::connect(&socket).unwrap());
    let mut client = server.connect();
    under_load(&book, mix, connections, seed, connect, || {
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(1_200));
            book.flush(&mut client).unwrap();
        }
        // However slow the machine is: until flash was written and read.
        let began = Instant::now();
        loop {
            std::thread::sleep(Duration::from_millis(1_000));
            let stats = client.stats("");
            let number = |name: &str| stats[name].parse::<u64>().unwrap();
            if number("get_extstore") > 10 && number("extstore_page_allocs") > 3
                || began.elapsed() > Duration::from_secs(120)
            {
                break;
            }
        }
    });
    book.check();
    let stats = client.stats("");
    let number = |name: &str| stats[name].parse::<u64>().unwrap();
    assert!(number("get_extstore") > 10, "flash was not read: {stats:?}");
    assert!(number("extstore_page_allocs") > 3, "nothing was written: {stats:?}");
    assert_eq!(number("badcrc_from_extstore"), 0, "{stats:?}");
}

#[test]
fn few_keys_and_many_connections() {
    let mix = Mix { few: 24, many: 20_000, most: 3_000, counters: 6, pause: true };
    run(mix, &["-t", "2"], 1, 8);
}

#[test]
fn reads_by_threads_instead_of_io_uring() {
    let mix = Mix { few: 400, many: 20_000, most: 15_000, counters: 20, pause: true };
    run(mix, &["-t", "3", "--io", "threads"], 2, 6);
}

#[test]
fn large_objects_beside_small_ones() {
    let mix = Mix { few: 16, many: 4_000, most: 15_900, counters: 2, pause: true };
    run(mix, &["-t", "2", "-R", "3"], 3, 5);
}
