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
//!  168   8  first byte of the write log, a multiple of 1 MiB | all zero without a write log
//!  176   4  its segments                                    | (incompatible feature bit 4)
//!  180   4  bytes of a segment                              |
//!  184   4  bytes of a sector                               |
//!  188   4  attachment number that was given out last       |
//!  192   4  number of entries of what was given up; 0 without a write log
//!  196      zero
//!  512      volumes, 192 bytes each; 264 with a write log
//!           what was given up, 24 bytes each, the first at the end of the copy and each next one before it
//!
//! volume   0   8  first group in the line space       24   4  state: 0 attached, 1 detached
//!          8   8  groups set aside                    28   4  length of the name
//!         16   8  bytes                               32  96  name, UTF-8
//!                                                    128  64  identity of the backing store, as it was when detached
//!
//!        with a write log:
//!        192  16  UUID of the volume                 216   8  sequence behind which it was attached
//!        208   4  attachment number                  224   8  generation of the volume (G)
//!        212   1  what the log holds of it           232   8  number of its marker that was last known durable
//!        213   1  order, as in the marker
//!        214   2  zero, or 1 in a former format: it is not believed
//!        240   8  its records up to the sequence at 248 count below this byte alone: an operator has given up the rest
//!        248   8  zero if that is not so
//!        256   8  the epoch whose run had it last: no marker of this cache's own is of a later one
//!
//! given up 0   4  attachment number of the volume       8   8  first record, or 0: what FRONTIERs up to the last list
//!          4   4  zero                                 16   8  last record
//! ```
//!
//! Two copies of 64 KiB are written in turn, each with the next sequence number and a sync behind it; a change is written to both, so
//! that none is undone by damage to one.
//!
//! A program that does not know an incompatible feature must leave the device alone. Bit 4 says that there is a write log. It lies
//! behind the slots: `device size` ends before it. Bit 0 says that the log may hold data that a backing store lacks (write-back), so
//! there is no bit 0 without bit 4. Bit 3 was a write log whose volumes had 256 bytes, without the last field: it is refused. What the log holds of a volume is 0 if the volume was never written back (then the rest is zero),
//! 1 nothing, 2 clean, 3 open, 4 taken up, 5 carried. It lies in the volume's entry, which grows to 264 bytes, and not in a table of
//! its own: one entry has all of a volume, and there is no second list to keep in step. The price is that a device with a log knows
//! 246 volumes at most, and one without 338. What an operator has given up since it could not be read has no bound of its own for each volume, and takes
//! the room that volumes leave.

use larder_base::UnixSecs;

use super::layout::{GROUP_LINES, Layout, LayoutError};
use super::log::Reach;
use crate::le;
use crate::superblock::Uuid;

mod given_up;
mod write_back;

pub use given_up::{GivenUp, MOST_GIVEN_UP};
pub use write_back::{
    Cut, HoldsState, LEAST_LOG_SEGMENTS, LEAST_SEGMENT, MOST_LOG_BYTES, WriteLogArea,
    WriteLogAreaError, WrittenBack,
};

/// What a superblock begins with.
pub const MAGIC: [u8; 8] = *b"LARDERBC";
/// The version that this code reads and writes.
pub const VERSION: u32 = 2;
/// Bytes of a copy.
pub const COPY_BYTES: usize = 64 << 10;
/// The write log may hold data that a backing store lacks.
pub const FEATURE_DIRTY: u64 = 1;
/// The slots of each shard are a log of segments.
pub const FEATURE_LOG: u64 = 2;
/// Each line has a slot of its own, in a sparse file, and the map is a table.
pub const FEATURE_SPARSE: u64 = 4;
/// There is a write log.
pub const FEATURE_WRITE_LOG: u64 = 16;
/// There is one of a former format, which this code does not read.
pub const FEATURE_FORMER_WRITE_LOG: u64 = 8;
/// Incompatible features that this code knows.
pub const KNOWN_INCOMPATIBLE: u64 =
    FEATURE_DIRTY | FEATURE_LOG | FEATURE_SPARSE | FEATURE_WRITE_LOG;
/// Most volumes of a device without a write log ([`BlockSuperblock::most_volumes`]).
pub const MAX_VOLUMES: usize = (COPY_BYTES - VOLUMES_AT) / VOLUME_BYTES;
/// Most volumes of a device with one.
pub const MAX_LOGGED_VOLUMES: usize = (COPY_BYTES - VOLUMES_AT) / LOGGED_VOLUME_BYTES;
/// Longest name of a volume, bytes.
pub const MAX_NAME: usize = 96;

