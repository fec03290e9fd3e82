//! Which blocks of a volume are a file system's metadata, found out from what passes by.
//!
//! A [`Detector`] is shown the bytes of reads and writes. From partition tables and superblocks it learns where file systems lie
//! and how they are laid out; from group descriptors, inodes and trees, where their metadata is; and it recognises
//! directories, trees and the like by what they look like. Nothing is asked of the guest's kernel, nothing is written, and
//! any bytes whatsoever are survived: what is found out only ever decides about preference in the cache.
//!
//! Sources: Azor (Klonatos et al., MSST '11), which notes that detection without the file system's help is possible; the layouts are
//! in the headers of [`ext4`] and [`xfs`].

mod bytes;
mod ext4;
mod learned;
mod partition;
mod xfs;

pub use partition::{PARTITION_TABLE_BYTES, Partition, partitions};

use std::collections::VecDeque;

use self::ext4::Ext4;
use self::learned::Learned;
use self::partition::MOST_PARTITIONS;
use self::xfs::Xfs;
use super::access::BlockKind;

/// File systems that are kept track of, of one volume.
const MOST_FILE_SYSTEMS: usize = 32;
/// Wishes that wait to be read.
const MOST_WANTED: usize = 4096;
/// Wishes in the life of a detector: a file system cannot send it reading forever.
const MOST_WISHES: u64 = 1 << 16;
/// What is read of a superblock: ext4's ends here.
const HEAD_BYTES: u64 = 4096;

/// Kinds of metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MetadataKind {
    /// MBR or GPT.
    PartitionTable,
    /// A superblock or a copy of it; in XFS the rest of that block too.
    Superblock,
    /// ext4's group descriptors, their copies and the room kept for more.
    GroupDescriptors,
    /// XFS's headers of an allocation group, where they are not in the superblock's block.
    GroupHeaders,
    /// Which blocks are free (ext4).
    BlockBitmap,
    /// Which inodes are free (ext4).
    InodeBitmap,
    /// Inodes.
    InodeTable,
    /// Where inodes are (XFS).
    InodeTree,
    /// Which blocks are free, owned by whom, shared by how many (XFS).
    AllocationTree,
    /// Directories and their indexes.
    Directory,
    /// Where a file's blocks are.
    ExtentTree,
    /// Where a directory's blocks are.
    DirectoryExtentTree,
    /// Where a file's blocks are (ext2, ext3).
    IndirectBlocks,
    /// Extended attributes outside inodes.
    ExtendedAttributes,
    /// Targets of symbolic links outside inodes (XFS).
    Symlink,
    /// Quotas (XFS).
    Quota,
    /// Journal or log.
    Journal,
}

impl MetadataKind {
    /// Every kind, in the order of their declaration.
    pub const ALL: [MetadataKind; 17] = [
        MetadataKind::PartitionTable,
        MetadataKind::Superblock,
        MetadataKind::GroupDescriptors,
        MetadataKind::GroupHeaders,
        MetadataKind::BlockBitmap,
        MetadataKind::InodeBitmap,
        MetadataKind::InodeTable,
        MetadataKind::InodeTree,
        MetadataKind::AllocationTree,
        MetadataKind::Directory,
        MetadataKind::ExtentTree,
        MetadataKind::DirectoryExtentTree,
        MetadataKind::IndirectBlocks,
        MetadataKind::ExtendedAttributes,
        MetadataKind::Symlink,
        MetadataKind::Quota,
        MetadataKind::Journal,
    ];

