//! What a file store says of its image: where it is, and an attribute by which the image itself remembers that it has a marker.

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_runtime::FileHandle;
use rustix::fs::{Stat, XattrFlags};
use rustix::io::Errno as Os;

use crate::syncs::Syncs;
use crate::watch::Watch;

/// The attribute. Its value is the path of the marker, as it was when it was written.
const ATTRIBUTE: &str = "user.larder.marker";
/// The longest value that is read, bytes.
const MAX_VALUE: usize = 4096;

/// A note that the image itself carries: a rename keeps it, and so does a copy that keeps attributes.
pub trait Attribute: Send + Sync + fmt::Debug {
    /// It; `None` if there is none.
    ///
    /// # Errors
    /// If it cannot be read; where there are no attributes at all there is none.
    fn get(&self) -> io::Result<Option<Vec<u8>>>;

    /// Sets it, or removes it, durably.
    ///
    /// # Errors
    /// If it cannot be set; also where there are no attributes at all.
    fn set(&self, value: Option<&[u8]>) -> io::Result<()>;
}

/// The image behind a file store.
#[derive(Clone, Debug)]
pub struct Image {
    path: PathBuf,
    file: FileHandle,
    device: bool,
    attribute: Arc<dyn Attribute>,
}

impl Image {
    /// Where it says that its marker is. (A value that is no path was written by something else.)
    pub(super) fn names_marker(&self) -> Option<PathBuf> {
        let value = self.attribute().get().ok()??;
        let path = Path::new(OsStr::from_bytes(&value)).to_owned();
        path.is_absolute().then_some(path)
    }

    /// An open image, by the path that it was opened by. A block device has no attribute.
    pub(crate) fn new(
        path: &Path,
        file: &FileHandle,
        device: bool,
        watch: &Arc<Watch>,
        syncs: &Arc<Syncs>,
    ) -> Image {
        let (watch, syncs) = (watch.clone(), syncs.clone());
        let attribute = Arc::new(OfImage { file: file.clone(), device, watch, syncs });
        Image { path: path.to_owned(), file: file.clone(), device, attribute }
    }

    /// It is a block device.
    pub fn is_device(&self) -> bool {
        self.device
    }

    /// The path that it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its attribute.
    pub fn attribute(&self) -> &dyn Attribute {
        &*self.attribute
    }

    /// What is at this path is the image.
    pub(crate) fn is_at(&self, path: &Path) -> bool {
        let (Ok(found), Ok(stat)) = (path.metadata(), self.stat()) else { return false };
        (stat.st_dev, stat.st_ino) == (found.dev(), found.ino())
            || self.device && found.file_type().is_block_device() && stat.st_rdev == found.rdev()
    }

    /// Bytes of the open file.
    pub(crate) fn bytes(&self) -> io::Result<u64> {
        Ok(self.stat()?.st_size.try_into().unwrap_or(0))
    }

    pub(super) fn stat(&self) -> io::Result<Stat> {
        Ok(rustix::fs::fstat(&self.file)?)
    }

    pub(super) fn file(&self) -> &FileHandle {
        &self.file
    }
}

/// The attribute of an open file.
#[derive(Debug)]
struct OfImage {
    file: FileHandle,
    device: bool,
    watch: Arc<Watch>,
    syncs: Arc<Syncs>,
}

impl Attribute for OfImage {
    fn get(&self) -> io::Result<Option<Vec<u8>>> {
        let mut value = vec![0; MAX_VALUE];
        match rustix::fs::fgetxattr(&self.file, ATTRIBUTE, &mut value[..]) {
            Ok(len) => {
                value.truncate(len);
                Ok(Some(value))
            }
            Err(Os::NODATA | Os::OPNOTSUPP | Os::NOSYS) => Ok(None),
            // It is there, and longer than any that was written here.
            Err(Os::RANGE) => Ok(Some(Vec::new())),
            // No such attributes on a device's node.
            Err(_) if self.device => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn set(&self, value: Option<&[u8]>) -> io::Result<()> {
        let file = self.file.as_fd();
        // It changes the file's times: that is this daemon's own change.
        let start = self.watch.begins(file);
        let set = match value {
            Some(value) => rustix::fs::fsetxattr(file, ATTRIBUTE, value, XattrFlags::empty()),
            None => rustix::fs::fremovexattr(file, ATTRIBUTE),
        };
        let set = match set {
            Err(Os::NODATA) if value.is_none() => Ok(()),
            other => other,
        };
        // What the kernel says once of pages that it could not write it may say to this one.
        let number = self.syncs.begins();
        let synced = set.and_then(|()| rustix::fs::fsync(file));
        if set.is_ok() && synced.is_err() {
            self.syncs.ledger.lost();
        }
        self.syncs.ended(number);
        self.watch.ended(start, set.is_ok());
        Ok(synced?)
    }
}
