//! Flash and state that are not what the last run left: refused, or cold, and never believed.

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use crate::server::{Site, region_of};

pub(crate) const SMALL: &[&str] =
    &["-m", "5", "-I", "16k", "-t", "1", "--flash-size", "16m", "--admission", "all"];
/// Objects that together are twice the DRAM, so that at least half of them are on flash when all have been set.
pub(crate) const OBJECTS: u32 = 20_000;

pub(crate) fn name(i: u32) -> String {
    format!("object-{i}")
}

/// Sets objects whose values say which generation of the test they are of.
pub(crate) fn fill(client: &mut crate::client::Client, generation: &str) {
    for chunk in (0..OBJECTS).collect::<Vec<_>>().chunks(100) {
        let mut out = Vec::new();
        for &i in chunk {
            let value = format!("{generation}-{i}-{:-<500}", "");
            write!(out, "set {} 0 0 {}\r\n{value}\r\n", name(i), value.len()).unwrap();
        }
        client.send(&out).unwrap();
        for _ in chunk {
            assert_eq!(client.line().unwrap(), "STORED");
        }
        // The cleaner shall take to flash what DRAM cannot hold, rather than evict it.
        std::thread::sleep(Duration::from_millis(4));
    }
}

/// How many objects answer, all of them of this generation.
pub(crate) fn count(client: &mut crate::client::Client, generation: &str) -> u32 {
    let mut there = 0;
    for chunk in (0..OBJECTS).collect::<Vec<_>>().chunks(100) {
        let mut out = Vec::new();
        for &i in chunk {
            write!(out, "get {}\r\n", name(i)).unwrap();
        }
        client.send(&out).unwrap();
        for &i in chunk {
            if let Some(hit) = client.classic().unwrap() {
                let text = String::from_utf8(hit.value).unwrap();
                assert!(text.starts_with(&format!("{generation}-{i}-")), "{i}: {}", &text[..20]);
                there += 1;
            }
        }
    }
    there
}

/// A site whose flash has been filled; `end` is how its server ended.
pub(crate) fn filled(end: impl FnOnce(crate::server::Server) -> String) -> Site {
    let site = Site::new();
    let server = site.start(SMALL);
    let mut client = server.connect();
    fill(&mut client, "one");
    assert!(client.stats("")["extstore_objects_used"].parse::<u32>().unwrap() > OBJECTS / 4);
    end(server);
    site
}

/// Starts, looks, and kills: how many objects were there and what the log said.
fn look(site: &Site, generation: &str) -> (u32, String) {
    let server = site.start(SMALL);
    let there = count(&mut server.connect(), generation);
    (there, server.kill())
}

fn assert_cold(site: &Site, why: &str) {
    let (there, log) = look(site, "nothing");
    assert!(there == 0 && log.contains("cold: ") && log.contains(why), "{there} objects:\n{log}");
}

fn patch(path: &Path, at: u64, bytes: &[u8]) {
    let mut f =
        std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(path).unwrap();
    f.seek(SeekFrom::Start(at)).unwrap();
    f.write_all(bytes).unwrap();
}

/// CRC-32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |mut crc: u32, &b| {
        crc ^= u32::from(b);
        for _ in 0..8 {
            crc = (crc >> 1) ^ ((crc & 1) * 0x82f6_3b78);
        }
        crc
    })
}

#[test]
fn flash_that_another_run_has_used_since_is_not_believed() {
    let site = filled(crate::server::Server::kill);
    let region = site.region().unwrap();
    let kept = site.dir.path().join("region");
    std::fs::copy(&region, &kept).unwrap();
    // The flash is moved to another machine, which has no memory of it, used there, and brought back.
    std::fs::remove_file(&region).unwrap();
    let server = site.start(SMALL);
    fill(&mut server.connect(), "two");
    let log = server.kill();
    assert!(log.contains("no memory of an earlier run"), "{log}");
    std::fs::copy(&kept, &region).unwrap();
    assert_cold(&site, "the flash has been used by another run since");
}

#[test]
fn an_older_copy_of_the_flash_is_not_believed() {
    let site = filled(crate::server::Server::stop);
    let copy = site.dir.path().join("copy");
    std::fs::copy(site.flash(), &copy).unwrap();
    let server = site.start(SMALL);
    fill(&mut server.connect(), "two");
    server.kill();
    // The copy is whole and of a clean stop, but its checkpoint has been used up, and the memory is of a later run.
    std::fs::copy(&copy, site.flash()).unwrap();
    assert_cold(&site, "the flash has been used by another run since");
}

