//! `larder block serve` while a file system is full, and while its cache device fails, shrinks or goes away: reads and writes go
//! on, and every byte is right, then and after the next start.
//!
//! The failing device is a file of nbdfuse over nbdkit's error filter; full file systems are small ones in a mount namespace of
//! the daemon's own. Without these programs its tests are ignored.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::daemon::ask::{counter, json, settle};
use crate::daemon::{Daemon, larder, one, prepare, read, session, try_one, write};
use larder_base::Rng;
use larder_block::backing::Session;
use larder_block::op::{FailureKind, Op};
use larder_format::block::superblock::COPY_BYTES;
use larder_runtime::{AlignedBuf, Payload};

/// What a place has, bytes: neither a line nor a multiple of one.
const PLACE: usize = 6144;
const PLACES: usize = 1200;
/// What is written to `dir`, where reads or writes of the cache device are to fail.
const READS: &str = "reads-fail";
const WRITES: &str = "writes-fail";
/// The same where reads of the cache's map are to fail.
const MAP_READS: &str = "map-reads-fail";
/// What the log says when a cache is out of use.
const GIVEN_UP: &str = "Volumes go on without it";

/// What every place of the volume has: a byte, repeated.
struct Model {
    versions: Vec<u8>,
    rng: Rng,
}

impl Model {
    fn new(seed: u64) -> Model {
        Model { versions: vec![0; PLACES], rng: Rng::new(seed) }
    }

    fn check(&self, session: &mut dyn Session, place: usize) {
        let bytes = read(session, (place * PLACE) as u64, PLACE);
        let wanted = self.versions[place];
        assert!(bytes.iter().all(|&b| b == wanted), "place {place}: {} for {wanted}", bytes[0]);
    }

    /// Reads and writes of places, the low ones more often. No client may notice anything.
    fn work(&mut self, session: &mut dyn Session, steps: usize) {
        for _ in 0..steps {
            let most = if self.rng.chance(0.5) { 100 } else { PLACES as u64 };
            let place = self.rng.below(most) as usize;
            if self.rng.chance(0.6) {
                self.check(session, place);
            } else {
                self.versions[place] = self.rng.range(1, 256) as u8;
                write(session, (place * PLACE) as u64, PLACE, self.versions[place]);
            }
        }
    }

    /// Works until the log says it.
    fn work_until(&mut self, session: &mut dyn Session, daemon: &mut Daemon, what: &str) {
        let end = Instant::now() + Duration::from_secs(120);
        while !daemon.said(what) {
            assert!(Instant::now() < end, "no '{what}' in the log: {:#?}", daemon.seen);
            self.work(session, 20);
        }
    }

    fn check_all(&self, session: &mut dyn Session) {
        (0..PLACES).for_each(|place| self.check(session, place));
    }

    /// The volume itself, past the daemon.
    fn check_file(&self, path: &Path) {
        let file = File::open(path).unwrap();
        let mut bytes = vec![0; PLACE];
        for (place, &wanted) in self.versions.iter().enumerate() {
            file.read_exact_at(&mut bytes, (place * PLACE) as u64).unwrap();
            assert!(bytes.iter().all(|&b| b == wanted), "place {place} of the volume");
        }
    }
}

/// A cache device that fails on command: a file of nbdfuse over nbdkit.
struct Device {
    dir: PathBuf,
    kit: Child,
    fuse: Child,
}

impl Device {
    /// A formatted cache at `dir/cache`.
    fn start(dir: &Path, errno: &str, placement: &str) -> Device {
        let trigger = |name: &str| dir.join(name).display().to_string();
        let mut plugin = vec!["--filter=error".into(), "file".into(), trigger("image")];
        plugin.push(format!("error={errno}"));
        for (kind, name) in [("pread", READS), ("pwrite", WRITES), ("zero", WRITES)] {
            plugin.push(format!("error-{kind}-rate=100%"));
            plugin.push(format!("error-{kind}-file={}", trigger(name)));
        }
        Device::start_over(dir, &plugin, placement)
    }

