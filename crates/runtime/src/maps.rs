//! The maps that caches leave in shared memory: whose they are, and which of them nobody will ask for again.
//!
//! A map is a [`SharedRegion`](crate::SharedRegion) named `larder-UUID`. It outlives its process, so it would outlive its cache
//! too, and take memory until the next boot. Beside it lies a note, `larder-UUID.owner`: which command has it, its directory,
//! its cache, and by what the one that decides is known again. Every start removes maps whose owner is gone ([`sweep`]).
//!
//! A map that is removed never makes data wrong, it makes a start cold. So what is not certain to be gone keeps its map: what lies
//! on a file system that is not mounted, a drive under `/dev`, a directory that was renamed where it lies, and maps without a note.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use larder_base::ByteSize;

use crate::lock::{Holder, holder, is_locked_by_another, try_lock_exclusive};
use crate::shared::{
    PRIVATE, SharedError, cannot_open, check_ownership, open_private, region_path,
};

/// What names of maps begin with; a UUID follows.
const PREFIX: &str = "larder-";
const UUID_CHARACTERS: usize = 36;
/// What the note beside a map is called, behind the map's name.
const NOTE: &str = ".owner";
const NOTE_HEAD: &str = "larder-owner 1";
/// Two paths, and what goes with them.
const MOST_NOTE: u64 = 16 << 10;
/// Names that are looked at beside a directory which is gone, at most.
const MOST_BESIDE: usize = 10_000;

/// Which command has a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerKind {
    /// `larder kv`: without its data directory the map is of no use.
    Kv,
    /// `larder block`: without its cache the map is of no use.
    Block,
}

impl OwnerKind {
    fn as_str(self) -> &'static str {
        match self {
            OwnerKind::Kv => "kv",
            OwnerKind::Block => "block",
        }
    }
}

impl fmt::Display for OwnerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "larder {}", self.as_str())
    }
}

/// Whose a map is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The command.
    pub kind: OwnerKind,
    /// The data or state directory.
    pub directory: PathBuf,
    /// The flash or the cache.
    pub cache: PathBuf,
    mark: Option<Mark>,
}

/// By what a file or directory is known again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    device: u64,
    inode: u64,
    /// When it was made, nanoseconds since 1970; 0 if its file system does not say. Numbers of inodes are used again.
    born: u64,
}

impl Mark {
    fn of(found: &Metadata) -> Mark {
        let born = found.created().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
        let born = born.map_or(0, |t| t.as_nanos() as u64);
        Mark { device: found.dev(), inode: found.ino(), born }
    }

    /// The two are known to be different things on one file system.
    fn differs(self, other: Mark) -> bool {
        self.device == other.device
            && self.born != 0
            && other.born != 0
            && (self.inode, self.born) != (other.inode, other.born)
    }
}

/// Whether what a map belongs to is there.
#[derive(Debug, PartialEq)]
enum Presence {
    There,
    Gone,
    /// It may come back.
    Away,
}

impl Owner {
    /// The owner of these, as they are now.
    pub fn new(kind: OwnerKind, directory: &Path, cache: &Path) -> Owner {
        let whole = |path: &Path| {
            let whole = path.canonicalize().or_else(|_| std::path::absolute(path));
            whole.unwrap_or_else(|_| path.to_owned())
        };
        let mut owner =
            Owner { kind, directory: whole(directory), cache: whole(cache), mark: None };
        owner.mark = owner.decides().metadata().ok().map(|found| Mark::of(&found));
        owner
    }

    /// The same for one that was noted some time ago and may be gone by now.
    pub fn of_old(kind: OwnerKind, directory: &Path, cache: &Path) -> Owner {
        Owner { kind, directory: directory.to_owned(), cache: cache.to_owned(), mark: None }
    }

    /// Without which the map is of no use.
    pub fn decides(&self) -> &Path {
        match self.kind {
            OwnerKind::Kv => &self.directory,
            OwnerKind::Block => &self.cache,
        }
    }

