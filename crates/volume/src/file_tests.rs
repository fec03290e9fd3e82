use std::time::Duration;

use larder_runtime::{AlignedBuf, Payload};
use tempfile::TempDir;

use super::*;
use crate::OpenOptions;
use crate::testing::{Client, against_a_model, one, run};

fn backing(dir: &TempDir, size: u64, direct: bool, ring: RingChoice) -> FileBacking {
    let path = dir.path().join("disk");
    File::create(&path).unwrap().set_len(size).unwrap();
    let options = OpenOptions { direct, ..OpenOptions::default() };
    FileBacking::open_path("file:disk".into(), &path, &options, ring).unwrap()
}

#[test]
fn random_operations() {
    for (seed, (direct, ring)) in [
        (false, RingChoice::Threads),
        (true, RingChoice::Threads),
        (false, RingChoice::Auto),
        (true, RingChoice::Auto),
    ]
    .into_iter()
    .enumerate()
    {
        let dir = TempDir::new().unwrap();
        let backing = backing(&dir, 2 << 20, direct, ring);
        let mut session = backing.session().unwrap();
        let model = against_a_model(&mut *session, 2 << 20, seed as u64, 25);
        one(&mut *session, Op::Flush).outcome.unwrap();
        assert!(std::fs::read(dir.path().join("disk")).unwrap() == model);
    }
}

#[test]
fn holes_are_told_from_data() {
    let dir = TempDir::new().unwrap();
    let backing = backing(&dir, 1 << 20, false, RingChoice::Auto);
    let mut session = backing.session().unwrap();
    let mut buf = AlignedBuf::zeroed(65536);
    buf.fill(1);
    one(&mut *session, Op::Write { offset: 131_072, data: Payload::new(buf), fua: true })
        .outcome
        .unwrap();
    let status = |session: &mut dyn Session, one_only| {
        one(session, Op::Status { offset: 0, len: 1 << 20, one: one_only }).outcome.unwrap()
    };
    let list = status(&mut *session, false);
    let hole = Extent { len: 131_072, hole: true, zero: true };
    let data = Extent { len: 65536, hole: false, zero: false };
    assert_eq!(list[..2], [hole, data]);
    assert_eq!(list.iter().map(|e| e.len).sum::<u32>(), 1 << 20);
    assert_eq!(status(&mut *session, true), [hole]);
    one(&mut *session, Op::Trim { offset: 131_072, len: 65536, fua: true }).outcome.unwrap();
    assert_eq!(status(&mut *session, false).len(), 1);
}

#[test]
fn who_it_is_and_whether_it_changed() {
    let dir = TempDir::new().unwrap();
    let backing = backing(&dir, 1 << 20, false, RingChoice::Threads);
    let before = backing.identity().unwrap();
    assert_eq!(before, backing.identity().unwrap());
    let mut session = backing.session().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let data = Payload::new(AlignedBuf::zeroed(10));
    one(&mut *session, Op::Write { offset: 0, data, fua: false }).outcome.unwrap();
    assert_ne!(before, backing.identity().unwrap());
}

/// What somebody else changes while it is open is not let go as if it were what is cached: not after own writes, not
/// without any, not when it is only read.
#[test]
fn a_change_that_is_not_ours_is_not_let_go_as_ours() {
    let foreign = |path: &std::path::Path| {
        std::thread::sleep(Duration::from_millis(1300));
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"XXXX", 5000).unwrap();
        std::thread::sleep(Duration::from_millis(30));
    };
    let again = |dir: &TempDir, let_go: &[u8; 64]| {
        let (path, options) = (dir.path().join("disk"), OpenOptions::default());
        let next = FileBacking::open_path("file:disk".into(), &path, &options, RingChoice::Threads);
        next.unwrap().identity().unwrap().proves(let_go, true, false)
    };
    for (own, change) in [(true, true), (false, true), (true, false), (false, false)] {
        let dir = TempDir::new().unwrap();
        let first = backing(&dir, 1 << 20, false, RingChoice::Threads);
        if own {
            let mut session = first.session().unwrap();
            let data = Payload::new(AlignedBuf::zeroed(10));
            one(&mut *session, Op::Write { offset: 0, data, fua: false }).outcome.unwrap();
        }
        if change {
            foreign(&dir.path().join("disk"));
        }
        let let_go = first.identity().unwrap().encode();
        drop(first);
        assert_eq!(again(&dir, &let_go).is_ok(), !change, "own writes: {own}");
    }
}

/// A look at the file, which clients' requests do too, asks nothing of its path. Whoever looks there says whether the file was written
/// to or renamed.
#[test]
fn what_is_changed_is_told_from_what_is_renamed_by_who_looks_at_the_path() {
    let dir = TempDir::new().unwrap();
    let backing = backing(&dir, 1 << 20, false, RingChoice::Caller);
    let (disk, other) = (dir.path().join("disk"), dir.path().join("other"));
    // Times go in steps.
    let pause = || std::thread::sleep(Duration::from_millis(30));
    let state = || backing.trouble().map(|trouble| trouble.state);
    let found = || {
        backing.look_at_place();
        state()
    };
    pause();
    std::fs::rename(&disk, &other).unwrap();
    assert_eq!((backing.look(), state()), (1, None));
    assert_eq!(found(), Some("moved"));
    pause();
    std::fs::rename(&other, &disk).unwrap();
    assert_eq!(backing.look(), 2);
    assert_eq!(found(), None);
    pause();
    let file = std::fs::OpenOptions::new().write(true).open(&disk).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"XXXX", 5000).unwrap();
    assert_eq!((backing.look(), state()), (3, None));
    assert_eq!(found(), Some("changed"));
}