const CRC_FROM: usize = 12;
const VOLUMES_AT: usize = 512;
const LOG_AT: usize = 168;
const ATTACHMENTS_AT: usize = 188;
const GIVEN_UP_AT: usize = 192;
const VOLUME_BYTES: usize = 192;
const LOGGED_VOLUME_BYTES: usize = VOLUME_BYTES + write_back::ENTRY_BYTES;

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
    /// What the write log has to do with it; nothing if it was never written back.
    pub write_back: Option<WrittenBack>,
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
    /// It has a write log, which this program cannot serve.
    #[error(
        "the device has a write log, and this program cannot write back: use one that can; formatting would lose what the volumes do not have yet"
    )]
    WriteLog,
    /// It has a write log of a former format.
    #[error(
        "the device has a write log of a former format: have the Larder that wrote it bring all that is dirty to the stores, then format it anew; \
         formatting before that would lose it"
    )]
    FormerWriteLog,
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
    /// Incompatible features in use. [`encode`](BlockSuperblock::encode) adds those that follow from the log and the volumes.
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
    /// Where the write log lies, if there is one: [`BlockSuperblock::set_write_log`].
    pub write_log: Option<WriteLogArea>,
    /// The attachment number that was given out last: no number is used again on this device. 0 without a write log.
    pub attachments: u32,
    /// The volumes.
    pub volumes: Vec<Volume>,
    /// What of them was given up since it could not be read. Nothing without a write log.
    pub given_up: Vec<GivenUp>,
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
            write_log: None,
            attachments: 0,
            volumes: Vec::new(),
            given_up: Vec::new(),
        }
    }

    /// Gives the device a write log, behind what the layout has.
    pub fn set_write_log(&mut self, area: WriteLogArea) {
        self.write_log = Some(area);
        self.incompatible |= FEATURE_WRITE_LOG;
    }

    /// How many volumes the device can know.
    pub fn most_volumes(&self) -> usize {
        let given_up = self.given_up.len() * given_up::GIVEN_UP_BYTES;
        (COPY_BYTES - VOLUMES_AT).saturating_sub(given_up) / stride(self.write_log.is_some())
    }

    /// Refuses a device that only a program which writes back can serve: it has a write log.
    ///
    /// # Errors
    /// [`BlockSuperblockError::WriteLog`].
    pub fn check_written_through(&self) -> Result<(), BlockSuperblockError> {
        match self.write_log {
            Some(_) => Err(BlockSuperblockError::WriteLog),
            None => Ok(()),
        }
    }

    /// The features as they follow from the rest.
    fn features(&self) -> u64 {
        let dirty = self.volumes.iter().filter_map(|v| v.write_back.as_ref());
        let dirty = dirty.map(|w| w.holds).any(HoldsState::may_be_dirty);
        let bit = |feature, is: bool| if is { feature } else { 0 };
        self.incompatible & !FEATURE_WRITE_LOG
            | bit(FEATURE_WRITE_LOG, self.write_log.is_some())
            | bit(FEATURE_DIRTY, dirty)
    }

    /// Nothing that is cached counts any more: its volumes go, but for those of which the write log may hold what their stores lack. Of these
    /// no line counts either, since nothing is what they are known by.
    pub fn forget_volumes(&mut self) {
        self.volumes.retain_mut(|volume| {
            volume.identity = [0; 64];
            volume.write_back.as_ref().is_some_and(|w| w.holds.may_be_dirty())
        });
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
    /// With more than [`most_volumes`](BlockSuperblock::most_volumes), a name longer than [`MAX_NAME`], or a volume that is written
    /// back where there is no write log.
    pub fn encode(&self) -> Vec<u8> {
        assert!(self.volumes.len() <= self.most_volumes(), "too many volumes");
        let mut out = vec![0u8; COPY_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(12, &VERSION.to_le_bytes());
        put(16, &self.features().to_le_bytes());
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
        if let Some(area) = &self.write_log {
            put(LOG_AT, &area.encode());
        }
        put(ATTACHMENTS_AT, &self.attachments.to_le_bytes());
        let stride = stride(self.write_log.is_some());
        for (i, volume) in self.volumes.iter().enumerate() {
            let at = VOLUMES_AT + i * stride;
            assert!(volume.name.len() <= MAX_NAME, "name too long");
            put(at, &volume.first_group.to_le_bytes());
            put(at + 8, &volume.groups.to_le_bytes());
            put(at + 16, &volume.bytes.to_le_bytes());
            put(at + 24, &u32::from(volume.state == VolumeState::Detached).to_le_bytes());
            put(at + 28, &(volume.name.len() as u32).to_le_bytes());
            put(at + 32, volume.name.as_bytes());
            put(at + 128, &volume.identity);
            if let Some(written_back) = &volume.write_back {
                assert!(self.write_log.is_some(), "written back, and there is no log");
                put(at + VOLUME_BYTES, &written_back.encode());
            }
        }
        put(GIVEN_UP_AT, &(self.given_up.len() as u32).to_le_bytes());
        for (i, given) in self.given_up.iter().enumerate() {
            put(COPY_BYTES - (i + 1) * given_up::GIVEN_UP_BYTES, &given.encode());
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
        let logged = incompatible & FEATURE_WRITE_LOG != 0;
        if incompatible & FEATURE_FORMER_WRITE_LOG != 0 {
            return Err(E::FormerWriteLog);
        }
        let unknown = incompatible & !KNOWN_INCOMPATIBLE;
        // Dirty data that is elsewhere than in a log which this code knows: above all it must not be lost.
        if incompatible & FEATURE_DIRTY != 0 && (!logged || unknown != 0) {
            return Err(E::Dirty);
        }
        if unknown != 0 {
            return Err(E::Feature { unknown });
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
        let write_log = if logged {
            Some(WriteLogArea::decode(&bytes[LOG_AT..ATTACHMENTS_AT], layout.device)?)
        } else {
            for at in (LOG_AT..ATTACHMENTS_AT + 4).step_by(8) {
                field("a write log, which there is not", u64_at(at), u64_at(at) == 0)?;
            }
            None
        };
        let attachments = u32_at(ATTACHMENTS_AT);
        let (stride, most) =
            (stride(logged), if logged { MAX_LOGGED_VOLUMES } else { MAX_VOLUMES });
        let count = u32_at(128) as usize;
        field("volumes", count as u64, count <= most)?;
        let mut volumes: Vec<Volume> = Vec::with_capacity(count);
        let space = layout.space_lines() / GROUP_LINES;
        for i in 0..count {
            let at = VOLUMES_AT + i * stride;
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
            let write_back = match &bytes[at + VOLUME_BYTES..at + stride] {
                [] => None,
                entry => WrittenBack::decode(entry)?,
            };
            if let Some(mine) = &write_back {
                let number = u64::from(mine.attachment);
                field("attachment number", number, mine.attachment <= attachments)?;
                let others = volumes.iter().filter_map(|v| v.write_back.as_ref());
                let apart = others.clone().all(|v| mine.is_apart(v));
                field("a volume written back as another is", i as u64, apart)?;
                let said = !mine.holds.may_be_dirty() || incompatible & FEATURE_DIRTY != 0;
                field("features", incompatible, said)?;
            }
            volumes.push(Volume {
                name,
                first_group,
                groups,
                bytes: u64_at(at + 16),
                state,
                identity,
                write_back,
            });
        }
        let given = if logged { u32_at(GIVEN_UP_AT) as usize } else { 0 };
        let room = (COPY_BYTES - VOLUMES_AT - count * stride) / given_up::GIVEN_UP_BYTES;
        field("what was given up", given as u64, given <= room.min(MOST_GIVEN_UP))?;
        let given = bytes.rchunks_exact(given_up::GIVEN_UP_BYTES).take(given);
        let given_up: Result<Vec<GivenUp>, E> =
            given.map(|entry| GivenUp::decode(entry, attachments)).collect();
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
            write_log,
            attachments,
            volumes,
            given_up: given_up?,
        })
    }

    /// Refuses a device that is smaller than it was when it was formatted, its write log included.
    ///
    /// # Errors
    /// [`BlockSuperblockError::Shrunk`].
    pub fn check_device(&self, found: u64) -> Result<(), BlockSuperblockError> {
        let expected = self.write_log.map_or(self.layout.device, |area| area.end());
        if found < expected {
            Err(BlockSuperblockError::Shrunk { found, expected })
        } else {
            Ok(())
        }
    }
}

/// Bytes of a volume's entry.
fn stride(logged: bool) -> usize {
    if logged { LOGGED_VOLUME_BYTES } else { VOLUME_BYTES }
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
mod tests;