    fn presence(&self) -> Presence {
        let path = self.decides();
        match path.metadata() {
            Ok(found) => match self.mark {
                // Something else of that name.
                Some(mark) if !path.starts_with("/dev") && mark.differs(Mark::of(&found)) => {
                    if self.lies_beside() { Presence::Away } else { Presence::Gone }
                }
                _ => Presence::There,
            },
            // A drive may be put in again.
            Err(_) if path.starts_with("/dev") || !path.is_absolute() => Presence::Away,
            Err(e)
                if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
            {
                if self.is_mounted() && !self.lies_beside() {
                    Presence::Gone
                } else {
                    Presence::Away
                }
            }
            // It cannot be seen by this user.
            Err(_) => Presence::Away,
        }
    }

    /// The file system on which it was is where it was.
    fn is_mounted(&self) -> bool {
        let Some(mark) = self.mark else { return true };
        let nearest = self.decides().ancestors().skip(1).find_map(|a| a.metadata().ok());
        nearest.is_some_and(|found| found.dev() == mark.device)
    }

    /// It has another name in the same directory.
    fn lies_beside(&self) -> bool {
        let (Some(mark), Some(parent)) = (self.mark, self.decides().parent()) else { return false };
        let all = std::fs::read_dir(parent).into_iter().flatten().flatten().take(MOST_BESIDE);
        all.filter_map(|entry| entry.metadata().ok())
            .any(|found| mark.born != 0 && Mark::of(&found) == mark)
    }

    fn encode(&self) -> Vec<u8> {
        let mark =
            self.mark.map_or(String::new(), |m| format!("{} {} {}", m.device, m.inode, m.born));
        let fields = [
            NOTE_HEAD.as_bytes(),
            self.kind.as_str().as_bytes(),
            self.directory.as_os_str().as_bytes(),
            self.cache.as_os_str().as_bytes(),
            mark.as_bytes(),
            // The last byte tells that the note is whole.
            b"",
        ];
        fields.join(&0)
    }

    fn decode(bytes: &[u8]) -> Option<Owner> {
        let fields: Vec<&[u8]> = bytes.split(|&b| b == 0).collect();
        let &[head, kind, directory, cache, mark, b""] = &fields[..] else { return None };
        if head != NOTE_HEAD.as_bytes() {
            return None;
        }
        let kind = [OwnerKind::Kv, OwnerKind::Block]
            .into_iter()
            .find(|k| k.as_str().as_bytes() == kind)?;
        let path = |bytes: &[u8]| PathBuf::from(std::ffi::OsString::from_vec(bytes.to_vec()));
        let numbers: Vec<u64> = std::str::from_utf8(mark)
            .ok()?
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()
            .ok()?;
        let mark = match numbers[..] {
            [] => None,
            [device, inode, born] => Some(Mark { device, inode, born }),
            _ => return None,
        };
        Some(Owner { kind, directory: path(directory), cache: path(cache), mark })
    }
}

fn note_path(map: &Path) -> PathBuf {
    let mut name = map.as_os_str().to_owned();
    name.push(NOTE);
    PathBuf::from(name)
}

/// Notes whose the map is. Only for who has its lock.
pub(crate) fn write_owner(map: &Path, owner: &Owner) -> io::Result<()> {
    let path = note_path(map);
    let mut file = open_private(&path).map_err(io::Error::other)?;
    check_ownership(&path, &file.metadata()?).map_err(io::Error::other)?;
    file.set_len(0)?;
    file.write_all(&owner.encode())
}

/// Takes the note away, before the map. Only for who has its lock.
pub(crate) fn remove_owner(map: &Path) {
    match std::fs::remove_file(note_path(map)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::debug!(%error, "the note of whose a map is stays");
        }
        _ => {}
    }
}

fn read_owner(map: &Path) -> Option<Owner> {
    let path = note_path(map);
    let file = OpenOptions::new().read(true).custom_flags(PRIVATE).open(&path).ok()?;
    check_ownership(&path, &file.metadata().ok()?).ok()?;
    let mut bytes = Vec::new();
    file.take(MOST_NOTE).read_to_end(&mut bytes).ok()?;
    Owner::decode(&bytes)
}

