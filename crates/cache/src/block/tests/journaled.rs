//! Volumes that are journaled: where their journal may lie, what happens when it is lost, torn or another's, and what is read before a recovery.

use std::os::unix::fs::FileExt;
use std::path::Path;

use larder_base::Rng;
use larder_format::block::journal::{COMMIT_AT, DESCRIPTORS_AT};
use larder_format::block::marker::{Marker, choose};

use super::*;
use crate::block::back::{
    self, BackConfig, BackWish, Cuts, JournalAt, MarkerAt, Order, Pace, RecoverError, RecoverWish,
    Recovery, recover,
};
use crate::block::{Builder, Cache};

const BYTES: u64 = 4 << 20;
const BLOCK: u64 = 4096;
const BLOCKS: u64 = 32;
/// Where the second of a journal's parts begins.
const SECOND: u64 = 64 << 20;

fn journaled(pace: Pace) -> BackConfig {
    BackConfig { order: Order::Journaled(Cuts::Flushes), pace, ..BackConfig::default() }
}

fn builder(dir: &Path, pace: Pace, journal: Option<&Path>) -> Builder {
    let path = dir.join("disk");
    if !path.exists() {
        File::create(&path).unwrap().set_len(BYTES).unwrap();
    }
    let builder = Cache::builder(dir.join("cache")).create(ByteSize::mib(192));
    let builder = builder.write_log(ByteSize::mib(96)).state_dir(dir.join("state")).threads(0);
    let builder = builder.volume("disk", &format!("file:{}", path.display())).unwrap();
    let builder = builder.write_back("disk", journaled(pace));
    match journal {
        Some(at) => {
            let at = JournalAt { at: Some(at.display().to_string()), local: false };
            builder.journal("disk", at)
        }
        None => builder,
    }
}

fn done<T>(cache: &Cache, pending: crate::block::Pending<T>) -> T {
    while !pending.is_done() {
        cache.turn().unwrap();
    }
    pending.wait().unwrap()
}

fn open_store(dir: &Path, read_only: bool) -> Box<dyn backing::Backing> {
    let uri: Uri = format!("file:{}", dir.join("disk").display()).parse().unwrap();
    let options = OpenOptions { watch: false, read_only, ..OpenOptions::default() };
    backing::open_with(&uri, &options).unwrap()
}

fn image(dir: &Path) -> Vec<u8> {
    std::fs::read(dir.join("disk")).unwrap()[..(BLOCKS * BLOCK) as usize].to_vec()
}

fn marker(dir: &Path) -> Marker {
    let bytes = std::fs::read(dir.join("disk.larder")).unwrap();
    choose(&bytes[..4096], &bytes[4096..8192]).unwrap().marker
}

/// What a host leaves whose cache is lost: a store, its marker and its journal, and the states that the volume had at its flushes, each behind so
/// many changes.
struct Left {
    dir: TempDir,
    journal: PathBuf,
    cuts: Vec<(u64, Vec<u8>)>,
}

impl Left {
    fn is_cut(&self) -> bool {
        let image = image(self.dir.path());
        self.cuts.iter().any(|(_, cut)| *cut == image)
    }

    fn recover(&self, wish: &RecoverWish) -> Result<Recovery, RecoverError> {
        let at = self.journal.display().to_string();
        let wish = RecoverWish { journal: Some(at), ..wish.clone() };
        recover(&*open_store(self.dir.path(), false), &wish)
    }

    /// The parts of the journal, with the number of the epoch that was committed last in each.
    fn epochs(&self) -> Vec<(u64, u64)> {
        let file = File::open(&self.journal).unwrap();
        let volume = marker(self.dir.path()).volume;
        let epoch = |start: u64| {
            let mut bytes = [0; 512];
            file.read_exact_at(&mut bytes, start + COMMIT_AT).unwrap();
            larder_format::block::journal::Commit::decode(&bytes, volume).ok().map(|c| c.epoch)
        };
        [0, SECOND].into_iter().filter_map(|start| Some((epoch(start)?, start))).collect()
    }

    fn change(&self, at: u64) {
        let file = File::options().read(true).write(true).open(&self.journal).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0xff], at).unwrap();
    }
}

