//! XFS: where metadata lies, from the superblock and what passes by.
//!
//! Layout as documented in "XFS Algorithms & Data Structures" (xfs-documentation). Only superblock, allocation group headers and the log have
//! fixed places. All else has magic numbers, and with version 5 its own address and the file system's UUID beside them, so
//! that a stale copy or a file that looks like metadata is not taken for it.

use super::bytes::{be16, be32, be64, u8_at, uuid};
use super::learned::Learned;
use super::{MetadataKind, Wanted};

/// Of one extent of a directory at most this many blocks are learned.
const MOST_OF_EXTENT: u64 = 4096;
/// Of so many allocation groups the headers are asked for.
const MOST_GROUPS_ASKED: u64 = 4096;

/// An XFS file system.
#[derive(Debug)]
pub(super) struct Xfs {
    /// Where it begins in the volume.
    pub(super) base: u64,
    pub(super) uuid: [u8; 16],
    /// What version 5 writes into each block, if it is not `uuid`.
    meta_uuid: [u8; 16],
    pub(super) block_bytes: u64,
    blocks: u64,
    group_blocks: u64,
    groups: u64,
    group_shift: u32,
    inode_bytes: usize,
    inodes_shift: u32,
    directory_blocks: u64,
    sector_bytes: u64,
    /// First block and number of blocks of the log, if it is internal.
    log: Option<(u64, u64)>,
    version5: bool,
}

impl Xfs {
    /// The file system at `base` of a volume, whose bytes from `base` on begin with `head`.
    pub(super) fn read(base: u64, head: &[u8], wanted: &mut Wanted) -> Option<Xfs> {
        if !head.starts_with(b"XFSB") {
            return None;
        }
        let block_bytes = u64::from(be32(head, 4)?);
        let version = be16(head, 100)? & 0xf;
        let (sector_bytes, inode_bytes) =
            (u64::from(be16(head, 102)?), usize::from(be16(head, 104)?));
        let (block_log, inode_log) = (u8_at(head, 120)?, u8_at(head, 122)?);
        let (inodes_shift, group_shift) =
            (u32::from(u8_at(head, 123)?), u32::from(u8_at(head, 124)?));
        let (group_blocks, groups) = (u64::from(be32(head, 84)?), u64::from(be32(head, 88)?));
        let blocks = be64(head, 8)?;
        let directory_log = u32::from(u8_at(head, 192)?);
        let sane = (4..=5).contains(&version)
            && (512..=65_536).contains(&block_bytes)
            && block_bytes.is_power_of_two()
            && u64::from(block_log) == u64::from(block_bytes.ilog2())
            && (512..=32_768).contains(&sector_bytes)
            && sector_bytes.is_power_of_two()
            && (256..=2048).contains(&inode_bytes)
            && inode_bytes as u64 <= block_bytes
            && 1usize.checked_shl(u32::from(inode_log)) == Some(inode_bytes)
            && block_bytes >> inodes_shift.min(63) == inode_bytes as u64
            && group_blocks >= 16
            && group_shift == group_blocks.next_power_of_two().ilog2()
            && groups > 0
            && directory_log <= 7
            && blocks.checked_mul(block_bytes)?.checked_add(base)? < 1 << 62
            && blocks <= group_blocks * groups
            && blocks > group_blocks * (groups - 1);
        if !sane {
            return None;
        }
        let log_start = be64(head, 48)?;
        let own = uuid(head, 32)?;
        let meta = uuid(head, 248)?;
        let separate = be32(head, 216)? & 0x4 != 0;
        let mut fs = Xfs {
            base,
            uuid: own,
            meta_uuid: if separate { meta } else { own },
            block_bytes,
            blocks,
            group_blocks,
            groups,
            group_shift,
            inode_bytes,
            inodes_shift,
            directory_blocks: 1 << directory_log,
            sector_bytes,
            log: None,
            version5: version == 5,
        };
        let log_blocks = u64::from(be32(head, 96)?);
        if log_start != 0
            && let Some(first) = fs.block_of(log_start)
            && log_blocks <= blocks - first
        {
            fs.log = Some((first, log_blocks));
        }
        for group in 0..groups.min(MOST_GROUPS_ASKED) {
            let at = base + group * group_blocks * block_bytes;
            wanted.push(at, (4 * sector_bytes).max(block_bytes));
        }
        Some(fs)
    }

    /// Bytes of the volume that it takes.
    pub(super) fn bytes(&self) -> u64 {
        self.blocks * self.block_bytes
    }