    /// The same, where [`MAP_READS`] makes reads fail from byte `from` on.
    fn start_that_fails_behind(dir: &Path, from: u64, placement: &str) -> Device {
        let image = dir.join("image").display().to_string();
        let trigger = dir.join(MAP_READS).display().to_string();
        let plugin = [
            "eval".to_owned(),
            format!("get_size=stat -c %s '{image}'"),
            format!(
                "pread=if [ -e '{trigger}' ] && [ $(($3 + $4)) -gt {from} ]; then echo EIO rot >&2; exit 1; fi; \
                 dd if='{image}' iflag=skip_bytes,count_bytes skip=$4 count=$3 bs=128k status=none"
            ),
            format!(
                "pwrite=dd of='{image}' oflag=seek_bytes seek=$4 bs=128k conv=notrunc status=none"
            ),
            "flush=exit 0".to_owned(),
            "can_write=exit 0".to_owned(),
            "can_flush=exit 0".to_owned(),
        ];
        Device::start_over(dir, &plugin, placement)
    }

    /// What nbdkit is to serve, by a plugin and its filters and parameters.
    fn start_over(dir: &Path, plugin: &[String], placement: &str) -> Device {
        File::create(dir.join("image")).unwrap().set_len(64 << 20).unwrap();
        File::create(dir.join("disk")).unwrap().set_len(8 << 20).unwrap();
        let (socket, point) = (dir.join("kit"), dir.join("fuse"));
        std::fs::create_dir(&point).unwrap();
        let mut kit = Command::new("nbdkit");
        kit.args(["-f", "--exit-with-parent", "-U"]).arg(&socket).args(plugin);
        let quiet = |c: &mut Command| {
            c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
        };
        let kit = quiet(&mut kit);
        await_path(&socket);
        let mut fuse = Command::new("nbdfuse");
        fuse.arg(point.join("cache")).arg(format!("nbd+unix:///?socket={}", socket.display()));
        let device = Device { dir: dir.to_owned(), kit, fuse: quiet(&mut fuse) };
        await_path(&point.join("cache"));
        let cache = device.cache();
        let format = ["format", cache.to_str().unwrap(), "--placement", placement];
        let (code, message) = larder(&format);
        assert_eq!(code, Some(0), "{message}");
        device
    }

    fn cache(&self) -> PathBuf {
        self.dir.join("fuse").join("cache")
    }

    fn fail(&self, triggers: &[&str]) {
        triggers.iter().for_each(|t| drop(File::create(self.dir.join(t)).unwrap()));
    }

    fn mend(&self, triggers: &[&str]) {
        triggers.iter().for_each(|t| std::fs::remove_file(self.dir.join(t)).unwrap());
    }

    fn serve(&self) -> Daemon {
        let program = Command::new(env!("CARGO_BIN_EXE_larder"));
        Daemon::start_by(program, &self.dir, &self.cache(), &[])
    }

    /// From one moment to the next there is no device any more.
    fn vanish(&mut self) {
        self.fuse.kill().unwrap();
        self.fuse.wait().unwrap();
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let point = self.dir.join("fuse");
        let _ = Command::new("fusermount3")
            .args(["-u", "-z"])
            .arg(point)
            .stderr(Stdio::null())
            .status();
        for child in [&mut self.fuse, &mut self.kit] {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

fn await_path(path: &Path) {
    let end = Instant::now() + Duration::from_secs(120);
    while !path.exists() {
        assert!(Instant::now() < end, "{} does not come up", path.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn status(dir: &Path) -> serde_json::Value {
    let output = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["block", "status", "--json", "--state-dir"])
        .arg(dir.join("state"))
        .args(["--answer-within", "120"])
        .output()
        .unwrap();
    assert!(output.status.success());
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Device errors while it serves; `gives_up`: none of its operations succeeds that a cache can do without.
fn device_fails(errno: &str, triggers: &[&str], placement: &str, gives_up: bool) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let device = Device::start(dir, errno, placement);
    let mut daemon = device.serve();
    let mut s = session(dir);
    let mut model = Model::new(1);
    model.work(&mut *s, 400);
    device.fail(triggers);
    if gives_up {
        model.work_until(&mut *s, &mut daemon, GIVEN_UP);
        let status = status(dir);
        assert!(status["cache"]["given_up"].is_string(), "{status:#}");
    }
    model.work(&mut *s, 300);
    model.check_all(&mut *s);
    drop(s);
    daemon.stop();
    model.check_file(&dir.join("disk"));
    // The device comes back, with whatever was on it.
    device.mend(triggers);
    let daemon = device.serve();
    let cold = daemon.seen.iter().any(|line| line.contains("cold: "));
    assert!(cold || !gives_up, "{:#?}", daemon.seen);
    let mut s = session(dir);
    model.check_all(&mut *s);
    model.work(&mut *s, 300);
    drop(s);
    daemon.stop();
    model.check_file(&dir.join("disk"));
}

#[test]
#[cfg_attr(
    any(without = "nbdkit", without = "nbdfuse", without = "fusermount3", without = "fuse"),
    ignore = "needs nbdkit, nbdfuse, fusermount3 and fuse (Debian: nbdkit, libnbd-bin, fuse3; /dev/fuse)"
)]
fn a_device_whose_writes_fail_is_given_up() {
    device_fails("EIO", &[WRITES], "set:8", true);
    device_fails("ENOSPC", &[WRITES], "full", true);
}

#[test]
#[cfg_attr(
    any(without = "nbdkit", without = "nbdfuse", without = "fusermount3", without = "fuse"),
    ignore = "needs nbdkit, nbdfuse, fusermount3 and fuse (Debian: nbdkit, libnbd-bin, fuse3; /dev/fuse)"
)]
fn a_device_that_fails_altogether_is_given_up() {
    device_fails("EIO", &[READS, WRITES], "set:8", true);
}

#[test]
#[cfg_attr(
    any(without = "nbdkit", without = "nbdfuse", without = "fusermount3", without = "fuse"),
    ignore = "needs nbdkit, nbdfuse, fusermount3 and fuse (Debian: nbdkit, libnbd-bin, fuse3; /dev/fuse)"
)]
fn reads_that_fail_come_from_the_volume() {
    device_fails("EIO", &[READS], "set:8", false);
    device_fails("EIO", &[READS], "full", false);
}

