//! What a flash device says of itself.
//!
//! ```text
//!    0   8  magic "LARDERSB"                            | fixed in every version,
//!    8   4  CRC-32C of bytes 12..4096                   | so that any version can tell
//!   12   4  format version                              | damage from a format
//!   16   8  incompatible features: an unknown bit       | that it does not know,
//!           means that the device must be left alone    | and which copy is newer
//!   24   8  compatible features: unknown bits are kept  |
//!   32   8  sequence number of this copy                |
//!   40  16  UUID
//!   56  16  hash key
//!   72   8  device size, bytes
//!   80   4  segment size, bytes
//!   84   2  number of segments
//!   86   2  number of virtual shards
//!   88   8  epoch: raised by one, and synced, at every start
//!   96   8  CAS base: every CAS handed out before this start is below it
//!  104   8  epoch of the last clean stop, 0 for none
//!  112   4  when the device was formatted, Unix seconds
//!  116   4  zero
//!  120   8  run: a random number of the last start (since version 2), 0 for none
//!  128   8  drive: a random number that names one of several drives (feature 1), 0 for one that is alone
//!  136   2  the number of its first segment, less one
//!  138   2  segments that can hold small objects
//!  140   2  the number of the first segment behind those, less one
//!  142   1  place among the drives
//!  143   1  bits that say in which run of 4,095 a segment lies
//!  144      zero
//! ```
//!
//! Two copies, in pages 0 and 1 of the device, are written in turn, each with the next sequence number and a sync
//! behind it: a torn write of one leaves the other. To format a device, zero both pages, sync, then write copy 0: a
//! format that was cut short leaves a device without a superblock, never an old superblock.
//!
//! Several drives of one cache have its UUID and its hash key, epochs and runs alike; each has segments with numbers of their own
//! ([`Numbers`]). A program that does not know them must leave such a drive alone.
//!
//! The epoch counts the starts of one device. It cannot tell two lines of starts apart that began with a copy of the device,
//! since both count on from the same number: that is what the **run** is for. Version 1 had none; it is read, and has run 0.

use larder_base::{HashKey, ObjectHash, UnixSecs};

use crate::geometry::{Geometry, GeometryError, Numbers, SMALL_SEGMENTS};
use crate::{PAGE_SIZE, le};

/// What a superblock begins with.
pub const MAGIC: [u8; 8] = *b"LARDERSB";
/// The version that this code writes.
pub const VERSION: u32 = 2;
/// The oldest version that this code reads.
pub const OLDEST_VERSION: u32 = 1;
/// The incompatible features that this code knows.
pub const KNOWN_INCOMPATIBLE: u64 = SEVERAL_DRIVES;
/// The incompatible feature of a drive that is one of several.
const SEVERAL_DRIVES: u64 = 1;
/// Places of drives in one cache.
pub const PLACES: u8 = 16;
/// Most bits that say in which run a segment lies.
const MAX_BITS: u8 = 4;
/// Number of copies: copy `n` lies in page `n` of the device.
pub const COPIES: usize = 2;

const CRC_FROM: usize = 12;

/// Names a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uuid(pub [u8; 16]);

impl std::fmt::Display for Uuid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                write!(f, "-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Uuid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Why a superblock cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SuperblockError {
    /// Neither copy begins with the magic number.
    #[error("no Larder superblock")]
    None,
    /// Both copies fail their checksum, or one does and the other is not there.
    #[error("both copies of the Larder superblock are damaged; format the device anew to use it")]
    Damaged,
    /// Written by another version.
    #[error(
        "the flash was formatted by version {found} of the format, this program reads versions {OLDEST_VERSION} to {VERSION}: use a Larder that reads version {found}, or format the device anew"
    )]
    Version {
        /// What the device says.
        found: u32,
    },
    /// A feature that changes the format in a way this version does not know.
    #[error(
        "the flash (format version {VERSION}) uses features that this program does not know (bits {unknown:#x}; it knows {KNOWN_INCOMPATIBLE:#x}): use the Larder that formatted it, or format the device anew"
    )]
    Feature {
        /// The unknown bits.
        unknown: u64,
    },
    /// The checksum holds but the division into segments cannot be.
    #[error("the superblock describes a device that cannot be")]
    Geometry(#[source] GeometryError),
    /// The checksum holds but a field contradicts another.
    #[error("the superblock says {field} = {value}, which cannot be")]
    Field {
        /// Which.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The device has become smaller.
    #[error(
        "the flash has {found} bytes but was formatted with {expected}: restore its size, or format it anew"
    )]
    Shrunk {
        /// Bytes now.
        found: u64,
        /// Bytes when it was formatted.
        expected: u64,
    },
}

