//! A marker in a file of its own.
//!
//! A file comes to its name complete and durable: it is made under another name (`.new` behind it), locked, written, and then renamed,
//! which fails if the name is taken. A power cut leaves no marker, or a whole one, and perhaps the other name, which the next
//! write takes for what it is.
//!
//! The lock is the file's own, so it goes with whoever holds it, and keeps the next one away while a write of a killed holder is
//! still under way. The file is opened by its name in an open directory, which may be moved.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use larder_format::block::marker::MAGIC;
use larder_runtime::{Refused, lock_exclusive, plain};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, RenameFlags, Stat, StatxFlags, Uid};
use rustix::io::Errno as Os;

use super::cut::Cut;
use super::image::Image;
use super::place::{Medium, PLACE_BYTES, copy_at, split};
use super::{MarkerIoError, NamedPlace};

/// Behind the name of the image.
pub(super) const SUFFIX: &str = ".larder";
/// Behind the name of the marker, while it is made.
const NEW: &str = ".new";
/// The longest name that leaves room for these, bytes.
const MAX_NAME: usize = 255 - SUFFIX.len() - NEW.len();
/// A file that is replaced again and again while it is opened is given up.
const TRIES: u32 = 8;

pub(super) struct FileMedium {
    /// Where it is named.
    path: PathBuf,
    dir: OwnedFd,
    name: OsString,
    image: Option<Image>,
    look: bool,
    held: Option<Held>,
    /// Its name may not be durable yet.
    unsynced: bool,
    /// It was said that the image takes no attribute.
    said: bool,
    pub(super) cut: Cut,
}

struct Held {
    file: File,
    which: (u64, u64),
}

