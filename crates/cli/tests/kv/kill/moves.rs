//! What an operator does between two runs: other flags, other directories and flash files, copies, clocks that are set back.
//! Whatever it is, a start must not serve what a run before it has overwritten, deleted or seen expire.

use std::path::{Path, PathBuf};
use std::process::Command;

use larder_base::Rng;

use super::mislead::{OBJECTS, SMALL, count, fill, filled, name};
use crate::history::Nanos;
use crate::load::{Mix, Notebook, under_load};
use crate::server::{Server, Site};

const NONE: &str = "none";
const MEMORY: &[&str] = &["-m", "5", "-I", "16k", "-t", "1"];

/// Deletes every object, whatever there is.
fn delete_all(client: &mut crate::client::Client) {
    for chunk in (0..OBJECTS).collect::<Vec<_>>().chunks(100) {
        let out: String = chunk.iter().map(|&i| format!("delete {}\r\n", name(i))).collect();
        client.send(out.as_bytes()).unwrap();
        for _ in chunk {
            let line = client.line().unwrap();
            assert!(line == "DELETED" || line == "NOT_FOUND", "{line}");
        }
    }
}

/// Copies the files of a directory, as `cp -r` does.
fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn a_run_without_flash_makes_what_is_on_flash_cold() {
    for end in [Server::stop, Server::kill] {
        let site = filled(end);
        let server = site.start_on(&site.data_dir(), Path::new(NONE), MEMORY);
        let log = server.log();
        assert!(log.contains("WARN") && log.contains("the next start with it is cold"), "{log}");
        delete_all(&mut server.connect());
        server.stop();
        // The second such run has nothing to say.
        let server = site.start_on(&site.data_dir(), Path::new(NONE), MEMORY);
        assert_eq!(server.connect().set("a", b"1"), "STORED");
        let log = server.stop();
        assert!(!log.contains("WARN"), "{log}");
        assert!(log.contains("without flash nothing is kept: 1 objects in DRAM are lost"), "{log}");
        let server = site.start(SMALL);
        let (there, log) = (count(&mut server.connect(), "nothing"), server.stop());
        assert!(there == 0 && log.contains("cold: a run without flash"), "{there}: {log}");
        // What is cached from then on is kept as ever.
        assert!(site.start(SMALL).stop().contains("warm: "));
    }
}

#[test]
fn a_run_without_flash_makes_no_directory_and_is_refused_beside_one_with_flash() {
    let site = Site::new();
    site.start_on(&site.data_dir(), Path::new(NONE), MEMORY).stop();
    assert!(!site.data_dir().exists());
    let server = site.start(SMALL);
    let mut command = site.command_on(&site.data_dir(), Path::new(NONE), MEMORY);
    command.arg("-s").arg(site.dir.path().join("other"));
    let mut args: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
    // The socket of the first is in use.
    let at = args.iter().position(|a| a == "-s").unwrap();
    args.drain(at..at + 2);
    let mut command = Command::new(command.get_program());
    command.env_remove("RUST_LOG").env_remove("STATE_DIRECTORY").args(args);
    let (code, last) = site.refused_as(command);
    assert_eq!(code, Some(1), "{last}");
    let pid = format!("process {}", server.pid());
    assert!(
        last.contains("in use by") && last.contains(&pid) && last.contains("--data-dir"),
        "{last}"
    );
    server.stop();
}

#[test]
fn a_copied_data_directory_used_in_turn_is_not_believed() {
    // The flash file lies in the data directory, as it does by default.
    let site = Site::new();
    let (original, copy) = (site.dir.path().join("o"), site.dir.path().join("c"));
    let on = |dir: &Path| site.start_on(dir, &dir.join("flash"), SMALL);
    let server = on(&original);
    fill(&mut server.connect(), "one");
    server.kill();
    copy_dir(&original, &copy);
    let server = on(&original);
    assert!(server.log().contains("warm: "), "{}", server.log());
    delete_all(&mut server.connect());
    server.kill();
    let server = on(&copy);
    let there = count(&mut server.connect(), "nothing");
    assert!(there == 0 && server.log().contains("cold: "), "{there}: {}", server.log());
    server.kill();
    let server = on(&original);
    let there = count(&mut server.connect(), "nothing");
    assert!(there == 0 && server.log().contains("cold: "), "{there}: {}", server.log());
    server.kill();
}

