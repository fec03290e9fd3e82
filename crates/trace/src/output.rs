//! Files that are written: there whole, or as they were before.

use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use tempfile::NamedTempFile;

/// Links that lead to one another, as the kernel has it.
const LINKS_AT_MOST: usize = 40;

/// A file that takes the place of what is there under its name when it is [committed](OutputFile::commit), and not before:
/// whatever goes wrong until then leaves what was there. A link is followed, and stays. Devices, pipes and what is
/// reached through `/proc` (`/dev/stdout`) have nothing to be kept: they are written as the bytes come.
pub struct OutputFile {
    body: Body,
}

enum Body {
    Direct(File),
    /// In its directory without a name, so that a kill leaves nothing.
    Unnamed(File, Box<Target>),
    /// Where the file system has no such files (NFS): beside its place, under a name that nobody else has. Only a kill
    /// leaves it there.
    Beside(NamedTempFile, Box<Target>),
}

/// What will be replaced.
struct Target {
    path: PathBuf,
    /// Of what is there already.
    before: Option<Metadata>,
}

impl Target {
    fn directory(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// A file that replaces another keeps its mode, and its owner where that may be.
    fn take_over(&self, file: &File) -> io::Result<()> {
        if let Some(before) = &self.before {
            fchown(file, Some(before.uid()), Some(before.gid())).ok();
            file.set_permissions(Permissions::from_mode(before.mode() & 0o7777))?;
        }
        file.sync_all()
    }
}

fn refuse(problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problem.to_owned())
}

/// Where the links lead that `path` may be: the file's own place. `None` where that is in `/proc`, whose names only look
/// like ones.
fn resolve(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_AT_MOST {
        let name = path.file_name().ok_or_else(|| refuse("it is no name of a file"))?;
        let directory = match path.parent() {
            Some(p) if !p.as_os_str().is_empty() => p.canonicalize()?,
            _ => Path::new(".").canonicalize()?,
        };
        if directory.starts_with("/proc") {
            return Ok(None);
        }
        let whole = directory.join(name);
        match fs::symlink_metadata(&whole) {
            Ok(m) if m.is_symlink() => path = directory.join(fs::read_link(&whole)?),
            Ok(_) => return Ok(Some(whole)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Some(whole)),
            Err(e) => return Err(e),
        }
    }
    Err(refuse("its links lead in a circle"))
}

impl OutputFile {
    /// Prepares to write `path`.
    ///
    /// # Errors
    /// A directory; a file that may not be written, or whose directory may not.
    pub fn create(path: &Path) -> io::Result<OutputFile> {
        if path.as_os_str().as_encoded_bytes().ends_with(b"/") {
            return Err(refuse("it names a directory; name a file in it"));
        }
        let before = match fs::metadata(path) {
            Ok(m) => Some(m),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(e),
        };
        if before.as_ref().is_some_and(Metadata::is_dir) {
            return Err(refuse("it is a directory; name a file in it"));
        }
        let regular = before.as_ref().is_none_or(Metadata::is_file);
        let place = if regular { resolve(path)? } else { None };
        let Some(place) = place else {
            // A regular file behind /proc is somebody's open one: what it holds stays, as with `>>`.
            let file = File::options().write(true).append(regular).open(path)?;
            return Ok(OutputFile { body: Body::Direct(file) });
        };
        if before.is_some() {
            // A file that may not be written is not to be replaced either.
            drop(File::options().write(true).open(&place)?);
        }
        let target = Target { path: place, before };
        OutputFile::towards(target, true)
    }

    /// `unnamed`: if the file system has such files.
    fn towards(target: Target, unnamed: bool) -> io::Result<OutputFile> {
        let body = match unnamed_in(target.directory()).filter(|_| unnamed) {
            Some(file) => Body::Unnamed(file, Box::new(target)),
            None => Body::Beside(temporary().tempfile_in(target.directory())?, Box::new(target)),
        };
        Ok(OutputFile { body })
    }

    /// Puts the file in its place.
    ///
    /// # Errors
    /// Those of the file system; then what was there is there still.
    pub fn commit(self) -> io::Result<()> {
        match self.body {
            Body::Direct(mut file) => file.flush(),
            Body::Unnamed(file, target) => {
                target.take_over(&file)?;
                if target.before.is_none() {
                    match name(&file, &target.path) {
                        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                        named => return named,
                    }
                }
                // A link never takes another's place: it gets a name of its own for as long as it takes to rename it.
                let named = temporary().make_in(target.directory(), |path| name(&file, path))?;
                named.into_temp_path().persist(&target.path).map_err(|e| e.error)
            }
            Body::Beside(file, target) => {
                target.take_over(file.as_file())?;
                file.persist(&target.path).map(drop).map_err(|e| e.error)
            }
        }
    }
}

/// A file without a name in `directory`; none where the file system has no such files, or `/proc`, by which one gets its
/// name, is not there.
fn unnamed_in(directory: &Path) -> Option<File> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    // The mode of a new file, which the process's mask narrows.
    let file = File::from(rustix::fs::open(directory, flags, Mode::from_raw_mode(0o666)).ok()?);
    fs::symlink_metadata(place_of(&file)).is_ok().then_some(file)
}

