//! ext4 (and ext2, ext3): where metadata lies, from the superblock and what passes by.
//!
//! Layout as documented in the kernel's `Documentation/filesystems/ext4/`. Fixed places follow from superblock and group
//! descriptors; directories, extent-tree nodes and the like are found from inodes, from their parents, and by what their
//! blocks look like.

use super::bytes::{le16, le32, u8_at, uuid};
use super::learned::{Learned, Ranges};
use super::{MetadataKind, Wanted};

const MAGIC: u16 = 0xef53;
const EXTENT_MAGIC: u16 = 0xf30a;
const XATTR_MAGIC: u32 = 0xea02_0000;

const COMPAT_SPARSE_SUPER2: u32 = 0x200;
const INCOMPAT_JOURNAL_DEVICE: u32 = 0x8;
const INCOMPAT_META_BG: u32 = 0x10;
const INCOMPAT_64BIT: u32 = 0x80;
const RO_COMPAT_SPARSE_SUPER: u32 = 0x1;

const INODE_EXTENTS: u32 = 0x8_0000;
const INODE_INLINE_DATA: u32 = 0x1000_0000;

/// Of one extent of a directory at most this many blocks are learned.
const MOST_OF_EXTENT: u64 = 4096;
/// Ranges of fixed metadata: three for each flexible group, so 1 PiB with the defaults of mkfs.
const MOST_RANGES: usize = 1 << 18;
/// Of inodes, and of nodes that lead to a directory's blocks, so many bytes are asked for in the life of a file system.
const MOST_ASKED: u64 = 16 << 20;
/// Of a group's flags: its inode table was never written.
const GROUP_INODES_UNUSED: u16 = 0x1;

/// An ext2, ext3 or ext4 file system.
#[derive(Debug)]
pub(super) struct Ext4 {
    /// Where it begins in the volume.
    pub(super) base: u64,
    pub(super) uuid: [u8; 16],
    pub(super) block_bytes: u64,
    blocks: u64,
    first_data_block: u64,
    blocks_per_group: u64,
    inodes_per_group: u64,
    inodes: u64,
    inode_bytes: usize,
    descriptor_bytes: usize,
    groups: u64,
    reserved_descriptor_blocks: u64,
    meta_groups_from: Option<u64>,
    sparse: bool,
    /// With `sparse_super2`, the only groups with backups.
    backups: Option<[u64; 2]>,
    /// Bitmaps, inode tables and the journal.
    fixed: Ranges,
    journal_known: bool,
    /// Bytes that may still be [asked](MOST_ASKED) for.
    may_ask: u64,
}

impl Ext4 {
    /// The file system at `base` of a volume, whose bytes from `base` on begin with `head`.
    pub(super) fn read(base: u64, head: &[u8], wanted: &mut Wanted) -> Option<Ext4> {
        let sb = head.get(1024..2048)?;
        if le16(sb, 0x38)? != MAGIC {
            return None;
        }
        let log = le32(sb, 0x18)?;
        let incompat = le32(sb, 0x60)?;
        if log > 6 || incompat & INCOMPAT_JOURNAL_DEVICE != 0 {
            return None;
        }
        let block_bytes = 1024u64 << log;
        let high = if incompat & INCOMPAT_64BIT != 0 { le32(sb, 0x150)? } else { 0 };
        let blocks = u64::from(le32(sb, 4)?) | u64::from(high) << 32;
        let first_data_block = u64::from(le32(sb, 0x14)?);
        let blocks_per_group = u64::from(le32(sb, 0x20)?);
        let inodes_per_group = u64::from(le32(sb, 0x28)?);
        let inode_bytes = if le32(sb, 0x4c)? == 0 { 128 } else { usize::from(le16(sb, 0x58)?) };
        let descriptor_bytes =
            if incompat & INCOMPAT_64BIT != 0 { usize::from(le16(sb, 0xfe)?) } else { 32 };
        let sane = first_data_block <= 1
            && blocks > first_data_block
            && blocks.checked_mul(block_bytes)?.checked_add(base)? < 1 << 62
            && (8..=65_528 * 16).contains(&blocks_per_group)
            && inodes_per_group > 0
            && inodes_per_group <= 8 * block_bytes
            && inode_bytes.is_power_of_two()
            && (128..=block_bytes as usize).contains(&inode_bytes)
            && descriptor_bytes.is_power_of_two()
            && (32..=1024).contains(&descriptor_bytes);
        if !sane || le16(sb, 0x5a)? != 0 {
            return None;
        }
        let compat = le32(sb, 0x5c)?;
        let meta = incompat & INCOMPAT_META_BG != 0;
        let mut fs = Ext4 {
            base,
            uuid: uuid(sb, 0x68)?,
            block_bytes,
            blocks,
            first_data_block,
            blocks_per_group,
            inodes_per_group,
            inodes: u64::from(le32(sb, 0)?),
            inode_bytes,
            descriptor_bytes,
            groups: (blocks - first_data_block).div_ceil(blocks_per_group),
            reserved_descriptor_blocks: u64::from(le16(sb, 0xce)?),
            meta_groups_from: meta.then_some(u64::from(le32(sb, 0x104)?)),
            sparse: le32(sb, 0x64)? & RO_COMPAT_SPARSE_SUPER != 0,
            backups: (compat & COMPAT_SPARSE_SUPER2 != 0)
                .then_some([u64::from(le32(sb, 0x24c)?), u64::from(le32(sb, 0x250)?)]),
            fixed: Ranges::new(MOST_RANGES),
            journal_known: false,
            may_ask: MOST_ASKED,
        };
        // The superblock has a copy of the journal's inode.
        if u8_at(sb, 0xfd)? == 1 {
            fs.learn_journal(sb.get(0x10c..0x10c + 60)?);
        }
        for block in 0..fs.descriptor_blocks().min(4096) {
            wanted.push(base + fs.descriptor_block(block) * block_bytes, block_bytes);
        }
        Some(fs)
    }

