//! What is dirty of a volume, as a file: for the day on which its store is gone, or cannot be written.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use larder_engine::block::writeback::overlay::{Holds, Stretch};
use larder_format::block::superblock::HoldsState;
use larder_runtime::DeviceOptions;
use rustix::fs::{FallocateFlags, RenameFlags};
use serde::{Deserialize, Serialize};

use super::super::super::open::{CacheError, open_device, read_superblock};
use super::{Left, MOST_LISTED, listed, overlay};

/// Bytes that are copied at a time.
const COPY: usize = 1 << 20;

/// What is to be written where.
#[derive(Clone, Debug, Default)]
pub struct ExportWish {
    /// The cache device.
    pub cache: PathBuf,
    /// The volume.
    pub volume: String,
    /// A file that is not there yet.
    pub file: PathBuf,
    /// What the file begins as: an image of the store. Else it holds zeros where nothing is dirty.
    pub base: Option<PathBuf>,
}

/// A stretch of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stretched {
    /// First byte.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
}

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Exported {
    /// The volume.
    pub volume: String,
    /// The file.
    pub file: String,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// The volume was put aside with what is dirty, and waits to be taken up.
    pub carried: bool,
    /// Dirty bytes that it holds.
    pub bytes: u64,
    /// Of them, those that are zeros because they were zeroed or trimmed.
    pub zeros: u64,
    /// Stretches in which they lie.
    pub extents: u64,
    /// The last write that it has, by its number; 0 if nothing is dirty.
    pub last: u64,
    /// Dirty bytes that could not be read, or do not have their checksum: the file has what it began with there.
    pub unreadable_bytes: u64,
    /// The first stretches of them.
    pub unreadable: Vec<Stretched>,
    /// Writes behind the last one are lost, of bytes that nobody knows.
    pub gap: bool,
    /// Bytes of the base; `None` without one.
    pub base_bytes: Option<u64>,
    /// Bytes of the volume.
    pub volume_bytes: u64,
    /// Seconds that it took.
    pub seconds: f64,
}

impl Exported {
    fn lost(&mut self, offset: u64, bytes: u64) {
        self.unreadable_bytes += bytes;
        let room = self.unreadable.len() < MOST_LISTED;
        match self.unreadable.last_mut() {
            Some(last) if last.offset + last.bytes == offset => last.bytes += bytes,
            _ if room => {
                self.unreadable.push(Stretched { offset, bytes });
            }
            _ => {}
        }
    }
}

fn fail(path: &Path) -> impl Fn(io::Error) -> CacheError {
    let what = path.display().to_string();
    move |e| CacheError::System { what: "the file", reason: format!("'{what}': {e}") }
}

/// Writes what is dirty of a volume to a file, each byte at its offset in the volume. The file is there when it is whole and durable, not before.
/// `go_on` hears how many bytes of how many are done, and may say no: then there is no file, and this is `None`.
///
/// # Errors
/// When the device is in use or no cache, has no such volume, or the file is there already or cannot be written.
pub fn export(
    wish: &ExportWish,
    go_on: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Option<Exported>, CacheError> {
    let partial = {
        let mut name = wish.file.as_os_str().to_owned();
        name.push(".partial");
        PathBuf::from(name)
    };
    let there = |path: &Path, what: &str| CacheError::System {
        what: "the file",
        reason: format!("'{}' is there already: {what}", path.display()),
    };
    if wish.file.symlink_metadata().is_ok() {
        return Err(there(&wish.file, "name another, it is not overwritten"));
    }
    // What may be wrong with the cache comes before a file is made.
    let device = open_device(&DeviceOptions::new(&wish.cache).read_only())?;
    let sb = read_superblock(&device)?;
    let no_volume = |reason: String| CacheError::Volume { name: wish.volume.clone(), reason };
    let Some(volume) = sb.volumes.iter().find(|v| v.name == wish.volume) else {
        let names: Vec<&str> = sb.volumes.iter().map(|v| v.name.as_str()).collect();
        return Err(no_volume(match names.is_empty() {
            true => "the cache knows no volume".to_owned(),
            false => format!("the cache does not know it; it knows {}", names.join(", ")),
        }));
    };
    let options = || {
        let mut options = File::options();
        options.read(true).write(true);
        options
    };
    let file = options().create_new(true).open(&partial).map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists => {
            there(&partial, "an export that was cut short may have left it: remove it")
        }
        _ => fail(&partial)(e),
    })?;
    let begun = Instant::now();
    let mut done = Exported {
        volume: wish.volume.clone(),
        file: wish.file.display().to_string(),
        volume_bytes: volume.bytes,
        carried: volume.write_back.is_some_and(|w| w.holds == HoldsState::Carried),
        ..Exported::default()
    };
    let attachment = volume.write_back.filter(|w| w.holds.may_be_dirty()).map(|w| w.attachment);
    let mut left = Left::read(&device, &sb);
    let written = write_all(&file, wish, attachment, left.as_mut(), &mut done, go_on)
        .and_then(|all| file.sync_all().map(|()| all).map_err(fail(&partial)))
        .and_then(|all| if all { rename(&partial, &wish.file).map(|()| all) } else { Ok(all) });
    if !matches!(written, Ok(true)) {
        // It is not whole.
        std::fs::remove_file(&partial).ok();
    }
    done.seconds = begun.elapsed().as_secs_f64();
    Ok(written?.then_some(done))
}