/// What is to be said of a map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapState {
    /// A process has it.
    InUse(Option<Holder>),
    /// What it belongs to is gone: nobody will ask for it.
    Stale,
    /// The next start of its owner is warm with it.
    Warm,
    /// What it belongs to is not to be seen, and may come back.
    Away,
    /// It has no note: an earlier version made it.
    Unknown,
    /// It is not this user's, and why.
    Foreign(String),
}

/// A map in shared memory.
#[derive(Clone, Debug)]
pub struct MapFile {
    /// Its name in the directory.
    pub name: String,
    /// Bytes of memory that it takes.
    pub bytes: u64,
    /// Whose it is.
    pub owner: Option<Owner>,
    /// What is to be said of it.
    pub state: MapState,
}

/// The maps in `dir`, by name.
///
/// # Errors
/// The directory cannot be read.
pub fn list(dir: &Path) -> io::Result<Vec<MapFile>> {
    Ok(names(dir)?.into_iter().filter_map(|name| look(dir, name, true)).collect())
}

fn names(dir: &Path) -> io::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(dir)? {
        let Ok(name) = entry?.file_name().into_string() else { continue };
        let name = name.strip_suffix(NOTE).unwrap_or(&name);
        if is_name(name) {
            names.insert(name.to_owned());
        }
    }
    Ok(names)
}

fn is_name(name: &str) -> bool {
    name.strip_prefix(PREFIX).is_some_and(|uuid| {
        uuid.len() == UUID_CHARACTERS && uuid.bytes().all(|b| b == b'-' || b.is_ascii_hexdigit())
    })
}

/// What is to be said of the map of that name; of one in use by whom only if `who`.
fn look(dir: &Path, name: String, who: bool) -> Option<MapFile> {
    let path = region_path(dir, &name).ok()?;
    let owner = read_owner(&path);
    let opened = OpenOptions::new().read(true).custom_flags(PRIVATE).open(&path);
    let file = match opened {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            // A note without its map.
            let there = note_path(&path).symlink_metadata().is_ok();
            return there.then_some(MapFile { name, bytes: 0, owner, state: MapState::Stale });
        }
        Err(e) => {
            let bytes = path.symlink_metadata().map_or(0, |found| found.len());
            let state = MapState::Foreign(why(&cannot_open(&path, e)));
            return Some(MapFile { name, bytes, owner, state });
        }
    };
    let found = file.metadata().ok()?;
    let state = match check_ownership(&path, &found) {
        Err(error) => MapState::Foreign(why(&error)),
        Ok(()) if is_locked_by_another(file.as_fd()).unwrap_or(true) => {
            MapState::InUse(if who { holder(file.as_fd()) } else { None })
        }
        Ok(()) => state(&file, owner.as_ref()),
    };
    Some(MapFile { name, bytes: found.blocks() * 512, owner, state })
}

/// The same of one that no process has.
fn state(file: &File, owner: Option<&Owner>) -> MapState {
    // A start was cut short before it took the memory.
    if file.metadata().is_ok_and(|found| found.len() == 0) {
        return MapState::Stale;
    }
    match owner.map(Owner::presence) {
        None => MapState::Unknown,
        Some(Presence::There) => MapState::Warm,
        Some(Presence::Gone) => MapState::Stale,
        Some(Presence::Away) => MapState::Away,
    }
}

fn why(error: &SharedError) -> String {
    match error {
        SharedError::Foreign { why, .. } => why.clone(),
        other => other.to_string(),
    }
}

/// Removes the maps whose owner is gone, and says so in the log.
pub fn sweep(dir: &Path) -> Vec<MapFile> {
    let names = names(dir).unwrap_or_default();
    let maps = names.into_iter().filter_map(|name| look(dir, name, false));
    let mut removed = Vec::new();
    for map in maps.filter(|map| map.state == MapState::Stale) {
        match take_away(dir, &map.name, true) {
            Ok(true) => {
                if let Some(owner) = &map.owner {
                    tracing::info!(
                        "the map '{}' ({}) of {} is removed: '{}' is gone",
                        map.name,
                        ByteSize(map.bytes),
                        owner.kind,
                        owner.decides().display()
                    );
                }
                removed.push(map);
            }
            // Somebody has it again.
            Ok(false) | Err(SharedError::InUse { .. }) => {}
            Err(error) => tracing::debug!(%error, "a map whose owner is gone stays"),
        }
    }
    removed
}