    /// Bytes of the volume that it takes.
    pub(super) fn bytes(&self) -> u64 {
        self.blocks * self.block_bytes
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.fixed.memory_bytes()
    }

    fn descriptors_per_block(&self) -> u64 {
        self.block_bytes / self.descriptor_bytes as u64
    }

    fn descriptor_blocks(&self) -> u64 {
        self.groups.div_ceil(self.descriptors_per_block())
    }

    /// Blocks of descriptors that follow the superblock: all, without meta groups.
    fn descriptor_blocks_together(&self) -> u64 {
        let all = self.descriptor_blocks();
        self.meta_groups_from.map_or(all, |from| from.min(all))
    }

    fn group_start(&self, group: u64) -> u64 {
        self.first_data_block + group * self.blocks_per_group
    }

    fn has_superblock(&self, group: u64) -> bool {
        if let Some(backups) = self.backups {
            return group == 0 || backups.contains(&group);
        }
        let power = |mut n: u64, of: u64| {
            while n.is_multiple_of(of) && n > 1 {
                n /= of;
            }
            n == 1
        };
        group <= 1 || !self.sparse || [3, 5, 7].into_iter().any(|of| power(group, of))
    }

    /// Where the block with the `n`th part of the group descriptors lies.
    fn descriptor_block(&self, n: u64) -> u64 {
        if n < self.descriptor_blocks_together() {
            // With blocks of 1 KiB the superblock has block 1 to itself, with larger ones it is in block 0.
            return self.first_data_block + 1 + n;
        }
        let group = n * self.descriptors_per_block();
        self.group_start(group) + u64::from(self.has_superblock(group))
    }

    /// The part of the group descriptors that `block` holds, the first copy only.
    fn descriptor_part(&self, block: u64) -> Option<u64> {
        let together = self.descriptor_blocks_together();
        let near = block.checked_sub(self.first_data_block + 1);
        if let Some(n) = near.filter(|&n| n < together) {
            return Some(n);
        }
        let group = block.checked_sub(self.first_data_block)? / self.blocks_per_group;
        let n = group / self.descriptors_per_block();
        let there = n >= together && n < self.descriptor_blocks();
        (there && self.descriptor_block(n) == block).then_some(n)
    }

    /// What lies at a fixed place.
    fn fixed(&self, block: u64) -> Option<MetadataKind> {
        let Some(data) = block.checked_sub(self.first_data_block) else {
            return Some(MetadataKind::Superblock);
        };
        let (group, within) = (data / self.blocks_per_group, data % self.blocks_per_group);
        if self.has_superblock(group) {
            let together = self.descriptor_blocks_together();
            let reserved =
                if self.meta_groups_from.is_some() { 0 } else { self.reserved_descriptor_blocks };
            if within == 0 {
                return Some(MetadataKind::Superblock);
            }
            if within <= together + reserved {
                return Some(MetadataKind::GroupDescriptors);
            }
        }
        if let Some(from) = self.meta_groups_from
            && group / self.descriptors_per_block() >= from
        {
            // One copy in the first, the second and the last group of each meta group.
            let place = group % self.descriptors_per_block();
            let copies = [0, 1, self.descriptors_per_block() - 1];
            if copies.contains(&place) && within == u64::from(self.has_superblock(group)) {
                return Some(MetadataKind::GroupDescriptors);
            }
        }
        self.fixed.get(block)
    }

