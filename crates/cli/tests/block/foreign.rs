//! What is done to a volume's store behind the daemon's back: others write to it while it is served, and while it is not; it is
//! put back to an older state; its file system keeps whole seconds; it is taken away and given back. No read may be older
//! than what the store holds.
//!
//! File systems that can be put back are small ones on loop devices. Without these programs such tests are ignored.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::daemon::ask::{ask, json, settle, status_when};
use crate::daemon::{Daemon, prepare, read, session, session_of, write};
use larder_base::Rng;
use larder_block::backing::Session;

const MIB: u64 = 1 << 20;
/// A little more than two lines.
const LEN: usize = 9000;
const PLACES: u64 = 40;

fn at(place: u64) -> u64 {
    place * 20_000
}

/// Longer than writes so close together that nobody can tell them apart by their times.
fn pause() {
    std::thread::sleep(Duration::from_millis(60));
}

/// Another program writes to the file.
fn foreign(path: &Path, place: u64, version: u8) {
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(&vec![version; LEN], at(place)).unwrap();
}

fn is(session: &mut dyn Session, place: u64, version: u8) -> bool {
    read(session, at(place), LEN).iter().all(|&b| b == version)
}

fn check(session: &mut dyn Session, place: u64, version: u8) {
    for round in 0..2 {
        let bytes = read(session, at(place), LEN);
        assert!(
            bytes.iter().all(|&b| b == version),
            "place {place}, round {round}: {} for {version}",
            bytes[0]
        );
    }
}

fn changes(status: &serde_json::Value) -> u64 {
    status["volumes"][0]["store"]["foreign_changes"].as_u64().unwrap()
}

fn cached(dir: &Path) -> u64 {
    json(dir, &["status"])["cache"]["lines"].as_u64().unwrap()
}

/// Waits until the daemon has nothing cached of what was there before.
fn noticed(dir: &Path, before: u64) {
    status_when(dir, "noticed", |s| changes(s) > before);
}

/// Whatever was cached when another program wrote is not read again, though the daemon itself wrote after it: not while it is
/// served, not after the next start, however the run ended.
#[test]
fn a_foreign_write_while_served_is_not_hidden_by_a_later_one() {
    for (kill, placement) in [(false, "set:8"), (true, "set:8"), (true, "full"), (false, "sparse")]
    {
        let dir = prepare(placement);
        let (dir, disk) = (dir.path(), dir.path().join("disk"));
        let mut daemon = Daemon::start(dir, &[]);
        let mut s = session(dir);
        (0..PLACES).for_each(|place| write(&mut *s, at(place), LEN, 1));
        settle(dir);
        assert!(is(&mut *s, 3, 1));
        pause();
        foreign(&disk, 3, 9);
        pause();
        // Has the later time.
        write(&mut *s, at(7), LEN, 2);
        daemon.wait_for("was written to by something else");
        if kill {
            // Whether or not the lines are dropped by now.
            drop(s);
            daemon.kill();
            daemon = Daemon::start(dir, &[]);
            s = session(dir);
        } else {
            // (One thread says the one, another the other.)
            let dropped = "lines are dropped: its store was changed";
            if !daemon.said(dropped) {
                daemon.wait_for(dropped);
            }
            check(&mut *s, 3, 9);
            let status = json(dir, &["status"]);
            assert_eq!(changes(&status), 1, "{status:#}");
            assert_eq!(status["volumes"][0]["store"]["state"], "changed");
            assert!(status["alarms"].to_string().contains("written to by something else"));
            drop(s);
            daemon.stop();
            daemon = Daemon::start(dir, &[]);
            s = session(dir);
        }
        check(&mut *s, 3, 9);
        check(&mut *s, 7, 2);
        check(&mut *s, 5, 1);
        drop(s);
        daemon.stop();
    }
}