fn which(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

impl FileMedium {
    /// `NAME.larder` beside an image, wherever links lead to it from.
    pub(super) fn beside(
        store: &str,
        image: Image,
        look: bool,
    ) -> Result<FileMedium, MarkerIoError> {
        let none = |why: String| MarkerIoError::NoPlace { store: store.to_owned(), why };
        #[cfg(any(test, feature = "testing"))]
        crate::testing::answers(image.path());
        let path = image.path().canonicalize().map_err(|e| none(plain(&e)))?;
        let stat = image.stat().map_err(|e| none(plain(&e)))?;
        let found = path.metadata().map_err(|e| none(plain(&e)))?;
        if (found.dev(), found.ino()) != which(&stat) {
            return Err(none("another file is at its path by now".into()));
        }
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(none("it is in no directory".into()));
        };
        if name.len() > MAX_NAME {
            return Err(none(format!("its name is longer than {MAX_NAME} bytes")));
        }
        let mut beside = name.to_owned();
        beside.push(SUFFIX);
        let medium = FileMedium::in_dir(parent, beside, Some(image), look).map_err(none)?;
        let image = medium.image.as_ref().map(|image| image.file().as_fd());
        // A file that is mounted by itself: what is made beside it lies elsewhere, and does not go where it goes.
        if image.and_then(mount_of).zip(mount_of(medium.dir.as_fd())).is_some_and(|(a, b)| a != b) {
            return Err(none("it is mounted as a single file, without its directory".into()));
        }
        Ok(medium)
    }

    /// A file of any name.
    ///
    /// # Errors
    /// What is wrong with the path.
    pub(super) fn at(path: &Path, image: Option<Image>, look: bool) -> Result<FileMedium, String> {
        #[cfg(any(test, feature = "testing"))]
        crate::testing::answers(path);
        let whole = match path.canonicalize() {
            Ok(whole) => whole,
            // There may be none yet; its directory must be there.
            Err(_) => path.to_owned(),
        };
        if image.as_ref().is_some_and(|image| image.is_at(&whole)) {
            return Err("is the volume's own store: name another file".into());
        }
        let name = whole.file_name().ok_or("names no file")?;
        if name.len() > MAX_NAME {
            return Err(format!("has a name of more than {MAX_NAME} bytes: choose a shorter one"));
        }
        let parent = whole.parent().filter(|dir| !dir.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new(".")).canonicalize();
        let parent = parent.map_err(|e| format!("its directory: {}", plain(&e)))?;
        FileMedium::in_dir(&parent, name.to_owned(), image, look)
    }

    fn in_dir(
        parent: &Path,
        name: OsString,
        image: Option<Image>,
        look: bool,
    ) -> Result<FileMedium, String> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(CWD, parent, flags, Mode::empty())
            .map_err(|e| format!("its directory '{}': {}", parent.display(), plain(&e.into())))?;
        let path = parent.join(&name);
        Ok(FileMedium {
            path,
            dir,
            name,
            image,
            look,
            held: None,
            unsynced: false,
            said: false,
            cut: Cut::default(),
        })
    }

    fn failed(&self, what: &str, e: impl Into<io::Error>) -> MarkerIoError {
        let reason = format!("{what}: {}", plain(&e.into()));
        MarkerIoError::Failed { place: self.name(), reason }
    }

    fn no_marker(&self, reason: &str) -> MarkerIoError {
        MarkerIoError::NotAMarker { place: self.name(), reason: reason.to_owned() }
    }

    fn new_name(&self) -> OsString {
        let mut name = self.name.clone();
        name.push(NEW);
        name
    }

    /// What is at its name, itself and not where it leads.
    fn at_name(&self) -> Result<Option<Stat>, MarkerIoError> {
        match rustix::fs::statat(&self.dir, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Os::NOENT) => Ok(None),
            Err(e) => Err(self.failed("it cannot be looked at", e)),
        }
    }

    /// Opens a file of that name, if there is one and it is a regular file.
    fn open(&self, name: &OsStr) -> Result<Option<(File, Stat)>, MarkerIoError> {
        let access = if self.look { OFlags::RDONLY } else { OFlags::RDWR };
        // Whatever is there, opening it waits for nothing.
        let flags = access | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let fd = match rustix::fs::openat(&self.dir, name, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Os::NOENT) => return Ok(None),
            Err(Os::ISDIR) => return Err(self.no_marker("is a directory")),
            Err(Os::LOOP) => return Err(self.no_marker("is a symbolic link")),
            Err(Os::NXIO | Os::NODEV) => return Err(self.no_marker("is no regular file")),
            Err(e) => return Err(self.failed("it cannot be opened", e)),
        };
        let stat = rustix::fs::fstat(&fd).map_err(|e| self.failed("it cannot be looked at", e))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Ok(Some((File::from(fd), stat))),
            FileType::Directory => Err(self.no_marker("is a directory")),
            _ => Err(self.no_marker("is no regular file")),
        }
    }

    fn lock(&self, file: &File) -> Result<(), MarkerIoError> {
        lock_exclusive(file.as_fd()).map_err(|refused| match refused {
            Refused::Held(Some(by)) if by.pid == std::process::id() => MarkerIoError::Held {
                place: self.name(),
                by: " by this process itself, which has it for another volume".into(),
            },
            Refused::Held(by) => MarkerIoError::Held {
                place: self.name(),
                by: by.map_or(" by another process".into(), |by| format!(" by {by}")),
            },
            Refused::Failed(e) => self.failed("it cannot be locked", e),
        })
    }

    /// Opens what is at its name now, unless it is open already.
    fn hold(&mut self) -> Result<Option<&Held>, MarkerIoError> {
        #[cfg(any(test, feature = "testing"))]
        crate::testing::answers(&self.path);
        for _ in 0..TRIES {
            let at_name = self.at_name()?.as_ref().map(which);
            if self.held.as_ref().map(|held| held.which) == at_name {
                return Ok(self.held.as_ref());
            }
            self.held = None;
            let name = self.name.clone();
            let Some((file, stat)) = self.open(&name)? else { continue };
            let image = self.image.as_ref().and_then(|image| image.stat().ok());
            if image.is_some_and(|image| which(&image) == which(&stat)) {
                return Err(self.no_marker("is the volume's own store"));
            }
            if !self.look {
                self.lock(&file)?;
            }
            // Whoever had it may have put another in its place: it is looked at again.
            self.held = Some(Held { file, which: which(&stat) });
        }
        Err(MarkerIoError::Changed {
            place: self.name(),
            now: "it is replaced again and again".into(),
        })
    }

    /// What is at its name, made durable first if that is said.
    fn copies(&mut self, durable: bool) -> Result<Option<[Vec<u8>; 2]>, MarkerIoError> {
        let Some(held) = self.hold()? else { return Ok(None) };
        let read = held.file.try_clone().and_then(|file| {
            if durable {
                file.sync_data()?;
            }
            read_from_start(&file, PLACE_BYTES)
        });
        let bytes = read.map_err(|e| self.failed("it cannot be read", e))?;
        Ok(Some(split(&bytes)))
    }

    fn must_hold(&self) -> Result<&Held, MarkerIoError> {
        self.held
            .as_ref()
            .ok_or_else(|| MarkerIoError::Changed { place: self.name(), now: "it is gone".into() })
    }

    fn step<T>(
        &mut self,
        what: &str,
        act: impl FnOnce(&FileMedium) -> Result<T, Os>,
    ) -> Result<T, MarkerIoError> {
        let may = self.cut.step();
        let done = may.and_then(|()| act(self).map_err(io::Error::from));
        done.map_err(|e| self.failed(what, e))
    }

    fn sync_name(&mut self) -> Result<(), MarkerIoError> {
        if self.unsynced {
            self.step("its directory cannot be made durable", |m| rustix::fs::fsync(&m.dir))?;
            self.unsynced = false;
        }
        Ok(())
    }

    /// One copy, durable.
    fn put(&mut self, copy: usize, bytes: &[u8]) -> Result<(), MarkerIoError> {
        let file = &self.must_hold()?.file;
        let file = file.try_clone().map_err(|e| self.failed("it cannot be written", e))?;
        let os = |e: io::Error| Os::from_io_error(&e).unwrap_or(Os::IO);
        self.step("it cannot be written", |_| file.write_all_at(bytes, copy_at(copy)).map_err(os))?;
        self.step("it cannot be made durable", |_| rustix::fs::fdatasync(&file))
    }

    /// A file under the other name, locked and empty.
    fn make(&mut self) -> Result<File, MarkerIoError> {
        let (name, mode) = (self.new_name(), Mode::RUSR | Mode::WUSR);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let create = |m: &FileMedium| rustix::fs::openat(&m.dir, &name, flags, mode);
        let mut made = self.step("it cannot be made", |m| match create(m) {
            Err(Os::EXIST) => Ok(None),
            other => other.map(Some),
        })?;
        if made.is_none() {
            self.remove_left_over(&name)?;
            made = Some(self.step("it cannot be made", create)?);
        }
        let Some(made) = made else { return Err(self.failed("it cannot be made", Os::EXIST)) };
        let file = File::from(made);
        // Whoever may use the image may use its marker.
        if let Some(Ok(stat)) = self.image.as_ref().map(Image::stat)
            && !self.image.as_ref().is_some_and(Image::is_device)
        {
            let (user, group) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
            let own = rustix::fs::fchown(&file, Some(user), Some(group));
            if own.is_ok() {
                let _ = rustix::fs::fchmod(&file, Mode::from_raw_mode(stat.st_mode & 0o666) | mode);
            }
        }
        self.lock(&file)?;
        Ok(file)
    }

    /// What a write that was cut short has left under the other name.
    fn remove_left_over(&mut self, name: &OsStr) -> Result<(), MarkerIoError> {
        let Some((file, stat)) = self.open(name)? else { return Ok(()) };
        self.lock(&file)?;
        let most = PLACE_BYTES;
        let bytes =
            read_from_start(&file, most).map_err(|e| self.failed("it cannot be read", e))?;
        let copies = split(&bytes);
        let ours = |copy: &[u8]| copy.starts_with(&MAGIC) || copy.iter().all(|&b| b == 0);
        if stat.st_size as usize > most || !copies.iter().all(|copy| ours(copy)) {
            let place = format!("'{}{NEW}'", self.path.display());
            let reason = "stands where a marker is to be made".to_owned();
            return Err(MarkerIoError::NotAMarker { place, reason });
        }
        self.step("what was left there cannot be removed", |m| {
            rustix::fs::unlinkat(&m.dir, name, AtFlags::empty())
        })
    }

    fn fill(&mut self, file: &File, first: usize, bytes: &[u8]) -> Result<(), MarkerIoError> {
        let os = |e: io::Error| Os::from_io_error(&e).unwrap_or(Os::IO);
        for copy in [first, first + 1] {
            self.step("it cannot be written", |_| {
                file.write_all_at(bytes, copy_at(copy)).map_err(os)
            })?;
        }
        self.step("it cannot be made durable", |_| rustix::fs::fsync(file))?;
        let new = self.new_name();
        let named = self.step("it cannot be given its name", |m| {
            let (dir, flags) = (&m.dir, RenameFlags::NOREPLACE);
            let named = match rustix::fs::renameat_with(dir, &new, dir, &m.name, flags) {
                // Not on NFS, for one.
                Err(Os::INVAL | Os::NOSYS | Os::OPNOTSUPP) => {
                    rustix::fs::linkat(dir, &new, dir, &m.name, AtFlags::empty())?;
                    rustix::fs::unlinkat(dir, &new, AtFlags::empty())
                }
                other => other,
            };
            match named {
                Err(Os::EXIST) => Ok(false),
                other => other.map(|()| true),
            }
        })?;
        match named {
            true => Ok(()),
            false => Err(MarkerIoError::Changed {
                place: self.name(),
                now: "something else has taken its name".into(),
            }),
        }
    }
}