/// Which of a cache's drives one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartOf {
    /// A random number that names it; never 0.
    pub drive: u64,
    /// Its place, below [`PLACES`].
    pub place: u8,
    /// Which numbers its segments have.
    pub numbers: Numbers,
    /// Bits that say in which run a segment lies ([`run_bits`](crate::geometry::run_bits)), the same on all drives of a cache for good.
    pub bits: u8,
}

impl PartOf {
    /// The highest number that a segment of its cache can have.
    pub fn most(&self) -> u16 {
        most_of(self.bits)
    }
}

/// The highest number of a segment where so many bits say in which run it lies.
pub fn most_of(bits: u8) -> u16 {
    SMALL_SEGMENTS << bits.min(MAX_BITS)
}

/// A superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Incompatible features in use.
    pub incompatible: u64,
    /// Compatible features in use.
    pub compatible: u64,
    /// Number of this copy: the higher is the newer.
    pub sequence: u64,
    /// Names the device.
    pub uuid: Uuid,
    /// The secret under which keys are hashed.
    pub hash_key: HashKey,
    /// The division into segments.
    pub geometry: Geometry,
    /// Raised at every start.
    pub epoch: u64,
    /// Every CAS handed out before this start is below it.
    pub cas_base: u64,
    /// Epoch whose run ended with a clean stop, if it is the last one: then the checkpoint of that epoch may be used.
    pub clean_epoch: u64,
    /// When the device was formatted.
    pub formatted: UnixSecs,
    /// A random number that the last start drew, which no other start has, on whatever copy of the device; 0 for none.
    pub run: u64,
    /// Which of several drives it is of; `None` where it is the only one.
    pub part: Option<PartOf>,
}

/// The superblock that rules a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The newer valid copy.
    pub superblock: Superblock,
    /// Which copy it is; the next one goes to the other.
    pub copy: usize,
    /// Whether the other copy was valid too (its write may have been torn, or rot).
    pub other_valid: bool,
}

impl Superblock {
    /// The first superblock of a device that is formatted.
    pub fn format(
        uuid: Uuid,
        hash_key: HashKey,
        geometry: Geometry,
        formatted: UnixSecs,
    ) -> Superblock {
        Superblock {
            incompatible: 0,
            compatible: 0,
            sequence: 1,
            uuid,
            hash_key,
            geometry,
            epoch: 0,
            cas_base: 1,
            clean_epoch: 0,
            formatted,
            run: 0,
            part: None,
        }
    }

    /// The first superblock of a drive that joins the cache of this one.
    #[must_use]
    pub fn format_beside(
        &self,
        geometry: Geometry,
        part: PartOf,
        formatted: UnixSecs,
    ) -> Superblock {
        let first = Superblock::format(self.uuid, self.hash_key, geometry, formatted);
        Superblock { incompatible: SEVERAL_DRIVES, part: Some(part), ..first }
    }

    /// The same drive as one of several.
    #[must_use]
    pub fn as_part(&self, part: PartOf) -> Superblock {
        let incompatible = self.incompatible | SEVERAL_DRIVES;
        Superblock { incompatible, part: Some(part), ..self.clone() }
    }

    /// What this drive says when another of its cache says `lead`: the same epoch, run and CAS base.
    #[must_use]
    pub fn following(&self, lead: &Superblock) -> Superblock {
        Superblock {
            sequence: self.sequence + 1,
            epoch: lead.epoch,
            cas_base: lead.cas_base,
            clean_epoch: lead.clean_epoch,
            run: lead.run,
            ..self.clone()
        }
    }

    /// The superblock of a new start: the next epoch, not cleanly stopped, with this CAS base and the random number that the
    /// start has drawn.
    #[must_use]
    pub fn start(&self, cas_base: u64, run: u64) -> Superblock {
        Superblock {
            sequence: self.sequence + 1,
            epoch: self.epoch + 1,
            cas_base: cas_base.max(self.cas_base),
            run,
            ..self.clone()
        }
    }

    /// The superblock after a clean stop of the present epoch.
    #[must_use]
    pub fn stop(&self, cas_base: u64) -> Superblock {
        Superblock {
            sequence: self.sequence + 1,
            clean_epoch: self.epoch,
            cas_base: cas_base.max(self.cas_base),
            ..self.clone()
        }
    }

    /// Whether the run of the present epoch was stopped cleanly.
    pub fn is_clean(&self) -> bool {
        self.epoch != 0 && self.clean_epoch == self.epoch
    }