#[test]
fn a_data_directory_that_is_put_back_from_a_copy_is_not_believed() {
    for in_place in [true, false] {
        let site = Site::new();
        let (dir, kept) = (site.dir.path().join("o"), site.dir.path().join("kept"));
        let on = || site.start_on(&dir, &dir.join("flash"), SMALL);
        let server = on();
        fill(&mut server.connect(), "one");
        server.stop();
        copy_dir(&dir, &kept);
        let server = on();
        assert!(count(&mut server.connect(), "one") > OBJECTS / 4, "{}", server.log());
        delete_all(&mut server.connect());
        server.stop();
        if !in_place {
            std::fs::remove_dir_all(&dir).unwrap();
        }
        copy_dir(&kept, &dir);
        let server = on();
        let there = count(&mut server.connect(), "nothing");
        assert!(there == 0 && server.log().contains("is a copy"), "{there}: {}", server.log());
        server.kill();
    }
}

#[test]
fn another_flash_or_another_data_directory_in_between_makes_it_cold() {
    for (end, other_flash) in
        [(Server::kill as fn(Server) -> String, true), (Server::kill, false), (Server::stop, true)]
    {
        let site = filled(end);
        let (dir, flash) = if other_flash {
            (site.data_dir(), site.dir.path().join("flash2"))
        } else {
            (site.dir.path().join("data2"), site.flash())
        };
        let server = site.start_on(&dir, &flash, SMALL);
        let there = count(&mut server.connect(), "nothing");
        assert!(there == 0 && server.log().contains("cold: "), "{there}: {}", server.log());
        server.kill();
        let server = site.start(SMALL);
        let there = count(&mut server.connect(), "nothing");
        assert!(there == 0 && server.log().contains("cold: "), "{there}: {}", server.log());
        server.kill();
    }
}

#[test]
fn a_moved_data_directory_is_warm() {
    let site = Site::new();
    let (dir, moved) = (site.dir.path().join("o"), site.dir.path().join("moved"));
    for end in [Server::stop, Server::kill] {
        let server = site.start_on(&dir, &dir.join("flash"), SMALL);
        fill(&mut server.connect(), "one");
        end(server);
        std::fs::rename(&dir, &moved).unwrap();
        let server = site.start_on(&moved, &moved.join("flash"), SMALL);
        assert!(count(&mut server.connect(), "one") > OBJECTS / 4, "{}", server.log());
        server.stop();
        std::fs::rename(&moved, &dir).unwrap();
    }
}

#[test]
fn what_had_expired_stays_so_when_the_clock_is_set_back() {
    for end in [Server::kill, Server::stop] {
        let site = Site::new();
        let mut args = SMALL.to_vec();
        args.push("--enable-debugtime");
        let server = site.start(&args);
        let mut client = server.connect();
        for i in 0..OBJECTS {
            let value = format!("one-{i}-{:-<500}", "");
            let ttl = if i % 2 == 0 { 100 } else { 0 };
            let line = format!("set {} 0 {ttl} {}\r\n{value}\r\n", name(i), value.len());
            assert_eq!(client.ask(&line), "STORED");
        }
        assert!(client.stats("")["extstore_objects_used"].parse::<u32>().unwrap() > OBJECTS / 8);
        assert_eq!(client.ask("debugtime 200\r\n"), "OK");
        let expired = |client: &mut crate::client::Client| {
            (0..OBJECTS).step_by(2).all(|i| client.get(&name(i)).is_none())
        };
        assert!(expired(&mut client));
        end(server);
        // The system's clock is 200 s behind what the last run knew.
        for _ in 0..2 {
            let server = site.start(SMALL);
            let mut client = server.connect();
            assert!(expired(&mut client), "objects that had expired are back");
            let log = server.log();
            assert!(log.contains("warm: ") && log.contains("WARN"), "{log}");
            assert!(log.contains("behind") && log.contains("--format-flash"), "{log}");
            assert!((1..OBJECTS).step_by(2).any(|i| client.get(&name(i)).is_some()));
            server.kill();
        }
    }
}

