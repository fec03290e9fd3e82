use std::fs::File;

use tempfile::TempDir;

use super::place_tests::{marker, read, there};
use super::{Image, MarkerIoError, MarkerPlace, PlaceOptions, marker_place};
use crate::file::FileBacking;
use crate::{Backing, BackingError, Capabilities, Identity, OpenOptions, Session, Uri};

/// A store that is only named.
#[derive(Debug)]
struct Named {
    uri: String,
    image: Option<Image>,
}

impl Backing for Named {
    fn uri(&self) -> &str {
        &self.uri
    }
    fn capabilities(&self) -> Capabilities {
        unreachable!("not asked")
    }
    fn identity(&self) -> Result<Identity, BackingError> {
        unreachable!("not asked")
    }
    fn resize(&self, _: Option<u64>) -> Result<u64, BackingError> {
        unreachable!("not asked")
    }
    fn session(&self) -> Result<Box<dyn Session>, BackingError> {
        unreachable!("not asked")
    }
    fn image(&self) -> Option<Image> {
        self.image.clone()
    }
}

fn named(uri: &str) -> Named {
    Named { uri: uri.into(), image: None }
}

fn choose(store: &dyn Backing, at: Option<&str>) -> Result<Box<dyn MarkerPlace>, String> {
    let options = PlaceOptions { at: at.map(str::to_owned), ..PlaceOptions::default() };
    marker_place(store, &options).map_err(|e| e.to_string())
}

fn refused(store: &dyn Backing, at: Option<&str>) -> String {
    choose(store, at).map(|place| place.describe()).unwrap_err()
}

fn image(dir: &TempDir) -> FileBacking {
    let path = dir.path().join("disk");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let options = OpenOptions { lease: false, ..OpenOptions::default() };
    FileBacking::open(&Uri::File { path }, &options).unwrap()
}

#[test]
fn a_store_without_a_place_is_named_with_what_to_do() {
    for uri in ["file:/dev/sdx", "nbd://host/export", "nbd+unix:///a?socket=/s", "other:x"] {
        let text = refused(&named(uri), None);
        for part in [uri, "name a place", "do without"] {
            assert!(text.contains(part), "{text}");
        }
    }
}

#[test]
fn what_is_named_comes_before_what_is_beside() {
    let (dir, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let store = image(&dir);
    let path = other.path().join("there");
    let at = path.to_str().unwrap();
    for option in [at.to_owned(), format!("file:{at}"), format!("file://{at}")] {
        let mut place = choose(&store, Some(&option)).unwrap();
        assert!(place.describe().contains(at));
        read(&mut *place);
        place.write(&marker(1)).unwrap();
        drop(place);
        // It is the same for whoever names it.
        assert_eq!(read(&mut *choose(&named("nbd://a/b"), Some(&option)).unwrap()), there(1));
        assert!(!dir.path().join("disk.larder").exists());
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_block_device_has_its_marker_in_a_file() {
    let dir = TempDir::new().unwrap();
    let at = dir.path().join("marker");
    let mut place = choose(&named("file:/dev/sdx"), at.to_str()).unwrap();
    read(&mut *place);
    place.write(&marker(1)).unwrap();
    assert_eq!(read(&mut *place), there(1));
    drop(place);
    // A link leads to the same.
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&at, &link).unwrap();
    let mut place = choose(&named("file:/dev/sdx"), link.to_str()).unwrap();
    assert_eq!(read(&mut *place), there(1));
}

#[test]
fn servers_are_chosen_by_their_uri_and_not_asked_before_a_read() {
    for at in ["nbd://localhost:1/a", "nbd+unix:///a?socket=/nowhere", "s3://bucket/prefix"] {
        let place = choose(&named("file:/dev/sdx"), Some(at)).unwrap();
        assert!(place.describe().contains(at), "{}", place.describe());
        assert!(!place.is_fenced());
    }
    let mut place = choose(&named("x"), Some("nbd+unix:///a?socket=/nowhere")).unwrap();
    assert!(matches!(place.read(), Err(MarkerIoError::Unreachable { .. })));
    let place = choose(&named("s3://bucket/prefix"), None).unwrap();
    assert!(place.describe().contains("s3://bucket/prefix"));
}

#[test]
fn what_cannot_be_a_place_is_refused_with_the_reason() {
    let dir = TempDir::new().unwrap();
    let store = image(&dir);
    let own = dir.path().join("disk");
    for (at, part) in [
        ("", "name a file"),
        ("http://x", "'http' is not known"),
        ("nbd://", "the host is missing"),
        ("/nowhere/at/all", "its directory"),
        ("/", "names no file"),
        (own.to_str().unwrap(), "own store"),
    ] {
        let text = refused(&store, Some(at));
        assert!(text.contains(part) && text.contains(&format!("'{at}' cannot be")), "{text}");
    }
}

#[test]
fn an_image_whose_path_leads_to_another_by_now_has_none_beside_it() {
    let dir = TempDir::new().unwrap();
    let store = image(&dir);
    std::fs::rename(dir.path().join("disk"), dir.path().join("old")).unwrap();
    assert!(refused(&store, None).contains("name a place"));
    File::create(dir.path().join("disk")).unwrap();
    assert!(refused(&store, None).contains("another file"));
}

#[test]
fn a_name_that_leaves_no_room_for_the_suffix_is_refused() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("x".repeat(250));
    File::create(&path).unwrap().set_len(4096).unwrap();
    let options = OpenOptions { lease: false, ..OpenOptions::default() };
    let store = FileBacking::open(&Uri::File { path }, &options).unwrap();
    assert!(refused(&store, None).contains("longer than"));
}