/// Gives the file its name, if nothing has taken that meanwhile.
fn rename(partial: &Path, file: &Path) -> Result<(), CacheError> {
    let here = rustix::fs::CWD;
    let named = match rustix::fs::renameat_with(here, partial, here, file, RenameFlags::NOREPLACE) {
        // The file system cannot tell.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => std::fs::rename(partial, file),
        named => named.map_err(io::Error::from),
    };
    named.map_err(fail(file))?;
    let dir = file.parent().filter(|dir| *dir != Path::new("")).unwrap_or(Path::new("."));
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(fail(dir))
}

/// Returns whether all was written: `go_on` may say no.
fn write_all(
    file: &File,
    wish: &ExportWish,
    attachment: Option<u32>,
    left: Option<&mut Left<'_>>,
    done: &mut Exported,
    go_on: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<bool, CacheError> {
    let say = fail(&wish.file);
    let left = left.zip(attachment);
    let volume =
        left.as_ref().map(|(left, attachment)| left.volume(*attachment)).unwrap_or_default();
    let void = left.as_ref().map(|(left, attachment)| left.void(*attachment)).unwrap_or_default();
    let shows = overlay(&volume, &void);
    let mut dirty = Vec::with_capacity(shows.extents());
    shows.look(0..u64::MAX, |stretch| {
        if let Stretch::Dirty(one) = stretch {
            dirty.push(one);
        }
    });
    let mut all = shows.bytes();
    let mut steps = 0;
    done.file_bytes = dirty.last().map_or(0, |d| d.at + d.len).max(done.volume_bytes);
    if let Some(base) = &wish.base {
        let of = fail(base);
        let mut image = File::open(base).map_err(&of)?;
        let bytes = image.seek(SeekFrom::End(0)).map_err(&of)?;
        done.base_bytes = Some(bytes);
        done.file_bytes = done.file_bytes.max(bytes);
        all += bytes;
        let mut copied = |at| go_on(at, all);
        if !copy(&image, bytes, file, &mut copied).map_err(&of)? {
            return Ok(false);
        }
        steps = bytes;
    }
    file.set_len(done.file_bytes).map_err(&say)?;
    done.gap = volume.gap;
    done.last = volume.records.last().map_or(0, |dirty| dirty.entry.record.sequence);
    let Some((left, _)) = left else { return Ok(true) };
    let mut end = None;
    for one in dirty {
        if !go_on(steps, all) {
            return Ok(false);
        }
        steps += one.len;
        done.extents += u64::from(end != Some(one.at));
        end = Some(one.at + one.len);
        if one.holds != Holds::Bytes {
            if wish.base.is_some() {
                zero(file, one.at, one.len).map_err(&say)?;
            }
            (done.bytes, done.zeros) = (done.bytes + one.len, done.zeros + one.len);
            continue;
        }
        let at = (one.sequence - volume.frontier - 1) as usize;
        let Some(record) = volume.records.get(at) else { continue };
        let first = record.entry.record.offset;
        let of = one.at - first..one.at + one.len - first;
        let mut failed = None;
        left.each_piece(record, of.clone(), |piece, bytes| {
            let range = piece.range.start.max(of.start)..piece.range.end.min(of.end);
            let at = first + range.start;
            if piece.lost.is_some() {
                done.lost(at, range.end - range.start);
                return true;
            }
            let skip = (range.start - piece.range.start) as usize;
            let bytes = bytes.get(skip..skip + (range.end - range.start) as usize);
            let bytes = bytes.unwrap_or(&[]);
            done.bytes += bytes.len() as u64;
            failed = file.write_all_at(bytes, at).err();
            failed.is_none()
        });
        if let Some(error) = failed {
            return Err(say(error));
        }
    }
    for lost in listed(&volume, &void) {
        done.lost(lost.start, lost.end - lost.start);
    }
    Ok(true)
}

/// Copies an image; where it has holes or zeros, the copy has holes. Returns whether all was copied.
fn copy(
    from: &File,
    bytes: u64,
    to: &File,
    go_on: &mut dyn FnMut(u64) -> bool,
) -> io::Result<bool> {
    let mut buffer = vec![0u8; COPY];
    let mut at = 0;
    while at < bytes {
        match rustix::fs::seek(from, rustix::fs::SeekFrom::Data(at)) {
            Ok(data) => at = data.max(at),
            Err(rustix::io::Errno::NXIO) => break,
            Err(_) => {}
        }
        if !go_on(at.min(bytes)) {
            return Ok(false);
        }
        let len = (bytes.saturating_sub(at)).min(COPY as u64) as usize;
        let Some(piece) = buffer.get_mut(..len) else { break };
        from.read_exact_at(piece, at)?;
        if piece.iter().any(|&b| b != 0) {
            to.write_all_at(piece, at)?;
        }
        at += len as u64;
    }
    Ok(true)
}

fn zero(file: &File, at: u64, len: u64) -> io::Result<()> {
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if rustix::fs::fallocate(file, punch, at, len).is_ok() {
        return Ok(());
    }
    let zeros = vec![0u8; COPY];
    let mut done = 0;
    while done < len {
        let n = (len - done).min(COPY as u64);
        file.write_all_at(&zeros[..n as usize], at + done)?;
        done += n;
    }
    Ok(())
}