#[test]
fn other_settings_keep_what_is_on_flash() {
    const BASE: &[&str] = &["-t", "1", "--flash-size", "16m", "--admission", "all"];
    let with = |more: &[&'static str]| [BASE, more].concat();
    let first = with(&["-m", "5", "-I", "16k", "--flash-object-size", "280"]);
    let others: &[&[&str]] = &[
        &["-m", "24", "-I", "16k", "--flash-object-size", "280"],
        &["-m", "5", "-I", "256k", "--flash-object-size", "280"],
        &["-m", "5", "-I", "16k", "--flash-object-size", "1000"],
    ];
    for (i, other) in others.iter().enumerate() {
        for end in [Server::stop, Server::kill] {
            let site = Site::new();
            let server = site.start(&first);
            fill(&mut server.connect(), "one");
            end(server);
            for round in 0..2 {
                let server = site.start(&with(other));
                let log = server.log();
                let there = count(&mut server.connect(), "one");
                assert!(
                    there > OBJECTS / 4 && log.contains("warm: "),
                    "{i} {round} {there}: {log}"
                );
                assert!(!log.contains("WARN"), "{log}");
                end(server);
            }
        }
    }
}

/// A start that could not keep what is on flash is refused, and loses nothing: there is a way back, and a way on.
#[test]
fn settings_that_cannot_hold_what_is_on_flash_are_refused_by_name() {
    for end in [Server::stop, Server::kill] {
        let site = Site::new();
        let with =
            |item| ["-m", "8", "-I", item, "-t", "1", "--flash-size", "16m", "--admission", "all"];
        let server = site.start(&with("16k"));
        fill(&mut server.connect(), "one");
        end(server);
        // None of the shards could hold such an object.
        for _ in 0..2 {
            let (code, last) = site.refused(&with("4m"));
            assert_eq!(code, Some(2), "{last}");
            assert!(last.contains("divided for -I 16 KiB"), "{last}");
            assert!(last.contains("-I 4 MiB cannot hold that"), "{last}");
            assert!(last.contains("Start with -I 16 KiB again"), "{last}");
            assert!(last.contains("--format-flash"), "{last}");
        }
        let server = site.start(&with("16k"));
        let there = count(&mut server.connect(), "one");
        assert!(there > OBJECTS / 8, "{there}: {}", server.log());
        end(server);
        let server = site.start(&[&with("4m")[..], &["--format-flash"]].concat());
        let there = count(&mut server.connect(), "nothing");
        assert!(there == 0 && server.log().contains("formatted"), "{there}: {}", server.log());
        fill(&mut server.connect(), "two");
        end(server);
        // Nothing is in the way where nothing could be kept anyway.
        let server = site.start(&with("4m"));
        assert!(count(&mut server.connect(), "two") > OBJECTS / 8, "{}", server.log());
        server.kill();
        site.lose_shared_memory();
        site.start(&with("16k")).stop();
    }
}

/// A run without flash keeps others with flash from its data directory for its life: they would not see what it deletes.
#[test]
fn a_run_with_flash_is_refused_beside_one_without_whose_data_directory_it_has() {
    for used_before in [true, false] {
        let site = if used_before { filled(Server::stop) } else { Site::new() };
        std::fs::create_dir_all(site.data_dir()).unwrap();
        let without = site.start_on(&site.data_dir(), Path::new(NONE), MEMORY);
        let other = |flash: &Path, args: &[&str]| {
            let socket = site.dir.path().join("other");
            let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
            command.env_remove("RUST_LOG").env_remove("STATE_DIRECTORY");
            command.args(["kv", "--http", "off", "-s"]).arg(&socket);
            command.arg("--data-dir").arg(site.data_dir()).arg("--flash").arg(flash).args(args);
            (command, socket)
        };
        let (code, last) = site.refused_as(other(&site.flash(), SMALL).0);
        let pid = format!("process {}", without.pid());
        assert!(code == Some(1) && last.contains(&pid), "{last}");
        assert!(last.contains("is without flash") && last.contains("--data-dir"), "{last}");
        // Those without flash are not in each other's way, and the last of them lets go.
        let (command, socket) = other(Path::new(NONE), MEMORY);
        let second = Server::of(command, socket);
        without.kill();
        let (code, last) = site.refused(SMALL);
        assert!(code == Some(1) && last.contains(&second.pid().to_string()), "{last}");
        assert!(!second.stop().contains("WARN"));
        let server = site.start(SMALL);
        let (there, log) = (count(&mut server.connect(), "nothing"), server.stop());
        assert!(there == 0 && log.contains("cold: "), "{there}: {log}");
    }
}

#[test]
fn a_stop_says_what_is_kept_and_what_is_lost() {
    let site = Site::new();
    let server = site.start(SMALL);
    for i in 0..7 {
        assert_eq!(server.connect().set(&name(i), b"small"), "STORED");
    }
    let log = server.stop();
    let words = |log: &str, before: &str| -> Option<u64> {
        log.split(before).next()?.rsplit(' ').next()?.parse().ok()
    };
    let lost =
        words(&log, " objects in DRAM are lost").or_else(|| words(&log, " in DRAM alone are lost"));
    assert!(lost.is_some_and(|lost| lost <= 7), "{log}");
    let server = site.start(SMALL);
    fill(&mut server.connect(), "one");
    let log = server.stop();
    let kept = words(&log, " objects on flash; ").unwrap_or_else(|| panic!("{log}"));
    assert!(words(&log, " in DRAM alone are lost").is_some_and(|lost| lost > 0), "{log}");
    let log = site.start(SMALL).stop();
    assert!(log.contains(&format!("warm: {kept} objects on flash")), "{kept}: {log}");
}

#[test]
fn format_flash_makes_a_flash_file_anew_with_the_size_asked_for() {
    let site = filled(Server::stop);
    for size in [32u64 << 20, 24 << 20] {
        let megabytes = format!("{}m", size >> 20);
        let args = ["-m", "5", "-I", "16k", "--flash-size", &megabytes];
        // A size that cannot be served loses nothing.
        let before = std::fs::metadata(site.flash()).unwrap().len();
        let (code, last) = site.refused(&[
            "-m",
            "5",
            "-I",
            "16k",
            "--flash-size",
            "4g",
            "--flash-object-size=280",
            "--format-flash",
        ]);
        assert_eq!(code, Some(2), "{last}");
        assert_eq!(std::fs::metadata(site.flash()).unwrap().len(), before);
        let (code, last) = site.refused(&args);
        assert!(code == Some(1) && last.contains("--format-flash"), "{last}");
        let server = site.start(&[&args[..], &["--format-flash"]].concat());
        assert_eq!(std::fs::metadata(site.flash()).unwrap().len(), size);
        let there = count(&mut server.connect(), "nothing");
        assert!(there == 0 && server.log().contains("formatted"), "{there}: {}", server.log());
        fill(&mut server.connect(), "two");
        server.stop();
        let server = site.start(&args);
        assert!(count(&mut server.connect(), "two") > OBJECTS / 8, "{}", server.log());
        server.stop();
    }
}

#[test]
fn nothing_is_made_under_dev() {
    let site = Site::new();
    let flash = PathBuf::from(format!("/dev/larder-test-{}", std::process::id()));
    // By a link to a link, of which one leads from its own directory.
    let (link, second) = (site.dir.path().join("link"), site.dir.path().join("second"));
    std::os::unix::fs::symlink(&flash, &link).unwrap();
    std::os::unix::fs::symlink("link", &second).unwrap();
    for path in [&flash, &link, &second] {
        for size in [&["--flash-size", "16m"][..], &[]] {
            let command = site.command_on(&site.data_dir(), path, &[MEMORY, size].concat());
            let (code, last) = site.refused_as(command);
            let made = flash.exists();
            std::fs::remove_file(&flash).ok();
            assert!(!made && code == Some(2), "{last}");
            assert!(last.contains("/dev") && last.contains("a file elsewhere"), "{last}");
            assert!(!site.data_dir().exists());
        }
    }
}

/// Of root alone can it be asked to become somebody else.
#[test]
#[cfg_attr(without = "root", ignore = "needs root (who alone can become another user)")]
fn a_user_who_may_not_make_the_data_directory_is_given_it() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let site = Site::new();
    std::fs::set_permissions(site.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let (dir, run) = (site.dir.path().join("only-root/larder"), site.dir.path().join("run"));
    std::fs::create_dir(&run).unwrap();
    std::fs::set_permissions(&run, std::fs::Permissions::from_mode(0o777)).unwrap();
    let start = || {
        let mut c = Command::new(env!("CARGO_BIN_EXE_larder"));
        c.env_remove("RUST_LOG").env("STATE_DIRECTORY", &dir);
        c.args(["kv", "--http", "off", "-u", "nobody", "-s"]).arg(run.join("sock")).args(SMALL);
        Server::of(c, run.join("sock"))
    };
    for _ in 0..2 {
        let server = start();
        assert_eq!(server.connect().set("a", b"1"), "STORED");
        server.stop();
        let found = std::fs::metadata(&dir).unwrap();
        assert_eq!((found.uid() == 0, found.mode() & 0o777), (false, 0o700));
        assert_eq!(std::fs::metadata(dir.join("flash")).unwrap().uid(), found.uid());
    }
}

/// What the operator of the random test has before him.
struct Moves<'a> {
    site: &'a Site,
    rng: Rng,
    book: Notebook,
    /// The directory in use, with the flash in it.
    dir: PathBuf,
    /// A copy of it that was made while nobody used it.
    copy: PathBuf,
    warm: u32,
    cold: u32,
    /// Starts that found in a file what had been in DRAM.
    dram: u32,
    reads: u64,
    /// When the last life ended, by the book.
    ended: Nanos,
}

