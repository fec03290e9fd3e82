//! `-e FILE`: what is in DRAM is there again after a stop in good order, once, and never an old value.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};

use crate::client::Client;
use crate::server::{Server, Site};

/// Room for all that these tests store, so that it stays in DRAM.
const FLASH: &[&str] = &["-m", "8", "-I", "64k", "-t", "1", "--flash-size", "16m"];
const ALONE: &[&str] = &["-m", "8", "-I", "64k", "-t", "1"];
const OBJECTS: u32 = 500;

/// A site, with flash or without, and its memory file.
struct Place {
    site: Site,
    flash: bool,
    file: String,
}

impl Place {
    fn new(flash: bool) -> Place {
        let site = Site::new();
        let file = site.dir.path().join("mem").display().to_string();
        Place { site, flash, file }
    }

    fn both() -> [Place; 2] {
        [Place::new(true), Place::new(false)]
    }

    fn meta(&self) -> PathBuf {
        PathBuf::from(format!("{}.meta", self.file))
    }

    /// The flash, or none, and what goes with it.
    fn on(&self) -> (PathBuf, Vec<&str>) {
        if self.flash {
            (self.site.flash(), FLASH.to_vec())
        } else {
            ("none".into(), ALONE.to_vec())
        }
    }

    fn start_with(&self, more: &[&str]) -> Server {
        let (flash, mut args) = self.on();
        args.extend(["-e", &self.file]);
        args.extend_from_slice(more);
        self.site.start_on(&self.site.data_dir(), &flash, &args)
    }

    fn start(&self) -> Server {
        self.start_with(&[])
    }

    /// A run that does not keep what is in DRAM.
    fn start_without(&self) -> Server {
        let (flash, args) = self.on();
        self.site.start_on(&self.site.data_dir(), &flash, &args)
    }

    /// What such a command that must end by itself says.
    fn refused(&self, more: &[&str]) -> (Option<i32>, String) {
        let (flash, mut args) = self.on();
        args.extend_from_slice(more);
        self.site.refused_as(self.site.command_on(&self.site.data_dir(), &flash, &args))
    }

    /// Starts, stores, and stops.
    fn filled(&self, generation: &str) -> String {
        let server = self.start();
        fill(&mut server.connect(), generation);
        server.stop_by(Signal::USR1)
    }

    fn copy(&self, name: &str) -> [(PathBuf, PathBuf); 2] {
        let to = |from: &Path| {
            from.with_file_name(format!("{name}-{}", from.file_name().unwrap().display()))
        };
        [PathBuf::from(&self.file), self.meta()].map(|from| {
            let kept = to(&from);
            std::fs::copy(&from, &kept).unwrap();
            (from, kept)
        })
    }
}

fn name(i: u32) -> String {
    format!("app{}:object-{i}", i % 3)
}

fn value(generation: &str, i: u32) -> String {
    format!("{generation}-{i}-{:-<300}", "")
}

fn fill(client: &mut Client, generation: &str) {
    for i in 0..OBJECTS {
        assert_eq!(client.set(&name(i), value(generation, i).as_bytes()), "STORED");
    }
}

/// How many objects are there; all must be of this generation.
fn count(client: &mut Client, generation: &str) -> u32 {
    let there = |i: &u32| match client.get(&name(*i)) {
        None => false,
        Some(got) => {
            assert_eq!(String::from_utf8(got).unwrap(), value(generation, *i));
            true
        }
    };
    (0..OBJECTS).filter(there).count() as u32
}

/// Starts with the file, and nothing of what was in DRAM may be there.
fn assert_cold(place: &Place, why: &str) {
    let server = place.start();
    let there = count(&mut server.connect(), "nothing");
    let log = server.kill();
    assert!(there == 0 && log.contains("DRAM is cold: ") && log.contains(why), "{there}: {log}");
}

