//! A disk that fills up while it serves.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::server::{Server, Site};

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(30), "not in 30 seconds: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_disk_that_fills_up_is_seen_and_lived_with() {
    let site = Site::new();
    let inner = site.command(&["-m", "5", "-I", "16k", "-t", "1", "--flash-size", "16m"]);
    // The kernel's limit on the size of files stands for a full disk: beyond it, writes fail. Its signal, which would
    // end the process, stays ignored over exec.
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\" --admission all"]);
    command.arg(inner.get_program()).args(inner.get_args());
    command.env_remove("RUST_LOG").env_remove("STATE_DIRECTORY").process_group(0);
    let server = Server::of(command, site.socket());
    site.remember_region();
    let pid = Pid::from_raw(server.pid() as i32).unwrap();
    let limit = |bytes| {
        prlimit(Some(pid), Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
    };
    let mut client = server.connect();
    let mut round = 0;
    let mut write = |client: &mut crate::client::Client| {
        round += 1;
        for i in 0..2_000 {
            let value = format!("{i}-{round}-{:-<700}", "");
            assert_eq!(
                client.set(&format!("k{}", (round * 2_000 + i) % 60_000), value.as_bytes()),
                "STORED"
            );
        }
    };
    let written = |client: &mut crate::client::Client| {
        client.stats("")["extstore_page_allocs"].parse::<u64>().unwrap()
    };
    let degraded = |client: &mut crate::client::Client| {
        client.stats(" larder")["larder_flash_degraded"] != "no"
    };
    eventually("segments are written", || {
        write(&mut client);
        written(&mut client) >= 3
    });
    assert!(!degraded(&mut client));

    limit(Some(1 << 20));
    eventually("the failure shows", || {
        write(&mut client);
        degraded(&mut client)
    });
    let errors = client.stat("larder_flash_write_errors");
    assert!(errors > 0 && client.stats("")["larder_alarms"] != "0");
    // What is on flash and what comes new are both served, and no value is of another key or an unfinished write.
    let before = written(&mut client);
    let (mut hits, mut flash) = (0, client.stats("")["get_extstore"].parse::<u64>().unwrap());
    for i in 0..60_000 {
        if let Some(value) = client.get(&format!("k{i}")) {
            hits += 1;
            assert!(value.starts_with(format!("{}-", i % 2_000).as_bytes()));
        }
    }
    flash = client.stats("")["get_extstore"].parse::<u64>().unwrap() - flash;
    assert!(hits > 1_000 && flash > 50, "{hits} {flash}");
    write(&mut client);
    assert_eq!(written(&mut client), before);

    limit(None);
    eventually("flash is in use again", || {
        write(&mut client);
        !degraded(&mut client) && written(&mut client) > before
    });
    drop(client);
    let log = server.stop();
    assert!(log.contains("flash is out of use") && log.contains("flash is in use again"), "{log}");
}
