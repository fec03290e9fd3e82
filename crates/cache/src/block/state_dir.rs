//! The directory that a cache keeps its notes in, which somebody may move away while it is open.
//!
//! What is noted there goes on into the directory that was moved, as far as it is mapped or open, and the next start looks for it at
//! the path. So an alarm says so, and what must be durable there is refused until it is back.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::Core;
use super::open::CacheError;

/// See the [module](self).
pub(super) struct StateDir {
    path: PathBuf,
    /// Device and inode of the directory that was there at the start, if any was.
    which: Option<(u64, u64)>,
    /// It was said in the log.
    said: AtomicBool,
}

fn at(path: &Path) -> Option<(u64, u64)> {
    path.metadata().ok().filter(|found| found.is_dir()).map(|found| (found.dev(), found.ino()))
}

impl StateDir {
    /// The directory as it is now.
    pub(super) fn new(path: &Path) -> StateDir {
        StateDir { path: path.to_owned(), which: at(path), said: AtomicBool::new(false) }
    }

    /// What is the matter with it, if it is not the directory of the start.
    fn trouble(&self) -> Option<String> {
        let now = at(&self.path);
        if self.which.is_none() || now == self.which {
            return None;
        }
        let how = if now.is_some() { "another is in its place" } else { "it was moved or removed" };
        Some(format!(
            "the state directory '{}' is not the one that this process began with: {how}; what is noted of volumes is not \
             found there by the next start, and none is attached, detached or resized until it is back: move it back, or if it is \
             lost stop this process and start it again",
            self.path.display()
        ))
    }

    /// Says in the log, once, that it is not there, and that it is again.
    fn look(&self) {
        let trouble = self.trouble();
        if self.said.swap(trouble.is_some(), Ordering::SeqCst) == trouble.is_some() {
            return;
        }
        match trouble {
            Some(trouble) => tracing::error!("{trouble}"),
            None => tracing::info!("the state directory '{}' is back", self.path.display()),
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
        let dir = StateDir::new(&path);
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
        assert_eq!(StateDir::new(&other).trouble(), None);
    }
}
