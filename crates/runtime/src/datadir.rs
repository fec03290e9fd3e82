//! The directory in which an instance keeps what is not on the flash device.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::lock::{Holder, Refused, lock_exclusive, lock_shared};

/// Why a data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// The path is something else.
    #[error("data directory '{0}' is not a directory: name another with --data-dir")]
    NotADirectory(PathBuf),
    /// Another instance runs on it.
    #[error("data directory '{path}' is in use by {}: stop it, or name another with --data-dir", owner(.pid, .holder))]
    InUse {
        /// The directory.
        path: PathBuf,
        /// What the lock file says.
        pid: Option<u32>,
        /// What the system says.
        holder: Option<Holder>,
    },
    /// It was written by another version.
    #[error(
        "data directory '{path}' has format version {found}, this program writes version {wanted}: \
         use a program of that version, or name another with --data-dir"
    )]
    Version {
        /// The directory.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// This program's.
        wanted: u32,
    },
    /// Its `VERSION` file is not one of ours.
    #[error(
        "'{path}' does not hold a version of Larder's format ('{text}'): this is another program's directory, or damaged"
    )]
    NotOurs {
        /// The file.
        path: PathBuf,
        /// The beginning of what it holds.
        text: String,
    },
    /// The operating system refused.
    #[error("cannot {action} '{path}': {source}{}", remedy(.source))]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// What to do about the usual refusals.
fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied => {
            " (run as a user who may write there, or name another with --data-dir)"
        }
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::NotADirectory => {
            " (name another with --data-dir)"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => " (free some space there)",
        _ => "",
    }
}

fn owner(pid: &Option<u32>, holder: &Option<Holder>) -> String {
    match (holder, pid) {
        (Some(h), _) => h.to_string(),
        (None, Some(pid)) => format!("process {pid}"),
        (None, None) => "another instance".to_owned(),
    }
}

/// A data directory, locked for this process.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    /// Held locked; holds the process id for people.
    lock: File,
    /// What [`DataDir::open`] has made, in the order of making.
    made: Vec<PathBuf>,
    /// Whether it is believed when files were made.
    births: bool,
}

/// A data directory in which this process keeps nothing, and which nobody opens meanwhile. Others may share it too.
#[derive(Debug)]
pub struct SharedDir {
    /// Held locked.
    _lock: File,
}

/// The file that is locked as long as the directory is open.
pub const LOCK: &str = "lock";
/// The file that says of which format the directory is.
pub const VERSION: &str = "VERSION";
const MAGIC: &str = "larder ";

