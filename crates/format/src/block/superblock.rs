//! What a cache device says of itself.
//!
//! ```text
//!    0   8  magic "LARDERBC"                            | fixed in every version, so that any
//!    8   4  CRC-32C of bytes 12..65536                  | version can tell damage from a
//!   12   4  format version                              | format that it does not know, and
//!   16   8  incompatible features                       | which copy is newer
//!   24   8  compatible features                         |
//!   32   8  sequence number of this copy                |
//!   40  16  UUID
//!   56   8  key of the placement (where laps begin)
//!   64   8  device size, bytes
//!   72   4  line, bytes
//!   76   4  ways
//!   80   4  shards
//!   84   4  sets of groups in a shard
//!   88   8  groups of a region
//!   96   8  epoch: raised, by chance how far, and synced, at every start
//!  104   8  epoch of the last clean stop, 0 for none
//!  112   8  generation of the ruling snapshot and its log; the first is random, so that no log of a former format is
//!           taken for this one's
//!  120   4  its area, 0 or 1
//!  124   4  when the device was formatted, Unix seconds
//!  128   4  number of volumes
//!  132   4  whether there is a snapshot: 0 before the first, when every slot is empty
//!  136   4  lines of a segment, if the slots are a log (incompatible feature bit 1); otherwise 0
//!  140   4  groups of a page of the table, if the slots are a sparse file (incompatible feature bit 2); otherwise 0
//!  144   8  lines that may be there at a time, if they are; otherwise 0
//!  152   8  generation of the log when this was written (an unfinished snapshot's is one more), 0 if not said
//!  160   8  pages that it had
//!  168      zero
//!  512      volumes, 192 bytes each
//!
//! volume   0   8  first group in the line space       24   4  state: 0 attached, 1 detached
//!          8   8  groups set aside                    28   4  length of the name
//!         16   8  bytes                               32  96  name, UTF-8
//!                                                    128  64  identity of the backing store, as it was when detached
//! ```
//!
//! Two copies of 64 KiB are written in turn, each with the next sequence number and a sync behind it; a change is written to both, so
//! that none is undone by damage to one. Feature bit 0 of
//! the incompatible ones is set while the device may hold lines that the backing store does not have (write-back): a
//! program that does not know it must leave the device alone.

use larder_base::UnixSecs;

use super::layout::{GROUP_LINES, Layout, LayoutError};
use super::log::Reach;
use crate::le;
use crate::superblock::Uuid;

/// What a superblock begins with.
pub const MAGIC: [u8; 8] = *b"LARDERBC";
/// The version that this code reads and writes.
pub const VERSION: u32 = 2;
/// Bytes of a copy.
pub const COPY_BYTES: usize = 64 << 10;
/// The device may hold dirty lines.
pub const FEATURE_DIRTY: u64 = 1;
/// The slots of each shard are a log of segments.
pub const FEATURE_LOG: u64 = 2;
/// Each line has a slot of its own, in a sparse file, and the map is a table.
pub const FEATURE_SPARSE: u64 = 4;
/// Incompatible features that this code knows.
pub const KNOWN_INCOMPATIBLE: u64 = FEATURE_LOG | FEATURE_SPARSE;
/// Most volumes of a device.
pub const MAX_VOLUMES: usize = (COPY_BYTES - VOLUMES_AT) / VOLUME_BYTES;
/// Longest name of a volume, bytes.
pub const MAX_NAME: usize = 96;

const CRC_FROM: usize = 12;
const VOLUMES_AT: usize = 512;
const VOLUME_BYTES: usize = 192;

/// Whether a volume is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeState {
    /// In use by the run of this epoch (or by the last one, which was cut short).
    Attached,
    /// Put aside in good order: `identity` is that of the backing store at that moment.
    Detached,
}

/// A volume that the device has lines of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Its name, 1 to 96 bytes.
    pub name: String,
    /// First group of its stretch of the line space.
    pub first_group: u64,
    /// Groups set aside for it.
    pub groups: u64,
    /// Its size, bytes.
    pub bytes: u64,
    /// Whether it is in use.
    pub state: VolumeState,
    /// What tells whether the backing store changed: the meaning is the backing's affair.
    pub identity: [u8; 64],
}

