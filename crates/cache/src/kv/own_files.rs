//! Files that a cache keeps for itself: no setting may name one of them for something else.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use larder_runtime::datadir;

use super::cleaner::{APPLICATIONS, BUDGET, is_budget_of_drive};
use super::run::RUN;
use super::warm::CHECKPOINT;

/// The server's log, where it runs as a daemon.
pub const LOG: &str = "larder.log";
/// The flash, where no other is named.
const FLASH: &str = "flash";

/// What the data directory holds, by name.
const NAMES: [(&str, &str); 8] = [
    (RUN, "says which run the cache is of"),
    (CHECKPOINT, "is the checkpoint"),
    (BUDGET, "says what is left of the write budget"),
    (APPLICATIONS, "says which applications there are"),
    (datadir::LOCK, "is the lock"),
    (datadir::VERSION, "is the version"),
    (LOG, "is the log"),
    (FLASH, "is the flash by default"),
];

/// Says what `path` is of the cache with this data directory and flash, or `None` if it is nothing of the cache. Files are compared
/// by name and by inode, so that links are seen; nothing need exist yet.
pub fn own_file<'a>(
    data_dir: &Path,
    flash: impl IntoIterator<Item = &'a Path>,
    path: &Path,
) -> Option<String> {
    let mut flash = flash.into_iter().filter(|flash| is_same(flash, path));
    let flash = flash.next().map(|_| "is the flash".to_owned());
    flash.or_else(|| in_data_dir(data_dir, path))
}

/// The same for the flash itself: it has one of the names of the data directory that is not the flash's.
pub fn flash_in_the_way(data_dir: &Path, flash: &Path) -> Option<String> {
    let by_default = data_dir.join(FLASH);
    if is_same(&by_default, flash) { None } else { in_data_dir(data_dir, flash) }
}

fn in_data_dir(data_dir: &Path, path: &Path) -> Option<String> {
    let dir = resolved(data_dir);
    let place = resolved(path);
    // What is written whole is written beside it first, under a name of its own.
    let name = place.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let whole = name.strip_prefix('.').and_then(|name| name.strip_suffix(".new")).unwrap_or(name);
    let inside = place.parent() == Some(dir.as_path());
    let whole = if is_budget_of_drive(whole) { BUDGET } else { whole };
    let found = NAMES
        .iter()
        .find(|(own, _)| (inside && *own == whole) || is_same_file(&data_dir.join(own), path));
    found.map(|(own, what)| {
        format!("{what} ('{own}' in the data directory '{}')", data_dir.display())
    })
}

/// Whether two paths lead to one file, which need not exist.
pub(super) fn is_same(a: &Path, b: &Path) -> bool {
    resolved(a) == resolved(b) || is_same_file(a, b)
}

/// Whether both exist and are one inode.
fn is_same_file(a: &Path, b: &Path) -> bool {
    match (a.metadata(), b.metadata()) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

/// The path without links, as far as it exists.
fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    if let Ok(found) = path.canonicalize() {
        return found;
    }
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => resolved(parent).join(name),
        _ => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_files_are_known_by_name_and_by_inode() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let own = |name: &str| own_file(&at("data"), [at("drive").as_path()], &at(name));
        // Before anything exists.
        assert!(own("data/checkpoint").unwrap().contains("is the checkpoint"));
        assert!(own("data/.run.json.new").is_some());
        assert!(
            own("data/budget-00000000000000ab.json").is_some()
                && own("data/budget-x.json").is_none()
        );
        assert!(own("data/budget.json").is_some() && own("data/applications.json").is_some());
        assert!(own("drive").unwrap().contains("is the flash"));
        assert_eq!(own("data/pid"), None);
        assert_eq!(own("checkpoint"), None, "in another directory");
        std::fs::create_dir_all(at("data/sub")).unwrap();
        std::fs::write(at("data/checkpoint"), "x").unwrap();
        std::fs::write(at("drive"), "x").unwrap();
        std::os::unix::fs::symlink(at("data"), at("link")).unwrap();
        std::os::unix::fs::symlink(at("data/checkpoint"), at("symbolic")).unwrap();
        std::fs::hard_link(at("data/checkpoint"), at("hard")).unwrap();
        std::fs::hard_link(at("drive"), at("other-drive")).unwrap();
        for name in ["link/checkpoint", "data/sub/../lock", "symbolic", "hard", "other-drive"] {
            assert!(own(name).is_some(), "{name}");
        }
        assert_eq!(own("data/memory"), None);
        assert!(flash_in_the_way(&at("data"), &at("link/run.json")).is_some());
        assert_eq!(flash_in_the_way(&at("data"), &at("link/flash")), None);
        assert_eq!(flash_in_the_way(&at("data"), &at("drive")), None);
    }
}