    /// The kind as `explain` names it.
    pub fn as_str(self) -> &'static str {
        match self {
            MetadataKind::PartitionTable => "partition table",
            MetadataKind::Superblock => "superblock",
            MetadataKind::GroupDescriptors => "group descriptors",
            MetadataKind::GroupHeaders => "allocation group headers",
            MetadataKind::BlockBitmap => "block bitmap",
            MetadataKind::InodeBitmap => "inode bitmap",
            MetadataKind::InodeTable => "inodes",
            MetadataKind::InodeTree => "inode tree",
            MetadataKind::AllocationTree => "allocation tree",
            MetadataKind::Directory => "directory",
            MetadataKind::ExtentTree => "extent tree",
            MetadataKind::DirectoryExtentTree => "extent tree of a directory",
            MetadataKind::IndirectBlocks => "indirect blocks",
            MetadataKind::ExtendedAttributes => "extended attributes",
            MetadataKind::Symlink => "symbolic link",
            MetadataKind::Quota => "quota",
            MetadataKind::Journal => "journal",
        }
    }

    /// As admission takes it.
    pub fn block_kind(self) -> BlockKind {
        if self == MetadataKind::Journal { BlockKind::Journal } else { BlockKind::Metadata }
    }

    fn code(self) -> u8 {
        self as u8 + 1
    }

    fn from_code(code: u8) -> Option<MetadataKind> {
        MetadataKind::ALL.get(usize::from(code).wrapping_sub(1)).copied()
    }
}

/// Places that a detector would like to see, in the order of its wishes; at most a fixed number.
#[derive(Debug, Default)]
struct Wanted {
    queue: VecDeque<(u64, u64)>,
    wishes: u64,
}

impl Wanted {
    fn push(&mut self, offset: u64, bytes: u64) {
        if self.wishes >= MOST_WISHES {
            return;
        }
        // Neighbours are read together, up to 1 MiB.
        if let Some((start, len)) = self.queue.back_mut()
            && *start + *len == offset
            && *len + bytes <= 1 << 20
        {
            *len += bytes;
            return;
        }
        if self.queue.len() < MOST_WANTED {
            self.wishes += 1;
            self.queue.push_back((offset, bytes));
        }
    }
}

#[derive(Debug)]
enum FileSystem {
    Ext4(Box<Ext4>),
    Xfs(Box<Xfs>),
}

impl FileSystem {
    fn base(&self) -> u64 {
        match self {
            FileSystem::Ext4(fs) => fs.base,
            FileSystem::Xfs(fs) => fs.base,
        }
    }

    fn end(&self) -> u64 {
        match self {
            FileSystem::Ext4(fs) => fs.base + fs.bytes(),
            FileSystem::Xfs(fs) => fs.base + fs.bytes(),
        }
    }

    fn block_bytes(&self) -> u64 {
        match self {
            FileSystem::Ext4(fs) => fs.block_bytes,
            FileSystem::Xfs(fs) => fs.block_bytes,
        }
    }
}

/// What is known of one volume's file systems. See the [module](self).
///
/// Memory: 8 bytes for each block that it may remember (a parameter), and for ext4 about 60 bytes for each flexible group of 2
/// GiB.
#[derive(Debug)]
pub struct Detector {
    /// By base, not overlapping.
    file_systems: Vec<FileSystem>,
    /// Where superblocks may be: the volume's start and its partitions'.
    starts: Vec<u64>,
    partitioned: bool,
    learned: Learned,
    wanted: Wanted,
    volume_bytes: u64,
}

impl Detector {
    /// Blocks that are remembered by default, of those whose place does not follow from the layout: half a MiB.
    pub const DEFAULT_BLOCKS: usize = 65_536;
    /// Of one request no more bytes than this are looked at.
    const MOST_PASSED: usize = 1 << 20;

    /// Nothing known of a volume of `volume_bytes`; room for `blocks` blocks.
    pub fn new(volume_bytes: u64, blocks: usize) -> Detector {
        let mut wanted = Wanted::default();
        wanted.push(0, PARTITION_TABLE_BYTES as u64);
        Detector {
            file_systems: Vec::new(),
            starts: vec![0],
            partitioned: false,
            learned: Learned::new(blocks),
            wanted,
            volume_bytes,
        }
    }

