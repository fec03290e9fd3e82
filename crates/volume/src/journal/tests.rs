use std::sync::atomic::Ordering;
use std::time::Duration;

use larder_format::block::journal::COMMIT_AT;
use larder_format::block::marker::{MarkerState, Order};
use tempfile::TempDir;

use super::*;
use crate::{OpenOptions, open_with};

const QUICK: Timeouts = Timeouts {
    connect: Duration::from_secs(1),
    silence: Duration::from_millis(500),
    give_up: Some(Duration::from_secs(2)),
};

fn head(number: u64) -> Marker {
    Marker {
        number,
        state: MarkerState::Dirty,
        volume: Uuid([1; 16]),
        identity: [0; 64],
        cache: Uuid([2; 16]),
        run: 1,
        host: "there".into(),
        generation: 3,
        attachment: 1,
        frontier: 0,
        time: 0,
        mark: None,
        order: Order::Journaled,
        applied: 0,
        joins: 0,
        probes: false,
    }
}

fn name(epoch: u64) -> EpochName {
    EpochName { generation: 3, epoch }
}

fn region(path: &Path, for_use: Use) -> Result<Box<dyn JournalPlace>, JournalError> {
    let site = Site { uri: Uri::File { path: path.to_owned() }, beside: false };
    site.open(for_use, QUICK)
}

/// An epoch is read as it was written, in whatever place; the one before it stays until it is there.
fn keeps_epochs(place: &mut dyn JournalPlace) {
    assert_eq!(place.head().unwrap(), Head::None);
    place.set_head(&head(1)).unwrap();
    assert_eq!(place.head().unwrap(), Head::Of(Box::new(head(1))));
    place.set_head(&head(2)).unwrap();
    assert_eq!(place.head().unwrap(), Head::Of(Box::new(head(2))));
    let whole = |place: &mut dyn JournalPlace, fill: u8| {
        let parts = place.parts().unwrap();
        let found = parts.into_iter().find(|part| {
            place.read(*part, COMMIT_AT, 512).unwrap().is_some_and(|bytes| bytes == [fill; 512])
        });
        found.map(|part| place.read(part, 3 * 4096, 70_001).unwrap().unwrap())
    };
    for epoch in 1..6u8 {
        let body = vec![epoch; 70_001];
        place.write(name(epoch.into()), &[epoch; 512], &body).unwrap();
        place.flush().unwrap();
        assert!(whole(place, epoch).unwrap() == body);
    }
    place.empty().unwrap();
    assert_eq!(whole(place, 5), None);
    assert!(matches!(place.head().unwrap(), Head::Of(_)), "whose it is stays");
}

#[test]
fn a_file_is_made_for_a_journal_and_keeps_epochs() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("journal");
    for for_use in [Use::Apply, Use::Look] {
        let absent = region(&path, for_use).err().unwrap();
        assert!(matches!(absent, JournalError::Absent { .. }) && !path.exists());
    }
    let mut place = region(&path, Use::Make).unwrap();
    keeps_epochs(&mut *place);
    // It has one holder, and anybody may look.
    let held = region(&path, Use::Make).err().unwrap().to_string();
    assert!(held.contains("locked"), "{held}");
    assert!(region(&path, Use::Look).is_ok());
    drop(place);
    let mut place = region(&path, Use::Apply).unwrap();
    assert_eq!(place.head().unwrap(), Head::Of(Box::new(head(2))));
}

/// A thread's ring is not another's.
#[test]
fn a_place_is_asked_by_one_thread_after_the_other() {
    let dir = TempDir::new().unwrap();
    let mut place = region(&dir.path().join("journal"), Use::Make).unwrap();
    for number in 1..4 {
        let there = std::thread::spawn(move || {
            place.set_head(&head(number)).unwrap();
            place
        });
        place = there.join().unwrap();
        assert_eq!(place.head().unwrap(), Head::Of(Box::new(head(number))));
    }
}