/// Nobody writes and nobody asks the store: it is noticed all the same. What is cached afterwards is used by the next start.
#[test]
fn a_foreign_write_is_noticed_while_all_is_answered_from_the_cache() {
    let dir = prepare("set:8");
    let (dir, disk) = (dir.path(), dir.path().join("disk"));
    let mut daemon = Daemon::start(dir, &[]);
    let mut s = session(dir);
    write(&mut *s, at(1), LEN, 1);
    settle(dir);
    pause();
    foreign(&disk, 1, 2);
    daemon.wait_for("lines are dropped: its store was changed");
    check(&mut *s, 1, 2);
    settle(dir);
    for kill in [true, false] {
        write(&mut *s, at(2), LEN, 3);
        settle(dir);
        drop(s);
        if kill {
            daemon.kill()
        } else {
            daemon.stop()
        }
        daemon = Daemon::start(dir, &[]);
        assert!(cached(dir) > 0, "kill: {kill}, {:#?}", daemon.seen);
        s = session(dir);
        check(&mut *s, 1, 2);
        check(&mut *s, 2, 3);
    }
    assert_eq!(changes(&json(dir, &["status"])), 0);
    drop(s);
    daemon.stop();
}

/// A cache file and a state directory, which are of `dir`'s volume whoever's they are.
fn line_of_runs(dir: &Path, name: &str) -> Daemon {
    let of = dir.join(name);
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command.args(["block", "serve", "--cache"]).arg(of.join("cache"));
    command.arg("--volume").arg(format!("disk=file:{}", dir.join("disk").display()));
    command.arg("--listen").arg(format!("unix:{}", dir.join("socket").display()));
    command.arg("--state-dir").arg(of.join("state"));
    // Where it is asked, whichever it is.
    std::fs::create_dir_all(dir.join("state")).unwrap();
    command.arg("--control").arg(dir.join("state/block.sock"));
    Daemon::of(command)
}

/// A cache and its copy, with their state directories, are used in turn before one volume. Neither has what the other wrote, and
/// the memory of the map, which has the number of both, is taken for nobody's but who left it.
#[test]
fn two_copies_that_are_used_in_turn_are_never_stale() {
    let cases = [("set:8", true), ("direct", false), ("full", true), ("sparse", true)];
    for (placement, state_too) in cases {
        let dir = prepare(placement);
        let dir = dir.path();
        let (own, copy) = (dir.join("own"), dir.join("copy"));
        std::fs::create_dir(&own).unwrap();
        std::fs::rename(dir.join("cache"), own.join("cache")).unwrap();
        let mut model = vec![0u8; PLACES as usize];
        // Reads everything, and writes every `step`th.
        let mut run = |name: &str, step: usize, version: u8, kill: bool| {
            let daemon = line_of_runs(dir, name);
            let mut s = session(dir);
            for place in 0..PLACES {
                let right = model[place as usize];
                assert!(
                    is(&mut *s, place, right),
                    "{placement}, {name} before version {version}, place {place}: not {right}; {:#?}",
                    daemon.seen
                );
            }
            settle(dir);
            for place in (0..PLACES as usize).step_by(step) {
                write(&mut *s, at(place as u64), LEN, version);
                model[place] = version;
            }
            settle(dir);
            assert!(cached(dir) > 0, "{placement}, {name}: nothing is cached");
            drop(s);
            if kill { daemon.kill() } else { daemon.stop() }
        };
        run("own", 1, 1, true);
        let copied = Command::new("cp").arg("-a").arg(&own).arg(&copy).status().unwrap();
        assert!(copied.success());
        if !state_too {
            // As with a copy of the file alone: to a new state directory.
            std::fs::remove_dir_all(copy.join("state")).unwrap();
        }
        run("own", 3, 2, true);
        run("copy", 4, 3, true);
        run("own", 5, 4, true);
        // With clean stops in between.
        run("copy", 6, 5, false);
        run("own", 7, 6, true);
        run("copy", 8, 7, true);
        run("own", 9, 8, false);
        run("copy", 10, 9, true);
        run("own", 1, 10, true);
    }
}