#[test]
#[cfg_attr(
    any(without = "nbdkit", without = "nbdfuse", without = "fusermount3", without = "fuse"),
    ignore = "needs nbdkit, nbdfuse, fusermount3 and fuse (Debian: nbdkit, libnbd-bin, fuse3; /dev/fuse)"
)]
fn a_device_that_vanishes_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut device = Device::start(dir, "EIO", "set:8");
    let mut daemon = device.serve();
    let mut s = session(dir);
    let mut model = Model::new(2);
    model.work(&mut *s, 400);
    device.vanish();
    model.work_until(&mut *s, &mut daemon, GIVEN_UP);
    model.work(&mut *s, 300);
    model.check_all(&mut *s);
    drop(s);
    daemon.stop();
    model.check_file(&dir.join("disk"));
}

/// The device cannot be read when the daemon starts: volumes are served without it, and when it can be read again it is cold,
/// since they were written to meanwhile. Where that cannot be noted the start is refused.
#[test]
#[cfg_attr(
    any(without = "nbdkit", without = "nbdfuse", without = "fusermount3", without = "fuse"),
    ignore = "needs nbdkit, nbdfuse, fusermount3 and fuse (Debian: nbdkit, libnbd-bin, fuse3; /dev/fuse)"
)]
fn a_map_that_cannot_be_read_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    // Behind both copies of the superblock, which say what the map is of.
    let from = 2 * COPY_BYTES as u64;
    let device = Device::start_that_fails_behind(dir, from, "set:8");
    let daemon = device.serve();
    let mut s = session(dir);
    let mut model = Model::new(6);
    model.work(&mut *s, 200);
    drop(s);
    daemon.stop();
    device.fail(&[MAP_READS]);
    // Nobody may write past the cache where it is not noted that it must not be used again.
    let (cache, socket) = (device.cache(), format!("unix:{}", dir.join("socket").display()));
    let disk = format!("disk=file:{}", dir.join("disk").display());
    let (cache, nowhere) = (cache.to_str().unwrap(), dir.join("disk").join("state"));
    let mut serve = vec!["serve", "--cache", cache, "--volume", &disk, "--listen", &socket];
    serve.extend(["--state-dir", nowhere.to_str().unwrap()]);
    let (code, message) = larder(&serve);
    assert!(code == Some(1) && message.contains("cannot be noted"), "{code:?} {message}");
    for round in 0..2 {
        let mut daemon = device.serve();
        assert!(daemon.said(GIVEN_UP), "{:#?}", daemon.seen);
        let now = status(dir);
        assert!(now["cache"]["given_up"].is_string(), "{now:#}");
        let alarms = now["alarms"].as_array().unwrap();
        let said = |a: &serde_json::Value| a.as_str().unwrap().contains("pass-through");
        assert!(alarms.iter().any(said), "{now:#}");
        let mut s = session(dir);
        model.check_all(&mut *s);
        model.work(&mut *s, 200);
        drop(s);
        assert_eq!(counter(&status(dir), "fills"), 0);
        // In good order and otherwise.
        if round == 0 {
            daemon.stop()
        } else {
            drop(daemon)
        }
        model.check_file(&dir.join("disk"));
    }
    device.mend(&[MAP_READS]);
    let daemon = device.serve();
    assert!(
        daemon.seen.iter().any(|line| line.contains("cold: the cache was given up")),
        "{:#?}",
        daemon.seen
    );
    let mut s = session(dir);
    model.check_all(&mut *s);
    model.work(&mut *s, 200);
    model.check_all(&mut *s);
    drop(s);
    daemon.stop();
    model.check_file(&dir.join("disk"));
}