#[test]
fn what_is_in_dram_is_there_after_a_stop_as_it_was() {
    for place in Place::both() {
        for signal in [Signal::USR1, Signal::TERM, Signal::INT] {
            let server = place.start();
            let mut client = server.connect();
            assert_eq!(client.stats(" settings")["memory_file"], place.file);
            fill(&mut client, "one");
            assert_eq!(client.ask("set flagged 77 0 2\r\nab\r\n"), "STORED");
            assert_eq!(client.ask("set soon 0 1 2\r\nab\r\n"), "STORED");
            assert_eq!(client.ask("set later 0 1000 2\r\nab\r\n"), "STORED");
            assert_eq!(client.ask("ms stale 1 T0\r\nx\r\n"), "HD");
            assert_eq!(client.ask("md stale I T1000\r\n"), "HD");
            assert_eq!(client.ask("set gone 0 0 1\r\nx\r\n"), "STORED");
            assert_eq!(client.ask("delete gone\r\n"), "DELETED");
            let cas = client.ask("mg flagged c\r\n");
            let before = client.stats("");
            let log = server.stop_by(signal);
            assert!(log.contains("objects in DRAM saved"), "{log}");
            for file in [PathBuf::from(&place.file), place.meta()] {
                let mode = std::fs::metadata(&file).unwrap().permissions().mode();
                assert_eq!(mode & 0o777, 0o600, "{}", file.display());
            }
            // However fast this is, its time comes.
            std::thread::sleep(std::time::Duration::from_millis(1_100));
            let server = place.start();
            let mut client = server.connect();
            let log = server.log();
            assert!(log.contains("DRAM is warm: "), "{log}");
            assert!(!place.meta().exists() && std::fs::metadata(&place.file).unwrap().len() == 0);
            assert_eq!(client.ask("mg flagged c\r\n"), cas);
            assert_eq!(client.ask("mg flagged f h\r\n"), "HD f77 h1");
            assert_eq!(count(&mut client, "one"), OBJECTS, "{log}");
            assert!(client.get("soon").is_none() && client.get("gone").is_none());
            let later = client.ask("mg later t\r\n");
            let left: u32 = later.strip_prefix("HD t").unwrap().parse().unwrap();
            assert!((900..1000).contains(&left), "{later}");
            // The win is for one client, and the object still says that it is stale.
            let (first, second) = (client.ask("mg stale s\r\n"), client.ask("mg stale s\r\n"));
            let has = |line: &str, flags: [char; 2]| flags.iter().all(|f| line.contains(*f));
            assert!(has(&first, ['W', 'X']) && has(&second, ['Z', 'X']), "{first}, {second}");
            let after = client.stats("");
            assert_eq!(after["larder_applications"], before["larder_applications"]);
            // No CAS is given out twice.
            let old: u64 =
                cas.split('c').nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
            assert_eq!(client.set("new", b"1"), "STORED");
            let new = client.ask("mg new c\r\n");
            assert!(new.strip_prefix("HD c").unwrap().parse::<u64>().unwrap() > old, "{new} {old}");
            server.stop();
        }
    }
}

#[test]
fn a_kill_leaves_dram_cold() {
    for place in Place::both() {
        place.filled("one");
        let server = place.start();
        assert_eq!(count(&mut server.connect(), "one"), OBJECTS);
        server.kill();
        assert_cold(&place, "no clean stop");
        // A kill before the first stop.
        let place = Place::new(place.flash);
        let server = place.start();
        fill(&mut server.connect(), "one");
        server.kill();
        assert_cold(&place, "no clean stop");
    }
}

#[test]
fn a_run_in_between_without_the_file_leaves_dram_cold() {
    for end in [Server::stop, Server::kill] {
        for place in Place::both() {
            place.filled("one");
            let server = place.start_without();
            assert_eq!(count(&mut server.connect(), "nothing"), 0);
            end(server);
            assert_cold(&place, "another run has answered");
            // As does one with flash for one without, and the other way round.
            place.filled("one");
            let other = Place { flash: !place.flash, site: Site::new(), file: place.file.clone() };
            let (flash, args) = other.on();
            let flash = if other.flash { place.site.flash() } else { flash };
            let server = place.site.start_on(&place.site.data_dir(), &flash, &args);
            fill(&mut server.connect(), "two");
            end(server);
            let server = place.start();
            assert_eq!(count(&mut server.connect(), "nothing"), 0);
            assert!(server.log().contains("DRAM is cold: "), "{}", server.log());
            server.kill();
        }
    }
}