/// Reads, writes, and an operator: stops, kills, starts, other programs that write, before, after and while it is served.
#[test]
fn random_moves_of_an_operator() {
    for seed in 0..3 {
        let dir = prepare(["set:8", "full", "sparse"][seed as usize]);
        let (dir, disk) = (dir.path(), dir.path().join("disk"));
        let mut rng = Rng::new(seed);
        let mut model = vec![0u8; PLACES as usize];
        let mut version = 0u8;
        for round in 0..8 {
            let daemon = Daemon::start(dir, &[]);
            let mut s = session(dir);
            for _ in 0..rng.range(5, 60) {
                let place = rng.below(PLACES);
                version = version.wrapping_add(1).max(1);
                match rng.below(12) {
                    0..5 => check(&mut *s, place, model[place as usize]),
                    5..10 => {
                        write(&mut *s, at(place), LEN, version);
                        model[place as usize] = version;
                    }
                    10 if rng.chance(0.3) => {
                        let before = changes(&json(dir, &["status"]));
                        pause();
                        foreign(&disk, place, version);
                        model[place as usize] = version;
                        pause();
                        if rng.chance(0.5) {
                            write(&mut *s, at((place + 1) % PLACES), LEN, version);
                            model[((place + 1) % PLACES) as usize] = version;
                        }
                        if rng.chance(0.3) {
                            // It ends at once.
                            break;
                        }
                        noticed(dir, before);
                        // All lines are dropped at once, in the next moment.
                        let end = Instant::now() + Duration::from_secs(120);
                        while !is(&mut *s, place, model[place as usize]) {
                            assert!(
                                Instant::now() < end,
                                "seed {seed}, round {round}: not dropped"
                            );
                        }
                    }
                    _ => settle(dir),
                }
            }
            drop(s);
            if rng.chance(0.5) {
                daemon.kill()
            } else {
                daemon.stop()
            }
            if rng.chance(0.4) {
                pause();
                let place = rng.below(PLACES);
                version = version.wrapping_add(1).max(1);
                foreign(&disk, place, version);
                model[place as usize] = version;
            }
            let daemon = Daemon::start(dir, &[]);
            let mut s = session(dir);
            for place in 0..PLACES {
                assert!(
                    is(&mut *s, place, model[place as usize]),
                    "seed {seed}, round {round}, place {place}: {:#?}",
                    daemon.seen
                );
            }
            drop(s);
            daemon.stop();
        }
    }
}

/// A small file system on a loop device, which can be put back to what it was.
struct Small {
    image: PathBuf,
    saved: PathBuf,
    point: PathBuf,
}

impl Small {
    fn new(dir: &Path, make: &[&str]) -> Small {
        let small =
            Small { image: dir.join("image"), saved: dir.join("saved"), point: dir.join("point") };
        std::fs::create_dir(&small.point).unwrap();
        File::create(&small.image).unwrap().set_len(64 * MIB).unwrap();
        assert!(
            Command::new("mkfs.ext4")
                .arg("-q")
                .args(make)
                .arg(&small.image)
                .status()
                .unwrap()
                .success()
        );
        small.mount();
        File::create(small.disk()).unwrap().set_len(8 * MIB).unwrap();
        // A file that was there before.
        pause();
        small
    }

    fn disk(&self) -> PathBuf {
        self.point.join("disk")
    }

    fn mount(&self) {
        let status =
            Command::new("mount").args(["-o", "loop"]).arg(&self.image).arg(&self.point).status();
        assert!(status.unwrap().success());
    }

    fn unmount(&self) -> bool {
        Command::new("umount").arg(&self.point).status().unwrap().success()
    }

    /// As a snapshot of what it lies on: in the middle of what is going on.
    fn snapshot(&self) {
        let freeze = |how| {
            let status = Command::new("fsfreeze").arg(how).arg(&self.point).status().unwrap();
            assert!(status.success());
        };
        freeze("-f");
        std::fs::copy(&self.image, &self.saved).unwrap();
        freeze("-u");
    }

    fn put_back(&self) {
        assert!(self.unmount());
        std::fs::copy(&self.saved, &self.image).unwrap();
        self.mount();
    }

    fn daemon(&self, dir: &Path) -> Daemon {
        let uri = format!("small=file:{}", self.disk().display());
        Daemon::start(dir, &["--volume", &uri])
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        self.unmount();
    }
}