/// A cache that was given up is taken back by a command once its device works again, while clients go on: what was written past
/// it is never answered as it was before.
#[test]
#[cfg_attr(
    any(without = "nbdkit", without = "nbdfuse", without = "fusermount3", without = "fuse"),
    ignore = "needs nbdkit, nbdfuse, fusermount3 and fuse (Debian: nbdkit, libnbd-bin, fuse3; /dev/fuse)"
)]
fn a_cache_that_was_given_up_is_taken_back() {
    for (placement, kill) in [("set:8", true), ("full", false)] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let device = Device::start(dir, "EIO", placement);
        let mut daemon = device.serve();
        let mut s = session(dir);
        let mut model = Model::new(8);
        let take_back = || crate::daemon::ask::ask(dir, &["take-back"]);
        let (code, _, message) = take_back();
        assert!(code == 1 && message.contains("it is in use"), "{message}");
        for round in 0..2 {
            model.work(&mut *s, 400);
            device.fail(&[WRITES]);
            daemon.seen.clear();
            model.work_until(&mut *s, &mut daemon, GIVEN_UP);
            let (code, _, message) = take_back();
            assert!(code == 1 && message.contains("did not take"), "{message}");
            model.work(&mut *s, 200);
            device.mend(&[WRITES]);
            // A busy disk may take longer than clients are to wait: then it is asked again.
            let end = Instant::now() + Duration::from_secs(120);
            let said = loop {
                let (code, said, message) = take_back();
                if code == 0 {
                    break said;
                }
                assert!(Instant::now() < end, "{round}: {message}");
            };
            assert!(said.contains("used again"), "{round}: {said}");
            let now = status(dir);
            assert!(now["cache"]["given_up"].is_null(), "{now:#}");
            let before = counter(&now, "fills");
            model.check_all(&mut *s);
            model.work(&mut *s, 300);
            settle(dir);
            assert!(counter(&status(dir), "fills") > before, "nothing is cached");
        }
        drop(s);
        if kill {
            daemon.kill()
        } else {
            daemon.stop()
        }
        let daemon = device.serve();
        assert!(daemon.seen.iter().any(|line| line.contains("warm from")), "{:#?}", daemon.seen);
        let mut s = session(dir);
        model.check_all(&mut *s);
        model.work(&mut *s, 200);
        drop(s);
        daemon.stop();
        model.check_file(&dir.join("disk"));
    }
}