#[test]
fn a_copy_that_is_put_back_leaves_dram_cold() {
    for place in Place::both() {
        place.filled("one");
        let kept = place.copy("kept");
        let linked = place.meta().with_file_name("linked");
        std::fs::hard_link(place.meta(), &linked).unwrap();
        let server = place.start();
        fill(&mut server.connect(), "two");
        server.kill();
        for (at, copy) in &kept {
            std::fs::copy(copy, at).unwrap();
        }
        assert_cold(&place, "another run has answered");
        // Nor after a stop, with the new description or with the old one under its own name.
        for with_meta in [false, true] {
            let log = place.filled("three");
            assert!(log.contains("saved"), "{log}");
            std::fs::copy(&kept[0].1, &kept[0].0).unwrap();
            if with_meta {
                std::fs::rename(&linked, place.meta()).unwrap();
            }
            let why =
                if with_meta { "another run has answered" } else { "not the file that its .meta" };
            assert_cold(&place, why);
        }
        // A copied directory does not say who has answered since.
        place.filled("four");
        let (dir, other) = (place.site.data_dir(), place.site.dir.path().join("other"));
        std::fs::create_dir(&other).unwrap();
        for entry in std::fs::read_dir(&dir).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), other.join(entry.file_name())).unwrap();
        }
        let (flash, mut args) = place.on();
        args.extend(["-e", &place.file]);
        let server = place.site.start_on(&other, &flash, &args);
        assert_eq!(count(&mut server.connect(), "nothing"), 0);
        assert!(server.log().contains("DRAM is cold: "), "{}", server.log());
        server.kill();
    }
}

#[test]
fn a_damaged_file_gives_what_is_whole_and_nothing_else() {
    for place in Place::both() {
        let len = |place: &Place| std::fs::metadata(&place.file).unwrap().len();
        let damage = |how: &dyn Fn(&mut Vec<u8>)| {
            place.filled("one");
            let mut bytes = std::fs::read(&place.file).unwrap();
            how(&mut bytes);
            std::fs::write(&place.file, bytes).unwrap();
            let server = place.start();
            let there = count(&mut server.connect(), "one");
            (there, server.kill())
        };
        let (there, log) = damage(&|b| {
            let half = b.len() / 2;
            b[half] ^= 1;
        });
        assert!((OBJECTS / 4..OBJECTS).contains(&there), "{there}: {log}");
        assert!(log.contains("WARN") && log.contains("the rest is lost: it is damaged"), "{log}");
        let (there, log) = damage(&|b| b.truncate(b.len() / 3));
        assert!((1..OBJECTS).contains(&there) && log.contains("it ends at byte"), "{there}: {log}");
        let (there, log) = damage(&|b| b.clear());
        assert!(there == 0 && log.contains("DRAM is cold: "), "{there}: {log}");
        // The description.
        for cut in [true, false] {
            place.filled("one");
            let mut bytes = std::fs::read(place.meta()).unwrap();
            if cut {
                bytes.truncate(40);
            } else {
                bytes[50] ^= 1;
            }
            std::fs::write(place.meta(), bytes).unwrap();
            assert_cold(&place, if cut { "ends at byte" } else { "is damaged" });
            assert_eq!(len(&place), 0);
        }
    }
}