/// Writes and flushes at random, until the store has some of them; then everything is left as it is at that moment. The journal may be said to be
/// elsewhere.
fn left(seed: u64, journal: Option<&str>) -> Left {
    let dir = TempDir::new().unwrap();
    let mut rng = Rng::new(seed);
    let named = journal.map(|name| dir.path().join(name));
    let cache = builder(dir.path(), Pace::Async, named.as_deref()).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    let mut plain = vec![0u8; (BLOCKS * BLOCK) as usize];
    let mut cuts = vec![(0, plain.clone())];
    let (mut epoch, mut changes) = (0, 0);
    for round in 0.. {
        let (block, byte) = (rng.below(BLOCKS), rng.next_u64() as u8);
        let range = (block * BLOCK) as usize..((block + 1) * BLOCK) as usize;
        if rng.chance(0.1) {
            plain[range].fill(0);
            done(&cache, disk.zero(block * BLOCK, BLOCK));
        } else {
            plain[range].fill(byte);
            done(&cache, disk.write(block * BLOCK, [byte; BLOCK as usize]));
        }
        changes += 1;
        if rng.chance(0.3) {
            done(&cache, disk.flush());
            cuts.push((changes, plain.clone()));
        }
        for _ in 0..rng.below(30) {
            cache.turn().unwrap();
        }
        if rng.chance(0.2) {
            std::thread::sleep(Duration::from_millis(3));
        }
        epoch = cache.core().back_status("disk").unwrap().status.epoch.max(epoch);
        if round > 20 && epoch >= 3 && rng.chance(0.1) {
            break;
        }
        assert!(round < 20_000, "no epoch comes to its end: {epoch}");
    }
    // (Its thread may be in the midst of an epoch, which nobody has been told of.)
    std::thread::sleep(Duration::from_millis(20));
    let path = named.unwrap_or_else(|| dir.path().join("disk.larder.journal"));
    let keep = [dir.path().join("disk"), dir.path().join("disk.larder"), path.clone()];
    let kept = keep.clone().map(|path| std::fs::read(path).unwrap());
    drop((disk, cache));
    for (path, bytes) in keep.iter().zip(kept) {
        std::fs::write(path, bytes).unwrap();
    }
    std::fs::remove_file(dir.path().join("cache")).unwrap();
    Left { dir, journal: path, cuts }
}

#[test]
fn a_recovered_store_is_a_cut_wherever_its_journal_lies() {
    for seed in 0..4 {
        let left = left(seed, (seed % 2 == 1).then_some("elsewhere"));
        assert_eq!(left.dir.path().join("elsewhere").exists(), seed % 2 == 1);
        assert_ne!(left.dir.path().join("disk.larder.journal").exists(), seed % 2 == 1);
        let told = left.recover(&RecoverWish::default()).unwrap();
        assert!(told.recovered && told.torn.is_none(), "{told:?}");
        let image = image(left.dir.path());
        let is_told = |&(at, ref cut): &(u64, Vec<u8>)| Some(at) == told.sequence && *cut == image;
        assert!(left.cuts.iter().any(is_told), "seed {seed}: {:?}", told.sequence);
        assert!(left.epochs().is_empty(), "the journal is emptied");
        // Any cache may serve it, and the journal is this volume's still.
        let named = (seed % 2 == 1).then_some(left.journal.as_path());
        let was = image;
        let cache = builder(left.dir.path(), Pace::Async, named).open().unwrap();
        let disk = cache.volume("disk").unwrap();
        assert!(done(&cache, disk.read(0, was.len()))[..] == was[..]);
    }
}

/// Whatever of the epoch a recovery has brought to the store when it is interrupted: the next one comes to the same image.
#[test]
fn a_recovery_that_is_interrupted_any_number_of_times_gives_the_same_image() {
    for seed in 10..13 {
        let left = left(seed, None);
        let dir = left.dir.path();
        let (disk, head) = (dir.join("disk"), dir.join("disk.larder"));
        let before = std::fs::read(&disk).unwrap();
        let marker = std::fs::read(&head).unwrap();
        let journal = std::fs::read(&left.journal).unwrap();
        left.recover(&RecoverWish::default()).unwrap();
        assert!(left.is_cut(), "seed {seed}");
        let after = std::fs::read(&disk).unwrap();
        let mut rng = Rng::new(seed);
        let mut now = before;
        for _ in 0..5 {
            // Some sectors were written, then the host went: its marker and journal are as they were.
            for (now, after) in now.chunks_mut(512).zip(after.chunks(512)) {
                if rng.chance(0.3) {
                    now.copy_from_slice(after);
                }
            }
            std::fs::write(&disk, &now).unwrap();
            std::fs::write(&head, &marker).unwrap();
            std::fs::write(&left.journal, &journal).unwrap();
            left.recover(&RecoverWish::default()).unwrap();
            assert!(std::fs::read(&disk).unwrap() == after, "seed {seed}");
        }
        // It went between the marker and the journal: nothing is to be done, and nothing is changed.
        std::fs::write(&left.journal, &journal).unwrap();
        assert!(!left.recover(&RecoverWish::default()).unwrap().recovered);
        assert!(std::fs::read(&disk).unwrap() == after);
    }
}