/// The cache is not there, cut short or no cache when the daemon starts: with a flag volumes are served without it, and when it
/// comes back, by whatever name, it is cold, since they were written to meanwhile.
#[test]
fn a_start_without_its_cache() {
    type Spoil = fn(&Path, &Path);
    let ways: [(&str, Spoil); 3] = [
        ("there is no such file", |_, _| ()),
        ("no block cache", |cache, away| {
            std::fs::write(cache, &std::fs::read(away).unwrap()[..4 << 10]).unwrap();
        }),
        ("no block cache", |cache, _| File::create(cache).unwrap().set_len(64 << 20).unwrap()),
    ];
    for (number, (why, spoil)) in ways.into_iter().enumerate() {
        let dir = prepare(if number == 1 { "full" } else { "set:8" });
        let dir = dir.path();
        let daemon = Daemon::start(dir, &[]);
        let mut s = session(dir);
        let mut model = Model::new(9);
        model.work(&mut *s, 600);
        settle(dir);
        drop(s);
        // In both ways its memory is warm, or its device.
        if number == 0 {
            daemon.kill()
        } else {
            daemon.stop()
        }
        let program = || Command::new(env!("CARGO_BIN_EXE_larder"));
        let (cache, away) = (dir.join("cache"), dir.join("away"));
        std::fs::rename(&cache, &away).unwrap();
        spoil(&cache, &away);
        let socket = format!("unix:{}", dir.join("another").display());
        let serve = ["serve", "--cache", cache.to_str().unwrap(), "--listen", &socket];
        let (code, message) = larder(&serve);
        let remedy = message.contains("--on-cache-failure serve");
        assert!(code == Some(1) && message.contains(why) && remedy, "{message}");
        let mut daemon = Daemon::start(dir, &["--on-cache-failure", "serve"]);
        assert!(daemon.said("there is no cache") && daemon.said(why), "{:#?}", daemon.seen);
        let now = status(dir);
        assert!(now["cache"]["given_up"].as_str().unwrap().contains(why), "{now:#}");
        assert!(now["alarms"].to_string().contains("pass-through"), "{now:#}");
        assert_eq!(now["cache"]["path"], cache.to_str().unwrap());
        let (code, _, message) = crate::daemon::ask::ask(dir, &["take-back"]);
        assert!(code == 1 && message.contains("start the daemon again"), "{message}");
        let mut s = session(dir);
        model.check_all(&mut *s);
        model.work(&mut *s, 600);
        // A detach waits for who is there, as with a cache.
        let mut waiting = program()
            .args(["block", "detach", "disk", "--state-dir"])
            .arg(dir.join("state"))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(waiting.stderr.take().unwrap()).lines().map(Result::unwrap);
        let line = said.find(|line| line.contains("client")).unwrap_or_default();
        assert!(line.contains("waits") && line.contains("--disconnect"), "{line}");
        waiting.kill().unwrap();
        waiting.wait().unwrap();
        model.check_all(&mut *s);
        drop(s);
        daemon.stop();
        model.check_file(&dir.join("disk"));
        // The first comes back under another name.
        let place = if number == 0 {
            away
        } else {
            std::fs::rename(&away, &cache).map(|()| cache).unwrap()
        };
        let daemon = Daemon::start_by(program(), dir, &place, &["--trust-unchanged"]);
        let cold = "cold: the cache was given up, or volumes were served without it";
        assert!(daemon.seen.iter().any(|line| line.contains(cold)), "{:#?}", daemon.seen);
        let mut s = session(dir);
        model.check_all(&mut *s);
        model.work(&mut *s, 300);
        settle(dir);
        drop(s);
        daemon.stop();
        // And is warm from then on.
        let daemon = Daemon::start_by(program(), dir, &place, &[]);
        assert!(daemon.seen.iter().any(|line| line.contains("warm from")), "{:#?}", daemon.seen);
        let mut s = session(dir);
        model.check_all(&mut *s);
        drop(s);
        daemon.stop();
    }
}

/// The file under the cache is cut short by somebody, or removed.
#[test]
fn a_cache_file_that_is_cut_short_or_removed() {
    for placement in ["set:8", "full", "sparse"] {
        for length in [Some(0), Some(5 << 20), None] {
            let dir = prepare(placement);
            let dir = dir.path();
            let daemon = Daemon::start(dir, &[]);
            let mut s = session(dir);
            let mut model = Model::new(3);
            model.work(&mut *s, 400);
            let cache = dir.join("cache");
            let whole = cache.metadata().unwrap().len();
            match length {
                Some(length) => {
                    File::options().write(true).open(&cache).unwrap().set_len(length).unwrap();
                }
                None => std::fs::remove_file(&cache).unwrap(),
            }
            model.work(&mut *s, 600);
            model.check_all(&mut *s);
            let alarms = status(dir)["alarms"].to_string();
            assert_eq!(alarms.contains("was removed"), length.is_none(), "{alarms}");
            drop(s);
            daemon.stop();
            model.check_file(&dir.join("disk"));
            // It is refused, or what is used of it is right.
            let socket = format!("unix:{}", dir.join("another").display());
            let serve = ["serve", "--cache", cache.to_str().unwrap(), "--listen", &socket];
            if length.is_none() {
                let (code, message) = larder(&serve);
                assert_eq!(code, Some(1));
                assert!(message.contains("no such file"), "{message}");
                continue;
            }
            if std::fs::metadata(&cache).unwrap().len() < whole {
                let (code, message) = larder(&serve);
                assert_eq!(code, Some(1), "{message}");
                assert!(message.contains(cache.to_str().unwrap()), "{message}");
                continue;
            }
            let daemon = Daemon::start(dir, &[]);
            let mut s = session(dir);
            model.check_all(&mut *s);
            drop(s);
            daemon.stop();
        }
    }
}