impl DataDir {
    /// Opens (or creates, for this user alone) and locks the directory, and checks that it is of format `version`.
    ///
    /// # Errors
    /// See [`DataDirError`]; nothing but the lock file is touched then.
    pub fn open(path: &Path, version: u32) -> Result<DataDir, DataDirError> {
        let failed = |action, path: &Path| {
            let path = path.to_owned();
            move |source| DataDirError::Io { path, action, source }
        };
        let mut made: Vec<PathBuf> = Vec::new();
        match std::fs::metadata(path) {
            Ok(found) if !found.is_dir() => {
                return Err(DataDirError::NotADirectory(path.to_owned()));
            }
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let absent = |p: &&Path| !p.as_os_str().is_empty() && !p.exists();
                made = path.ancestors().take_while(absent).map(Path::to_owned).collect();
                made.reverse();
                DirBuilder::new()
                    .recursive(true)
                    .mode(0o700)
                    .create(path)
                    .map_err(failed("create data directory", path))?;
            }
            Err(e) => return Err(failed("open data directory", path)(e)),
        }
        let lock_path = path.join(LOCK);
        let had_lock = lock_path.exists();
        let lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&lock_path)
            .map_err(failed("create", &lock_path))?;
        lock_exclusive(lock.as_fd()).map_err(|refused| match refused {
            Refused::Held(holder) => {
                let pid = read_start(&lock_path).ok().and_then(|t| t.trim().parse().ok());
                DataDirError::InUse { path: path.to_owned(), pid, holder }
            }
            Refused::Failed(e) => failed("lock", &lock_path)(e),
        })?;
        if !had_lock {
            made.push(lock_path.clone());
        }
        let mut dir = DataDir { path: path.to_owned(), lock, made, births: true };
        dir.check_version(version)?;
        dir.lock
            .set_len(0)
            .and_then(|()| writeln!(&dir.lock, "{}", std::process::id()))
            .map_err(failed("write", &lock_path))?;
        Ok(dir)
    }

    /// Keeps a directory from being opened, beside others that do the same. Only the lock file is made, if it is missing.
    ///
    /// # Errors
    /// [`DataDirError::InUse`] when somebody has it open; what the system says of the lock file, of a directory that is not
    /// there too.
    pub fn share(path: &Path) -> Result<SharedDir, DataDirError> {
        let lock_path = path.join(LOCK);
        let failed = |action| {
            let path = lock_path.clone();
            move |source| DataDirError::Io { path, action, source }
        };
        let lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&lock_path)
            .map_err(failed("create"))?;
        lock_shared(lock.as_fd()).map_err(|refused| match refused {
            Refused::Held(holder) => {
                let pid = read_start(&lock_path).ok().and_then(|t| t.trim().parse().ok());
                DataDirError::InUse { path: path.to_owned(), pid, holder }
            }
            Refused::Failed(e) => failed("lock")(e),
        })?;
        Ok(SharedDir { _lock: lock })
    }

    /// Goes on as [`DataDir::share`] does. Nobody can open the directory in between.
    ///
    /// # Errors
    /// As [`DataDir::share`].
    pub fn into_shared(self) -> Result<SharedDir, DataDirError> {
        match lock_shared(self.lock.as_fd()) {
            Ok(()) => Ok(SharedDir { _lock: self.lock }),
            Err(Refused::Held(holder)) => {
                Err(DataDirError::InUse { path: self.path, pid: None, holder })
            }
            Err(Refused::Failed(source)) => {
                Err(DataDirError::Io { path: self.path.join(LOCK), action: "lock", source })
            }
        }
    }

    /// For tests: as on a file system that does not say when a file was made.
    pub fn without_births(mut self) -> DataDir {
        self.births = false;
        self
    }

    /// What tells a file of this directory from a copy.
    pub fn mark_of(&self, found: &std::fs::Metadata) -> FileMark {
        let mark = FileMark::of(found);
        if self.births { mark } else { FileMark { born: 0, ..mark } }
    }

    fn check_version(&mut self, wanted: u32) -> Result<(), DataDirError> {
        let path = self.path.join(VERSION);
        let text = match read_start(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                self.replace(VERSION, format!("{MAGIC}{wanted}\n").as_bytes())?;
                self.made.push(path);
                return Ok(());
            }
            Err(source) => return Err(DataDirError::Io { path, action: "read", source }),
        };
        match text.trim_end().strip_prefix(MAGIC).and_then(|n| n.parse::<u32>().ok()) {
            Some(found) if found == wanted => Ok(()),
            Some(found) => Err(DataDirError::Version { path: self.path.clone(), found, wanted }),
            None => {
                let text = text.chars().take(40).filter(|c| !c.is_control()).collect();
                Err(DataDirError::NotOurs { path, text })
            }
        }
    }

    /// What [`DataDir::open`] found missing and made: directories, the lock file, the version. Whoever goes no further
    /// than opening removes it, the last first.
    pub fn made(&self) -> &[PathBuf] {
        &self.made
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A file in it.
    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Puts `bytes` under `name`, so that after a crash at any moment the file is the old one or the new one, whole.
    ///
    /// # Errors
    /// [`DataDirError::Io`]; the old file is still there then.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> Result<(), DataDirError> {
        self.replace_with(name, |file| file.write_all(bytes))
    }

    /// As [`DataDir::replace`], for contents written piece by piece.
    ///
    /// # Errors
    /// As [`DataDir::replace`], and whatever `write` reports.
    pub fn replace_with(
        &self,
        name: &str,
        write: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> Result<(), DataDirError> {
        self.replace_all(name, write)
    }

    /// As [`DataDir::replace`], for contents that say in which file they were written, so that a copy can be told from it.
    ///
    /// # Errors
    /// As [`DataDir::replace`].
    pub fn replace_marked(
        &self,
        name: &str,
        bytes: impl FnOnce(FileMark) -> Vec<u8>,
    ) -> Result<(), DataDirError> {
        self.replace_all(name, |file| {
            let mark = self.mark_of(&file.metadata()?);
            file.write_all(&bytes(mark))
        })
    }

    fn replace_all(
        &self,
        name: &str,
        write: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> Result<(), DataDirError> {
        let temporary = self.path.join(format!(".{name}.new"));
        let target = self.path.join(name);
        let written = (|| {
            // Never a file that is there already: what is written is new, and so is its mark.
            match std::fs::remove_file(&temporary) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
            let mut file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&temporary)?;
            write(&mut file)?;
            file.sync_all()?;
            drop(file);
            std::fs::rename(&temporary, &target)?;
            File::open(&self.path)?.sync_all()
        })();
        written.map_err(|source| {
            let _ = std::fs::remove_file(&temporary);
            DataDirError::Io { path: target, action: "write", source }
        })
    }

    /// Removes a file, durably. Nothing happens if there is none.
    ///
    /// # Errors
    /// [`DataDirError::Io`].
    pub fn remove(&self, name: &str) -> Result<(), DataDirError> {
        let path = self.path.join(name);
        let removed = match std::fs::remove_file(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => Err(e),
            Ok(()) => File::open(&self.path).and_then(|d| d.sync_all()),
        };
        removed.map_err(|source| DataDirError::Io { path, action: "remove", source })
    }
}