#[test]
fn what_is_there_and_is_no_journal_is_left_as_it_is() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("journal");
    for bytes in [&b"my notes"[..], &[7; 20_000]] {
        std::fs::write(&path, bytes).unwrap();
        let error = region(&path, Use::Make).err().unwrap();
        assert!(matches!(error, JournalError::NotAJournal { .. }), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
    }
    // What is too small is made larger only where it is a file.
    std::fs::write(&path, [0; 4096]).unwrap();
    let error = region(&path, Use::Apply).err().unwrap();
    assert!(matches!(error, JournalError::Small { bytes: 4096, .. }), "{error}");
    assert!(region(&path, Use::Make).unwrap().head().unwrap() == Head::None);
    assert_eq!(path.metadata().unwrap().len(), region::REGION);
}

#[test]
fn a_probe_that_was_left_in_a_place_is_no_damaged_head() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("journal");
    let mut place = region(&path, Use::Make).unwrap();
    assert_eq!(place.head().unwrap(), Head::None);
    assert!(place.probe(Some(&larder_format::block::marker::probe([5; 16]))).unwrap());
    drop(place);
    let mut place = region(&path, Use::Make).unwrap();
    assert_eq!(place.head().unwrap(), Head::None);
    place.set_head(&head(1)).unwrap();
    assert_eq!(place.head().unwrap(), Head::Of(Box::new(head(1))));
}

#[test]
fn a_head_is_the_old_or_the_new_one_whatever_sectors_of_it_were_written() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("journal");
    let mut place = region(&path, Use::Make).unwrap();
    assert_eq!(place.head().unwrap(), Head::None);
    place.set_head(&head(1)).unwrap();
    drop(place);
    let before = std::fs::read(&path).unwrap();
    let mut place = region(&path, Use::Make).unwrap();
    place.head().unwrap();
    place.set_head(&head(2)).unwrap();
    drop(place);
    let after = std::fs::read(&path).unwrap();
    // A copy is written whole before the other is begun.
    for first in 0..2 {
        for sectors in 0..=16 {
            let mut torn = before.clone();
            for sector in 0..sectors {
                let at = ((first * 8 + sector) % 16) * 512;
                torn[at..at + 512].copy_from_slice(&after[at..at + 512]);
            }
            std::fs::write(&path, &torn).unwrap();
            match region(&path, Use::Apply).unwrap().head().unwrap() {
                Head::Of(found) => assert!([1, 2].contains(&found.number)),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn places_are_named_by_path_or_uri_and_the_store_itself_is_none() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, [0; 4096]).unwrap();
    std::os::unix::fs::symlink(&path, dir.path().join("link")).unwrap();
    let uri: Uri = format!("file:{}", path.display()).parse().unwrap();
    let store = open_with(&uri, &OpenOptions::default()).unwrap();
    let beside = Site::of(&*store, None).unwrap();
    assert_eq!(beside.path(), Some(&*dir.path().join("disk.larder.journal")));
    assert!(beside.beside && !beside.is_lost_with_this_host(&StoreNames::of(&*store)).unwrap());
    for own in [path.display().to_string(), uri.to_string()] {
        let error = Site::of(&*store, Some(&own)).unwrap_err().to_string();
        assert!(error.contains("the volume's own store"), "{error}");
    }
    let link = dir.path().join("link").display().to_string();
    assert!(Site::of(&*store, Some(&link)).is_err());
    for (at, words) in [("", "name a file"), ("nbd://", "host is missing"), ("s3://b", "bucket")] {
        let error = Site::of(&*store, Some(at)).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains(words), "{error}");
    }
    let other = Site::of(&*store, Some("/other")).unwrap();
    assert!(
        !other.is_lost_with_this_host(&StoreNames::of(&*store)).unwrap(),
        "the store is here too"
    );
}