#[test]
fn what_cannot_be_opened() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("disk");
    let open = |read_only| {
        let uri: Uri = format!("file:{}", path.display()).parse().unwrap();
        FileBacking::open(&uri, &OpenOptions { read_only, ..OpenOptions::default() })
    };
    let why = |read_only| open(read_only).expect_err("it cannot").to_string();
    assert!(why(false).contains("does not exist"));
    File::create(&path).unwrap();
    assert!(why(true).contains("empty"));
    File::create(&path).unwrap().set_len(5000).unwrap();
    let first = open(false).unwrap();
    assert_eq!(first.capabilities().size, 5000);
    assert!(why(false).contains("locked by this daemon itself"), "two writers");
    drop(first);
    let first = open(true).unwrap();
    assert!(open(true).is_ok(), "two readers");
    assert!(why(false).contains("locked by this daemon itself"), "a writer beside a reader");
    drop(first);
    let first = open(false).unwrap();
    assert!(why(true).contains("locked by this daemon itself"), "a reader beside a writer");
    let uri: Uri = format!("file:{}", path.display()).parse().unwrap();
    let careless = OpenOptions { lease: false, ..OpenOptions::default() };
    assert!(FileBacking::open(&uri, &careless).is_ok(), "two writers that vouch for each other");
    drop(first);
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(why(true).contains("neither"));
}

/// The file shrinks while it is served: an error, not a hang and not zeroes.
#[test]
fn a_file_that_shrinks() {
    let dir = TempDir::new().unwrap();
    let backing = backing(&dir, 1 << 20, false, RingChoice::Auto);
    let mut session = backing.session().unwrap();
    File::options().write(true).open(dir.path().join("disk")).unwrap().set_len(4096).unwrap();
    let done = one(&mut *session, Op::Read { offset: 8192, buf: AlignedBuf::zeroed(4096) });
    let failure = done.outcome.unwrap_err();
    assert_eq!(failure.kind, FailureKind::Failed);
    assert!(failure.message.contains("ended early"), "{failure}");
}

fn data(offset: u64, fua: bool) -> Op {
    Op::Write { offset, data: Payload::new(AlignedBuf::zeroed(4096)), fua }
}

fn of_a_file(dir: &TempDir) -> (FileBacking, Arc<Syncs>) {
    let path = dir.path().join("disk");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let uri: Uri = format!("file:{}", path.display()).parse().unwrap();
    let backing = FileBacking::open(&uri, &OpenOptions::default()).unwrap();
    let syncs = backing.syncs.clone();
    (backing, syncs)
}

/// The kernel says once for the open file that pages could not be written. Each client that was there hears of it, whoever
/// flushes first and with whatever kind of request.
#[test]
fn a_failed_fdatasync_is_heard_of_by_every_client() {
    for first_fua in [false, true] {
        let dir = TempDir::new().unwrap();
        let (backing, syncs) = of_a_file(&dir);
        let mut sessions: Vec<_> = (0..3).map(|_| backing.session().unwrap()).collect();
        let mut clients: Vec<_> = (0..3).map(|_| Client::new(&backing)).collect();
        let mut ask = |at: usize, op: Op| {
            let outcome = one(&mut *sessions[at], op).outcome;
            clients[at].believes(outcome.is_ok(), backing.losses())
        };
        for at in [0, 1] {
            assert!(ask(at, data(at as u64 * 4096, false)));
        }
        syncs.fails.store(true, Ordering::SeqCst);
        let first = if first_fua { data(65_536, true) } else { Op::Flush };
        assert!(!ask(1, first));
        assert!(!ask(0, Op::Flush), "its write is gone too");
        assert!(!ask(2, data(0, true)), "so it is to who only flushes");
        for at in 0..3 {
            assert!(ask(at, Op::Flush), "once");
        }
        // With nothing written since, a flush that fails takes nothing from the others.
        syncs.fails.store(true, Ordering::SeqCst);
        assert!(!ask(0, Op::Flush) && ask(1, Op::Flush));
        assert_eq!(backing.losses(), 1);
    }
}

/// Of two flushes at once one got to hear of the failure; the other one, which ended well, is not believed before that is known.
#[test]
fn a_flush_waits_for_what_those_beside_it_have_heard() {
    let dir = TempDir::new().unwrap();
    let (backing, syncs) = of_a_file(&dir);
    let (mut a, mut b) = (backing.session().unwrap(), backing.session().unwrap());
    one(&mut *b, data(0, false)).outcome.unwrap();
    a.submit(1, Op::Flush);
    a.flush(Instant::now());
    // It has ended; its thread has not looked yet.
    b.submit(2, Op::Flush);
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        b.flush(Instant::now());
        b.turn(Instant::now());
        assert!(b.pop().is_none());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(b.in_flight() == 1 && b.wake_at().is_some());
    syncs.fails.store(true, Ordering::SeqCst);
    assert!(run(&mut *a, 1).pop().unwrap().outcome.is_err());
    run(&mut *b, 1).pop().unwrap().outcome.unwrap();
    assert_eq!((backing.losses(), b.in_flight()), (1, 0));
}