    /// What a block is, as far as known. `None` is data.
    pub(super) fn find(&self, offset: u64, learned: &Learned) -> Option<MetadataKind> {
        let block = (offset - self.base) / self.block_bytes;
        self.fixed(block).or_else(|| learned.get(self.base + block * self.block_bytes))
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
        if let Some(part) = self.descriptor_part(block) {
            self.learn_descriptors(part, bytes, wanted);
        }
        if let Some(kind) = self.fixed(block) {
            if kind == MetadataKind::InodeTable {
                self.learn_inodes(bytes, learned, wanted);
            }
            return Some(kind);
        }
        let known = learned.get(offset);
        let kind = if let Some(depth) = self.extent_node(bytes) {
            let of_directory = known == Some(MetadataKind::DirectoryExtentTree);
            self.learn_extents(bytes, depth, of_directory, learned, wanted);
            if of_directory { MetadataKind::DirectoryExtentTree } else { MetadataKind::ExtentTree }
        } else if self.is_directory(bytes, known == Some(MetadataKind::Directory))
            || is_index(bytes)
        {
            MetadataKind::Directory
        } else if le32(bytes, 0) == Some(XATTR_MAGIC) && le32(bytes, 8) == Some(1) {
            MetadataKind::ExtendedAttributes
        } else if known == Some(MetadataKind::IndirectBlocks) && self.is_block_map(bytes) {
            MetadataKind::IndirectBlocks
        } else {
            // Whatever it was, it is no longer.
            if known.is_some() {
                learned.forget(offset);
            }
            return None;
        };
        if known != Some(kind) {
            learned.set(offset, kind);
        }
        Some(kind)
    }

    /// Asks for blocks `start..end`, as far as that is still allowed.
    fn ask(&mut self, start: u64, end: u64, wanted: &mut Wanted) {
        for block in start..end.min(self.blocks) {
            if self.may_ask < self.block_bytes {
                return;
            }
            self.may_ask -= self.block_bytes;
            wanted.push(self.base + block * self.block_bytes, self.block_bytes);
        }
    }

    /// Inodes of a group that are in use, at most, if one of them is a directory's; none otherwise.
    fn inodes_to_ask(&self, descriptor: &[u8]) -> Option<u64> {
        let wide = self.descriptor_bytes >= 64;
        let count = |low: usize, high: usize| {
            let low = u64::from(le16(descriptor, low)?);
            let high = if wide { u64::from(le16(descriptor, high)?) } else { 0 };
            Some(low | high << 16)
        };
        let (directories, unused) = (count(0x10, 0x30)?, count(0x1c, 0x32)?);
        let written = le16(descriptor, 0x12)? & GROUP_INODES_UNUSED == 0;
        // Without checksums of groups nothing says which inodes are unused: zero.
        (directories > 0 && written).then(|| self.inodes_per_group.saturating_sub(unused))
    }

    fn learn_descriptors(&mut self, part: u64, bytes: &[u8], wanted: &mut Wanted) {
        let wide = self.descriptor_bytes >= 64;
        let table_blocks =
            (self.inodes_per_group * self.inode_bytes as u64).div_ceil(self.block_bytes);
        for (i, d) in bytes.chunks_exact(self.descriptor_bytes).enumerate() {
            if part * self.descriptors_per_block() + i as u64 >= self.groups {
                break;
            }
            let place = |low: usize, high: usize| {
                let low = u64::from(le32(d, low)?);
                let high = if wide { u64::from(le32(d, high)?) } else { 0 };
                Some(low | high << 32).filter(|&b| b > self.first_data_block && b < self.blocks)
            };
            let (Some(block_bitmap), Some(inode_bitmap), Some(table)) =
                (place(0, 0x20), place(4, 0x24), place(8, 0x28))
            else {
                continue;
            };
            if table_blocks > self.blocks - table {
                continue;
            }
            let new = self.fixed.get(table) != Some(MetadataKind::InodeTable);
            if let Some(inodes) = self.inodes_to_ask(d).filter(|_| new) {
                // Directories are known by their inodes alone as long as nothing of them passes by: what lies in the cache
                // since an earlier run, what the guest has in its memory.
                let used = (inodes * self.inode_bytes as u64).div_ceil(self.block_bytes);
                self.ask(table, table + used.min(table_blocks), wanted);
            }
            self.fixed.add(block_bitmap, block_bitmap + 1, MetadataKind::BlockBitmap);
            self.fixed.add(inode_bitmap, inode_bitmap + 1, MetadataKind::InodeBitmap);
            self.fixed.add(table, table + table_blocks, MetadataKind::InodeTable);
        }
    }