#[test]
fn a_checkpoint_that_is_not_whole_is_not_believed() {
    for cut in [true, false] {
        let site = filled(crate::server::Server::stop);
        site.lose_shared_memory();
        let checkpoint = site.data_dir().join("checkpoint");
        let len = std::fs::metadata(&checkpoint).unwrap().len();
        if cut {
            let f = std::fs::OpenOptions::new().write(true).open(&checkpoint).unwrap();
            f.set_len(len - 5).unwrap();
            drop(f);
            assert_cold(&site, "the checkpoint ends at byte");
        } else {
            patch(&checkpoint, len / 2, b"\xff\x01");
            assert_cold(&site, "the checkpoint is damaged");
        }
    }
}

#[test]
fn a_checkpoint_of_an_earlier_stop_is_not_believed() {
    let site = filled(crate::server::Server::stop);
    let checkpoint = site.data_dir().join("checkpoint");
    let kept = site.dir.path().join("kept");
    std::fs::copy(&checkpoint, &kept).unwrap();
    for end in [crate::server::Server::stop, crate::server::Server::kill] {
        let server = site.start(SMALL);
        fill(&mut server.connect(), "two");
        end(server);
        site.lose_shared_memory();
        std::fs::copy(&kept, &checkpoint).unwrap();
        assert_cold(&site, "");
    }
}

#[test]
fn a_second_instance_is_refused() {
    let site = Site::new();
    let server = site.start(SMALL);
    assert_eq!(server.connect().set("a", b"1"), "STORED");
    let other_socket = site.dir.path().join("other").display().to_string();
    // The same data directory with another flash; the same flash with another data directory.
    let flash = site.dir.path().join("flash2").display().to_string();
    let dir = site.dir.path().join("data2").display().to_string();
    // It is another's flash before a socket is made that others could take for a server's that runs: so here, where none can.
    let no_socket = site.dir.path().join("missing/socket").display().to_string();
    for (more, socket, what) in [
        (["--flash", &flash], &other_socket, "data"),
        (["--data-dir", &dir], &other_socket, "flash"),
        (["--data-dir", &dir], &no_socket, "flash"),
    ] {
        let mut args = SMALL.to_vec();
        args.extend(["-s", socket]);
        args.extend(more);
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_larder"));
        command.args(["kv", "--http", "off"]);
        for (flag, default) in [("--data-dir", site.data_dir()), ("--flash", site.flash())] {
            if more[0] != flag {
                command.arg(flag).arg(default);
            }
        }
        let out = command.args(&args).output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        let last = text.lines().last().unwrap_or_default();
        assert_eq!(out.status.code(), Some(1), "{text}");
        let pid = format!("process {}", server.pid());
        assert!(last.contains("in use") && last.contains(what) && last.contains(&pid), "{text}");
    }
    assert_eq!(server.connect().get("a").as_deref(), Some(&b"1"[..]));
    server.stop();
}

/// Everything about a file that must stay as it is.
fn bytes(path: &Path) -> Vec<u8> {
    let mut all = Vec::new();
    std::fs::File::open(path).unwrap().read_to_end(&mut all).unwrap();
    all
}

#[test]
fn flash_of_another_size_is_refused_and_left_alone() {
    let site = filled(crate::server::Server::stop);
    let before = bytes(&site.flash());
    for size in ["17m", "32m"] {
        let (code, last) = site.refused(&["-m", "5", "-I", "16k", "--flash-size", size]);
        assert_eq!(code, Some(1), "{last}");
        assert!(
            last.contains("16777216 bytes")
                && last.contains("give the size it has")
                && last.contains("--format-flash"),
            "{last}"
        );
    }
    assert!(bytes(&site.flash()) == before, "the flash was changed");
    let (there, log) = look(&site, "one");
    assert!(there > OBJECTS / 4, "{there}: {log}");
}

