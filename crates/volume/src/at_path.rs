//! Whether the path by which a file was opened still leads to it.
//!
//! The open file is the store, whatever stands at its path later: it was proved and locked, and what is cached is of it. So it is
//! served on, an alarm says so, and another file at the path is never opened unasked.

use std::fs::Metadata;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use parking_lot::Mutex;
use rustix::fs::{AtFlags, StatxFlags};

use crate::looker::{Looker, is_absent};

/// See the [module](self).
#[derive(Debug)]
pub(super) struct AtPath {
    uri: String,
    looker: Looker,
    /// A block device: its node may be made anew, its number counts.
    device: bool,
    /// Device and inode of the file that is open, or the device's number.
    which: (u64, u64),
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Since when it is elsewhere, and what to say.
    moved: Option<(Instant, String)>,
    /// It was elsewhere, and no change was explained by that since.
    was_moved: bool,
    /// It was found at its path so many times since then.
    back: u32,
}

/// A file that was elsewhere and was found at its path so many times since then has stayed where it was: what changes it now does
/// something else.
const SETTLED: u32 = 2;

/// What stands at the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stands {
    Nothing,
    Another,
}

fn which(found: &Metadata, device: bool) -> (u64, u64) {
    if device { (found.rdev(), 0) } else { (found.dev(), found.ino()) }
}

impl AtPath {
    /// Of a file that was just opened by this path. `apart`: a thread looks at the path, not who asks.
    pub(super) fn new(
        uri: &str,
        path: &Path,
        found: &Metadata,
        device: bool,
        apart: bool,
    ) -> AtPath {
        let (looker, which) = (Looker::new(path, apart), which(found, device));
        AtPath { uri: uri.to_owned(), looker, device, which, state: Mutex::default() }
    }

    /// Looks at the path. Returns whether the open file is elsewhere, or was lately, which explains a change of its times; `take`:
    /// there is one, and what comes after it must have another reason. `None` where nobody knows.
    pub(super) fn look(&self, file: impl AsFd, take: bool) -> Option<bool> {
        self.found(file, take, self.looker.look()?)
    }

    /// The same with what was found there.
    fn found(&self, file: impl AsFd, take: bool, found: io::Result<Metadata>) -> Option<bool> {
        let stands = match found {
            Ok(found) if which(&found, self.device) == self.which => None,
            Ok(_) => Some(Stands::Another),
            Err(e) if is_absent(&e) => Some(Stands::Nothing),
            // Nobody knows.
            Err(_) => return None,
        };
        let mut state = self.state.lock();
        let Some(stands) = stands else {
            if state.moved.take().is_some() {
                tracing::info!("backing store '{}' is at its path again", self.uri);
            }
            let was = state.was_moved;
            state.back = state.back.saturating_add(1);
            state.was_moved = was && !take && state.back < SETTLED;
            return Some(was);
        };
        self.moved(&mut state, file, stands);
        Some(true)
    }

    /// Notices that the file has no name any more, which needs no look at its path.
    pub(super) fn look_at_links(&self, file: impl AsFd) {
        let mut state = self.state.lock();
        if state.moved.is_none() && !self.device && links(&file) == Some(0) {
            self.moved(&mut state, file, Stands::Nothing);
        }
    }

    fn moved(&self, state: &mut State, file: impl AsFd, stands: Stands) {
        (state.was_moved, state.back) = (true, 0);
        let text = self.text(file, stands);
        match &mut state.moved {
            Some((_, said)) if *said == text => {}
            Some((_, said)) => *said = text,
            none => {
                tracing::error!("backing store {text}");
                *none = Some((Instant::now(), text));
            }
        }
    }