    /// The linear number of a block from its number by allocation group.
    fn block_of(&self, by_group: u64) -> Option<u64> {
        let (group, within) =
            (by_group >> self.group_shift, by_group & ((1 << self.group_shift) - 1));
        let block = group.checked_mul(self.group_blocks)?.checked_add(within)?;
        (group < self.groups && within < self.group_blocks && block < self.blocks).then_some(block)
    }

    fn fixed(&self, block: u64) -> Option<MetadataKind> {
        let headers = (4 * self.sector_bytes).div_ceil(self.block_bytes);
        let within = block % self.group_blocks;
        if within < headers {
            return Some(if within == 0 {
                MetadataKind::Superblock
            } else {
                MetadataKind::GroupHeaders
            });
        }
        let in_log = |&(start, len): &(u64, u64)| block >= start && block - start < len;
        self.log.filter(in_log).map(|_| MetadataKind::Journal)
    }

    /// What a block is, as far as known. `None` is data.
    pub(super) fn find(&self, offset: u64, learned: &Learned) -> Option<MetadataKind> {
        let block = (offset - self.base) / self.block_bytes;
        self.fixed(block).or_else(|| learned.get(self.base + block * self.block_bytes))
    }

    fn set(&self, block: u64, kind: MetadataKind, learned: &mut Learned) {
        if block < self.blocks && self.fixed(block).is_none() {
            learned.set(self.base + block * self.block_bytes, kind);
        }
    }

    /// A whole block passes by. What it is, and what can be learned from it.
    pub(super) fn observe(
        &mut self,
        offset: u64,
        bytes: &[u8],
        learned: &mut Learned,
        wanted: &mut Wanted,
    ) -> Option<MetadataKind> {
        let block = (offset - self.base) / self.block_bytes;
        if let Some(kind) = self.fixed(block) {
            if kind != MetadataKind::Journal {
                for sector in bytes.chunks_exact(self.sector_bytes.min(self.block_bytes) as usize) {
                    self.learn_header(block, sector, learned, wanted);
                }
            }
            return Some(kind);
        }
        let known = learned.get(offset);
        let Some(kind) = self.recognise(block, bytes, known) else {
            // A directory's block may be of several file-system blocks, of which only the first says so.
            let inside = self.directory_blocks > 1 && known == Some(MetadataKind::Directory);
            if inside {
                return known;
            }
            if known.is_some() {
                learned.forget(offset);
            }
            return None;
        };
        if known != Some(kind) {
            learned.set(offset, kind);
        }
        match kind {
            MetadataKind::InodeTable => self.learn_inodes(bytes, learned),
            MetadataKind::InodeTree => self.learn_inode_tree(block, bytes, learned, wanted),
            MetadataKind::ExtentTree | MetadataKind::DirectoryExtentTree => {
                self.learn_extent_tree(bytes, kind, learned);
            }
            MetadataKind::Directory => {
                for next in 1..self.directory_blocks {
                    self.set(block + next, MetadataKind::Directory, learned);
                }
            }
            _ => {}
        }
        Some(kind)
    }

    /// Whether the address and UUID that version 5 writes into a block are its own.
    fn own(&self, block: u64, bytes: &[u8], address_at: usize, uuid_at: usize) -> bool {
        be64(bytes, address_at) == Some(block * (self.block_bytes / 512))
            && self.own_uuid(bytes, uuid_at)
    }

    fn own_uuid(&self, bytes: &[u8], at: usize) -> bool {
        uuid(bytes, at).is_some_and(|u| u == self.meta_uuid || u == self.uuid)
    }