/// Why a superblock cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockSuperblockError {
    /// Neither copy begins with the magic number.
    #[error("no superblock of a Larder block cache")]
    None,
    /// Both copies fail their checksum, or one does and the other is not there.
    #[error(
        "both copies of the superblock are damaged; format the device anew to use it (the volumes are not affected)"
    )]
    Damaged,
    /// Written by another version.
    #[error(
        "the device was formatted by version {found} of the format, this program reads version {VERSION}: use a Larder that reads version {found}, or format it anew"
    )]
    Version {
        /// What the device says.
        found: u32,
    },
    /// It may hold data that the volumes do not have.
    #[error(
        "the device may hold written data that the volumes do not have yet (write-back), which this program cannot write back: use the Larder that wrote it; formatting would lose that data"
    )]
    Dirty,
    /// A feature that this version does not know.
    #[error(
        "the device uses features that this program does not know (bits {unknown:#x}): use the Larder that formatted it, or format it anew"
    )]
    Feature {
        /// The unknown bits.
        unknown: u64,
    },
    /// The layout cannot be.
    #[error("the superblock describes a device that cannot be")]
    Layout(#[source] LayoutError),
    /// A field contradicts another.
    #[error("the superblock says {field} = {value}, which cannot be")]
    Field {
        /// Which.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The device has become smaller.
    #[error(
        "the cache device has {found} bytes but was formatted with {expected}: restore its size, or format it anew"
    )]
    Shrunk {
        /// Bytes now.
        found: u64,
        /// Bytes when it was formatted.
        expected: u64,
    },
}

/// A superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockSuperblock {
    /// Incompatible features in use.
    pub incompatible: u64,
    /// Compatible features in use.
    pub compatible: u64,
    /// Number of this copy: the higher is the newer.
    pub sequence: u64,
    /// Names the device.
    pub uuid: Uuid,
    /// Key of the permutation that places groups.
    pub key: u64,
    /// Where its parts lie.
    pub layout: Layout,
    /// Raised at every start.
    pub epoch: u64,
    /// Epoch whose run ended with a clean stop, if it is the last one.
    pub clean_epoch: u64,
    /// Generation of the ruling log and snapshot.
    pub generation: u64,
    /// Whether there is a snapshot; before the first every slot is empty.
    pub snapshot: bool,
    /// Its area.
    pub area: u32,
    /// When the device was formatted.
    pub formatted: UnixSecs,
    /// How far the log had come when this was written.
    pub reach: Reach,
    /// The volumes.
    pub volumes: Vec<Volume>,
}

impl BlockSuperblock {
    /// The first superblock of a device that is formatted.
    pub fn format(
        uuid: Uuid,
        key: u64,
        generation: u64,
        layout: Layout,
        formatted: UnixSecs,
    ) -> BlockSuperblock {
        BlockSuperblock {
            incompatible: match (layout.segment, layout.is_sparse()) {
                (_, true) => FEATURE_SPARSE,
                (0, _) => 0,
                _ => FEATURE_LOG,
            },
            compatible: 0,
            sequence: 1,
            uuid,
            key,
            layout,
            epoch: 0,
            clean_epoch: 0,
            generation,
            snapshot: false,
            area: 0,
            formatted,
            reach: Reach::default(),
            volumes: Vec::new(),
        }
    }

    /// Whether the run of the present epoch was stopped cleanly.
    pub fn is_clean(&self) -> bool {
        self.clean_epoch == self.epoch
    }

    /// The copy that the next sequence number goes to.
    pub fn copy(&self) -> usize {
        (self.sequence % 2) as usize
    }

    /// A stretch of the line space for a volume of `bytes`, or nothing if there is none free.
    pub fn allocate(&self, bytes: u64) -> Option<(u64, u64)> {
        let region = self.layout.region_groups;
        let group_bytes = u64::from(self.layout.line) * GROUP_LINES;
        // Whole regions: volumes share no bit of the write-intent map.
        let groups = bytes.div_ceil(group_bytes).max(1).next_multiple_of(region);
        let mut taken: Vec<(u64, u64)> =
            self.volumes.iter().map(|v| (v.first_group, v.groups)).collect();
        taken.sort_unstable();
        let mut first = 0;
        for (start, len) in taken {
            if first + groups <= start {
                break;
            }
            first = start + len;
        }
        let space = self.layout.space_lines() / GROUP_LINES / region * region;
        (first + groups <= space).then_some((first, groups))
    }