#[test]
fn a_store_whose_journal_is_lost_or_torn_is_recovered_only_if_that_is_accepted() {
    for case in 0..4 {
        let left = left(20 + case, None);
        let before = image(left.dir.path());
        let &(_, last) = left.epochs().iter().max().unwrap();
        let word = match case {
            0 => {
                std::fs::remove_file(&left.journal).unwrap();
                "is not there"
            }
            1 => {
                left.change(last + DESCRIPTORS_AT + 20);
                "damaged"
            }
            2 => {
                left.change(last + COMMIT_AT + 20);
                "damaged"
            }
            _ => {
                // An older copy of it was put in its place.
                std::fs::write(&left.journal, vec![0; 2 * SECOND as usize]).unwrap();
                "is empty"
            }
        };
        let was = marker(left.dir.path());
        let error = left.recover(&RecoverWish::default()).unwrap_err();
        assert!(matches!(error, RecoverError::Torn { .. }), "case {case}: {error}");
        let said = error.to_string();
        assert!(said.contains(word) && said.contains("between two"), "case {case}: {said}");
        assert_eq!(marker(left.dir.path()), was);
        // Nor is it read.
        let error = view(&left).unwrap_err().to_string();
        assert!(error.contains("have its store recovered"), "case {case}: {error}");
        let wish = RecoverWish { accept_torn: true, ..RecoverWish::default() };
        let told = left.recover(&wish).unwrap();
        assert!(told.recovered && told.torn.unwrap().contains(word), "case {case}");
        assert!(image(left.dir.path()) == before, "the store is taken as it is");
    }
}

/// With its cache nothing is lost with a journal.
#[test]
fn a_lost_journal_is_made_anew_where_the_cache_is_there() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("disk.larder.journal");
    let cache = builder(dir.path(), Pace::AtBound, None).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    done(&cache, disk.write(0, [7; 4096]));
    done(&cache, disk.flush());
    drop((disk, cache));
    std::fs::remove_file(&path).unwrap();
    let cache = builder(dir.path(), Pace::AtBound, None).threads(1).open().unwrap();
    // Nothing has come to it yet, and the one before may have had something.
    std::fs::copy(&path, dir.path().join("copy")).unwrap();
    let wish = RecoverWish {
        journal: Some(dir.path().join("copy").display().to_string()),
        ..RecoverWish::default()
    };
    let disk = cache.volume("disk").unwrap();
    assert!(disk.read(0, 4096).wait().unwrap().iter().all(|&b| b == 7));
    drop((disk, cache));
    let error = recover(&*open_store(dir.path(), false), &wish).unwrap_err();
    assert!(error.to_string().contains("was damaged before"), "{error}");
    let cache = builder(dir.path(), Pace::AtBound, None).threads(1).open().unwrap();
    assert!(cache.core().destage("disk", &mut |_| true).unwrap());
    std::fs::copy(&path, dir.path().join("copy")).unwrap();
    let said = std::fs::read(dir.path().join("disk.larder")).unwrap();
    drop(cache);
    // It was killed: its marker is dirty.
    std::fs::write(dir.path().join("disk.larder"), said).unwrap();
    let told = recover(&*open_store(dir.path(), false), &wish).unwrap();
    assert!(told.recovered && told.torn.is_none());
    assert!(image(dir.path())[..4096].iter().all(|&b| b == 7));
}