    fn recognise(
        &self,
        block: u64,
        bytes: &[u8],
        known: Option<MetadataKind>,
    ) -> Option<MetadataKind> {
        let magic: [u8; 4] = bytes.get(..4)?.try_into().ok()?;
        // A tree's level and number of records, sane for any block.
        let tree = || {
            let level = be16(bytes, 4)?;
            let records = u64::from(be16(bytes, 6)?);
            Some(level < 16 && records <= self.block_bytes / 8)
        };
        let kind = match (self.version5, &magic) {
            (true, b"AB3B" | b"AB3C" | b"RMB3" | b"R3FC")
                if tree()? && self.own(block, bytes, 16, 32) =>
            {
                MetadataKind::AllocationTree
            }
            (true, b"IAB3" | b"FIB3") if tree()? && self.own(block, bytes, 16, 32) => {
                MetadataKind::InodeTree
            }
            (true, b"BMA3") if tree()? && self.own(block, bytes, 24, 40) => extent_tree(known),
            (true, b"XDB3" | b"XDD3" | b"XDF3") if self.own(block, bytes, 8, 24) => {
                MetadataKind::Directory
            }
            (true, b"XSLM") if self.own(block, bytes, 40, 16) => MetadataKind::Symlink,
            (true, b"XARM") if self.own(block, bytes, 40, 16) => MetadataKind::ExtendedAttributes,
            (false, b"ABTB" | b"ABTC") if tree()? => MetadataKind::AllocationTree,
            (false, b"IABT" | b"FIBT") if tree()? => MetadataKind::InodeTree,
            (false, b"BMAP") if tree()? => extent_tree(known),
            (false, b"XD2B" | b"XD2D" | b"XD2F") => MetadataKind::Directory,
            _ if magic.starts_with(b"IN") => {
                return self.is_inodes(block, bytes).then_some(MetadataKind::InodeTable);
            }
            _ if magic.starts_with(b"DQ") && (!self.version5 || self.own_uuid(bytes, 120)) => {
                MetadataKind::Quota
            }
            _ => {
                let (old, new) = (!self.version5, self.version5 && self.own(block, bytes, 16, 32));
                match be16(bytes, 8)? {
                    0x3df1 | 0x3dff | 0x3ebe if new => MetadataKind::Directory,
                    0xd2f1 | 0xd2ff | 0xfebe if old => MetadataKind::Directory,
                    0x3bee if new => MetadataKind::ExtendedAttributes,
                    0xfbee if old => MetadataKind::ExtendedAttributes,
                    _ => return None,
                }
            }
        };
        Some(kind)
    }

    /// Whether a block is full of inodes, of its own address in version 5.
    fn is_inodes(&self, block: u64, bytes: &[u8]) -> bool {
        let all = bytes.chunks_exact(self.inode_bytes);
        if all.len() == 0 || !all.clone().all(|inode| inode.starts_with(b"IN")) {
            return false;
        }
        if !self.version5 {
            return all.clone().all(|inode| u8_at(inode, 4).is_some_and(|v| v <= 2));
        }
        let (group, within) = (block / self.group_blocks, block % self.group_blocks);
        let first = (group << self.group_shift | within) << self.inodes_shift;
        let own = |(i, inode): (usize, &[u8])| {
            be64(inode, 152) == Some(first + i as u64) && self.own_uuid(inode, 160)
        };
        all.enumerate().all(own)
    }

    /// Roots of trees, from the headers of an allocation group.
    fn learn_header(&self, block: u64, sector: &[u8], learned: &mut Learned, wanted: &mut Wanted) {
        let group = block / self.group_blocks * self.group_blocks;
        let mut root = |at: usize, kind: MetadataKind| {
            let Some(within) = be32(sector, at).map(u64::from) else { return };
            if within > 0 && within < self.group_blocks {
                self.set(group + within, kind, learned);
                if kind == MetadataKind::InodeTree {
                    wanted.push(self.base + (group + within) * self.block_bytes, self.block_bytes);
                }
            }
        };
        if sector.starts_with(b"XAGF") {
            root(16, MetadataKind::AllocationTree);
            root(20, MetadataKind::AllocationTree);
        } else if sector.starts_with(b"XAGI") {
            root(20, MetadataKind::InodeTree);
        }
    }

    /// Inode chunks, from a leaf of the inode tree; further blocks of the tree, from an inner one.
    fn learn_inode_tree(
        &self,
        block: u64,
        bytes: &[u8],
        learned: &mut Learned,
        wanted: &mut Wanted,
    ) {
        let header = if self.version5 { 56 } else { 16 };
        let group = block / self.group_blocks * self.group_blocks;
        let (Some(level), Some(records)) = (be16(bytes, 4), be16(bytes, 6)) else { return };
        let room = bytes.len().saturating_sub(header);
        let free_tree = bytes.starts_with(b"FIB");
        if level > 0 {
            let most = room / 8;
            for i in 0..usize::from(records).min(most) {
                let Some(within) = be32(bytes, header + 4 * most + 4 * i).map(u64::from) else {
                    return;
                };
                if within > 0 && within < self.group_blocks && !free_tree {
                    self.set(group + within, MetadataKind::InodeTree, learned);
                    wanted.push(self.base + (group + within) * self.block_bytes, self.block_bytes);
                }
            }
            return;
        }
        let per_block = 1u64 << self.inodes_shift;
        for i in 0..usize::from(records).min(room / 16) {
            let at = header + 16 * i;
            let (Some(first), Some(holes)) = (be32(bytes, at), be16(bytes, at + 4)) else { return };
            let start = u64::from(first) >> self.inodes_shift;
            for n in 0..(64 / per_block).max(1) {
                // Bit i of the holes stands for inodes 4i to 4i + 3 of a sparse chunk. Without sparse chunks the field is the
                // high half of a count up to 64, so zero.
                let bits = (per_block / 4).clamp(1, 16);
                let mask = ((1u64 << bits) - 1) << (n * per_block / 4);
                if u64::from(holes) & mask != mask && start + n < self.group_blocks {
                    self.set(group + start + n, MetadataKind::InodeTable, learned);
                }
            }
        }
    }