/// larder with a small file system of its own at `dir/small`, prepared by a script.
fn in_small_file_system(dir: &Path, size: &str, script: &str) -> Command {
    std::fs::create_dir(dir.join("small")).unwrap();
    let mount = format!("mount -t tmpfs -o size={size} none \"$0\"");
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["-rm", "sh", "-euc", script]).arg(dir.join("small"));
        command
    };
    assert!(unshare(&mount).status().unwrap().success(), "no mount namespace");
    let mut command = unshare(&format!("{mount}; cd \"$0\"; {script}; exec \"$@\""));
    command.arg(env!("CARGO_BIN_EXE_larder"));
    command
}

/// A volume whose file system is full: the client is told, what it was told of as written is there, and when there is room
/// again it goes on.
#[test]
#[cfg_attr(
    without = "mount-namespace",
    ignore = "needs a mount namespace of its own (unshare -rm)"
)]
fn a_volume_without_space() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let script = "truncate -s 8M disk; head -c 3M /dev/zero >ballast";
    let program = in_small_file_system(dir, "8m", script);
    let small = dir.join("small");
    std::fs::remove_file(dir.join("disk")).unwrap();
    std::os::unix::fs::symlink(small.join("disk"), dir.join("disk")).unwrap();
    let daemon = Daemon::start_by(program, dir, &dir.join("cache"), &[]);
    // As the daemon sees it.
    let inside = PathBuf::from(format!("/proc/{}/root", daemon.child.id()))
        .join(small.strip_prefix("/").unwrap());
    let mut s = session(dir);
    let mut model = Model::new(4);
    model.check_all(&mut *s);
    let mut refused = Vec::new();
    for place in 0..PLACES {
        let mut data = AlignedBuf::zeroed(PLACE);
        data.fill(7);
        let offset = (place * PLACE) as u64;
        match try_one(&mut *s, Op::Write { offset, data: Payload::new(data), fua: false }) {
            Ok(_) => model.versions[place] = 7,
            Err(failure) => {
                assert_eq!(failure.kind, FailureKind::NoSpace, "{failure}");
                refused.push(place);
            }
        }
    }
    assert!(refused.len() > 200 && refused.len() < 1000, "{} refused", refused.len());
    one(&mut *s, Op::Flush);
    // Where a write was refused, the cache says what the volume has.
    let mut truth = vec![0; 8 << 20];
    File::open(inside.join("disk")).unwrap().read_exact_at(&mut truth, 0).unwrap();
    for _ in 0..2 {
        for place in 0..PLACES {
            let at = place * PLACE;
            assert!(read(&mut *s, at as u64, PLACE) == truth[at..at + PLACE], "place {place}");
            if !refused.contains(&place) {
                model.check(&mut *s, place);
            }
        }
    }
    std::fs::remove_file(inside.join("ballast")).unwrap();
    for &place in &refused {
        write(&mut *s, (place * PLACE) as u64, PLACE, 9);
        model.versions[place] = 9;
    }
    model.work(&mut *s, 300);
    model.check_all(&mut *s);
    model.check_file(&inside.join("disk"));
    drop(s);
    daemon.stop();
}

