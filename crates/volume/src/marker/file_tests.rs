use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use larder_format::block::marker::{COPY_BYTES, Marker};
use tempfile::TempDir;

use super::cut::{Cut, Fault};
use super::file::FileMedium;
use super::place::Place;
use super::place_tests::{marker, read, there};
use super::{Found, MarkerIoError, MarkerPlace, PlaceOptions, marker_place};
use crate::file::FileBacking;
use crate::{Backing, OpenOptions, Uri};

const NONE: Found = Found::Absent { was: false };

type Put<'a> = &'a dyn Fn(&Path);

/// A directory with an image.
struct Bench {
    dir: TempDir,
}

impl Bench {
    fn new() -> Bench {
        let bench = Bench { dir: TempDir::new().unwrap() };
        fs::File::create(bench.path("disk")).unwrap().set_len(1 << 20).unwrap();
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn open(&self, name: &str) -> FileBacking {
        let uri = Uri::File { path: self.path(name) };
        FileBacking::open(&uri, &OpenOptions { lease: false, ..OpenOptions::default() }).unwrap()
    }

    fn place(&self, name: &str) -> Box<dyn MarkerPlace> {
        marker_place(&self.open(name), &PlaceOptions::default()).unwrap()
    }

    fn medium(&self) -> Place<FileMedium> {
        let image = self.open("disk").image().unwrap();
        Place::new(FileMedium::beside("disk", image, false).unwrap())
    }

    /// The image with this marker beside it.
    fn with(number: u64) -> Bench {
        let bench = Bench::new();
        let mut place = bench.place("disk");
        read(&mut *place);
        place.write(&marker(number)).unwrap();
        bench
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir.path()).unwrap();
        let name = |e: std::io::Result<fs::DirEntry>| e.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<_> = entries.map(name).collect();
        names.sort();
        names
    }

    /// Whether this file system has attributes at all.
    fn has_attributes(&self) -> bool {
        let image = self.open("disk").image().unwrap();
        let before = image.attribute().get().unwrap();
        let has = image.attribute().set(Some(b"x")).is_ok();
        if has {
            image.attribute().set(before.as_deref()).unwrap();
        }
        has
    }
}

#[test]
fn a_marker_is_written_read_and_removed() {
    let bench = Bench::new();
    fs::set_permissions(bench.path("disk"), fs::Permissions::from_mode(0o660)).unwrap();
    let mut place = bench.place("disk");
    assert!(place.describe().contains("disk.larder") && place.is_fenced());
    assert_eq!(read(&mut *place), NONE);
    assert_eq!(bench.names(), ["disk"], "looking makes nothing");
    for number in 1..6 {
        place.write(&marker(number)).unwrap();
        let bytes = fs::read(bench.path("disk.larder")).unwrap();
        let copy = marker(number).encode();
        assert!(bytes == [copy.clone(), copy].concat(), "both copies have it");
    }
    assert_eq!(fs::metadata(bench.path("disk.larder")).unwrap().mode() & 0o777, 0o660);
    assert_eq!(read(&mut *place), there(5));
    drop(place);
    let mut place = bench.place("disk");
    assert_eq!(read(&mut *place), there(5));
    place.remove().unwrap();
    assert_eq!(bench.names(), ["disk"]);
    assert_eq!(read(&mut *place), NONE, "and nothing says that there was one");
    place.write(&marker(1)).unwrap();
    assert_eq!(bench.names(), ["disk", "disk.larder"]);
}

/// A journal lies behind it.
#[test]
fn what_lies_behind_the_copies_stays() {
    let bench = Bench::with(1);
    let file = fs::OpenOptions::new().write(true).open(bench.path("disk.larder")).unwrap();
    file.write_all_at(&[9; 100], 8192).unwrap();
    let mut place = bench.place("disk");
    read(&mut *place);
    place.write(&marker(2)).unwrap();
    assert_eq!(fs::read(bench.path("disk.larder")).unwrap()[8192..], [9; 100]);
}