    /// A range that would tell more, to be read from the backing store and shown to [`observe`](Self::observe) when there is nothing better
    /// to do. When a volume is attached long after its file system was mounted, superblocks and descriptors do not pass by
    /// any more.
    pub fn next_wanted(&mut self) -> Option<(u64, u64)> {
        loop {
            let (offset, bytes) = self.wanted.queue.pop_front()?;
            if offset < self.volume_bytes {
                return Some((offset, bytes.min(self.volume_bytes - offset)));
            }
        }
    }

    /// What `bytes` bytes at `offset` hold, as far as known without seeing them: metadata if any of it is.
    pub fn classify(&self, offset: u64, bytes: u64) -> BlockKind {
        let end = offset.saturating_add(bytes.max(1));
        let mut worst = BlockKind::Unknown;
        let mut at = offset;
        while at < end {
            let (kind, next) = self.place(at);
            match kind {
                Some(kind) if kind.block_kind() == BlockKind::Metadata => {
                    return BlockKind::Metadata;
                }
                Some(_) => worst = BlockKind::Journal,
                None if worst == BlockKind::Unknown && self.inside(at).is_some() => {
                    worst = BlockKind::Data
                }
                None => {}
            }
            at = next;
        }
        worst
    }

    /// The kind of metadata at `offset`.
    pub fn find(&self, offset: u64) -> Option<MetadataKind> {
        self.place(offset).0
    }

    /// The kind at `offset`, and where the next block begins.
    fn place(&self, offset: u64) -> (Option<MetadataKind>, u64) {
        let Some(fs) = self.inside(offset) else {
            let table = self.partitioned && offset < PARTITION_TABLE_BYTES as u64;
            let next = self.file_systems.iter().map(FileSystem::base).find(|&base| base > offset);
            let next = next.unwrap_or(u64::MAX);
            let kind = table.then_some(MetadataKind::PartitionTable);
            return (kind, if table { next.min(PARTITION_TABLE_BYTES as u64) } else { next });
        };
        let block = fs.block_bytes();
        let next = fs.base() + ((offset - fs.base()) / block + 1) * block;
        let kind = match fs {
            FileSystem::Ext4(fs) => fs.find(offset, &self.learned),
            FileSystem::Xfs(fs) => fs.find(offset, &self.learned),
        };
        (kind, next)
    }

    fn index_of(&self, offset: u64) -> Option<usize> {
        let after = self.file_systems.partition_point(|fs| fs.base() <= offset);
        let at = after.checked_sub(1)?;
        (offset < self.file_systems[at].end()).then_some(at)
    }

    fn inside(&self, offset: u64) -> Option<&FileSystem> {
        self.index_of(offset).map(|at| &self.file_systems[at])
    }

    /// A request's bytes pass by: of a large one its beginning is looked at.
    pub fn pass(&mut self, offset: u64, bytes: &[u8]) {
        self.observe(offset, &bytes[..bytes.len().min(Detector::MOST_PASSED)]);
    }

    /// Bytes that were read from the backing store at `offset`, or written to it, pass by. What they hold: metadata if any
    /// of it is.
    pub fn observe(&mut self, offset: u64, bytes: &[u8]) -> BlockKind {
        let Some(end) = offset.checked_add(bytes.len() as u64) else { return BlockKind::Unknown };
        self.observe_starts(offset, bytes, end);
        let mut worst = BlockKind::Unknown;
        let mut see = |kind: BlockKind| {
            let rank = |k| match k {
                BlockKind::Unknown => 0,
                BlockKind::Data => 1,
                BlockKind::Journal => 2,
                BlockKind::Metadata => 3,
            };
            if rank(kind) > rank(worst) {
                worst = kind;
            }
        };
        let mut at = offset;
        while at < end {
            let Some(index) = self.index_of(at) else {
                let (kind, next) = self.place(at);
                see(kind.map_or(BlockKind::Unknown, MetadataKind::block_kind));
                at = next;
                continue;
            };
            let fs = &mut self.file_systems[index];
            let block = fs.block_bytes();
            let start = at - (at - fs.base()) % block;
            let next = start + block;
            let kind = if start >= offset && next <= end {
                let part = &bytes[(start - offset) as usize..(next - offset) as usize];
                match fs {
                    FileSystem::Ext4(fs) => {
                        fs.observe(start, part, &mut self.learned, &mut self.wanted)
                    }
                    FileSystem::Xfs(fs) => {
                        fs.observe(start, part, &mut self.learned, &mut self.wanted)
                    }
                }
            } else {
                match fs {
                    FileSystem::Ext4(fs) => fs.find(start, &self.learned),
                    FileSystem::Xfs(fs) => fs.find(start, &self.learned),
                }
            };
            see(kind.map_or(BlockKind::Data, MetadataKind::block_kind));
            at = next;
        }
        worst
    }