    fn text(&self, file: impl AsFd, stands: Stands) -> String {
        let (uri, path) = (&self.uri, self.looker.path().display());
        let kind = if self.device { "device" } else { "file" };
        let gone = !self.device && links(&file) == Some(0);
        let how = match (stands, gone) {
            (Stands::Another, _) => "it was replaced".to_owned(),
            (Stands::Nothing, true) => "it was removed".to_owned(),
            (Stands::Nothing, false) => "it was moved, or its name was removed".to_owned(),
        };
        let descriptor = file.as_fd().as_raw_fd();
        let place = format!("/proc/{}/fd/{descriptor}", std::process::id());
        let remedy = if gone {
            format!(
                "it is lost when the volume is detached or this process ends: stop the clients and copy it first, from '{place}'"
            )
        } else {
            let now = std::fs::read_link(&place).map(|now| format!(" from '{}'", now.display()));
            format!(
                "move it back{}, or detach the volume and attach the {kind} that is meant",
                now.unwrap_or_default()
            )
        };
        format!(
            "'{uri}': the {kind} at '{path}' is not the one that is open: {how}; reads and writes go to the open one; {remedy}"
        )
    }

    /// Since when the open file is not at its path, and what to say.
    pub(super) fn trouble(&self) -> Option<(Instant, String)> {
        self.state.lock().moved.clone()
    }
}

/// Names of an open file, as far as that is known here: a server that has it is not asked, since it may hang.
fn links(file: impl AsFd) -> Option<u32> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(file, "", flags, StatxFlags::NLINK).ok().map(|found| found.stx_nlink)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn opened(path: &Path) -> (File, AtPath) {
        std::fs::write(path, "x").unwrap();
        let file = File::open(path).unwrap();
        let at = AtPath::new("file:disk", path, &file.metadata().unwrap(), false, false);
        assert!(at.look(&file, false) == Some(false) && at.trouble().is_none());
        (file, at)
    }

    #[test]
    fn a_file_that_is_moved_and_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("disk"), dir.path().join("other"));
        let (file, at) = opened(&path);
        std::fs::rename(&path, &other).unwrap();
        at.look_at_links(&file);
        assert!(at.trouble().is_none(), "it has a name");
        assert_eq!(at.look(&file, false), Some(true));
        let text = at.trouble().unwrap().1;
        assert!(text.contains("it was moved") && text.contains(other.to_str().unwrap()), "{text}");
        std::fs::write(&path, "new").unwrap();
        assert_eq!(at.look(&file, false), Some(true));
        assert!(at.trouble().unwrap().1.contains("it was replaced"));
        std::fs::rename(&other, &path).unwrap();
        assert_eq!(at.look(&file, true), Some(true), "it was, since it was asked");
        assert!(at.trouble().is_none() && at.look(&file, true) == Some(false));
    }

    #[test]
    fn a_file_that_is_removed_is_to_be_copied() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        for replaced in [false, true] {
            let (file, at) = opened(&path);
            std::fs::remove_file(&path).unwrap();
            if replaced {
                std::fs::write(&path, "new").unwrap();
            } else {
                at.look_at_links(&file);
                assert!(at.trouble().unwrap().1.contains("it was removed"));
            }
            assert_eq!(at.look(&file, false), Some(true));
            let text = at.trouble().unwrap().1;
            assert!(text.contains("copy it first") && text.contains("/proc/"), "{text}");
            assert_eq!(text.contains("it was replaced"), replaced, "{text}");
        }
    }
    /// A directory above it that is moved away and back changes nothing of the file: what changes it later is not explained by that.
    #[test]
    fn that_it_was_elsewhere_is_forgotten_when_it_stays_where_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let (above, other) = (dir.path().join("above"), dir.path().join("other"));
        std::fs::create_dir(&above).unwrap();
        let (file, at) = opened(&above.join("disk"));
        std::fs::rename(&above, &other).unwrap();
        assert_eq!(at.look(&file, false), Some(true));
        std::fs::rename(&other, &above).unwrap();
        assert_eq!(at.look(&file, false), Some(true), "what moved it may not be noticed yet");
        assert_eq!(at.look(&file, false), Some(true));
        assert_eq!(at.look(&file, true), Some(false));
    }

    #[test]
    fn where_nobody_knows_nothing_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let (file, at) = opened(&path);
        let denied = || Err(io::ErrorKind::PermissionDenied.into());
        assert_eq!(at.found(&file, true, denied()), None);
        assert!(at.trouble().is_none());
        std::fs::remove_file(&path).unwrap();
        assert_eq!(at.look(&file, false), Some(true));
        assert_eq!(at.found(&file, true, denied()), None);
        assert!(at.trouble().is_some(), "it is not known to be back");
    }
}