#[test]
fn the_marker_is_beside_the_image_wherever_links_lead_to_it_from() {
    let bench = Bench::with(1);
    let elsewhere = TempDir::new().unwrap();
    symlink(bench.path("disk"), elsewhere.path().join("link")).unwrap();
    let store = FileBacking::open(
        &Uri::File { path: elsewhere.path().join("link") },
        &OpenOptions { lease: false, ..OpenOptions::default() },
    );
    let mut place = marker_place(&store.unwrap(), &PlaceOptions::default()).unwrap();
    assert_eq!(read(&mut *place), there(1));
}

#[test]
fn a_power_cut_at_any_step_leaves_the_marker_before_or_the_new_one() {
    for before in [None, Some(1)] {
        for step in 0.. {
            let bench = before.map_or_else(Bench::new, Bench::with);
            let mut place = bench.medium();
            let first = place.read().unwrap();
            place.medium().cut = Cut::after(step, Fault::Power);
            let written = place.write(&marker(2));
            let came = place.medium().cut.has_come();
            drop(place);
            let mut place = bench.place("disk");
            let found = read(&mut *place);
            match &written {
                Ok(()) => assert_eq!(found, there(2)),
                Err(_) => assert!(found == first || found == there(2), "{step}: {found:?}"),
            }
            // Whatever was left, the next write goes well, and leaves nothing else.
            place.write(&marker(3)).unwrap();
            assert_eq!(read(&mut *place), there(3));
            assert_eq!(bench.names(), ["disk", "disk.larder"], "{step}");
            if !came {
                assert!(step > 3);
                break;
            }
        }
    }
}

#[test]
fn a_power_cut_at_any_step_of_a_removal_never_leaves_a_marker_that_is_missed() {
    for step in 0.. {
        let bench = Bench::with(1);
        let mut place = bench.medium();
        place.read().unwrap();
        place.medium().cut = Cut::after(step, Fault::Power);
        let removed = place.remove();
        let came = place.medium().cut.has_come();
        drop(place);
        let found = read(&mut *bench.place("disk"));
        assert!(found == NONE || found == there(1) && removed.is_err(), "{step}: {found:?}");
        if !came {
            break;
        }
    }
}

#[test]
fn on_a_full_disk_the_marker_before_stays_and_no_part_of_a_new_one() {
    for before in [None, Some(1)] {
        for step in 0.. {
            let bench = before.map_or_else(Bench::new, Bench::with);
            let mut place = bench.medium();
            let first = place.read().unwrap();
            place.medium().cut = Cut::after(step, Fault::Full);
            let written = place.write(&marker(2));
            if !place.medium().cut.has_come() {
                break;
            }
            if let Err(error) = &written {
                let text = error.to_string();
                assert!(text.contains("disk.larder") && text.contains("free some space"), "{text}");
                assert!(!bench.names().contains(&"disk.larder.new".to_owned()), "{step}");
                // The holder goes on when there is room.
                place.write(&marker(3)).unwrap();
                assert_eq!(place.read().unwrap(), there(3));
            }
            drop(place);
            let found = read(&mut *bench.place("disk"));
            assert!(found == first || matches!(found, Found::There(_)), "{found:?}");
        }
    }
}

#[test]
fn one_torn_copy_is_made_up_for_and_two_are_damage() {
    for copy in [0u64, 1] {
        let bench = Bench::with(1);
        let file = fs::OpenOptions::new().write(true).open(bench.path("disk.larder")).unwrap();
        file.write_all_at(&[0xee; 300], copy * COPY_BYTES as u64 + 512).unwrap();
        let mut place = bench.place("disk");
        assert_eq!(read(&mut *place), there(1));
        file.write_all_at(&[0xee; 300], (1 - copy) * COPY_BYTES as u64 + 512).unwrap();
        assert_eq!(read(&mut *place), Found::Damaged);
        place.write(&marker(2)).unwrap();
        assert_eq!(read(&mut *place), there(2));
    }
}

#[test]
fn a_marker_that_was_cut_short_is_read_and_made_whole() {
    let bench = Bench::with(1);
    let file = fs::OpenOptions::new().write(true).open(bench.path("disk.larder")).unwrap();
    file.set_len(5000).unwrap();
    let mut place = bench.place("disk");
    assert_eq!(read(&mut *place), there(1));
    place.write(&marker(2)).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 8192);
    file.set_len(100).unwrap();
    assert_eq!(read(&mut *place), Found::Damaged);
}