    /// Partition tables and superblocks among the bytes.
    fn observe_starts(&mut self, offset: u64, bytes: &[u8], end: u64) {
        if offset == 0 && bytes.len() >= 512 {
            let found = partitions(bytes);
            self.partitioned = !found.is_empty();
            for partition in found.iter().take(MOST_PARTITIONS) {
                if !self.starts.contains(&partition.start) && self.starts.len() <= MOST_PARTITIONS {
                    self.starts.push(partition.start);
                    self.wanted.push(partition.start, HEAD_BYTES);
                }
            }
        }
        for i in 0..self.starts.len() {
            let start = self.starts[i];
            if start >= offset && end >= HEAD_BYTES && start <= end - HEAD_BYTES {
                self.head(start, &bytes[(start - offset) as usize..]);
            }
        }
    }

    /// The bytes of a volume from `start` on, where a file system may begin.
    fn head(&mut self, start: u64, head: &[u8]) {
        let head = &head[..HEAD_BYTES as usize];
        let at = self.file_systems.iter().position(|fs| fs.base() == start);
        if let Some(at) = at {
            let same = match &self.file_systems[at] {
                FileSystem::Ext4(fs) => ext4::same(fs, head),
                FileSystem::Xfs(fs) => xfs::same(fs, head),
            };
            if same {
                return;
            }
            // Another file system was made there, or it grew.
            self.file_systems.remove(at);
            self.learned.clear();
        }
        let xfs = Xfs::read(start, head, &mut self.wanted).map(|fs| FileSystem::Xfs(Box::new(fs)));
        let found = xfs.or_else(|| {
            Ext4::read(start, head, &mut self.wanted).map(|fs| FileSystem::Ext4(Box::new(fs)))
        });
        let Some(found) = found else { return };
        // What overlaps it was there before: a whole volume's, before it was partitioned.
        self.file_systems.retain(|fs| fs.end() <= found.base() || fs.base() >= found.end());
        if self.file_systems.len() < MOST_FILE_SYSTEMS {
            let place = self.file_systems.partition_point(|fs| fs.base() < found.base());
            self.file_systems.insert(place, found);
        }
    }

    /// The file systems that are known, for people: kind and first byte of each.
    pub fn file_systems(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.file_systems.iter().map(|fs| match fs {
            FileSystem::Ext4(fs) => ("ext4", fs.base),
            FileSystem::Xfs(fs) => ("xfs", fs.base),
        })
    }

    /// Bytes of DRAM.
    pub fn memory_bytes(&self) -> usize {
        let fs = |fs: &FileSystem| match fs {
            FileSystem::Ext4(fs) => size_of::<Ext4>() + fs.memory_bytes(),
            FileSystem::Xfs(_) => size_of::<Xfs>(),
        };
        let wanted = self.wanted.queue.capacity() * 16;
        self.learned.memory_bytes() + self.file_systems.iter().map(fs).sum::<usize>() + wanted
    }
}

#[cfg(test)]
mod tests;