/// Where the process's own open files can be found.
fn place_of(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Gives a file without a name the name `path`, which must be nobody's.
fn name(file: &File, path: &Path) -> io::Result<()> {
    Ok(rustix::fs::linkat(CWD, place_of(file), CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

fn temporary() -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    // The mode of a new file, which the process's mask narrows.
    builder.prefix(".larder-").suffix(".new").permissions(Permissions::from_mode(0o666));
    builder
}

impl Write for OutputFile {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match &mut self.body {
            Body::Direct(f) | Body::Unnamed(f, _) => f.write(buf),
            Body::Beside(f, _) => f.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.body {
            Body::Direct(f) | Body::Unnamed(f, _) => f.flush(),
            Body::Beside(f, _) => f.flush(),
        }
    }
}

/// Whether what is written to `output` would change `input`, a trace's name as [`open`](crate::open) takes it: the same file
/// or block device by whatever name, and by `-` for standard input and output.
pub fn is_same_file(input: &str, output: &str) -> bool {
    if input.starts_with("gen:") {
        return false;
    }
    let known = |m: Metadata| {
        let kind = m.file_type();
        (kind.is_file() || kind.is_block_device()).then(|| (m.dev(), m.ino()))
    };
    let of_path = |path: &str| known(fs::metadata(path).ok()?);
    let of_open = |file: &dyn AsFd| {
        known(File::from(file.as_fd().try_clone_to_owned().ok()?).metadata().ok()?)
    };
    let a = if input == "-" { of_open(&io::stdin()) } else { of_path(input) };
    let b = if output == "-" { of_open(&io::stdout()) } else { of_path(output) };
    a.is_some() && a == b
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn write(path: &Path, text: &str) -> io::Result<()> {
        let mut file = OutputFile::create(path)?;
        file.write_all(text.as_bytes())?;
        file.commit()
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_not_committed_leaves_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, "old").unwrap();
        for place in [path.clone(), dir.path().join("b")] {
            let mut file = OutputFile::create(&place).unwrap();
            file.write_all(b"half").unwrap();
        }
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(dir.path()), ["a"]);
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        write(&path, "new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640, "the mode is kept");
        assert_eq!(names(dir.path()), ["a"]);
        write(&dir.path().join("c"), "x").unwrap();
        let plain = dir.path().join("d");
        fs::write(&plain, "x").unwrap();
        let mode = |name: &str| fs::metadata(dir.path().join(name)).unwrap().mode();
        assert_eq!(mode("c"), mode("d"), "that of any new file");
    }

    /// Both ways, since file systems differ; and where somebody makes the file meanwhile.
    #[test]
    fn with_and_without_a_name_meanwhile() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let can = unnamed_in(dir.path()).is_some();
        for (round, unnamed) in [true, false, true, false].into_iter().enumerate() {
            let before = fs::metadata(&path).ok();
            let target = Target { path: path.clone(), before };
            let mut file = OutputFile::towards(target, unnamed).unwrap();
            let there = names(dir.path()).iter().filter(|name| *name != "a").count();
            assert_eq!(there, usize::from(!(unnamed && can)));
            write!(file, "round {round}").unwrap();
            file.commit().unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), format!("round {round}"));
            assert_eq!(names(dir.path()), ["a"]);
        }
        let late = dir.path().join("late");
        let mut file = OutputFile::create(&late).unwrap();
        fs::write(&late, "another's").unwrap();
        file.write_all(b"mine").unwrap();
        file.commit().unwrap();
        assert_eq!(fs::read(&late).unwrap(), b"mine");
        assert_eq!(names(dir.path()), ["a", "late"]);
    }

    #[test]
    fn links_stay_and_what_they_lead_to_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("sub")).unwrap();
        fs::write(at("sub/file"), "old").unwrap();
        symlink("sub/file", at("one")).unwrap();
        symlink("one", at("two")).unwrap();
        symlink("sub/none", at("dangling")).unwrap();
        symlink("loop", at("loop")).unwrap();
        write(&at("two"), "new").unwrap();
        write(&at("dangling"), "made").unwrap();
        assert_eq!(fs::read(at("sub/file")).unwrap(), b"new");
        assert_eq!(fs::read(at("sub/none")).unwrap(), b"made");
        assert!(fs::symlink_metadata(at("two")).unwrap().is_symlink());
        assert_eq!(names(&at("sub")), ["file", "none"]);
        for wrong in [at("loop"), at("sub"), at("none/x"), at("sub/"), at(".."), PathBuf::new()] {
            assert!(write(&wrong, "x").is_err(), "{}", wrong.display());
        }
    }

    #[test]
    fn devices_and_open_files_are_written_as_they_are() {
        write(Path::new("/dev/null"), "x").unwrap();
        assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
        assert!(write(Path::new("/dev/full"), "x").is_err());
        let mut open = tempfile::tempfile().unwrap();
        open.write_all(b"first ").unwrap();
        let number = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
        write(&number, "second").unwrap();
        assert_eq!(fs::read(&number).unwrap(), b"first second");
    }

    #[test]
    fn a_file_is_told_by_any_of_its_names() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        fs::write(at("a"), "x").unwrap();
        fs::write(at("other"), "x").unwrap();
        fs::hard_link(at("a"), at("hard")).unwrap();
        symlink(at("a"), at("soft")).unwrap();
        for same in ["a", "hard", "soft"] {
            assert!(is_same_file(&at("a"), &at(same)), "{same}");
        }
        for (a, b) in [
            (at("a"), at("other")),
            (at("a"), at("none")),
            ("/dev/null".into(), "/dev/null".into()),
        ] {
            assert!(!is_same_file(&a, &b), "{a} {b}");
        }
        assert!(!is_same_file("gen:zipf", "gen:zipf"));
    }
}