#[test]
fn somebodys_file_system_is_refused_and_left_alone() {
    let site = Site::new();
    let flash = site.flash();
    std::fs::File::create(&flash).unwrap().set_len(16 << 20).unwrap();
    let made = std::process::Command::new("mkfs.ext4").arg("-q").arg(&flash).output();
    if !made.is_ok_and(|out| out.status.success()) {
        // Without e2fsprogs: what identifies one, the magic number of its superblock.
        patch(&flash, 0x438, &[0x53, 0xef]);
    }
    let before = bytes(&flash);
    for args in [SMALL, &["-m", "5", "-I", "16k"]] {
        let (code, last) = site.refused(args);
        assert_eq!(code, Some(1), "{last}");
        assert!(last.contains("ext") && last.contains("--format-flash"), "{last}");
        assert!(bytes(&flash) == before, "the file system was changed");
    }
    let mut args = SMALL.to_vec();
    args.push("--format-flash");
    site.start(&args).stop();
}

#[test]
fn a_format_of_the_future_is_refused_and_left_alone() {
    let site = filled(crate::server::Server::stop);
    for at in [0u64, 4096] {
        let mut page = bytes(&site.flash())[at as usize..at as usize + 4096].to_vec();
        page[12..16].copy_from_slice(&9u32.to_le_bytes());
        let crc = crc32c(&page[12..]);
        page[8..12].copy_from_slice(&crc.to_le_bytes());
        patch(&site.flash(), at, &page);
    }
    let before = bytes(&site.flash());
    let (code, last) = site.refused(SMALL);
    assert_eq!(code, Some(1), "{last}");
    assert!(last.contains("version 9"), "{last}");
    assert!(bytes(&site.flash()) == before, "the flash was changed");
}

#[test]
fn a_damaged_superblock_costs_the_other_copy_nothing() {
    for copies in [&[0u64][..], &[4096], &[0, 4096]] {
        let site = filled(crate::server::Server::stop);
        for at in copies {
            patch(&site.flash(), at + 100, &[0xff; 64]);
        }
        if copies.len() == 2 {
            let (code, last) = site.refused(SMALL);
            assert_eq!(code, Some(1), "{last}");
            assert!(last.contains("superblock") && last.contains("--format-flash"), "{last}");
        } else {
            // Either the newer copy was lost, and then nothing can be proved, or the older.
            let (there, log) = look(&site, "one");
            assert!(there == 0 || there > OBJECTS / 4, "{there}: {log}");
            assert_eq!(there == 0, log.contains("cold: "), "{there}: {log}");
        }
    }
}

#[test]
fn formatting_leaves_no_memory_of_the_former_flash_behind() {
    let site = filled(crate::server::Server::kill);
    let former = site.region().unwrap();
    let mut args = SMALL.to_vec();
    args.push("--format-flash");
    let server = site.start(&args);
    assert_eq!(count(&mut server.connect(), "nothing"), 0);
    server.stop();
    assert_ne!(region_of(&site.flash()).unwrap(), former);
    assert!(!former.exists(), "{} stays until the machine restarts", former.display());
}

#[test]
fn what_expires_or_is_flushed_while_nobody_serves_is_gone() {
    let site = Site::new();
    let server = site.start(SMALL);
    let mut client = server.connect();
    for i in 0..OBJECTS {
        let ttl = if i % 2 == 0 { 3 } else { 0 };
        if i % 50 == 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
        let value = format!("one-{i}-{:-<500}", "");
        client
            .send(
                format!("set {} 0 {ttl} {} noreply\r\n{value}\r\n", name(i), value.len())
                    .as_bytes(),
            )
            .unwrap();
    }
    assert_eq!(client.ask("version\r\n")[..7], *"VERSION");
    server.kill();
    std::thread::sleep(Duration::from_secs(4));
    let server = site.start(SMALL);
    let mut client = server.connect();
    for i in (0..OBJECTS).step_by(2) {
        assert_eq!(client.get(&name(i)), None, "object {i} had expired");
    }
    let before = count(&mut client, "one");
    assert!(before > OBJECTS / 8, "{before}");
    // A flush that was announced is carried out by the next run.
    assert_eq!(client.ask("flush_all 2\r\n"), "OK");
    server.kill();
    let server = site.start(SMALL);
    let mut client = server.connect();
    assert!(client.stats("").contains_key("uptime"));
    std::thread::sleep(Duration::from_millis(3_100));
    assert_eq!(count(&mut client, "one"), 0, "flushed, and back");
}