    /// The first generation that a segment may get in this epoch: a generation of an earlier epoch is lower, so none is ever
    /// repeated on one device (2³² fillings of segments in one run are out of reach).
    pub fn first_generation(&self) -> u64 {
        self.epoch << 32
    }

    /// What the checksums of this device's records start from, beside segment and generation. It depends on the secret,
    /// so no client can make a value that looks like a record.
    pub fn salt(&self) -> u32 {
        crc32c::crc32c_append(crc32c::crc32c(&self.uuid.0), &self.hash_key.0)
    }

    /// Refuses a device that is smaller than it was when it was formatted.
    pub fn check_device(&self, device_bytes: u64) -> Result<(), SuperblockError> {
        let expected = self.geometry.device_bytes();
        if device_bytes < expected {
            return Err(SuperblockError::Shrunk { found: device_bytes, expected });
        }
        Ok(())
    }

    /// The bytes of this copy: one page.
    pub fn encode(&self) -> Box<[u8; PAGE_SIZE]> {
        let mut page = Box::new([0; PAGE_SIZE]);
        let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(12, &VERSION.to_le_bytes());
        put(16, &self.incompatible.to_le_bytes());
        put(24, &self.compatible.to_le_bytes());
        put(32, &self.sequence.to_le_bytes());
        put(40, &self.uuid.0);
        put(56, &self.hash_key.0);
        put(72, &self.geometry.device_bytes().to_le_bytes());
        put(80, &self.geometry.segment_bytes().to_le_bytes());
        put(84, &self.geometry.segments().to_le_bytes());
        put(86, &(ObjectHash::VIRTUAL_SHARDS as u16).to_le_bytes());
        put(88, &self.epoch.to_le_bytes());
        put(96, &self.cas_base.to_le_bytes());
        put(104, &self.clean_epoch.to_le_bytes());
        put(112, &self.formatted.0.to_le_bytes());
        put(120, &self.run.to_le_bytes());
        if let Some(part) = &self.part {
            put(128, &part.drive.to_le_bytes());
            put(136, &part.numbers.small_before.to_le_bytes());
            put(138, &part.numbers.small.to_le_bytes());
            put(140, &part.numbers.large_before.to_le_bytes());
            put(142, &[part.place, part.bits]);
        }
        let crc = crc32c::crc32c(&page[CRC_FROM..]);
        page[8..12].copy_from_slice(&crc.to_le_bytes());
        page
    }

    /// Reads one copy. [`choose`] is what a start needs.
    ///
    /// # Errors
    /// [`SuperblockError::None`] without the magic number, [`SuperblockError::Damaged`] with a wrong checksum or less than
    /// a page; the others as they say.
    pub fn decode(page: &[u8]) -> Result<Superblock, SuperblockError> {
        if !page.starts_with(&MAGIC) {
            return Err(SuperblockError::None);
        }
        let page = page.get(..PAGE_SIZE).ok_or(SuperblockError::Damaged)?;
        let u64_at = |at: usize| le(&page[at..at + 8]);
        if le(&page[8..12]) as u32 != crc32c::crc32c(&page[CRC_FROM..]) {
            return Err(SuperblockError::Damaged);
        }
        let found = le(&page[12..16]) as u32;
        if !(OLDEST_VERSION..=VERSION).contains(&found) {
            return Err(SuperblockError::Version { found });
        }
        let incompatible = u64_at(16);
        let unknown = incompatible & !KNOWN_INCOMPATIBLE;
        if unknown != 0 {
            return Err(SuperblockError::Feature { unknown });
        }
        let geometry = Geometry::with_segment(u64_at(72), le(&page[80..84]))
            .map_err(SuperblockError::Geometry)?;
        let field = |field, value: u64, right: bool| {
            if right { Ok(()) } else { Err(SuperblockError::Field { field, value }) }
        };
        let segments = le(&page[84..86]);
        field("segments", segments, segments == u64::from(geometry.segments()))?;
        let shards = le(&page[86..88]);
        field("virtual shards", shards, shards == u64::from(ObjectHash::VIRTUAL_SHARDS))?;
        let epoch = u64_at(88);
        field("epoch", epoch, epoch < 1 << 32)?;
        let clean_epoch = u64_at(104);
        field("clean epoch", clean_epoch, clean_epoch <= epoch)?;
        let sequence = u64_at(32);
        field("sequence", sequence, sequence < u64::MAX)?;
        let part = if incompatible & SEVERAL_DRIVES == 0 {
            None
        } else {
            let u16_at = |at: usize| le(&page[at..at + 2]) as u16;
            let numbers = Numbers {
                small_before: u16_at(136),
                small: u16_at(138),
                large_before: u16_at(140),
            };
            let (drive, place) = (u64_at(128), page[142]);
            field("drive", drive, drive != 0)?;
            field("place", place.into(), place < PLACES)?;
            let bits = page[143];
            field("bits", bits.into(), bits <= MAX_BITS)?;
            let can_be = numbers.can_be(geometry.segments(), most_of(bits));
            field("numbers", numbers.small_before.into(), can_be)?;
            Some(PartOf { drive, place, numbers, bits })
        };
        Ok(Superblock {
            part,
            incompatible,
            compatible: u64_at(24),
            sequence,
            uuid: Uuid(page[40..56].try_into().expect("16 bytes")),
            hash_key: HashKey(page[56..72].try_into().expect("16 bytes")),
            geometry,
            epoch,
            cas_base: u64_at(96),
            clean_epoch,
            formatted: UnixSecs(le(&page[112..116]) as u32),
            run: if found >= 2 { u64_at(120) } else { 0 },
        })
    }
}