    /// The journal's extents, from its inode's 60 bytes of block pointers.
    fn learn_journal(&mut self, pointers: &[u8]) {
        if self.journal_known
            || le16(pointers, 0) != Some(EXTENT_MAGIC)
            || le16(pointers, 6) != Some(0)
        {
            return;
        }
        let count = usize::from(le16(pointers, 2).unwrap_or(0)).min(4);
        for i in 0..count {
            if let Some((start, len)) = self.extent(pointers, i) {
                self.fixed.add(start, start + len, MetadataKind::Journal);
                self.journal_known = true;
            }
        }
    }

    /// First block and number of blocks of the `i`th extent of a leaf.
    fn extent(&self, node: &[u8], i: usize) -> Option<(u64, u64)> {
        let at = 12 + 12 * i;
        let len = u64::from(le16(node, at + 4)?);
        // More than 32768 marks blocks that are allocated and not yet written.
        let len = if len > 32_768 { len - 32_768 } else { len };
        let start = u64::from(le32(node, at + 8)?) | u64::from(le16(node, at + 6)?) << 32;
        let fits = start > 0 && len > 0 && start.checked_add(len)? <= self.blocks;
        fits.then_some((start, len))
    }

    /// The depth of a block that holds a node of an extent tree.
    fn extent_node(&self, bytes: &[u8]) -> Option<u16> {
        if le16(bytes, 0)? != EXTENT_MAGIC {
            return None;
        }
        let (entries, most, depth) = (le16(bytes, 2)?, le16(bytes, 4)?, le16(bytes, 6)?);
        let sane = u64::from(most) == (self.block_bytes - 12) / 12 && entries <= most && depth <= 5;
        sane.then_some(depth)
    }

    fn set(&self, block: u64, kind: MetadataKind, learned: &mut Learned) {
        if block > 0 && block < self.blocks && self.fixed(block).is_none() {
            learned.set(self.base + block * self.block_bytes, kind);
        }
    }

    /// What the entries of an extent-tree node lead to.
    fn learn_extents(
        &mut self,
        node: &[u8],
        depth: u16,
        of_directory: bool,
        learned: &mut Learned,
        wanted: &mut Wanted,
    ) {
        let entries =
            usize::from(le16(node, 2).unwrap_or(0)).min((node.len().saturating_sub(12)) / 12);
        for i in 0..entries {
            if depth == 0 {
                if !of_directory {
                    return;
                }
                let Some((start, len)) = self.extent(node, i) else { continue };
                for block in start..start + len.min(MOST_OF_EXTENT) {
                    self.set(block, MetadataKind::Directory, learned);
                }
                continue;
            }
            let at = 12 + 12 * i;
            let (Some(low), Some(high)) = (le32(node, at + 4), le16(node, at + 8)) else { return };
            let kind = if of_directory {
                MetadataKind::DirectoryExtentTree
            } else {
                MetadataKind::ExtentTree
            };
            let block = u64::from(low) | u64::from(high) << 32;
            let at = self.base.saturating_add(block.saturating_mul(self.block_bytes));
            let new = of_directory && block < self.blocks && learned.get(at) != Some(kind);
            self.set(block, kind, learned);
            if new {
                self.ask(block, block + 1, wanted);
            }
        }
    }

    fn learn_inodes(&mut self, bytes: &[u8], learned: &mut Learned, wanted: &mut Wanted) {
        for inode in bytes.chunks_exact(self.inode_bytes) {
            // Too short to be an inode: none of it can be read.
            let _ = self.learn_inode(inode, learned, wanted);
        }
    }

