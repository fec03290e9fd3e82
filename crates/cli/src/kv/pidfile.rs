//! `-P`: a file with the process id. What is no such file is left alone.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::CliError;

/// No process id is longer, with spaces around it, bytes.
const LONGEST: u64 = 64;

/// The process id in a file, for as long as the server runs.
pub(super) struct PidFile {
    path: PathBuf,
    /// Device and inode of what was written.
    which: (u64, u64),
}

fn which(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// What a file holds, if no more than a process id.
fn text_in(path: &Path) -> Option<String> {
    let mut text = String::new();
    let read = File::open(path).ok()?.take(LONGEST + 1).read_to_string(&mut text).ok()?;
    (read as u64 <= LONGEST).then(|| text.trim().to_owned())
}

/// The number that a file consists of, if it consists of one.
fn number_in(path: &Path) -> Option<u32> {
    text_in(path)?.parse().ok()
}

/// Whether a regular file is one that may be replaced: a number, or nothing at all, as a power cut leaves it, or whoever makes it
/// beforehand for the server's user.
fn is_pid_file(path: &Path) -> bool {
    text_in(path).is_some_and(|text| text.is_empty() || text.parse::<u32>().is_ok())
}

/// Whether a pid file may be written there: nothing is, an empty file, or an earlier one.
///
/// # Errors
/// The path holds something else, which would be lost.
pub(super) fn check(path: &Path) -> Result<(), CliError> {
    let refused = |why: &str| {
        Err(CliError::Usage(format!(
            "pidfile '{}': {why}, and would be overwritten: remove it, or choose another path (-P)",
            path.display()
        )))
    };
    match path.symlink_metadata() {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        // What is wrong with it is said when it is written.
        Err(_) => Ok(()),
        Ok(found) if found.is_symlink() => refused("is a symbolic link"),
        Ok(found) if !found.is_file() => refused("is no regular file"),
        Ok(_) if !is_pid_file(path) => refused("holds something else than a process id"),
        Ok(_) => Ok(()),
    }
}

impl PidFile {
    /// Writes it, in place of an earlier one.
    ///
    /// # Errors
    /// As [`check`]; what the system says.
    pub(super) fn write(path: &Path) -> Result<PidFile, CliError> {
        check(path)?;
        let bad = |e: std::io::Error| {
            CliError::Runtime(format!(
                "pidfile '{}': {e}: choose a path that this user may write (-P)",
                path.display()
            ))
        };
        // Renamed into place, so that nobody reads half a number.
        let pid = std::process::id();
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{pid}.new"));
        let temporary = PathBuf::from(name);
        // In a container a process has the number of the one before: what that one left when it was killed.
        let left = temporary.symlink_metadata().is_ok_and(|found| found.is_file());
        if left && is_pid_file(&temporary) {
            std::fs::remove_file(&temporary).map_err(bad)?;
        }
        let mut options = OpenOptions::new();
        let mut file =
            options.write(true).create_new(true).mode(0o644).open(&temporary).map_err(bad)?;
        let written = writeln!(file, "{pid}")
            .and_then(|()| file.metadata())
            .and_then(|found| std::fs::rename(&temporary, path).map(|()| found));
        let found = written.map_err(|e| {
            std::fs::remove_file(&temporary).ok();
            bad(e)
        })?;
        Ok(PidFile { path: path.to_owned(), which: which(&found) })
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // Another server may have written its own there, or somebody something else.
        let ours = self.path.symlink_metadata().is_ok_and(|found| which(&found) == self.which);
        if ours && number_in(&self.path) == Some(std::process::id()) {
            std::fs::remove_file(&self.path).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_file_replaces_only_a_pid_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pid");
        let refused = || match PidFile::write(&path) {
            Err(CliError::Usage(text)) => text,
            _ => panic!("it was not refused"),
        };
        for content in ["notes\n", "12 13\n", "-4\n"] {
            std::fs::write(&path, content).unwrap();
            assert!(refused().contains("holds something else than a process id"));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
        }
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(dir.path().join("other"), &path).unwrap();
        assert!(refused().contains("is a symbolic link"));
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(refused().contains("is no regular file"));
        std::fs::remove_dir(&path).unwrap();
        for content in ["", " \n"] {
            std::fs::write(&path, content).unwrap();
            drop(PidFile::write(&path).unwrap());
            assert!(!path.exists());
        }
        std::fs::write(&path, " ".repeat(100)).unwrap();
        assert!(refused().contains("holds something else than a process id"));
        std::fs::write(&path, "4194304\n").unwrap();
        // Of the same name but for its end: somebody else's.
        std::fs::write(path.with_extension("tmp"), "notes").unwrap();
        let written = PidFile::write(&path).unwrap();
        assert_eq!(number_in(&path), Some(std::process::id()));
        drop(written);
        assert!(!path.exists());
        assert_eq!(std::fs::read(path.with_extension("tmp")).unwrap(), b"notes");
    }

    #[test]
    fn one_of_the_same_number_that_was_killed_meanwhile_is_not_in_the_way() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pid");
        let left = dir.path().join(format!("pid.{}.new", std::process::id()));
        for content in ["", "1\n"] {
            std::fs::write(&left, content).unwrap();
            drop(PidFile::write(&path).unwrap());
            assert!(!left.exists());
        }
        std::fs::write(&left, "notes").unwrap();
        assert!(matches!(PidFile::write(&path), Err(CliError::Runtime(_))));
        assert_eq!(std::fs::read(&left).unwrap(), b"notes");
    }

    #[test]
    fn at_the_end_only_ones_own_pid_file_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pid");
        // Overwritten where it is.
        let written = PidFile::write(&path).unwrap();
        std::fs::write(&path, "1\n").unwrap();
        drop(written);
        assert_eq!(number_in(&path), Some(1));
        // Another file in its place, with the same number.
        let written = PidFile::write(&path).unwrap();
        let kept = dir.path().join("kept");
        std::fs::rename(&path, &kept).unwrap();
        std::fs::copy(&kept, &path).unwrap();
        drop(written);
        assert!(path.exists() && kept.exists());
    }
}