/// Up to so many bytes.
fn read_from_start(file: &File, most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; most];
    let mut len = 0;
    while len < most {
        match file.read_at(&mut bytes[len..], len as u64) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    bytes.truncate(len);
    Ok(bytes)
}

/// The mount that a file is reached through, where the kernel says.
fn mount_of(file: impl AsFd) -> Option<u64> {
    let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).ok()?;
    (found.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(found.stx_mnt_id)
}

impl Medium for FileMedium {
    fn load(&mut self) -> Result<Option<[Vec<u8>; 2]>, MarkerIoError> {
        // What a killed process has left to the kernel may not be on the disk.
        let durable = !self.look;
        self.copies(durable)
    }

    fn glance(&mut self) -> Result<Option<[Vec<u8>; 2]>, MarkerIoError> {
        self.copies(false)
    }

    fn create(&mut self, first: usize, bytes: &[u8]) -> Result<(), MarkerIoError> {
        let file = self.make()?;
        let filled = self.fill(&file, first, bytes);
        if filled.is_err() {
            // If the power is still on.
            let new = self.new_name();
            let _ = self.step("", |m| rustix::fs::unlinkat(&m.dir, &new, AtFlags::empty()));
        }
        filled?;
        let stat = rustix::fs::fstat(&file).map_err(|e| self.failed("it is not known", e))?;
        self.held = Some(Held { file, which: which(&stat) });
        self.unsynced = true;
        self.sync_name()
    }