/// Removes the map of that name, whatever it keeps warm. `false` if there is none.
///
/// # Errors
/// [`SharedError::InUse`], and [`SharedError::Foreign`] when it is not this user's.
pub fn remove(dir: &Path, name: &str) -> Result<bool, SharedError> {
    take_away(dir, name, false)
}

fn take_away(dir: &Path, name: &str, stale: bool) -> Result<bool, SharedError> {
    let path = region_path(dir, name)?;
    let failed = |action| {
        let path = path.clone();
        move |source: io::Error| SharedError::Io { path, action, source }
    };
    match path.symlink_metadata() {
        Ok(found) => check_ownership(&path, &found)?,
        Err(_) if note_path(&path).symlink_metadata().is_ok() => {}
        Err(_) => return Ok(false),
    }
    // Of a note alone the map is made, to be locked: whoever makes it at the same time waits for that.
    let file = open_private(&path)?;
    if !try_lock_exclusive(file.as_fd()).map_err(failed("lock"))? {
        return Err(SharedError::InUse { path, holder: holder(file.as_fd()) });
    }
    // Removed between the opening and the lock: what is there now is another's.
    if file.metadata().map_err(failed("look at"))?.nlink() == 0 {
        return Ok(false);
    }
    if stale && state(&file, read_owner(&path).as_ref()) != MapState::Stale {
        return Ok(false);
    }
    remove_owner(&path);
    std::fs::remove_file(&path).map_err(failed("remove"))?;
    Ok(true)
}