#[test]
fn a_journal_where_the_marker_is_or_would_be_is_known_by_any_name() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::write(at("disk"), [0; 4096]).unwrap();
    std::fs::create_dir(at("folder")).unwrap();
    std::os::unix::fs::symlink(at("disk"), at("folder/linked")).unwrap();
    // The store is named by a link; its marker is beside the file itself, and is not there yet.
    let uri: Uri = format!("file:{}", at("folder/linked").display()).parse().unwrap();
    let store = StoreNames::of(&*open_with(&uri, &OpenOptions::default()).unwrap());
    let is = |journal: String, marker: Option<&str>| {
        Site::of_names(&store, Some(&journal)).unwrap().is_markers(&store, marker)
    };
    let said = |name: &str| at(name).display().to_string();
    std::os::unix::fs::symlink(at("disk.larder"), at("dangling")).unwrap();
    std::os::unix::fs::symlink("../disk.larder", at("folder/relative")).unwrap();
    for round in 0..2 {
        for own in ["disk.larder", "folder/../disk.larder", "dangling", "folder/relative"] {
            assert!(
                is(said(own), None) && is(format!("file:{}", said(own)), None),
                "{own} {round}"
            );
            assert!(is(said(own), Some(&said("disk.larder"))), "{own} {round}");
            assert!(!is(said(own), Some(&said("other"))), "{own} {round}");
        }
        assert!(!is(said("folder/linked.larder"), None) && !is(said("disk.larder.journal"), None));
        // Then it is there, and so is another name of the file.
        std::fs::write(at("disk.larder"), [0; 8192]).unwrap();
        std::fs::hard_link(at("disk.larder"), at(&format!("hard{round}"))).unwrap();
        assert!(is(said(&format!("hard{round}")), None));
    }
    let export = |name: &str| format!("nbd+unix:///{name}?socket=/nowhere/socket");
    assert!(is(export("a"), Some(&export("a"))) && !is(export("a"), Some(&export("b"))));
    assert!(!is(export("a"), None));
}

/// A store of that name, of which nothing else is asked.
#[derive(Debug)]
struct Named(&'static str, Box<dyn Backing>);

impl Backing for Named {
    fn uri(&self) -> &str {
        self.0
    }
    fn capabilities(&self) -> crate::Capabilities {
        self.1.capabilities()
    }
    fn identity(&self) -> Result<crate::Identity, crate::BackingError> {
        self.1.identity()
    }
    fn resize(&self, bytes: Option<u64>) -> Result<u64, crate::BackingError> {
        self.1.resize(bytes)
    }
    fn session(&self) -> Result<Box<dyn crate::Session>, crate::BackingError> {
        self.1.session()
    }
}

#[test]
fn a_journal_here_before_a_store_elsewhere_is_known() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, [0; 4096]).unwrap();
    let uri: Uri = format!("file:{}", path.display()).parse().unwrap();
    let here = path.with_extension("journal").display().to_string();
    // (Addresses of documentation, which no host has.)
    for (store, journal, lost) in [
        ("nbd://192.0.2.1/a", here.as_str(), true),
        ("nbd://127.0.0.1/a", &here, false),
        ("nbd+unix:///a?socket=/s", &here, false),
        ("s3://bucket/a", &here, true),
        ("s3://bucket/a?endpoint=http://127.0.0.1:9", &here, false),
        ("nbd://192.0.2.1/a", "nbd://192.0.2.1/journal", false),
        ("nbd://192.0.2.1/a", "nbd://127.0.0.1/journal", true),
        ("nbd://192.0.2.1/a", "s3://bucket/journals", false),
        ("s3://bucket/a", "s3://bucket/a", false),
    ] {
        let options = OpenOptions { lease: false, ..OpenOptions::default() };
        let store = Named(store, open_with(&uri, &options).unwrap());
        let site = Site::of(&store, Some(journal)).unwrap();
        let found = site.is_lost_with_this_host(&StoreNames::of(&store)).unwrap();
        assert_eq!(found, lost, "{} {journal}", store.0);
    }
    for none in ["nbd://192.0.2.1/a", "nbd+unix:///a?socket=/s"] {
        let store = Named(
            none,
            open_with(&uri, &OpenOptions { lease: false, ..OpenOptions::default() }).unwrap(),
        );
        let error = Site::of(&store, None).unwrap_err();
        assert!(matches!(&error, JournalError::NoPlace { .. }), "{error}");
    }
}