    /// The bytes of this copy.
    ///
    /// # Panics
    /// With more than [`MAX_VOLUMES`] volumes or a name longer than [`MAX_NAME`].
    pub fn encode(&self) -> Vec<u8> {
        assert!(self.volumes.len() <= MAX_VOLUMES, "too many volumes");
        let mut out = vec![0u8; COPY_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(12, &VERSION.to_le_bytes());
        put(16, &self.incompatible.to_le_bytes());
        put(24, &self.compatible.to_le_bytes());
        put(32, &self.sequence.to_le_bytes());
        put(40, &self.uuid.0);
        put(56, &self.key.to_le_bytes());
        put(64, &self.layout.device.to_le_bytes());
        put(72, &self.layout.line.to_le_bytes());
        put(76, &self.layout.ways.to_le_bytes());
        put(80, &self.layout.shards.to_le_bytes());
        put(84, &self.layout.group_sets.to_le_bytes());
        put(88, &self.layout.region_groups.to_le_bytes());
        put(96, &self.epoch.to_le_bytes());
        put(104, &self.clean_epoch.to_le_bytes());
        put(112, &self.generation.to_le_bytes());
        put(120, &self.area.to_le_bytes());
        put(124, &self.formatted.0.to_le_bytes());
        put(128, &(self.volumes.len() as u32).to_le_bytes());
        put(132, &u32::from(self.snapshot).to_le_bytes());
        put(136, &self.layout.segment.to_le_bytes());
        put(140, &self.layout.page_groups.to_le_bytes());
        put(144, &self.layout.most_lines.to_le_bytes());
        put(152, &self.reach.generation.to_le_bytes());
        put(160, &self.reach.pages.to_le_bytes());
        for (i, volume) in self.volumes.iter().enumerate() {
            let at = VOLUMES_AT + i * VOLUME_BYTES;
            assert!(volume.name.len() <= MAX_NAME, "name too long");
            put(at, &volume.first_group.to_le_bytes());
            put(at + 8, &volume.groups.to_le_bytes());
            put(at + 16, &volume.bytes.to_le_bytes());
            put(at + 24, &u32::from(volume.state == VolumeState::Detached).to_le_bytes());
            put(at + 28, &(volume.name.len() as u32).to_le_bytes());
            put(at + 32, volume.name.as_bytes());
            put(at + 128, &volume.identity);
        }
        let crc = crc32c::crc32c(&out[CRC_FROM..]);
        out[8..12].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Reads one copy; [`choose`] is what a start needs.
    ///
    /// # Errors
    /// [`BlockSuperblockError::None`] without the magic number, `Damaged` with a wrong checksum or too few bytes; the
    /// others as they say.
    pub fn decode(bytes: &[u8]) -> Result<BlockSuperblock, BlockSuperblockError> {
        use BlockSuperblockError as E;
        if !bytes.starts_with(&MAGIC) {
            return Err(E::None);
        }
        let bytes = bytes.get(..COPY_BYTES).ok_or(E::Damaged)?;
        let u64_at = |at: usize| le(&bytes[at..at + 8]);
        let u32_at = |at: usize| le(&bytes[at..at + 4]) as u32;
        if u32_at(8) != crc32c::crc32c(&bytes[CRC_FROM..]) {
            return Err(E::Damaged);
        }
        if u32_at(12) != VERSION {
            return Err(E::Version { found: u32_at(12) });
        }
        let incompatible = u64_at(16);
        if incompatible & FEATURE_DIRTY & !KNOWN_INCOMPATIBLE != 0 {
            return Err(E::Dirty);
        }
        if incompatible & !KNOWN_INCOMPATIBLE != 0 {
            return Err(E::Feature { unknown: incompatible & !KNOWN_INCOMPATIBLE });
        }
        let field = |field, value: u64, right: bool| {
            if right { Ok(()) } else { Err(E::Field { field, value }) }
        };
        let (device, line, ways, shards) = (u64_at(64), u32_at(72), u32_at(76), u32_at(80));
        let sparse = incompatible & FEATURE_SPARSE != 0;
        field("groups of a page", u64::from(u32_at(140)), sparse == (u32_at(140) > 0))?;
        field("lines at a time", u64_at(144), sparse == (u64_at(144) > 0))?;
        let layout = if sparse {
            field("ways", u64::from(ways), ways == 1)?;
            field("features", incompatible, incompatible & FEATURE_LOG == 0)?;
            let a_set = u128::from(line) * u128::from(GROUP_LINES) * u128::from(shards);
            let span = u64::try_from(u128::from(u32_at(84)) * a_set).unwrap_or(u64::MAX);
            let size = u64_at(144).saturating_mul(u64::from(line));
            Layout::sparse_of(size, line, span, shards, u32_at(140))
        } else if incompatible & FEATURE_LOG != 0 {
            field("ways", u64::from(ways), ways == 1)?;
            Layout::full_of(device, line, shards, u32_at(136))
        } else {
            field("lines of a segment", u64::from(u32_at(136)), u32_at(136) == 0)?;
            Layout::new(device, line, ways, shards)
        }
        .map_err(E::Layout)?;
        field("device size", device, device == layout.device)?;
        field("sets", u64::from(u32_at(84)), u32_at(84) == layout.group_sets)?;
        field("groups of a region", u64_at(88), u64_at(88) == layout.region_groups)?;
        field("area", u64::from(u32_at(120)), u32_at(120) < 2)?;
        field("clean epoch", u64_at(104), u64_at(104) <= u64_at(96))?;
        field("epoch", u64_at(96), u64_at(96) < u64::MAX)?;
        field("sequence", u64_at(32), u64_at(32) < u64::MAX)?;
        field("generation", u64_at(112), u64_at(112) < u64::MAX - 1)?;
        let count = u32_at(128) as usize;
        field("volumes", count as u64, count <= MAX_VOLUMES)?;
        let mut volumes: Vec<Volume> = Vec::with_capacity(count);
        let space = layout.space_lines() / GROUP_LINES;
        for i in 0..count {
            let at = VOLUMES_AT + i * VOLUME_BYTES;
            let len = u32_at(at + 28) as usize;
            field("length of a volume's name", len as u64, (1..=MAX_NAME).contains(&len))?;
            let name = std::str::from_utf8(&bytes[at + 32..at + 32 + len])
                .map_err(|_| E::Field { field: "name of volume", value: i as u64 })?
                .to_owned();
            let (first_group, groups) = (u64_at(at), u64_at(at + 8));
            let end = first_group.checked_add(groups).filter(|&end| end <= space);
            field("groups of a volume", groups, end.is_some() && groups > 0)?;
            let room = u128::from(groups) * u128::from(u64::from(layout.line) * GROUP_LINES);
            field("bytes of a volume", u64_at(at + 16), u128::from(u64_at(at + 16)) <= room)?;
            let apart = volumes.iter().all(|v| {
                v.name != name
                    && (first_group >= v.first_group + v.groups
                        || v.first_group >= first_group + groups)
            });
            field("a volume that meets another", i as u64, apart)?;
            let state =
                if u32_at(at + 24) == 1 { VolumeState::Detached } else { VolumeState::Attached };
            let identity = bytes[at + 128..at + 192].try_into().expect("64 bytes");
            volumes.push(Volume {
                name,
                first_group,
                groups,
                bytes: u64_at(at + 16),
                state,
                identity,
            });
        }
        Ok(BlockSuperblock {
            incompatible,
            compatible: u64_at(24),
            sequence: u64_at(32),
            uuid: Uuid(bytes[40..56].try_into().expect("16 bytes")),
            key: u64_at(56),
            layout,
            epoch: u64_at(96),
            clean_epoch: u64_at(104),
            generation: u64_at(112),
            snapshot: u32_at(132) != 0,
            area: u32_at(120),
            formatted: UnixSecs(u32_at(124)),
            reach: Reach { generation: u64_at(152), pages: u64_at(160) },
            volumes,
        })
    }

    /// Refuses a device that is smaller than it was when it was formatted.
    ///
    /// # Errors
    /// [`BlockSuperblockError::Shrunk`].
    pub fn check_device(&self, found: u64) -> Result<(), BlockSuperblockError> {
        let expected = self.layout.device;
        if found < expected {
            Err(BlockSuperblockError::Shrunk { found, expected })
        } else {
            Ok(())
        }
    }
}

/// The newer of the two copies whose checksum holds. If that one has a version or a feature that this program does not
/// know, it is refused, even if the older copy could be read.
///
/// # Errors
/// As [`BlockSuperblock::decode`].
pub fn choose(a: &[u8], b: &[u8]) -> Result<BlockSuperblock, BlockSuperblockError> {
    use BlockSuperblockError as E;
    let read = |bytes: &[u8]| {
        let decoded = BlockSuperblock::decode(bytes);
        let whole = !matches!(decoded, Err(E::None | E::Damaged));
        (decoded, whole.then(|| le(&bytes[32..40])))
    };
    match (read(a), read(b)) {
        ((Err(E::None), None), (Err(E::None), None)) => Err(E::None),
        ((_, None), (_, None)) => Err(E::Damaged),
        ((a, x), (b, y)) => {
            if y > x {
                b
            } else {
                a
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_base::Rng;

    fn sample() -> BlockSuperblock {
        let layout = Layout::new(64 << 20, 4096, 4, 2).unwrap();
        let mut sb = BlockSuperblock::format(Uuid([7; 16]), 99, 5, layout, UnixSecs(1_700_000_000));
        for (i, name) in ["root", "daten-ä"].iter().enumerate() {
            let (first_group, groups) = sb.allocate(10 << 20).unwrap();
            sb.volumes.push(Volume {
                name: (*name).to_owned(),
                first_group,
                groups,
                bytes: 10 << 20,
                state: if i == 0 { VolumeState::Attached } else { VolumeState::Detached },
                identity: [i as u8; 64],
            });
        }
        sb
    }

    #[test]
    fn it_comes_back() {
        let sb = sample();
        assert_eq!(BlockSuperblock::decode(&sb.encode()), Ok(sb));
        let log = Layout::full(64 << 20, 4096, 2).unwrap();
        let sb = BlockSuperblock::format(Uuid([7; 16]), 99, 5, log, UnixSecs(1));
        assert_eq!(sb.incompatible, FEATURE_LOG);
        assert_eq!(BlockSuperblock::decode(&sb.encode()), Ok(sb));
    }

    #[test]
    fn the_newer_copy_rules_and_a_torn_one_does_not() {
        let a = sample();
        let b = BlockSuperblock { sequence: 2, epoch: 5, ..sample() };
        assert_eq!(choose(&a.encode(), &b.encode()), Ok(b.clone()));
        let mut torn = b.encode();
        torn[40_000] ^= 1;
        assert_eq!(choose(&a.encode(), &torn), Ok(a));
        assert_eq!(choose(&torn, &torn), Err(BlockSuperblockError::Damaged));
        assert_eq!(choose(&[0; 10], &[]), Err(BlockSuperblockError::None));
    }

    #[test]
    fn dirty_lines_and_other_versions_are_left_alone() {
        let dirty = BlockSuperblock { incompatible: FEATURE_DIRTY, ..sample() };
        assert_eq!(BlockSuperblock::decode(&dirty.encode()), Err(BlockSuperblockError::Dirty));
        let feature = BlockSuperblock { incompatible: 8, ..sample() };
        assert_eq!(
            BlockSuperblock::decode(&feature.encode()),
            Err(BlockSuperblockError::Feature { unknown: 8 })
        );
        let mut newer = sample().encode();
        newer[12] = 9;
        let crc = crc32c::crc32c(&newer[12..]).to_le_bytes();
        newer[8..12].copy_from_slice(&crc);
        assert_eq!(
            BlockSuperblock::decode(&newer),
            Err(BlockSuperblockError::Version { found: 9 })
        );
    }

    #[test]
    fn sealed_garbage_never_panics() {
        let mut rng = Rng::new(5);
        let whole = sample().encode();
        let log = Layout::full(64 << 20, 4096, 2).unwrap();
        let log = BlockSuperblock::format(Uuid([7; 16]), 99, 5, log, UnixSecs(1)).encode();
        for _ in 0..3_000 {
            let mut bytes = if rng.chance(0.5) { whole.clone() } else { log.clone() };
            for _ in 0..rng.range(1, 4) {
                let at = rng.below(1024) as usize;
                bytes[at] = rng.next_u64() as u8;
            }
            if rng.chance(0.9) {
                let crc = crc32c::crc32c(&bytes[12..]).to_le_bytes();
                bytes[8..12].copy_from_slice(&crc);
            }
            if let Ok(sb) = BlockSuperblock::decode(&bytes) {
                assert_eq!(BlockSuperblock::decode(&sb.encode()), Ok(sb));
            }
        }
    }
}