/// The volume's file system is put back to a snapshot while the daemon is dead. What it wrote since is not there any more, and
/// not in the cache either; whether it had written before the snapshot or not.
#[test]
#[cfg_attr(
    any(without = "mkfs.ext4", without = "mount", without = "loop"),
    ignore = "needs mkfs.ext4, mount and loop devices (Debian: e2fsprogs, mount; root)"
)]
fn a_file_system_that_is_put_back() {
    for (kill, before) in [(true, true), (true, false), (false, true)] {
        let dir = prepare("set:8");
        let dir = dir.path();
        let small = Small::new(dir, &[]);
        let daemon = small.daemon(dir);
        let mut s = session_of(dir, "small");
        check(&mut *s, 2, 0);
        if before {
            write(&mut *s, at(1), LEN, 1);
            write(&mut *s, at(2), LEN, 1);
        }
        pause();
        small.snapshot();
        pause();
        write(&mut *s, at(2), LEN, 2);
        settle(dir);
        check(&mut *s, 2, 2);
        drop(s);
        if kill {
            daemon.kill()
        } else {
            daemon.stop()
        }
        small.put_back();
        let daemon = small.daemon(dir);
        let mut s = session_of(dir, "small");
        check(&mut *s, 1, u8::from(before));
        check(&mut *s, 2, u8::from(before));
        drop(s);
        // What nobody put back is warm.
        write(&mut *session_of(dir, "small"), at(3), LEN, 3);
        settle(dir);
        daemon.kill();
        let daemon = small.daemon(dir);
        assert!(cached(dir) > 0, "{:#?}", daemon.seen);
        daemon.stop();
    }
}

/// A file system that keeps whole seconds: another program writes within the second, before and after the daemon ends. Nothing
/// is proved by such times.
#[test]
#[cfg_attr(
    any(without = "mkfs.ext4", without = "mount", without = "loop"),
    ignore = "needs mkfs.ext4, mount and loop devices (Debian: e2fsprogs, mount; root)"
)]
fn a_file_system_that_keeps_whole_seconds() {
    for kill in [false, true] {
        let dir = prepare("set:8");
        let dir = dir.path();
        let small = Small::new(dir, &["-I", "128"]);
        for round in 0..3 {
            let daemon = small.daemon(dir);
            let mut s = session_of(dir, "small");
            write(&mut *s, at(1), LEN, 10 + round);
            settle(dir);
            check(&mut *s, 1, 10 + round);
            drop(s);
            if kill {
                daemon.kill()
            } else {
                daemon.stop()
            }
            foreign(&small.disk(), 1, 20 + round);
            let mut daemon = small.daemon(dir);
            let mut s = session_of(dir, "small");
            check(&mut *s, 1, 20 + round);
            assert!(daemon.said("keeps whole seconds"), "{:#?}", daemon.seen);
            assert_eq!(changes(&json(dir, &["status"])), 0, "own writes are not taken for others'");
            drop(s);
            daemon.stop();
        }
    }
}

/// QEMU keeps off a file that is served, and the daemon off one that QEMU has.
#[test]
#[cfg_attr(without = "qemu-io", ignore = "needs qemu-io (Debian: qemu-utils)")]
fn qemu_does_not_open_a_served_file() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let disk = dir.join("disk").display().to_string();
    let qemu = |more: &[&str]| {
        let output =
            Command::new("qemu-io").args(["-f", "raw"]).args(more).arg(&disk).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let daemon = Daemon::start(dir, &[]);
    let (opened, error) = qemu(&["-c", "write 0 4k"]);
    assert!(!opened && error.contains("lock"), "{error}");
    let (opened, error) = qemu(&["-r", "-U", "-c", "read 0 4k"]);
    assert!(opened, "who says that it shares may read: {error}");
    daemon.stop();
    let (opened, error) = qemu(&["-c", "write 0 4k"]);
    assert!(opened, "{error}");
}

/// Detached and attached again at once, again and again, while its metadata is read.
#[test]
fn a_volume_goes_and_comes_back_at_once() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let other = dir.join("other");
    File::create(&other).unwrap().set_len(8 * MIB).unwrap();
    let uri = format!("other=file:{}", other.display());
    let daemon = Daemon::start(dir, &["--admission", "two_lbs", "--volume", &uri]);
    for round in 0..30u8 {
        let mut s = session_of(dir, "other");
        write(&mut *s, at(u64::from(round)), LEN, round);
        check(&mut *s, u64::from(round), round);
        drop(s);
        let (code, _, error) = ask(dir, &["detach", "other", "--disconnect"]);
        assert_eq!(code, 0, "{error}");
        let (code, _, error) = ask(dir, &["attach", &uri]);
        assert_eq!(code, 0, "round {round}: {error}");
    }
    daemon.stop();
}