#[test]
fn a_journal_that_is_anothers_or_no_journal_is_left_as_it_is() {
    let (one, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let journal = one.path().join("journal");
    drop(builder(one.path(), Pace::AtBound, Some(&journal)).open().unwrap());
    let refused = |what: &str| {
        let before = std::fs::read(&journal).unwrap();
        let why = builder(other.path(), Pace::AtBound, Some(&journal)).open().err().unwrap();
        assert!(why.to_string().contains(what), "{why}");
        assert!(std::fs::read(&journal).unwrap() == before);
        assert!(!other.path().join("disk.larder").exists(), "nothing is dirty");
    };
    refused("is the journal of another volume");
    // It is open elsewhere.
    let cache = builder(one.path(), Pace::AtBound, Some(&journal)).open().unwrap();
    refused("locked by this daemon itself");
    drop(cache);
    std::fs::write(&journal, "my notes").unwrap();
    refused("holds something that is no journal");
}

#[test]
fn a_journal_in_a_place_that_would_be_lost_too_is_refused() {
    let dir = TempDir::new().unwrap();
    let cache = dir.path().join("cache");
    let refused = |journal: &str, usage: bool| {
        let back = builder(dir.path(), Pace::AtBound, Some(Path::new(journal)));
        let why = back.open().err().unwrap();
        let is_usage = matches!(&why, CacheError::Journal { why, .. } if why.is_usage());
        assert_eq!(is_usage, usage, "{why}");
        assert!(!dir.path().join("disk.larder").exists(), "nothing is dirty");
        why.to_string()
    };
    let said = refused(cache.to_str().unwrap(), true);
    assert!(said.contains("would be lost with the cache"), "{said}");
    let said = refused(dir.path().join("disk").to_str().unwrap(), true);
    assert!(said.contains("the volume's own store"), "{said}");
    let said = refused("nbd://", true);
    assert!(said.contains("the host is missing"), "{said}");
    let said = refused("/nowhere/journal", false);
    assert!(said.contains("/nowhere/journal"), "{said}");
}

fn view(left: &Left) -> Result<Box<dyn backing::Backing>, CacheError> {
    let wish = BackWish {
        back: None,
        marker: MarkerAt::Beside,
        journal: JournalAt { at: Some(left.journal.display().to_string()), local: false },
        moved: false,
    };
    back::view("disk", open_store(left.dir.path(), true), &wish)
}

#[test]
fn before_a_recovery_a_store_is_read_with_its_journal_over_it_and_nothing_is_changed() {
    for seed in 30..33 {
        let left = left(seed, None);
        let dir = left.dir.path();
        let files = ["disk", "disk.larder", "disk.larder.journal"].map(|name| dir.join(name));
        let read = || files.clone().map(|path| std::fs::read(path).unwrap());
        let before = read();
        // As it was begun to be written in place when the cache went.
        let cache = Cache::builder(dir.join("other")).create(ByteSize::mib(64));
        let cache = cache.state_dir(dir.join("state")).threads(1).open().unwrap();
        let volume = Volume::new("disk", view(&left).unwrap(), 4096, true);
        let volume = Arc::new(volume);
        cache.core().attach(&volume, false).unwrap().ok();
        let shown = {
            let mut session = volume.backing().session().unwrap();
            let buf = larder_runtime::AlignedBuf::zeroed((BLOCKS * BLOCK) as usize);
            let op = larder_volume::op::Op::Read { offset: 0, buf };
            let done = larder_volume::testing::one(&mut *session, op);
            let larder_volume::op::Op::Read { buf, .. } = done.op else { panic!("a read") };
            buf[..].to_vec()
        };
        assert!(left.cuts.iter().any(|(_, cut)| *cut == shown), "seed {seed}");
        cache.core().detach("disk", true, &mut |_| true).unwrap();
        drop((volume, cache));
        assert!(read() == before, "something was changed");
        left.recover(&RecoverWish::default()).unwrap();
        assert!(image(dir) == shown, "a recovery comes to the same");
    }
}

#[test]
fn a_store_that_was_written_in_any_order_or_is_no_image_is_not_read_without_its_cache() {
    use larder_format::block::marker::Order as Said;
    let left = left(40, None);
    let path = left.dir.path().join("disk.larder");
    let was = marker(left.dir.path());
    for (order, joins, refused) in [
        (Said::Any, 0, true),
        (Said::Flush, was.frontier + 1, true),
        (Said::Flush, was.frontier, false),
    ] {
        let bytes = Marker { order, joins, ..was.clone() }.encode();
        std::fs::write(&path, [bytes.clone(), bytes].concat()).unwrap();
        let other = TempDir::new().unwrap();
        let cache = Cache::builder(other.path().join("cache")).create(ByteSize::mib(64));
        let cache = cache.state_dir(other.path().join("state")).threads(1).open().unwrap();
        let volume = Arc::new(Volume::new("disk", view(&left).unwrap(), 4096, true));
        let attached = cache.core().attach(&volume, false);
        assert_eq!(attached.is_err(), refused, "{order:?}, {joins}");
        if let Err(why) = attached {
            assert!(why.to_string().contains("have its store recovered"), "{why}");
        }
    }
}

/// Puts another file in the place of the store, below its marker and its journal; the store itself is `away` then.
fn swap(dir: &Path) {
    std::fs::rename(dir.join("disk"), dir.join("away")).unwrap();
    std::fs::write(dir.join("disk"), vec![99; BYTES as usize]).unwrap();
}

#[test]
fn a_journal_is_laid_over_no_store_but_its_own() {
    let left = left(50, None);
    let dir = left.dir.path();
    swap(dir);
    let (was, epochs) = (marker(dir), left.epochs());
    let error = left.recover(&RecoverWish::default()).unwrap_err();
    assert!(matches!(error, RecoverError::OtherStore(_)), "{error}");
    let torn = RecoverWish { accept_torn: true, ..RecoverWish::default() };
    assert!(matches!(left.recover(&torn), Err(RecoverError::OtherStore(_))));
    let said = view(&left).unwrap_err().to_string();
    assert!(said.contains("was written beside another store"), "{said}");
    assert!(std::fs::read(dir.join("disk")).unwrap().iter().all(|&b| b == 99));
    assert_eq!((marker(dir), left.epochs()), (was, epochs));
    // A whole copy is another file, and may be vouched for.
    std::fs::copy(dir.join("away"), dir.join("disk")).unwrap();
    assert!(matches!(left.recover(&RecoverWish::default()), Err(RecoverError::OtherStore(_))));
    let told = left.recover(&RecoverWish { moved: true, ..RecoverWish::default() }).unwrap();
    assert!(told.recovered && left.is_cut(), "{told:?}");
}

#[test]
fn what_is_dirty_is_not_given_up_by_a_journal_over_another_store() {
    use crate::block::back::discard::{DiscardWish, discard};
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    let cache = builder(dir, Pace::AtBound, None).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    done(&cache, disk.write(0, [7; 4096]));
    done(&cache, disk.flush());
    drop((disk, cache));
    swap(dir);
    let gives_up = |moved| {
        let wish = DiscardWish {
            cache: dir.join("cache"),
            volume: "disk".into(),
            yes: true,
            moved,
            ..DiscardWish::default()
        };
        discard(&wish, Some(&*open_store(dir, false))).map_err(|e| e.to_string())
    };
    let (was, said) = (marker(dir), gives_up(false).unwrap_err());
    assert!(said.contains("say that the store was moved"), "{said}");
    assert_eq!(marker(dir), was);
    assert!(std::fs::read(dir.join("disk")).unwrap().iter().all(|&b| b == 99));
    assert!(gives_up(true).unwrap().done);
}

#[test]
fn nothing_of_a_journal_is_laid_over_a_store_that_has_become_too_small_for_it() {
    let left = left(51, None);
    let path = left.dir.path().join("disk");
    File::options().write(true).open(&path).unwrap().set_len(512).unwrap();
    let before = std::fs::read(&path).unwrap();
    let said = left.recover(&RecoverWish::default()).unwrap_err().to_string();
    assert!(said.contains("restore its size"), "{said}");
    assert!(std::fs::read(&path).unwrap() == before);
}

/// What its own cache holds is nothing that anybody should give up; and it is refused before the cache knows the store by another name.
#[test]
fn a_volume_that_is_dirty_in_this_cache_is_not_read_without_it_and_says_that_the_cache_has_it() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    let cache = || {
        let more = dir.join("more");
        File::create(&more).unwrap().set_len(BYTES).unwrap();
        let builder = Cache::builder(dir.join("cache")).state_dir(dir.join("state")).threads(2);
        let builder = builder.volume("more", &format!("file:{}", more.display())).unwrap();
        builder.awaits("disk").open().unwrap()
    };
    let first = builder(dir, Pace::AtBound, None).open().unwrap();
    let disk = first.volume("disk").unwrap();
    done(&first, disk.write(0, [1; BLOCK as usize]));
    done(&first, disk.flush());
    drop((disk, first));
    let cache = cache();
    for _ in 0..2 {
        let store = back::view("disk", open_store(dir, true), &BackWish::default()).unwrap();
        assert!(store.has_journal_laid_over());
        let why = cache.attach_as("disk", store, &BackWish::default()).err().unwrap().to_string();
        assert!(why.contains("serve it as back:journaled"), "{why}");
        assert!(!why.contains("is not the one that it had") && !why.contains("give"), "{why}");
    }
    let wish = BackWish { back: Some(journaled(Pace::AtBound)), ..BackWish::default() };
    let disk = cache.attach_as("disk", open_store(dir, false), &wish).unwrap();
    assert!(disk.read(0, BLOCK as usize).wait().unwrap().iter().all(|&b| b == 1));
}