    fn learn_inodes(&self, bytes: &[u8], learned: &mut Learned) {
        for inode in bytes.chunks_exact(self.inode_bytes) {
            // Too short to be an inode: none of it can be read.
            let _ = self.learn_inode(inode, learned);
        }
    }

    fn learn_inode(&self, inode: &[u8], learned: &mut Learned) -> Option<()> {
        let (mode, version, format) = (be16(inode, 2)?, u8_at(inode, 4)?, u8_at(inode, 5)?);
        if mode == 0 {
            return None;
        }
        let fork_at = if version >= 3 { 176 } else { 100 };
        let large_counts = version >= 3 && be64(inode, 120)? & 1 << 4 != 0;
        let (extents, attribute_extents) = if large_counts {
            (be64(inode, 24)?, u64::from(be32(inode, 76)?))
        } else {
            (u64::from(be32(inode, 76)?), u64::from(be16(inode, 80)?))
        };
        let split = fork_at + 8 * usize::from(u8_at(inode, 82)?);
        let data =
            if split > fork_at { inode.get(fork_at..split)? } else { inode.get(fork_at..)? };
        let directory = mode & 0xf000 == 0x4000;
        match format {
            2 if directory => self.learn_records(data, extents, MetadataKind::Directory, learned),
            2 if mode & 0xf000 == 0xa000 => {
                self.learn_records(data, extents, MetadataKind::Symlink, learned)
            }
            3 => {
                let kind = if directory {
                    MetadataKind::DirectoryExtentTree
                } else {
                    MetadataKind::ExtentTree
                };
                let most = data.len().saturating_sub(4) / 16;
                for i in 0..usize::from(be16(data, 2)?).min(most) {
                    let child = be64(data, 4 + 8 * most + 8 * i)?;
                    self.block_of(child).into_iter().for_each(|b| self.set(b, kind, learned));
                }
            }
            _ => {}
        }
        if split > fork_at && u8_at(inode, 83)? == 2 {
            let attributes = inode.get(split..)?;
            self.learn_records(
                attributes,
                attribute_extents,
                MetadataKind::ExtendedAttributes,
                learned,
            );
        }
        Some(())
    }

    /// Blocks of `count` packed extent records: a flag, 54 bits of file offset, 52 of block number, 21 of length.
    fn learn_records(&self, bytes: &[u8], count: u64, kind: MetadataKind, learned: &mut Learned) {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        for record in bytes.chunks_exact(16).take(count) {
            let (Some(high), Some(low)) = (be64(record, 0), be64(record, 8)) else { return };
            let (by_group, len) = ((high & 0x1ff) << 43 | low >> 21, low & 0x1f_ffff);
            let Some(start) = self.block_of(by_group) else { continue };
            for block in start..start + len.min(MOST_OF_EXTENT) {
                self.set(block, kind, learned);
            }
        }
    }

    fn learn_extent_tree(&self, bytes: &[u8], kind: MetadataKind, learned: &mut Learned) {
        let header = if self.version5 { 72 } else { 24 };
        let (Some(level), Some(records)) = (be16(bytes, 4), be16(bytes, 6)) else { return };
        let Some(body) = bytes.get(header..) else { return };
        if level == 0 {
            if kind == MetadataKind::DirectoryExtentTree {
                self.learn_records(body, u64::from(records), MetadataKind::Directory, learned);
            }
            return;
        }
        let most = body.len() / 16;
        for i in 0..usize::from(records).min(most) {
            let child = be64(body, 8 * most + 8 * i).and_then(|b| self.block_of(b));
            child.into_iter().for_each(|b| self.set(b, kind, learned));
        }
    }
}

fn extent_tree(known: Option<MetadataKind>) -> MetadataKind {
    match known {
        Some(MetadataKind::DirectoryExtentTree) => MetadataKind::DirectoryExtentTree,
        _ => MetadataKind::ExtentTree,
    }
}

/// Whether `head` holds the superblock that `fs` was read from.
pub(super) fn same(fs: &Xfs, head: &[u8]) -> bool {
    head.starts_with(b"XFSB") && uuid(head, 32) == Some(fs.uuid) && be64(head, 8) == Some(fs.blocks)
}