/// Chooses between the two copies: the newer one whose checksum holds. If that one has a version or a feature that this
/// program does not know, it is refused, even if the older copy could be read.
pub fn choose(a: &[u8], b: &[u8]) -> Result<Chosen, SuperblockError> {
    // The position of the sequence number is the same in every version.
    let read = |page: &[u8]| {
        let decoded = Superblock::decode(page);
        let whole = !matches!(decoded, Err(SuperblockError::None | SuperblockError::Damaged));
        (decoded, whole.then(|| le(&page[32..40])))
    };
    let ((a, a_sequence), (b, b_sequence)) = (read(a), read(b));
    if a_sequence.is_none() && b_sequence.is_none() {
        let nothing = matches!((&a, &b), (Err(SuperblockError::None), Err(SuperblockError::None)));
        return Err(if nothing { SuperblockError::None } else { SuperblockError::Damaged });
    }
    let other_valid = a_sequence.is_some() && b_sequence.is_some();
    // No sequence orders below any: a valid copy wins over none.
    let (copy, newer) = if b_sequence > a_sequence { (1, b) } else { (0, a) };
    Ok(Chosen { superblock: newer?, copy, other_valid })
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    fn sample() -> Superblock {
        let geometry = Geometry::plan(64 << 20).unwrap();
        let uuid = Uuid(*b"0123456789abcdef");
        Superblock {
            cas_base: 99,
            compatible: 1 << 40,
            ..Superblock::format(uuid, HashKey([8; 16]), geometry, UnixSecs(1_700_000_000))
        }
    }

    /// A page whose checksum holds again after bytes of it were changed.
    fn resealed(
        mut page: Box<[u8; PAGE_SIZE]>,
        change: impl FnOnce(&mut [u8]),
    ) -> Box<[u8; PAGE_SIZE]> {
        change(&mut page[..]);
        let crc = crc32c::crc32c(&page[CRC_FROM..]);
        page[8..12].copy_from_slice(&crc.to_le_bytes());
        page
    }

    #[test]
    fn round_trip_through_a_life() {
        let formatted = sample();
        let started = formatted.start(500, 77);
        let stopped = started.stop(700);
        let again = stopped.start(600, 77);
        for s in [&formatted, &started, &stopped, &again] {
            assert_eq!(&Superblock::decode(&s.encode()[..]).unwrap(), s);
        }
        assert!(
            !formatted.is_clean() && !started.is_clean() && stopped.is_clean() && !again.is_clean()
        );
        assert_eq!((again.epoch, again.cas_base, again.sequence), (2, 700, 4));
        assert_eq!((formatted.run, stopped.run), (0, 77));
        assert!(again.first_generation() > started.first_generation() + u64::from(u32::MAX));
        assert_eq!(started.uuid.to_string(), "30313233-3435-3637-3839-616263646566");
    }

    #[test]
    fn the_newer_copy_wins() {
        let (old, new) = (sample(), sample().start(7, 77));
        let (a, b) = (old.encode(), new.encode());
        let chosen = choose(&a[..], &b[..]).unwrap();
        assert_eq!((chosen.superblock, chosen.copy, chosen.other_valid), (new.clone(), 1, true));
        let chosen = choose(&b[..], &a[..]).unwrap();
        assert_eq!((chosen.superblock, chosen.copy), (new, 0));
        let chosen = choose(&[0; PAGE_SIZE], &a[..]).unwrap();
        assert_eq!((chosen.copy, chosen.other_valid), (1, false));
    }

    /// A write of the newer copy that is cut at any byte, over the older one or over zeros.
    #[test]
    fn torn_at_every_byte() {
        let (first, second, third) =
            (sample(), sample().start(7, 77), sample().start(7, 77).stop(8));
        let (a, b) = (first.encode(), second.encode());
        for before in [a.clone(), Box::new([0; PAGE_SIZE])] {
            for cut in 0..=PAGE_SIZE {
                let mut torn = before.clone();
                torn[..cut].copy_from_slice(&third.encode()[..cut]);
                let chosen = choose(&torn[..], &b[..]).unwrap();
                // Past its last field a page is zero in either case: the write is as good as done.
                let done = torn == third.encode();
                assert_eq!(
                    chosen.superblock,
                    if done { third.clone() } else { second.clone() },
                    "{cut}"
                );
            }
        }
    }

    #[test]
    fn every_flipped_bit_is_caught() {
        let page = sample().encode();
        for bit in 0..PAGE_SIZE * 8 {
            let mut bad = page.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let error = Superblock::decode(&bad[..]).unwrap_err();
            let none = bit < MAGIC.len() * 8;
            assert_eq!(error, if none { SuperblockError::None } else { SuperblockError::Damaged });
        }
    }

    #[test]
    fn what_is_unknown_is_refused_by_name() {
        let newer = resealed(sample().start(1, 77).encode(), |p| p[12] = 3);
        let error = choose(&sample().encode()[..], &newer[..]).unwrap_err();
        assert_eq!(error, SuperblockError::Version { found: 3 });
        assert!(
            error.to_string().contains("version 3")
                && error.to_string().contains("versions 1 to 2")
        );
        let feature = resealed(sample().encode(), |p| p[17] = 0x80);
        let error = choose(&feature[..], &[0; PAGE_SIZE]).unwrap_err();
        assert_eq!(error, SuperblockError::Feature { unknown: 0x8000 });
        assert!(error.to_string().contains("0x8000"), "{error}");
        // An older copy in a format that is not known is nobody's business.
        let older = resealed(sample().encode(), |p| p[12] = 9);
        assert_eq!(choose(&older[..], &sample().start(1, 77).encode()[..]).unwrap().copy, 1);
    }

    #[test]
    fn the_first_version_has_no_run() {
        let old = resealed(sample().start(5, 77).encode(), |p| p[12] = 1);
        let read = Superblock::decode(&old[..]).unwrap();
        assert_eq!(read, Superblock { run: 0, ..sample().start(5, 77) });
        assert_eq!(read.encode()[12], VERSION as u8, "what is written next is of today's");
    }

    #[test]
    fn nothing_and_damage_are_told_apart() {
        assert_eq!(choose(&[0; PAGE_SIZE], &[0; PAGE_SIZE]), Err(SuperblockError::None));
        assert_eq!(choose(&[], &[]), Err(SuperblockError::None));
        assert_eq!(choose(&MAGIC, &[]), Err(SuperblockError::Damaged));
        let mut bad = sample().encode();
        bad[100] ^= 1;
        assert_eq!(choose(&bad[..], &bad[..]), Err(SuperblockError::Damaged));
    }

    #[test]
    fn fields_that_contradict_are_refused() {
        for (at, name) in
            [(84, "segments"), (86, "virtual shards"), (92, "epoch"), (104, "clean epoch")]
        {
            let bad = resealed(sample().encode(), |p| p[at] ^= 0x11);
            let error = Superblock::decode(&bad[..]).unwrap_err();
            assert!(
                matches!(error, SuperblockError::Field { field, .. } if field == name),
                "{error:?}"
            );
        }
        let bad = resealed(sample().encode(), |p| p[80..84].fill(0xff));
        assert!(matches!(Superblock::decode(&bad[..]), Err(SuperblockError::Geometry(_))));
        assert!(sample().check_device(64 << 20).is_ok());
        assert!(
            sample().check_device((64 << 20) - 1).unwrap_err().to_string().contains("67108864")
        );
    }

    #[test]
    fn random_fields_never_panic() {
        let mut rng = Rng::new(11);
        for _ in 0..5000 {
            let bad = resealed(sample().encode(), |p| {
                let at = rng.range(12, 132) as usize;
                let n = rng.range(1, 8) as usize;
                rng.fill(&mut p[at..at + n]);
            });
            if let Ok(s) = Superblock::decode(&bad[..]) {
                assert_eq!(Superblock::decode(&s.encode()[..]).unwrap(), s);
                let _ = s.start(1, 77).first_generation();
            }
        }
    }
}