#[test]
fn an_image_that_is_renamed_without_its_marker_says_that_there_was_one() {
    let bench = Bench::with(1);
    if !bench.has_attributes() {
        return;
    }
    fs::rename(bench.path("disk"), bench.path("moved")).unwrap();
    let mut place = bench.place("moved");
    assert_eq!(read(&mut *place), Found::Absent { was: true });
    // With its marker it is as it was, and then knows its new place.
    fs::rename(bench.path("disk.larder"), bench.path("moved.larder")).unwrap();
    assert_eq!(read(&mut *place), there(1));
    place.write(&marker(2)).unwrap();
    let image = bench.open("moved").image().unwrap();
    let value = image.attribute().get().unwrap().unwrap();
    assert!(String::from_utf8(value).unwrap().ends_with("moved.larder"));
}

/// By a name that is too long, as by one that is mounted as a single file, it has no place beside it: it knows where that is.
#[test]
fn an_image_has_its_marker_also_by_a_name_that_has_no_place() {
    let bench = Bench::with(1);
    if !bench.has_attributes() {
        return;
    }
    let long = "x".repeat(250);
    fs::hard_link(bench.path("disk"), bench.path(&long)).unwrap();
    for look in [true, false] {
        let options = PlaceOptions { look, ..PlaceOptions::default() };
        let mut place = marker_place(&bench.open(&long), &options).unwrap();
        assert_eq!(read(&mut *place), there(1));
        assert!(place.named_by_store().unwrap().is_this);
    }
    fs::remove_file(bench.path("disk.larder")).unwrap();
    assert_eq!(read(&mut *bench.place(&long)), Found::Absent { was: true });
    let image = bench.open(&long).image().unwrap();
    image.attribute().set(None).unwrap();
    let none = marker_place(&bench.open(&long), &PlaceOptions::default()).map(|_| ());
    assert!(matches!(none, Err(MarkerIoError::NoPlace { .. })), "{none:?}");
}

/// As far as the copy keeps attributes. One that does not cannot be told from an image that never had a marker; one with the
/// marker has it as it was, and its identity tells them apart.
#[test]
fn a_copied_image_says_that_there_was_a_marker() {
    let bench = Bench::with(1);
    if !bench.has_attributes() {
        return;
    }
    fs::copy(bench.path("disk"), bench.path("copy")).unwrap();
    let value = bench.open("disk").image().unwrap().attribute().get().unwrap();
    let copy = bench.open("copy").image().unwrap();
    copy.attribute().set(value.as_deref()).unwrap();
    assert_eq!(read(&mut *bench.place("copy")), Found::Absent { was: true });
    copy.attribute().set(None).unwrap();
    copy.attribute().set(None).unwrap();
    assert_eq!(read(&mut *bench.place("copy")), NONE);
    fs::copy(bench.path("disk.larder"), bench.path("copy.larder")).unwrap();
    assert_eq!(read(&mut *bench.place("copy")), there(1));
}

#[test]
fn a_marker_that_is_removed_while_it_is_held_is_missed_before_the_next_write() {
    let bench = Bench::with(1);
    let mut place = bench.place("disk");
    read(&mut *place);
    fs::remove_file(bench.path("disk.larder")).unwrap();
    let refused = place.write(&marker(2));
    assert!(matches!(refused, Err(MarkerIoError::Changed { .. })), "{refused:?}");
    assert_eq!(bench.names(), ["disk"]);
    assert_eq!(read(&mut *place), Found::Absent { was: bench.has_attributes() });
    place.write(&marker(2)).unwrap();
    // Another one in its place.
    fs::write(bench.path("other"), marker(9).encode()).unwrap();
    fs::rename(bench.path("other"), bench.path("disk.larder")).unwrap();
    assert!(matches!(place.write(&marker(3)), Err(MarkerIoError::Changed { .. })));
    assert_eq!(read(&mut *place), there(9));
}