/// What tells a file from every copy of it on the same file system: it stays when the file is renamed, and a file that is
/// written anew, by whoever, has another. Where the file system does not say when a file was made (ext4 with inodes of 128
/// bytes), a file that is written anew may have the number, and so the mark, of one that was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileMark {
    /// The number of the file.
    pub inode: u64,
    /// When the file was made, nanoseconds since 1970; 0 where the file system does not say.
    pub born: u64,
}

impl FileMark {
    /// Of a file that has been looked at.
    pub fn of(found: &std::fs::Metadata) -> FileMark {
        let born = found.created().ok().and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
        FileMark { inode: found.ino(), born: born.map_or(0, |d| d.as_nanos() as u64) }
    }
}

/// The first bytes of a small file, whatever its length.
fn read_start(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(256).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn is_made_private_locked_and_versioned() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("a/b");
        let dir = DataDir::open(&path, 3).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(std::fs::read_to_string(path.join("VERSION")).unwrap(), "larder 3\n");
        let b = [top.path().join("a"), path.clone(), path.join("lock"), path.join("VERSION")];
        assert_eq!(dir.made(), b);
        let e = DataDir::open(&path, 3).unwrap_err();
        assert!(
            matches!(e, DataDirError::InUse { pid: Some(pid), .. } if pid == std::process::id()),
            "{e}"
        );
        assert!(e.to_string().contains(&format!("process {}", std::process::id())), "{e}");
        drop(dir);
        assert!(DataDir::open(&path, 3).unwrap().made().is_empty());
        let e = DataDir::open(&path, 4).unwrap_err();
        assert!(matches!(e, DataDirError::Version { found: 3, wanted: 4, .. }), "{e}");
        for other in ["", "PostgreSQL 16\n", "larder x\n", "larder 99999999999\n", "\u{1b}[31m"] {
            std::fs::write(path.join("VERSION"), other).unwrap();
            let e = DataDir::open(&path, 3).unwrap_err();
            assert!(
                matches!(e, DataDirError::NotOurs { .. }) && !e.to_string().contains('\u{1b}'),
                "{e}"
            );
        }
        std::fs::write(top.path().join("file"), b"x").unwrap();
        let e = DataDir::open(&top.path().join("file"), 3).unwrap_err();
        assert!(matches!(e, DataDirError::NotADirectory(_)), "{e}");
    }

    #[test]
    fn a_marked_file_is_told_from_its_copies() {
        let top = tempfile::tempdir().unwrap();
        let dir = DataDir::open(&top.path().join("a"), 1).unwrap();
        let mark = |path: &Path| FileMark::of(&std::fs::metadata(path).unwrap());
        let mut written = None;
        let mut write = || {
            dir.replace_marked("state", |mark| {
                written = Some(mark);
                b"one".to_vec()
            })
            .unwrap();
            written.unwrap()
        };
        let first = write();
        assert_eq!(mark(&dir.join("state")), first);
        // A copy elsewhere, a copy that is put back, and one that is written over what is there.
        let kept = top.path().join("kept");
        std::fs::copy(dir.join("state"), &kept).unwrap();
        assert_ne!(mark(&kept), first);
        let second = write();
        assert_ne!(second, first);
        std::fs::copy(&kept, dir.join("state")).unwrap();
        assert_ne!(mark(&dir.join("state")), first);
        // The same file under another name, in another directory, is the same.
        std::fs::rename(top.path().join("a"), top.path().join("b")).unwrap();
        assert_eq!(mark(&top.path().join("b/state")), second);
    }

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() {
        let top = tempfile::tempdir().unwrap();
        let dir = DataDir::open(top.path(), 1).unwrap();
        dir.replace("state", b"old").unwrap();
        let failed = dir.replace_with("state", |file| {
            file.write_all(b"half of the ne")?;
            Err(io::Error::other("the power went"))
        });
        assert!(failed.unwrap_err().to_string().contains("the power went"));
        assert_eq!(std::fs::read(dir.join("state")).unwrap(), b"old");
        dir.replace("state", b"new").unwrap();
        assert_eq!(std::fs::read(dir.join("state")).unwrap(), b"new");
        dir.remove("state").unwrap();
        dir.remove("state").unwrap();
        let mut names: Vec<_> =
            std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["VERSION", "lock"], "nothing temporary is left");
    }

    #[test]
    fn is_shared_by_those_who_keep_nothing_in_it() {
        let top = tempfile::tempdir().unwrap();
        let in_use = |r: Result<DataDir, DataDirError>| {
            matches!(r, Err(DataDirError::InUse { holder: Some(_), .. }))
        };
        let e = DataDir::share(&top.path().join("absent")).unwrap_err();
        assert!(matches!(e, DataDirError::Io { .. }), "{e}");
        let (first, second) = (DataDir::share(top.path()), DataDir::share(top.path()));
        let (first, second) = (first.unwrap(), second.unwrap());
        assert!(in_use(DataDir::open(top.path(), 3)));
        drop(first);
        assert!(in_use(DataDir::open(top.path(), 3)));
        drop(second);
        let dir = DataDir::open(top.path(), 3).unwrap();
        assert!(matches!(DataDir::share(top.path()), Err(DataDirError::InUse { .. })));
        let shared = dir.into_shared().unwrap();
        assert!(in_use(DataDir::open(top.path(), 3)) && DataDir::share(top.path()).is_ok());
        drop(shared);
        assert!(DataDir::open(top.path(), 3).is_ok());
    }

    #[test]
    fn a_mark_without_a_time_of_making_says_so() {
        let top = tempfile::tempdir().unwrap();
        let dir = DataDir::open(top.path(), 3).unwrap();
        let found = std::fs::metadata(top.path().join("VERSION")).unwrap();
        assert_eq!(dir.mark_of(&found), FileMark::of(&found));
        let dir = dir.without_births();
        let mut marked = None;
        dir.replace_marked("x", |mark| {
            marked = Some(mark);
            Vec::new()
        })
        .unwrap();
        let found = std::fs::metadata(top.path().join("x")).unwrap();
        let mark = dir.mark_of(&found);
        assert!(marked == Some(mark) && mark.born == 0 && mark.inode != 0);
    }
}
