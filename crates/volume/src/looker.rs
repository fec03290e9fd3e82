//! Looks at a path that may lie on a file system that hangs.
//!
//! No call that names a path can be called off. So a thread of its own does it, which has nothing but the path: whoever asks waits
//! for a while, and nobody waits for the thread to end.

use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Who asks waits for so long.
const PATIENCE: Duration = Duration::from_secs(1);
/// An answer that came later than that was waited for is good for so long.
const FRESH: Duration = Duration::from_secs(1);

type Found = io::Result<Metadata>;

/// See the [module](self).
#[derive(Debug)]
pub struct Looker {
    path: PathBuf,
    /// A thread looks, not who asks.
    apart: bool,
    way: Mutex<Option<Way>>,
}

/// To the thread and back.
#[derive(Debug)]
struct Way {
    ask: Sender<()>,
    found: Receiver<(Instant, Found)>,
    /// Its answer is still to come.
    asked: bool,
}

impl Way {
    fn new(path: &Path) -> io::Result<Way> {
        let (ask, asked) = mpsc::channel();
        let (tell, found) = mpsc::channel();
        let path = path.to_owned();
        // It ends when nobody can ask any more.
        std::thread::Builder::new().name("block-path".into()).spawn(move || {
            while asked.recv().is_ok() {
                let found = path.metadata();
                if tell.send((Instant::now(), found)).is_err() {
                    return;
                }
            }
        })?;
        Ok(Way { ask, found, asked: false })
    }

    /// The answer, for which `patience` is waited; `Err` if there is no thread any more.
    fn look(&mut self, patience: Duration) -> Result<Option<Found>, ()> {
        if self.asked {
            match self.found.try_recv() {
                Ok((at, found)) => {
                    self.asked = false;
                    if at.elapsed() < FRESH {
                        return Ok(Some(found));
                    }
                }
                // It was waited for already.
                Err(mpsc::TryRecvError::Empty) => return Ok(None),
                Err(mpsc::TryRecvError::Disconnected) => return Err(()),
            }
        }
        self.ask.send(()).map_err(|_| ())?;
        self.asked = true;
        match self.found.recv_timeout(patience) {
            Ok((_, found)) => {
                self.asked = false;
                Ok(Some(found))
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(()),
        }
    }
}

impl Looker {
    /// For that path, which does not depend on the working directory any more. Without `apart` whoever asks looks, and waits as long
    /// as that takes: for programs that want no threads.
    pub fn new(path: &Path, apart: bool) -> Looker {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        Looker { path, apart, way: Mutex::new(None) }
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What stands there: `None` where that is not found out within a second, so that nobody knows. What was asked before may be
    /// answered now, if it was found within the last second.
    pub fn look(&self) -> Option<io::Result<Metadata>> {
        if !self.apart {
            return Some(self.path.metadata());
        }
        let mut way = self.way.try_lock_for(PATIENCE)?;
        if way.is_none() {
            match Way::new(&self.path) {
                Ok(new) => *way = Some(new),
                Err(error) => {
                    tracing::debug!(%error, "no thread to look at '{}'", self.path.display());
                    return None;
                }
            }
        }
        match way.as_mut()?.look(PATIENCE) {
            Ok(found) => found,
            Err(()) => {
                *way = None;
                None
            }
        }
    }
}

/// Whether a look at a path says that nothing is there. (Other failures say nothing.)
pub fn is_absent(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way() -> (Way, Receiver<()>, Sender<(Instant, Found)>) {
        let ((ask, asked), (tell, found)) = (mpsc::channel(), mpsc::channel());
        (Way { ask, found, asked: false }, asked, tell)
    }

    #[test]
    fn what_stands_at_a_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        for apart in [false, true] {
            let looker = Looker::new(&path, apart);
            let look = || {
                // A machine that is loaded may take longer than is waited for.
                std::iter::repeat_with(|| looker.look()).flatten().next().unwrap()
            };
            assert!(is_absent(&look().unwrap_err()));
            std::fs::write(&path, "x").unwrap();
            // (An answer from before may have come late.)
            while look().is_err() {}
            assert_eq!(look().unwrap().len(), 1);
            std::fs::remove_file(&path).unwrap();
        }
    }

    /// It is waited for once: who asks meanwhile hears at once that nobody knows, and a thread that hangs is asked once.
    #[test]
    fn a_file_system_that_hangs_is_not_waited_for_again() {
        let (mut way, asked, tell) = way();
        assert!(way.look(Duration::ZERO).unwrap().is_none());
        // That long nobody waits.
        assert!(way.look(Duration::from_secs(1_000_000)).unwrap().is_none());
        assert_eq!(asked.try_iter().count(), 1);
        tell.send((Instant::now(), Err(io::ErrorKind::NotFound.into()))).unwrap();
        assert!(way.look(Duration::ZERO).unwrap().is_some_and(|found| found.is_err()));
        // What was found long ago is not what is there now.
        assert!(way.look(Duration::ZERO).unwrap().is_none());
        let before = Instant::now().checked_sub(2 * FRESH).unwrap();
        tell.send((before, Err(io::ErrorKind::NotFound.into()))).unwrap();
        assert!(way.look(Duration::ZERO).unwrap().is_none());
        assert_eq!(asked.try_iter().count(), 2);
        drop(tell);
        assert!(way.look(Duration::ZERO).is_err());
    }
}