#[test]
fn what_is_there_and_is_no_marker_is_left_as_it_is() {
    let text = b"somebody's notes".to_vec();
    let put: [(&str, Put<'_>); 6] = [
        ("is a directory", &|at| fs::create_dir(at).unwrap()),
        ("is no marker", &|at| fs::write(at, &text).unwrap()),
        ("is empty", &|at| fs::write(at, "").unwrap()),
        ("is no marker", &|at| fs::write(at, [0; 8192]).unwrap()),
        ("symbolic link", &|at| symlink("nowhere", at).unwrap()),
        ("is no regular file", &|at| {
            std::os::unix::net::UnixListener::bind(at).unwrap();
        }),
    ];
    for (what, put) in put {
        let bench = Bench::new();
        let at = bench.path("disk.larder");
        let mut early = bench.place("disk");
        read(&mut *early);
        put(&at);
        let before = fs::symlink_metadata(&at).unwrap();
        let mut place = bench.place("disk");
        for error in [place.read().unwrap_err(), early.write(&marker(1)).unwrap_err()] {
            let text = error.to_string();
            assert!(matches!(error, MarkerIoError::NotAMarker { .. }), "{text}");
            assert!(text.contains(what) && text.contains("disk.larder"), "{text}");
        }
        assert!(place.write(&marker(1)).is_err() && place.remove().is_err());
        let after = fs::symlink_metadata(&at).unwrap();
        assert_eq!((before.ino(), before.len()), (after.ino(), after.len()));
        assert_eq!(bench.names(), ["disk", "disk.larder"]);
    }
}

#[test]
fn somebody_elses_file_where_a_marker_is_made_is_left_as_it_is() {
    let bench = Bench::new();
    fs::write(bench.path("disk.larder.new"), "somebody's notes").unwrap();
    let mut place = bench.place("disk");
    read(&mut *place);
    let error = place.write(&marker(1)).unwrap_err();
    assert!(error.to_string().contains("disk.larder.new"), "{error}");
    assert_eq!(fs::read(bench.path("disk.larder.new")).unwrap(), b"somebody's notes");
    // What a power cut has left there is not in the way: empty, written in part, or whole.
    for left in [Vec::new(), vec![0; 8192], marker(7).encode()] {
        fs::remove_file(bench.path("disk.larder")).ok();
        fs::write(bench.path("disk.larder.new"), left).unwrap();
        read(&mut *place);
        place.write(&marker(1)).unwrap();
        assert_eq!(bench.names(), ["disk", "disk.larder"]);
    }
}

#[test]
fn a_file_that_may_not_be_read_is_an_error() {
    // Root may read all.
    if rustix::process::geteuid().is_root() {
        return;
    }
    let bench = Bench::with(1);
    fs::set_permissions(bench.path("disk.larder"), fs::Permissions::from_mode(0o000)).unwrap();
    let error = bench.place("disk").read().unwrap_err();
    assert!(error.to_string().contains("disk.larder") && error.to_string().contains("user"));
}

#[test]
fn a_second_holder_is_refused_and_told_who_has_it() {
    let bench = Bench::with(1);
    let mut place = bench.place("disk");
    read(&mut *place);
    let mut second = bench.place("disk");
    let error = second.read().unwrap_err();
    assert!(matches!(error, MarkerIoError::Held { .. }));
    let text = error.to_string();
    assert!(text.contains("disk.larder") && text.contains("this process itself"), "{text}");
    assert!(second.write(&marker(2)).is_err());
    // Whoever only looks may.
    let look = PlaceOptions { look: true, ..PlaceOptions::default() };
    let mut looking = marker_place(&bench.open("disk"), &look).unwrap();
    assert_eq!(read(&mut *looking), there(1));
    assert!(!looking.is_fenced());
    assert!(matches!(looking.write(&marker(2)), Err(MarkerIoError::LookOnly { .. })));
    place.write(&marker(2)).unwrap();
    drop(place);
    assert_eq!(read(&mut *second), there(2));
}

/// Of two that have both found none, one makes it.
#[test]
fn two_that_make_the_first_marker_do_not_overwrite_each_other() {
    let bench = Bench::new();
    let (mut one, mut other) = (bench.place("disk"), bench.place("disk"));
    read(&mut *one);
    read(&mut *other);
    one.write(&marker(1)).unwrap();
    let refused = other.write(&marker(2));
    assert!(matches!(refused, Err(MarkerIoError::Held { .. })), "{refused:?}");
    drop(one);
    let refused = other.write(&marker(2));
    assert!(matches!(refused, Err(MarkerIoError::Changed { .. })), "{refused:?}");
    assert_eq!(bench.names(), ["disk", "disk.larder"]);
    assert_eq!(read(&mut *other), there(1));
}

/// At any moment between the look and the rename.
#[test]
fn a_file_that_appears_meanwhile_is_not_overwritten() {
    let mut appeared = 0;
    for step in 0.. {
        let bench = Bench::new();
        let mut place = bench.medium();
        place.read().unwrap();
        let at = bench.path("disk.larder");
        place.medium().cut = Cut::meanwhile(step, move || {
            if let Ok(file) = fs::OpenOptions::new().write(true).create_new(true).open(at) {
                file.write_all_at(b"somebody's notes", 0).unwrap();
            }
        });
        let written = place.write(&marker(1));
        if !place.medium().cut.has_come() {
            break;
        }
        assert_eq!(bench.names(), ["disk", "disk.larder"]);
        let bytes = fs::read(bench.path("disk.larder")).unwrap();
        if bytes == b"somebody's notes" {
            appeared += 1;
            assert!(matches!(written, Err(MarkerIoError::Changed { .. })), "{written:?}");
        } else {
            written.unwrap();
        }
    }
    assert!(appeared >= 4, "{appeared}");
}

/// The attribute changes the image's times: nobody takes that for somebody else's write.
#[test]
fn a_marker_is_no_change_of_the_image_by_somebody_else() {
    let bench = Bench::new();
    let store = bench.open("disk");
    let mut place = marker_place(&store, &PlaceOptions::default()).unwrap();
    read(&mut *place);
    for number in 1..4 {
        std::thread::sleep(std::time::Duration::from_millis(50));
        place.write(&marker(number)).unwrap();
        assert_eq!(store.look(), 0);
    }
    std::thread::sleep(std::time::Duration::from_millis(50));
    place.remove().unwrap();
    assert_eq!(store.look(), 0);
    let let_go = store.identity().unwrap().encode();
    drop((place, store));
    assert!(bench.open("disk").identity().unwrap().proves(&let_go, true, false).is_ok());
}

/// Whatever lies there, a read says something, and what is no marker stays.
#[test]
fn mutated_files_are_read_without_harm() {
    let mut rng = larder_base::Rng::new(3);
    let bench = Bench::with(1);
    let whole = fs::read(bench.path("disk.larder")).unwrap();
    let mut place = bench.place("disk");
    for _ in 0..300 {
        let mut bytes = whole.clone();
        for _ in 0..rng.range(1, 5) {
            let at = rng.below(bytes.len() as u64) as usize;
            bytes[at] = rng.below(256) as u8;
        }
        bytes.truncate(rng.below(whole.len() as u64 * 2) as usize);
        let file = fs::OpenOptions::new().write(true).open(bench.path("disk.larder")).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        match place.read() {
            Ok(Found::There(found)) => assert_eq!(*found, marker(1)),
            Ok(Found::Damaged) => {}
            Ok(Found::Absent { .. }) => panic!("it is there"),
            Err(_) => assert!(place.write(&Marker { number: 99, ..marker(1) }).is_err()),
        }
        assert_eq!(fs::read(bench.path("disk.larder")).unwrap(), bytes);
    }
}

/// What is made in the directory around it does not go where the image goes, a container's for one.
#[test]
fn an_image_that_is_mounted_by_itself_has_no_place_beside_it() {
    let bench = Bench::new();
    let alone = bench.path("alone");
    fs::write(&alone, "").unwrap();
    let run = |name: &str, arguments: &[&std::ffi::OsStr]| {
        let done = std::process::Command::new(name).args(arguments).output();
        done.is_ok_and(|done| done.status.success())
    };
    // Only root may, and not everywhere.
    if !run("mount", &["--bind".as_ref(), bench.path("disk").as_os_str(), alone.as_os_str()]) {
        return;
    }
    let store = bench.open("alone");
    let beside = marker_place(&store, &PlaceOptions::default()).map(|place| place.describe());
    drop(store);
    assert!(run("umount", &[alone.as_os_str()]));
    let text = beside.unwrap_err().to_string();
    assert!(text.contains("mounted as a single file") && text.contains("name a place"), "{text}");
}