/// Notes whose the map of that name is, if it has no note yet and no process has it.
pub fn adopt(dir: &Path, name: &str, owner: &Owner) {
    let Ok(path) = region_path(dir, name) else { return };
    if path.symlink_metadata().is_err() || read_owner(&path).is_some() {
        return;
    }
    let Ok(file) = OpenOptions::new().read(true).write(true).custom_flags(PRIVATE).open(&path)
    else {
        return;
    };
    let ours = file.metadata().is_ok_and(|found| check_ownership(&path, &found).is_ok());
    if ours
        && try_lock_exclusive(file.as_fd()).unwrap_or(false)
        && let Err(error) = write_owner(&path, owner)
    {
        tracing::debug!(%error, "it is not noted whose a map is");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SharedRegion;

    const NAME: &str = "larder-00112233-4455-6677-8899-aabbccddeeff";

    struct Place {
        shm: tempfile::TempDir,
        disk: tempfile::TempDir,
    }

    impl Place {
        fn new() -> Place {
            let place =
                Place { shm: tempfile::tempdir().unwrap(), disk: tempfile::tempdir().unwrap() };
            std::fs::create_dir(place.directory()).unwrap();
            std::fs::write(place.cache(), "x").unwrap();
            place
        }

        fn directory(&self) -> PathBuf {
            self.disk.path().join("data")
        }

        fn cache(&self) -> PathBuf {
            self.disk.path().join("cache")
        }

        fn map(&self, kind: OwnerKind) -> SharedRegion {
            let region = SharedRegion::open(self.shm.path(), NAME, 1 << 16).unwrap();
            region.set_owner(&Owner::new(kind, &self.directory(), &self.cache()));
            region
        }

        fn state(&self) -> MapState {
            let mut all = list(self.shm.path()).unwrap();
            assert_eq!(all.len(), 1, "{all:?}");
            all.pop().unwrap().state
        }

        fn files(&self) -> usize {
            std::fs::read_dir(self.shm.path()).unwrap().count()
        }
    }

    #[test]
    fn a_map_goes_with_what_it_belongs_to() {
        for kind in [OwnerKind::Kv, OwnerKind::Block] {
            let place = Place::new();
            let region = place.map(kind);
            assert!(matches!(place.state(), MapState::InUse(Some(_))));
            std::fs::remove_dir(place.directory()).unwrap();
            std::fs::remove_file(place.cache()).unwrap();
            assert!(sweep(place.shm.path()).is_empty(), "in use");
            assert!(matches!(remove(place.shm.path(), NAME), Err(SharedError::InUse { .. })));
            drop(region);
            assert_eq!(place.state(), MapState::Stale);
            assert_eq!(sweep(place.shm.path()).len(), 1);
            assert_eq!(place.files(), 0, "the note goes too");
        }
    }

    #[test]
    fn what_may_be_asked_for_stays() {
        let place = Place::new();
        drop(place.map(OwnerKind::Kv));
        let stays = |state: MapState| {
            assert_eq!(place.state(), state);
            assert!(sweep(place.shm.path()).is_empty());
        };
        std::fs::remove_file(place.cache()).unwrap();
        stays(MapState::Warm);
        // Renamed where it lies, as far as the file system can tell.
        if place.directory().metadata().unwrap().created().is_ok() {
            let moved = place.disk.path().join("moved");
            std::fs::rename(place.directory(), &moved).unwrap();
            stays(MapState::Away);
            std::fs::create_dir(place.directory()).unwrap();
            stays(MapState::Away);
            std::fs::remove_dir(&moved).unwrap();
            assert_eq!(place.state(), MapState::Stale, "another directory of the same name");
        }
        // By name it goes whatever it is for.
        assert!(remove(place.shm.path(), NAME).unwrap());
        assert!(!remove(place.shm.path(), NAME).unwrap());
    }

    #[test]
    fn what_is_not_mounted_is_not_gone() {
        let place = Place::new();
        let mut owner = Owner::new(OwnerKind::Kv, &place.directory(), &place.cache());
        std::fs::remove_dir(place.directory()).unwrap();
        assert_eq!(owner.presence(), Presence::Gone);
        owner.mark = owner.mark.map(|m| Mark { device: m.device + 1, ..m });
        assert_eq!(owner.presence(), Presence::Away);
        let drive = Owner::of_old(OwnerKind::Block, &place.directory(), Path::new("/dev/none0"));
        assert_eq!(drive.presence(), Presence::Away);
    }

    #[test]
    fn a_map_without_a_note_is_nobodys_to_remove() {
        let place = Place::new();
        let region = SharedRegion::open(place.shm.path(), NAME, 1 << 16).unwrap();
        region.words()[3].store(7, std::sync::atomic::Ordering::Relaxed);
        drop(region);
        assert_eq!(place.state(), MapState::Unknown);
        assert!(sweep(place.shm.path()).is_empty());
        // It opens as before.
        let region = place.map(OwnerKind::Kv);
        assert!(!region.is_fresh());
        assert_eq!(region.words()[3].load(std::sync::atomic::Ordering::Relaxed), 7);
        drop(region);
        // A damaged note is none.
        let note = note_path(&place.shm.path().join(NAME));
        let whole = std::fs::read(&note).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&note, &whole[..length]).unwrap();
            assert_eq!(place.state(), MapState::Unknown, "{length}");
        }
        std::fs::remove_file(&note).unwrap();
        // What an earlier version noted elsewhere is taken over.
        let gone = place.disk.path().join("no-cache");
        let owner = Owner::of_old(OwnerKind::Block, &place.directory(), &gone);
        adopt(place.shm.path(), NAME, &owner);
        assert_eq!(sweep(place.shm.path())[0].owner, Some(owner));
        // A note alone goes.
        std::fs::write(&note, &whole).unwrap();
        std::fs::set_permissions(&note, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
        assert_eq!(sweep(place.shm.path()).len(), 1);
        assert_eq!(place.files(), 0);
        std::fs::write(place.shm.path().join("larder-else"), "x").unwrap();
        assert!(list(place.shm.path()).unwrap().is_empty());
    }

    #[test]
    fn owners_are_what_was_written() {
        for owner in [
            Owner::new(OwnerKind::Kv, Path::new("/"), Path::new("relative")),
            Owner::of_old(OwnerKind::Block, Path::new("/a\nb"), Path::new("/c d")),
        ] {
            assert_eq!(Owner::decode(&owner.encode()), Some(owner));
        }
        for bad in
            [&b""[..], b"x", b"larder-owner 2\0kv\0/\0/\0\0", b"larder-owner 1\0kw\0/\0/\0\0"]
        {
            assert_eq!(Owner::decode(bad), None);
        }
    }
}
