//! Notes in the state directory that say that what is on a cache device must not be used.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use larder_base::{HashKey, KeyHasher};
use larder_engine::block::node::start::Notes;
use larder_format::block::BlockSuperblock;
use larder_runtime::plain;
use larder_volume::is_absent;

use super::region::MAPS;

/// Is there as long as what is on the device of that UUID must not be used.
fn marker(dir: &Path, uuid: &str) -> PathBuf {
    dir.join(format!("given-up-{uuid}"))
}

/// Is there as long as the cache at `path`, whichever that is, must not be used.
fn passed_by(dir: &Path, path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let hash = KeyHasher::new(HashKey([0; 16])).hash(path.as_os_str().as_bytes());
    dir.join(format!("passed-by-{:016x}", hash.0))
}

/// Writes a note durably.
fn note(dir: &Path, note: &Path, text: &str) -> std::io::Result<()> {
    std::fs::write(note, text)?;
    std::fs::File::open(note)?.sync_all()?;
    std::fs::File::open(dir)?.sync_all()
}

/// Notes durably that the next start must not use what is on the device.
pub(super) fn note_given_up(dir: &Path, sb: &BlockSuperblock) -> std::io::Result<()> {
    note(dir, &marker(dir, &sb.uuid.to_string()), "the cache was given up\n")
}

/// Forgets that, once the device has an empty map.
pub(super) fn forget_given_up(dir: &Path, uuid: &str) {
    Voided(vec![marker(dir, uuid)]).forget();
}

/// Notes durably that volumes are served without the cache that should be at `path`: it must not be used, when it comes back,
/// nor must any other that was served with this state directory. `uuid` is what is known of it.
fn note_passed_by(dir: &Path, path: &Path, uuid: Option<&str>) -> std::io::Result<()> {
    let mut known: Vec<String> = uuid.map(str::to_owned).into_iter().collect();
    match std::fs::read_dir(dir.join(MAPS)) {
        Ok(entries) => {
            for entry in entries {
                known.extend(entry?.file_name().into_string().ok());
            }
        }
        Err(e) if is_absent(&e) => {}
        Err(e) => return Err(e),
    }
    std::fs::create_dir_all(dir)?;
    for uuid in known {
        note(dir, &marker(dir, &uuid), "volumes were served without the cache\n")?;
    }
    note(dir, &passed_by(dir, path), &format!("{}\n", path.display()))
}

/// Notes that say that what is on a device must not be used.
pub(super) struct Voided(Vec<PathBuf>);

impl Voided {
    /// Those on the device with this superblock, at `path`. One that cannot be looked at may be there.
    pub(super) fn find(dir: &Path, sb: &BlockSuperblock, path: &Path) -> Voided {
        let mut notes = vec![marker(dir, &sb.uuid.to_string()), passed_by(dir, path)];
        notes.retain(|note| match std::fs::symlink_metadata(note) {
            Ok(_) => true,
            Err(e) if is_absent(&e) => false,
            Err(e) => {
                let why = plain(&e);
                tracing::warn!(
                    "'{}' cannot be looked at ({why}): taken as if it were there",
                    note.display()
                );
                true
            }
        });
        Voided(notes)
    }

    /// Why, in words, if there is any.
    pub(super) fn why(&self) -> Option<&'static str> {
        let any = !self.0.is_empty();
        any.then_some("the cache was given up, or volumes were served without it")
    }

    /// The device has an empty map now.
    pub(super) fn forget(&self) {
        for note in &self.0 {
            if let Err(error) = std::fs::remove_file(note)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                tracing::warn!(%error, "'{}' stays: the next start will be cold too", note.display());
            }
        }
    }
}

/// The notes of a start.
pub(super) struct AtStart<'a> {
    pub dir: &'a Path,
    pub superblock: &'a BlockSuperblock,
    pub voided: &'a Voided,
}

impl Notes for AtStart<'_> {
    fn given_up(&mut self) -> Result<(), String> {
        let made = std::fs::create_dir_all(self.dir);
        made.and_then(|()| note_given_up(self.dir, self.superblock))
            .map_err(|e| plain(&e).to_string())
    }

    fn forget(&mut self) {
        self.voided.forget();
    }
}

/// The notes of a start without the cache that should be at `path`. `uuid` is what is known of it.
pub(super) struct PassedBy<'a> {
    pub dir: &'a Path,
    pub path: &'a Path,
    pub uuid: Option<String>,
}

impl Notes for PassedBy<'_> {
    fn given_up(&mut self) -> Result<(), String> {
        note_passed_by(self.dir, self.path, self.uuid.as_deref()).map_err(|e| plain(&e).to_string())
    }

    /// It stays until the cache that comes back has an empty map.
    fn forget(&mut self) {}
}

#[cfg(test)]
mod tests {
    use larder_base::UnixSecs;
    use larder_format::Uuid;
    use larder_format::block::Layout;

    use super::*;

    #[test]
    fn a_note_that_cannot_be_looked_at_may_be_there() {
        let at = tempfile::TempDir::new().unwrap();
        let layout = Layout::new(64 << 20, 4096, 8, 2).unwrap();
        let sb = BlockSuperblock::format(Uuid([3; 16]), 1, 1, layout, UnixSecs(1));
        let cache = Path::new("/dev/null");
        let why = |dir: &Path| Voided::find(dir, &sb, cache).why();
        let (dir, file, circle) =
            (at.path().join("state"), at.path().join("file"), at.path().join("circle"));
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&circle, &circle).unwrap();
        assert_eq!((why(&dir), why(&at.path().join("none")), why(&file)), (None, None, None));
        assert!(why(&circle).is_some(), "nobody knows what is behind it");
        // Nor is it known which caches were served with it.
        assert!(note_passed_by(&circle, cache, None).is_err());
        std::fs::write(dir.join(MAPS), "").unwrap();
        note_passed_by(&dir, cache, None).unwrap();
        assert!(why(&dir).is_some());
    }
}