/// A cache file that is larger than its file system: it is said when it is made and when it is used; when the file system is
/// full, what is cached goes on to be read and written.
#[test]
#[cfg_attr(
    without = "mount-namespace",
    ignore = "needs a mount namespace of its own (unshare -rm)"
)]
fn a_cache_without_space() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    File::create(dir.join("disk")).unwrap().set_len(8 << 20).unwrap();
    let script = "\"$1\" block format cache --size 64m >../format.out 2>../format.err";
    let program = in_small_file_system(dir, "4m", script);
    let cache = dir.join("small").join("cache");
    let begun = Instant::now();
    let mut daemon = Daemon::start_by(program, dir, &cache, &[]);
    let warning = "less than the cache of 64 MiB may take";
    let format = std::fs::read_to_string(dir.join("format.err")).unwrap();
    assert!(format.contains(warning) && format.lines().count() == 1, "{format}");
    assert!(daemon.said(warning), "{:#?}", daemon.seen);
    let mut s = session(dir);
    let mut model = Model::new(5);
    model.work_until(&mut *s, &mut daemon, "No space left");
    let hits = |dir| status(dir)["volumes"][0]["read_hits"].as_u64().unwrap();
    let before = hits(dir);
    model.work(&mut *s, 300);
    model.check_all(&mut *s);
    assert!(daemon.said(GIVEN_UP) || hits(dir) > before, "nothing is read from the cache");
    // Filling rests: it is said once, with what helps, seen in the counters, and tried again a few times, not for every line.
    let now = status(dir);
    let rests = counter(&now, "fill_rests");
    // Each is twice as long as the one before, until one was without a failure: at worst every other one is of a second.
    let most = 8 + begun.elapsed().as_secs() / 2;
    assert!((1..most).contains(&rests) && daemon.said("free some space there"), "{now:#}");
    let said =
        daemon.seen.iter().filter(|l| l.contains("nothing new is cached for")).count() as u64;
    assert!((rests..most).contains(&said), "{:#?}", daemon.seen);
    if now["cache"]["given_up"].is_null() {
        assert!(now["verdicts"]["no_space"].as_u64() > Some(0), "{now:#}");
    }
    drop(s);
    daemon.stop();
    model.check_file(&dir.join("disk"));
}

/// What a write around the cache has dropped stays dropped when the page of the map's log that says so is damaged: a log that
/// lost its end looks like a shorter one, by which the old line would still be there, with its checksum.
#[test]
fn a_damaged_log_does_not_bring_back_what_was_dropped() {
    for placement in ["set:8", "full"] {
        let dir = prepare(placement);
        let start = || Daemon::start(dir.path(), &["--write", "hdd-inv"]);
        let daemon = start();
        let mut s = session(dir.path());
        write(&mut *s, 0, 1 << 20, 1);
        read(&mut *s, 0, 1 << 20);
        settle(dir.path());
        drop(s);
        daemon.stop();
        let daemon = start();
        let mut s = session(dir.path());
        let bytes = read(&mut *s, 0, 1 << 20);
        assert!(bytes.iter().all(|&b| b == 1), "{placement}");
        assert_eq!(counter(&json(dir.path(), &["status"]), "read_hits"), 256, "{placement}");
        write(&mut *s, 0, 1 << 20, 2);
        drop(s);
        daemon.stop();

        let cache = dir.path().join("cache");
        let file = File::options().read(true).write(true).open(&cache).unwrap();
        let mut bytes = vec![0; 64 << 20];
        let len = file.read_at(&mut bytes, 0).unwrap();
        let pages = bytes[..len].chunks_exact(4096).enumerate();
        let last = pages
            .filter(|(_, page)| page.starts_with(b"LMLG"))
            .max_by_key(|(_, page)| {
                // Generation and number.
                [8, 16].map(|at| u64::from_le_bytes(page[at..at + 8].try_into().unwrap()))
            })
            .unwrap();
        let at = last.0 as u64 * 4096 + 70;
        file.write_all_at(&[bytes[at as usize] ^ 1], at).unwrap();

        let check = Command::new(env!("CARGO_BIN_EXE_larder"))
            .args(["block", "check", cache.to_str().unwrap()])
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&check.stdout);
        assert!(check.status.code() == Some(1) && told.contains("GAP"), "{placement}: {told}");
        let mut daemon = start();
        assert!(daemon.said("pages of the map's log are damaged"), "{placement}");
        let mut s = session(dir.path());
        let now = read(&mut *s, 0, 1 << 20);
        assert!(now.iter().all(|&b| b == 2), "{placement}: {}", now[0]);
        settle(dir.path());
        drop(s);
        daemon.stop();
        // And it is whole again.
        let mut daemon = start();
        assert!(!daemon.said("damaged"), "{placement}");
        let mut s = session(dir.path());
        assert!(read(&mut *s, 0, 1 << 20).iter().all(|&b| b == 2), "{placement}");
        drop(s);
        daemon.stop();
    }
}