#[test]
fn what_larder_has_not_written_is_refused_and_left() {
    let place = Place::new(false);
    let other = place.site.dir.path().join("notes");
    std::fs::write(&other, "somebody's notes\n").unwrap();
    let path = other.display().to_string();
    let (code, last) = place.refused(&["-e", &path]);
    assert!(code == Some(2) && last.contains(&path) && last.contains("remove it"), "{last}");
    assert_eq!(std::fs::read_to_string(&other).unwrap(), "somebody's notes\n");
    // memcached ends on an empty description, too.
    for content in ["", "Tmain\nKmaxbytes 67108864\n"] {
        std::fs::write(place.meta(), content).unwrap();
        let (code, last) = place.refused(&["-e", &place.file]);
        assert!(code == Some(2) && last.contains(".meta") && last.contains("remove it"), "{last}");
        assert_eq!(std::fs::read_to_string(place.meta()).unwrap(), content);
    }
    std::fs::remove_file(place.meta()).unwrap();
    let dir = place.site.dir.path().display().to_string();
    for path in [&dir, "/nonexistent/mem", &format!("{dir}/notes/mem")] {
        let (code, last) = place.refused(&["-e", path]);
        assert!(code == Some(2) && last.contains(&format!("memory-file '{path}'")), "{last}");
    }
    let record = format!("{dir}/record");
    let (code, last) = place.refused(&["-e", &place.file, "--record", &record]);
    assert!(code == Some(2) && last.contains("record"), "{last}");
    // The PID file goes at the end, whatever is in it by then.
    for pid in [place.file.clone(), format!("{}.meta", place.file)] {
        let (code, last) = place.refused(&["-e", &place.file, "-P", &pid]);
        assert!(code == Some(2) && last.contains("pidfile"), "{last}");
    }
    // Of a FIFO nothing could ever be read.
    let fifo = format!("{dir}/fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let (code, last) = place.refused(&["-e", &fifo]);
    assert!(code == Some(2) && last.contains("no regular file"), "{last}");
    // A start that is refused has left nothing.
    assert!(!Path::new(&place.file).exists() && !place.site.data_dir().exists());
}

/// Each would overwrite what the other has saved.
#[test]
fn a_file_is_one_servers_alone() {
    let place = Place::new(false);
    let server = place.start();
    fill(&mut server.connect(), "first");
    // A server in another place altogether.
    let other = Place { file: place.file.clone(), ..Place::new(false) };
    let (code, last) = other.refused(&["-e", &place.file]);
    assert!(code == Some(2) && last.contains("in use by process"), "{last}");
    server.stop_by(Signal::USR1);
    let server = place.start();
    assert!(count(&mut server.connect(), "first") > 0);
}

#[test]
fn what_was_flushed_or_is_about_to_be_stays_so() {
    for place in Place::both() {
        let server = place.start();
        let mut client = server.connect();
        fill(&mut client, "one");
        assert_eq!(client.ask("flush_all\r\n"), "OK");
        assert_eq!(client.set("after", b"1"), "STORED");
        server.stop();
        let server = place.start();
        let mut client = server.connect();
        assert_eq!(count(&mut client, "nothing"), 0);
        assert_eq!(client.get("after"), Some(b"1".to_vec()));
        // Announced: it comes due while the server runs, or while it does not.
        fill(&mut client, "two");
        assert_eq!(client.ask("flush_all 1000\r\n"), "OK");
        server.stop();
        let server = place.start_with(&["--enable-debugtime"]);
        let mut client = server.connect();
        assert_eq!(count(&mut client, "two"), OBJECTS);
        assert_eq!(client.ask("debugtime 1001\r\n"), "OK");
        assert_eq!(count(&mut client, "nothing"), 0);
        server.stop();
        let place = Place::new(place.flash);
        let server = place.start();
        let mut client = server.connect();
        fill(&mut client, "three");
        assert_eq!(client.ask("flush_all 3\r\n"), "OK");
        server.stop();
        std::thread::sleep(std::time::Duration::from_millis(3_100));
        let server = place.start();
        assert_eq!(count(&mut server.connect(), "nothing"), 0);
        let log = server.kill();
        // A slow machine comes to it before it has stopped.
        assert!(log.contains("a flush that a client had") || log.contains(": 0 of 0 "), "{log}");
    }
}

#[test]
fn a_clock_that_was_set_back_revives_nothing() {
    for place in Place::both() {
        let server = place.start_with(&["--enable-debugtime"]);
        let mut client = server.connect();
        assert_eq!(client.ask("set short 0 100 1\r\nx\r\n"), "STORED");
        assert_eq!(client.ask("set long 0 10000 1\r\nx\r\n"), "STORED");
        assert_eq!(client.ask("debugtime 200\r\n"), "OK");
        assert!(client.get("short").is_none());
        assert_eq!(client.ask("set after 0 100 1\r\nx\r\n"), "STORED");
        server.stop();
        // The system's clock is 200 s behind what the last run knew.
        let server = place.start_with(&["--enable-debugtime"]);
        let mut client = server.connect();
        assert!(client.get("short").is_none());
        assert!(client.get("long").is_some() && client.get("after").is_some());
        assert!(server.log().contains("behind"), "{}", server.log());
        assert_eq!(client.ask("debugtime 150\r\n"), "OK");
        assert!(client.get("after").is_none());
        server.stop();
    }
}

#[test]
fn less_memory_keeps_what_fits_and_says_how_much_did_not() {
    let place = Place::new(false);
    let start = |memory: &str, item: &str| {
        let args = ["-m", memory, "-I", item, "-t", "1", "-e", &place.file];
        place.site.start_on(&place.site.data_dir(), Path::new("none"), &args)
    };
    let server = start("16", "64k");
    let mut client = server.connect();
    for i in 0..4_000 {
        assert_eq!(client.set(&format!("filler-{i}"), &[b'x'; 2_500]), "STORED");
    }
    server.stop();
    let server = start("6", "64k");
    let log = server.log();
    let line = log.lines().find(|l| l.contains("DRAM is warm: ")).unwrap();
    let number = |before: &str| -> u64 {
        line.split(before).next().unwrap().rsplit(' ').next().unwrap().parse().unwrap()
    };
    let (there, saved, unfit) = (number(" of "), number(" objects are"), number(" found no room"));
    assert!(line.contains("WARN") && there > 500 && saved > there + 500, "{line}");
    assert_eq!(there + unfit, saved, "{line}");
    server.stop();
    // A smaller largest object, where memory is not so full that maintenance takes the new object away.
    let server = start("16", "64k");
    assert_eq!(server.connect().set("large", &[b'y'; 40_000]), "STORED");
    let stopped = server.stop();
    let server = start("16", "16k");
    let log = server.log();
    assert!(log.contains("found no room"), "the stop:\n{stopped}\nthe start:\n{log}");
    assert!(server.connect().get("large").is_none());
    server.stop();
}

#[test]
fn a_full_disk_costs_what_is_in_dram_and_nothing_else() {
    for place in Place::both() {
        // The kernel's limit on the size of files stands for a full disk. Its signal stays ignored over exec.
        let (flash, mut args) = place.on();
        args.extend(["-e", &place.file, "--admission", "all"]);
        let args = if place.flash { args } else { args[..args.len() - 2].to_vec() };
        let inner = place.site.command_on(&place.site.data_dir(), &flash, &args);
        let mut command = Command::new("sh");
        command.args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""]);
        command.arg(inner.get_program()).args(inner.get_args());
        command.env_remove("RUST_LOG").env_remove("STATE_DIRECTORY").process_group(0);
        let server = Server::of(command, place.site.socket());
        place.site.remember_region();
        let mut client = server.connect();
        fill(&mut client, "one");
        let pid = Pid::from_raw(server.pid() as i32).unwrap();
        let limit = Rlimit { current: Some(100 << 10), maximum: None };
        prlimit(Some(pid), Resource::Fsize, limit).unwrap();
        drop(client);
        let log = server.stop();
        assert!(log.contains("WARN") && log.contains("the next start is cold in DRAM"), "{log}");
        assert!(log.contains("500 objects in DRAM are lost"), "{log}");
        assert!(!place.meta().exists() && std::fs::metadata(&place.file).unwrap().len() == 0);
        let server = place.start();
        assert_eq!(count(&mut server.connect(), "nothing"), 0);
        assert!(server.log().contains("DRAM is cold: "), "{}", server.log());
        // And all is well from then on.
        fill(&mut server.connect(), "two");
        server.stop();
        let server = place.start();
        assert_eq!(count(&mut server.connect(), "two"), OBJECTS);
        server.stop();
    }
}