#[cfg(feature = "object")]
mod objects {
    use object_store::path::Path as ObjectPath;
    use object_store::{ObjectStoreExt, PutPayload};

    use super::super::object::ObjectPlace;
    use super::*;
    use crate::object::{Memory, runtime};

    fn place(store: &Memory, for_use: Use) -> Result<ObjectPlace, JournalError> {
        let prefix = ObjectPath::from("a");
        ObjectPlace::with_store(
            "s3://test/a".into(),
            Box::new(store.clone()),
            prefix,
            for_use,
            QUICK,
        )
    }

    fn names(store: &Memory) -> Vec<String> {
        use futures_util::TryStreamExt;
        use object_store::ObjectStore;
        let prefix = ObjectPath::from("a/wb");
        let list = store.store.list(Some(&prefix)).try_collect::<Vec<_>>();
        let list = runtime().unwrap().block_on(list).unwrap();
        let mut names: Vec<String> =
            list.into_iter().filter_map(|o| o.location.filename().map(str::to_owned)).collect();
        names.sort();
        names
    }

    #[test]
    fn an_object_store_keeps_the_last_epoch_beside_the_volume() {
        let store = Memory::default();
        keeps_epochs(&mut place(&store, Use::Make).unwrap());
        let mut journal = place(&store, Use::Make).unwrap();
        for epoch in 6..9 {
            journal.write(name(epoch), &[1; 512], &[2; 100]).unwrap();
        }
        assert_eq!(names(&store), ["0000000000000003-0000000000000008", "head"]);
        // Another run knows of it, and removes it with its own first.
        let mut next = place(&store, Use::Make).unwrap();
        assert_eq!(next.parts().unwrap().len(), 1);
        next.write(EpochName { generation: 4, epoch: 1 }, &[1; 512], &[2; 100]).unwrap();
        assert_eq!(names(&store), ["0000000000000004-0000000000000001", "head"]);
    }

    #[test]
    fn an_epoch_whose_answer_was_lost_is_written_once_more() {
        let store = Memory::default();
        let mut journal = place(&store, Use::Make).unwrap();
        store.faults.after.store(1, Ordering::SeqCst);
        journal.write(name(1), &[1; 512], &[2; 100]).unwrap();
        store.faults.after.store(0, Ordering::SeqCst);
        // As after a failure of the store's: with another time in its commit.
        journal.write(name(1), &[9; 512], &[2; 100]).unwrap();
        let parts = journal.parts().unwrap();
        assert_eq!(journal.read(parts[0], COMMIT_AT, 512).unwrap(), Some(vec![9; 512]));
        assert_eq!(journal.read(parts[0], COMMIT_AT, 1 << 30).unwrap(), None);
    }

    #[test]
    fn an_object_store_without_conditional_writes_has_no_place_for_a_journal() {
        let store = Memory::default();
        store.faults.unconditional.store(true, Ordering::SeqCst);
        let error = place(&store, Use::Make).err().unwrap();
        assert!(error.is_usage() && error.to_string().contains("conditional"), "{error}");
        assert!(names(&store).is_empty());
    }

    #[test]
    fn a_head_of_another_writer_is_not_replaced() {
        let store = Memory::default();
        let mut one = place(&store, Use::Make).unwrap();
        let mut other = place(&store, Use::Make).unwrap();
        assert_eq!((one.head().unwrap(), other.head().unwrap()), (Head::None, Head::None));
        one.set_head(&head(1)).unwrap();
        other.set_head(&head(2)).unwrap_err();
        assert_eq!(other.head().unwrap(), Head::Of(Box::new(head(1))));
        let at = ObjectPath::from("a/wb/head");
        let bytes = PutPayload::from_static(b"my notes");
        runtime().unwrap().block_on(store.store.put(&at, bytes)).unwrap();
        assert!(matches!(one.head(), Err(JournalError::NotAJournal { .. })));
    }
}
