//! The directory that a cache keeps its notes in, which somebody may move away while it is open.
//!
//! What is noted there goes on into the directory that was moved, as far as it is mapped or open, and the next start looks for it at
//! the path. So an alarm says so, and what must be durable there is refused until it is back.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use larder_volume::{Looker, is_absent};
use parking_lot::Mutex;

use super::Core;
use super::open::CacheError;

/// Device and inode of a directory.
type Which = (u64, u64);

/// See the [module](self).
pub(super) struct StateDir {
    looker: Looker,
    /// The directory that was there at the start, if any was.
    which: Option<Which>,
    /// What was there when that was known last.
    now: Mutex<Option<Which>>,
    /// It was said in the log that it is not there.
    said: Mutex<bool>,
}

/// The directory that was found. `Err`: nobody knows.
fn directory(found: io::Result<Metadata>) -> io::Result<Option<Which>> {
    match found {
        Ok(found) => Ok(found.is_dir().then(|| (found.dev(), found.ino()))),
        Err(e) if is_absent(&e) => Ok(None),
        Err(e) => Err(e),
    }
}

impl StateDir {
    /// The directory as it is now. `apart`: a thread looks at it later on, not who asks.
    pub(super) fn new(path: &Path, apart: bool) -> StateDir {
        let which = directory(path.metadata()).ok().flatten();
        let looker = Looker::new(path, apart);
        StateDir { looker, which, now: Mutex::new(which), said: Mutex::new(false) }
    }

    /// What is the matter with it, if it is not the directory of the start. (Where that is not found out within a second: as far as
    /// it was known last.)
    fn trouble(&self) -> Option<String> {
        self.which?;
        let found = self.looker.look();
        self.judge(found)
    }

    fn judge(&self, found: Option<io::Result<Metadata>>) -> Option<String> {
        let mut now = self.now.lock();
        if let Some(Ok(found)) = found.map(directory) {
            *now = found;
        }
        if *now == self.which {
            return None;
        }
        let how = if now.is_some() { "another is in its place" } else { "it was moved or removed" };
        Some(format!(
            "the state directory '{}' is not the one that this process began with: {how}; what is noted of volumes is not \
             found there by the next start, and none is attached, detached or resized until it is back: move it back, or if it is \
             lost stop this process and start it again",
            self.looker.path().display()
        ))
    }

    /// Says in the log, once, that it is not there, and that it is again.
    fn look(&self) {
        let trouble = self.trouble();
        if std::mem::replace(&mut *self.said.lock(), trouble.is_some()) == trouble.is_some() {
            return;
        }
        match trouble {
            Some(trouble) => tracing::error!("{trouble}"),
            None => {
                tracing::info!("the state directory '{}' is back", self.looker.path().display())
            }
        }
    }
}

impl Core {
    /// What is the matter with the state directory, if it is not the one of the start any more.
    pub fn state_dir_trouble(&self) -> Option<String> {
        self.state_dir.trouble()
    }

    /// Says in the log when it changes.
    pub(super) fn look_at_state_dir(&self) {
        self.state_dir.look();
    }

    /// That the state directory is there, in which something is to be durable of the volume `name`.
    ///
    /// # Errors
    /// [`CacheError::Volume`], naming the directory.
    pub fn check_state_dir(&self, name: &str) -> Result<(), CacheError> {
        match self.state_dir.trouble() {
            Some(reason) => Err(CacheError::Volume { name: name.to_owned(), reason }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_is_moved_away_and_comes_back() {
        let top = tempfile::tempdir().unwrap();
        let (path, other) = (top.path().join("state"), top.path().join("other"));
        std::fs::create_dir(&path).unwrap();
        let dir = StateDir::new(&path, false);
        assert_eq!(dir.trouble(), None);
        std::fs::rename(&path, &other).unwrap();
        let text = dir.trouble().unwrap();
        assert!(
            text.contains("moved or removed") && text.contains(path.to_str().unwrap()),
            "{text}"
        );
        std::fs::create_dir(&path).unwrap();
        assert!(dir.trouble().unwrap().contains("another is in its place"));
        std::fs::remove_dir(&path).unwrap();
        std::fs::rename(&other, &path).unwrap();
        assert_eq!(dir.trouble(), None);
        // Where there was none, nothing is kept.
        assert_eq!(StateDir::new(&other, false).trouble(), None);
    }

    #[test]
    fn where_nobody_knows_it_is_what_it_was() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("state");
        std::fs::create_dir(&path).unwrap();
        let dir = StateDir::new(&path, false);
        let failed = || Some(Err(io::ErrorKind::PermissionDenied.into()));
        assert_eq!(dir.judge(failed()), None);
        assert_eq!(dir.judge(None), None);
        std::fs::remove_dir(&path).unwrap();
        assert!(dir.trouble().is_some());
        assert!(
            dir.judge(failed()).is_some() && dir.judge(None).is_some(),
            "it is not known to be back"
        );
    }
}