    fn replace(&mut self, first: usize, bytes: &[u8]) -> Result<(), MarkerIoError> {
        self.sync_name()?;
        self.put(first, bytes)?;
        self.put(first + 1, bytes)
    }

    fn clear(&mut self) -> Result<(), MarkerIoError> {
        // First what says that there is one: the other way round a power cut would leave a marker that is missed.
        if let Some(image) = &self.image
            && !matches!(image.attribute().get(), Ok(None))
        {
            let unset = self.cut.step().and_then(|()| image.attribute().set(None));
            unset.map_err(|e| self.failed("the image's attribute cannot be removed", e))?;
        }
        if self.held.is_some() {
            self.step("it cannot be removed", |m| {
                rustix::fs::unlinkat(&m.dir, &m.name, AtFlags::empty())
            })?;
            self.held = None;
            self.unsynced = true;
        }
        self.sync_name()
    }

    fn was(&mut self) -> Result<bool, MarkerIoError> {
        let Some(image) = &self.image else { return Ok(false) };
        let value = image.attribute().get();
        let value = value.map_err(|e| self.failed("the image's attribute cannot be read", e))?;
        Ok(value.is_some())
    }

    fn keep(&mut self) {
        let value = self.path.as_os_str().as_bytes();
        let Some(image) = &self.image else { return };
        if image.is_device() || matches!(image.attribute().get(), Ok(Some(is)) if is == value) {
            return;
        }
        let set = self.cut.step().and_then(|()| image.attribute().set(Some(value)));
        if let Err(e) = set
            && !std::mem::replace(&mut self.said, true)
        {
            tracing::warn!(
                "'{}' cannot remember that its marker is '{}': {}; if the marker is lost, nothing says that there was one",
                image.path().display(),
                self.path.display(),
                plain(&e)
            );
        }
    }

    fn let_go(&mut self) {
        self.held = None;
    }

    fn is_looked_at(&self) -> bool {
        self.look
    }

    fn is_fenced(&self) -> bool {
        !self.look
    }

    fn name(&self) -> String {
        format!("marker '{}'", self.path.display())
    }

    fn named_by_store(&self) -> Option<NamedPlace> {
        let path = self.image.as_ref()?.names_marker()?;
        let is_this = path == self.path;
        Some(NamedPlace { path, is_this })
    }
}