    fn learn_inode(
        &mut self,
        inode: &[u8],
        learned: &mut Learned,
        wanted: &mut Wanted,
    ) -> Option<()> {
        let (mode, links) = (le16(inode, 0)?, le16(inode, 0x1a)?);
        if mode == 0 || links == 0 {
            return None;
        }
        let acl = u64::from(le32(inode, 0x68)?) | u64::from(le16(inode, 0x76)?) << 32;
        self.set(acl, MetadataKind::ExtendedAttributes, learned);
        let flags = le32(inode, 0x20)?;
        let pointers = inode.get(0x28..0x28 + 60)?;
        let directory = mode & 0xf000 == 0x4000;
        if flags & INODE_INLINE_DATA != 0 || !(directory || mode & 0xf000 == 0x8000) {
            return None;
        }
        if flags & INODE_EXTENTS != 0 {
            if le16(pointers, 0)? == EXTENT_MAGIC && le16(pointers, 2)? <= 4 {
                let depth = le16(pointers, 6)?;
                self.learn_extents(pointers, depth, directory, learned, wanted);
            }
            return Some(());
        }
        for i in 0..15 {
            let block = u64::from(le32(pointers, 4 * i)?);
            if i >= 12 {
                self.set(block, MetadataKind::IndirectBlocks, learned);
            } else if directory {
                self.set(block, MetadataKind::Directory, learned);
            }
        }
        Some(())
    }

    /// Whether a block could be a map of blocks.
    fn is_block_map(&self, bytes: &[u8]) -> bool {
        bytes.chunks_exact(4).all(|p| le32(p, 0).is_some_and(|b| u64::from(b) < self.blocks))
    }

    /// Whether a block is a chain of directory entries that ends exactly at its end. One without any live entry and without a
    /// checksum says too little, and so do names of any bytes, as an encrypted directory has: they count only where a directory
    /// was known to be.
    fn is_directory(&self, bytes: &[u8], known: bool) -> bool {
        let (mut at, mut live) = (0usize, known);
        while at < bytes.len() {
            let (Some(inode), Some(len)) = (le32(bytes, at), le16(bytes, at + 4)) else {
                return false;
            };
            let (Some(name_len), Some(kind)) = (u8_at(bytes, at + 6), u8_at(bytes, at + 7)) else {
                return false;
            };
            // In blocks of 64 KiB, the length of a whole block does not fit.
            let len = if len == 0xffff || len == 0 { 65_536 } else { usize::from(len) };
            let fits = len >= 8 && len.is_multiple_of(4) && at + len <= bytes.len();
            if !fits || u64::from(inode) > self.inodes || usize::from(name_len) + 8 > len {
                return false;
            }
            if inode == 0 && len == 12 && kind == 0xde && name_len == 0 {
                // The checksum at the end.
                return at > 0 && at + len == bytes.len();
            }
            if inode != 0 {
                let name = &bytes[at + 8..at + 8 + usize::from(name_len)];
                let odd = !known && name.iter().any(|&b| b == 0 || b == b'/');
                if kind > 7 || name.is_empty() || odd {
                    return false;
                }
                live = true;
            }
            at += len;
        }
        live
    }
}

/// Whether a block is a node of a directory's hash tree: its root begins like a directory of `.` and `..`, an inner node
/// with an entry that takes the whole block.
fn is_index(bytes: &[u8]) -> bool {
    let check = || {
        let count_at = if le32(bytes, 0)? == 0 && usize::from(le16(bytes, 4)?) == bytes.len() {
            8
        } else if le16(bytes, 4)? == 12
            && bytes.get(8..10)? == b".\0"
            && usize::from(le16(bytes, 16)?) + 12 == bytes.len()
        {
            0x20
        } else {
            return None;
        };
        let (limit, count) =
            (usize::from(le16(bytes, count_at)?), usize::from(le16(bytes, count_at + 2)?));
        let room = (bytes.len() - count_at) / 8;
        Some((limit == room || limit == room - 1) && count >= 1 && count <= limit)
    };
    check().unwrap_or(false)
}

/// Whether `head` holds the superblock that `fs` was read from.
pub(super) fn same(fs: &Ext4, head: &[u8]) -> bool {
    head.get(1024..2048).is_some_and(|sb| {
        le16(sb, 0x38) == Some(MAGIC)
            && uuid(sb, 0x68) == Some(fs.uuid)
            && le32(sb, 4).map(u64::from) == Some(fs.blocks & 0xffff_ffff)
    })
}