const MIX: Mix = Mix { few: 48, many: 8_000, most: 4_000, counters: 0, pause: false };

impl Moves<'_> {
    /// One life of a server on this directory and flash, under load, with random settings; how it ended.
    fn life(&mut self, dir: &Path, flash: &Path, kill: bool) {
        let memory = ["2", "3", "8"][self.rng.below(3) as usize];
        let item = ["16k", "64k"][self.rng.below(2) as usize];
        let object = ["280", "1000"][self.rng.below(2) as usize];
        let mut args = vec!["-m", memory, "-I", item, "-t", "2", "--enable-debugtime"];
        if flash != Path::new(NONE) {
            args.extend([
                "--flash-object-size",
                object,
                "--flash-size",
                "16m",
                "--admission",
                "all",
            ]);
        }
        // It lies in the directory: it is copied and put back as all of it is.
        let file = dir.join("mem").display().to_string();
        if self.rng.chance(0.7) {
            args.extend(["-e", &file]);
        }
        let command = self.site.command_on(dir, flash, &args);
        let server = match Server::try_of(command, self.site.socket()) {
            Ok(server) => server,
            Err(log) => {
                // These settings cannot hold what is there, and so nothing was lost: this operator wants them all the same.
                assert!(
                    log.contains("cannot hold that") && log.contains("--format-flash"),
                    "{log}"
                );
                args.push("--format-flash");
                self.site.start_on(dir, flash, &args)
            }
        };
        self.site.remember_region_of(flash);
        let mut client = server.connect();
        self.book.falls_behind(self.ended);
        self.book.sweep(&mut client, &MIX).unwrap();
        self.book.check();
        let seed = self.rng.next_u64() >> 32;
        under_load(
            &self.book,
            MIX,
            4,
            seed,
            || server.connect(),
            || {
                // However slow the machine: until enough has been done.
                let began = std::time::Instant::now();
                let enough = |client: &mut crate::client::Client| {
                    client.stats("")["cmd_set"].parse::<u64>().unwrap() > 12_000
                };
                while !enough(&mut client) && began.elapsed().as_secs() < 20 {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
            },
        );
        if self.rng.chance(0.3) {
            // What lives for a few seconds is gone by then, and stays so though the next start knows nothing of this.
            self.book.jump(&mut client, 5);
            self.book.sweep(&mut client, &MIX).unwrap();
        }
        self.reads += client.stats("").get("get_extstore").map_or(0, |n| n.parse().unwrap());
        drop(client);
        self.ended = self.book.now();
        let log = if kill { server.kill() } else { server.stop() };
        let says = |what: &str| u32::from(log.contains(what));
        self.warm += says("INFO warm: ");
        self.cold += says("INFO cold: ");
        self.dram += says("DRAM is warm: ");
    }

    fn own(&mut self, kill: bool) {
        let dir = self.dir.clone();
        self.life(&dir, &dir.join("flash"), kill);
    }

    fn step(&mut self) {
        let kill = self.rng.chance(0.5);
        let dir = self.dir.clone();
        match self.rng.below(10) {
            // As ever: other settings are moves enough.
            0..4 => self.own(kill),
            4 => self.life(&dir, Path::new(NONE), kill),
            5 => self.life(&dir, &dir.join("flash2"), kill),
            6 => {
                // A restart of the machine.
                self.own(kill);
                if let Some(region) = crate::server::region_of(&dir.join("flash")) {
                    std::fs::remove_file(region).ok();
                }
            }
            7 => {
                // Put back from a copy: all of it, the flash alone, everything else.
                copy_dir(&dir, &self.copy);
                self.own(kill);
                let (copy, which) = (self.copy.clone(), self.rng.below(3));
                for entry in std::fs::read_dir(&copy).unwrap() {
                    let name = entry.unwrap().file_name();
                    let is_flash = name == "flash";
                    if which == 0 || is_flash == (which == 1) {
                        if self.rng.chance(0.5) {
                            std::fs::remove_file(dir.join(&name)).ok();
                        }
                        std::fs::copy(copy.join(&name), dir.join(&name)).unwrap();
                    }
                }
            }
            8 => {
                // A copy that is used in turn, after a kill: the memory shows it.
                self.own(true);
                copy_dir(&dir, &self.copy);
                if self.rng.chance(0.5) {
                    self.own(true);
                }
                let copy = self.copy.clone();
                self.life(&copy, &copy.join("flash"), kill);
            }
            _ => {
                // Another directory for the same flash, or the same directory under another name.
                self.own(kill);
                let other = self.site.dir.path().join("other");
                if self.rng.chance(0.5) {
                    self.life(&other, &dir.join("flash"), kill);
                } else {
                    std::fs::remove_dir_all(&other).ok();
                    std::fs::rename(&dir, &other).unwrap();
                    self.life(&other, &other.join("flash"), kill);
                    std::fs::rename(&other, &dir).unwrap();
                }
            }
        }
        // The last word.
        self.own(self.rng.clone().chance(0.5));
    }
}

#[test]
fn an_operators_moves_in_any_order() {
    let site = Site::new();
    let mut moves = Moves {
        dir: site.dir.path().join("o"),
        copy: site.dir.path().join("copy"),
        site: &site,
        rng: Rng::new(std::env::var("LARDER_SEED").map_or(5, |s| s.parse().unwrap())),
        book: Notebook::new(),
        warm: 0,
        cold: 0,
        dram: 0,
        reads: 0,
        ended: 0,
    };
    for _ in 0..std::env::var("LARDER_MOVES").map_or(8, |s| s.parse().unwrap()) {
        moves.step();
    }
    moves.book.check();
    assert!(
        moves.warm > 1 && moves.cold > 1 && moves.dram > 1 && moves.reads > 100,
        "{} {} {} {}",
        moves.warm,
        moves.cold,
        moves.dram,
        moves.reads
    );
}
