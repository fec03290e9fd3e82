//! The file that a clean stop leaves: what DRAM knew of the flash, so that the next start is warm.
//!
//! ```text
//! header    0   8  magic "LARDERCP"                      section    0   4  kind
//!           8   4  CRC-32C of bytes 12..72                          4   4  id (a shard's number, or 0)
//!          12   4  format version                                   8   8  number of words
//!          16  16  UUID of the flash                               16   4  CRC-32C of the above
//!          32   8  epoch of the run that stopped                   20      blocks of up to 8,192 words, each
//!          40   8  device size                                             followed by its CRC-32C
//!          48   4  segment size
//!          52   2  number of segments                   end             a section of kind 0xffff_ffff, id = number
//!          54   2  zero                                                 of sections, words = their words, no blocks;
//!          56   8  when it was written, Unix seconds                    nothing follows
//!          64   8  zero
//! ```
//!
//! Every checksum starts from the one before it, so blocks cannot be swapped, and the end cannot be taken from another
//! file. A reader knows that a checkpoint is whole only when [`CheckpointReader::next_section`] has returned `None`:
//! until then nothing that was read may be used. It is written for one epoch and belongs to the flash only as long as
//! the superblock says that this epoch was stopped cleanly; the next start raises the epoch and so disowns it.

use std::io::{self, Read, Write};

use crate::geometry::Geometry;
use crate::le;
use crate::superblock::Uuid;

/// What a checkpoint begins with.
pub const MAGIC: [u8; 8] = *b"LARDERCP";
/// The version that this code reads and writes.
pub const VERSION: u32 = 1;
/// Words of a whole block: 64 KiB.
pub const BLOCK_WORDS: usize = 8192;
/// The most sections that a checkpoint can have.
pub const MAX_SECTIONS: u32 = 1 << 16;

const HEADER_LEN: usize = 72;
const SECTION_LEN: usize = 20;
const END: u32 = u32::MAX;

/// Kinds of section. What their words mean is the engine's affair; an unknown kind is skipped by whoever reads.
pub mod kind {
    /// The segment table.
    pub const SEGMENTS: u32 = 1;
    /// One shard's flash index.
    pub const INDEX: u32 = 2;
    /// One shard's counters and epochs.
    pub const SHARD: u32 = 3;
    /// What admission has learnt.
    pub const ADMISSION: u32 = 4;
}

/// Why a checkpoint cannot be written or used. All but the first mean: start cold.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file could not be read or written.
    #[error("the checkpoint could not be read or written")]
    Io(#[from] io::Error),
    /// Another kind of file.
    #[error("not a Larder checkpoint")]
    NotCheckpoint,
    /// Written by another version.
    #[error("the checkpoint has version {found}, this program reads version {VERSION}")]
    Version {
        /// What the file says.
        found: u32,
    },
    /// Of another flash.
    #[error("the checkpoint belongs to flash {found}, this is {expected}")]
    OtherDevice {
        /// What the file says.
        found: Uuid,
        /// The flash at hand.
        expected: Uuid,
    },
    /// Of another run.
    #[error("the checkpoint is of epoch {found}, the flash was last used in epoch {expected}")]
    OtherEpoch {
        /// What the file says.
        found: u64,
        /// What the superblock says.
        expected: u64,
    },
    /// Of a flash that was divided otherwise.
    #[error("the checkpoint describes another division of the flash into segments")]
    OtherGeometry,
    /// The file ends too early.
    #[error("the checkpoint ends at byte {at}, in the middle of {what}")]
    Truncated {
        /// Where.
        at: u64,
        /// In what.
        what: &'static str,
    },
    /// A checksum is wrong, or lengths contradict each other.
    #[error("the checkpoint is damaged before byte {at} ({what})")]
    Damaged {
        /// Where reading had come to.
        at: u64,
        /// What is wrong.
        what: &'static str,
    },
}

/// What a checkpoint belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The flash.
    pub uuid: Uuid,
    /// The run that stopped.
    pub epoch: u64,
    /// The division of the flash.
    pub geometry: Geometry,
}

/// Writes a checkpoint. Wrap files in nothing: writes are 64 KiB.
#[derive(Debug)]
pub struct CheckpointWriter<W> {
    out: W,
    chain: u32,
    sections: u32,
    words: u64,
}

impl<W: Write> CheckpointWriter<W> {
    /// Begins a checkpoint; `written` is the time in Unix seconds.
    pub fn create(
        mut out: W,
        identity: &Identity,
        written: u64,
    ) -> io::Result<CheckpointWriter<W>> {
        let mut header = [0; HEADER_LEN];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(12, &VERSION.to_le_bytes());
        put(16, &identity.uuid.0);
        put(32, &identity.epoch.to_le_bytes());
        put(40, &identity.geometry.device_bytes().to_le_bytes());
        put(48, &identity.geometry.segment_bytes().to_le_bytes());
        put(52, &identity.geometry.segments().to_le_bytes());
        put(56, &written.to_le_bytes());
        let chain = crc32c::crc32c(&header[12..]);
        header[8..12].copy_from_slice(&chain.to_le_bytes());
        out.write_all(&header)?;
        Ok(CheckpointWriter { out, chain, sections: 0, words: 0 })
    }

    /// Writes a section of `len` words.
    ///
    /// # Panics
    /// When `words` yields more or fewer than `len`, or `kind` is the one that stands for the end.
    pub fn section(
        &mut self,
        kind: u32,
        id: u32,
        len: u64,
        words: impl IntoIterator<Item = u64>,
    ) -> io::Result<()> {
        assert!(kind != END && self.sections < MAX_SECTIONS, "section {kind} of {}", self.sections);
        self.section_header(kind, id, len)?;
        let mut words = words.into_iter();
        let mut left = len;
        let mut block = Vec::with_capacity(BLOCK_WORDS * 8 + 4);
        while left > 0 {
            let count = left.min(BLOCK_WORDS as u64);
            block.clear();
            for _ in 0..count {
                let word = words.next().expect("as many words as were announced");
                block.extend_from_slice(&word.to_le_bytes());
            }
            self.chain = crc32c::crc32c_append(self.chain, &block);
            block.extend_from_slice(&self.chain.to_le_bytes());
            self.out.write_all(&block)?;
            left -= count;
        }
        assert!(words.next().is_none(), "more words than the {len} announced");
        self.sections += 1;
        self.words += len;
        Ok(())
    }

    fn section_header(&mut self, kind: u32, id: u32, words: u64) -> io::Result<()> {
        let mut header = [0; SECTION_LEN];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[4..8].copy_from_slice(&id.to_le_bytes());
        header[8..16].copy_from_slice(&words.to_le_bytes());
        self.chain = crc32c::crc32c_append(self.chain, &header[..16]);
        header[16..].copy_from_slice(&self.chain.to_le_bytes());
        self.out.write_all(&header)
    }

    /// Writes the end and flushes. To be safe against a power cut the caller must still sync the file, then rename it
    /// into place.
    pub fn finish(mut self) -> io::Result<W> {
        self.section_header(END, self.sections, self.words)?;
        self.out.flush()?;
        Ok(self.out)
    }
}

/// A section that is about to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// Its kind ([`kind`]).
    pub kind: u32,
    /// Its id.
    pub id: u32,
    /// Its words, as the file says: compare it with what you expect before you make room for so many.
    pub words: u64,
}

/// Reads a checkpoint, in memory of one block.
#[derive(Debug)]
pub struct CheckpointReader<R> {
    input: R,
    chain: u32,
    at: u64,
    sections: u32,
    words: u64,
    /// Words of the present section that are still in the file.
    left: u64,
    block: Vec<u8>,
    ended: bool,
    written: u64,
}

impl<R: Read> CheckpointReader<R> {
    /// Reads the header and refuses a checkpoint of anything but `expected`.
    pub fn open(input: R, expected: &Identity) -> Result<CheckpointReader<R>, CheckpointError> {
        let mut reader = CheckpointReader {
            input,
            chain: 0,
            at: 0,
            sections: 0,
            words: 0,
            left: 0,
            block: Vec::new(),
            ended: false,
            written: 0,
        };
        let mut header = [0; HEADER_LEN];
        reader.fill(&mut header[..8], "the header")?;
        if header[..8] != MAGIC {
            return Err(CheckpointError::NotCheckpoint);
        }
        reader.fill(&mut header[8..], "the header")?;
        reader.chain = crc32c::crc32c(&header[12..]);
        if le(&header[8..12]) as u32 != reader.chain {
            return Err(reader.damaged("the header"));
        }
        let found = le(&header[12..16]) as u32;
        if found != VERSION {
            return Err(CheckpointError::Version { found });
        }
        let uuid = Uuid(header[16..32].try_into().expect("16 bytes"));
        if uuid != expected.uuid {
            return Err(CheckpointError::OtherDevice { found: uuid, expected: expected.uuid });
        }
        let epoch = le(&header[32..40]);
        if epoch != expected.epoch {
            return Err(CheckpointError::OtherEpoch { found: epoch, expected: expected.epoch });
        }
        let geometry = (le(&header[40..48]), le(&header[48..52]), le(&header[52..54]));
        let g = &expected.geometry;
        if geometry != (g.device_bytes(), u64::from(g.segment_bytes()), u64::from(g.segments())) {
            return Err(CheckpointError::OtherGeometry);
        }
        reader.written = le(&header[56..64]);
        Ok(reader)
    }

    /// When it was written, Unix seconds.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Goes to the next section, past what is left of the present one (which is checked all the same). `None` is the end:
    /// the whole file has been checked, and nothing follows.
    pub fn next_section(&mut self) -> Result<Option<Section>, CheckpointError> {
        while self.left > 0 {
            self.next_block()?;
        }
        if self.ended {
            return Ok(None);
        }
        let mut header = [0; SECTION_LEN];
        self.fill(&mut header, "a section's header")?;
        self.chain = crc32c::crc32c_append(self.chain, &header[..16]);
        if le(&header[16..]) as u32 != self.chain {
            return Err(self.damaged("a section's header"));
        }
        let (kind, id) = (le(&header[..4]) as u32, le(&header[4..8]) as u32);
        let words = le(&header[8..16]);
        if kind == END {
            if id != self.sections || words != self.words {
                return Err(self.damaged("sections are missing"));
            }
            if read_some(&mut self.input, &mut [0])? != 0 {
                return Err(self.damaged("something follows the end"));
            }
            self.ended = true;
            return Ok(None);
        }
        if self.sections == MAX_SECTIONS {
            return Err(self.damaged("too many sections"));
        }
        self.sections += 1;
        self.words = self.words.saturating_add(words);
        self.left = words;
        Ok(Some(Section { kind, id, words }))
    }

    /// Hands the words of the present section to `take`, block by block, in order. The block has been checked, the rest of
    /// the file has not: keep what is taken apart until the end has been reached.
    pub fn read_words(&mut self, mut take: impl FnMut(u64)) -> Result<(), CheckpointError> {
        while self.left > 0 {
            self.next_block()?;
            for word in self.block.chunks_exact(8) {
                take(le(word));
            }
        }
        Ok(())
    }

    fn next_block(&mut self) -> Result<(), CheckpointError> {
        let count = self.left.min(BLOCK_WORDS as u64) as usize;
        let mut block = std::mem::take(&mut self.block);
        block.resize(count * 8 + 4, 0);
        let filled = self.fill(&mut block, "a block");
        self.block = block;
        filled?;
        let crc = le(&self.block[count * 8..]) as u32;
        self.block.truncate(count * 8);
        self.chain = crc32c::crc32c_append(self.chain, &self.block);
        if crc != self.chain {
            return Err(self.damaged("a block"));
        }
        self.left -= count as u64;
        Ok(())
    }

    fn fill(&mut self, out: &mut [u8], what: &'static str) -> Result<(), CheckpointError> {
        let mut filled = 0;
        while filled < out.len() {
            let count = read_some(&mut self.input, &mut out[filled..])?;
            filled += count;
            self.at += count as u64;
            if count == 0 {
                return Err(CheckpointError::Truncated { at: self.at, what });
            }
        }
        Ok(())
    }

    fn damaged(&self, what: &'static str) -> CheckpointError {
        CheckpointError::Damaged { at: self.at, what }
    }
}

/// One read that is not interrupted; zero at the end.
fn read_some(input: &mut impl Read, out: &mut [u8]) -> io::Result<usize> {
    loop {
        match input.read(out) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    fn identity() -> Identity {
        Identity { uuid: Uuid([4; 16]), epoch: 9, geometry: Geometry::plan(64 << 20).unwrap() }
    }

    type Sections = Vec<(u32, u32, Vec<u64>)>;

    fn write(sections: &Sections) -> Vec<u8> {
        let mut writer = CheckpointWriter::create(Vec::new(), &identity(), 1234).unwrap();
        for (kind, id, words) in sections {
            writer.section(*kind, *id, words.len() as u64, words.iter().copied()).unwrap();
        }
        writer.finish().unwrap()
    }

    fn read(bytes: impl Read) -> Result<Sections, CheckpointError> {
        let mut reader = CheckpointReader::open(bytes, &identity())?;
        let mut out = Vec::new();
        while let Some(section) = reader.next_section()? {
            let mut words = Vec::new();
            reader.read_words(|w| words.push(w))?;
            assert_eq!(words.len() as u64, section.words);
            out.push((section.kind, section.id, words));
        }
        assert!(reader.next_section()?.is_none());
        assert_eq!(reader.written(), 1234);
        Ok(out)
    }

    fn sample(rng: &mut Rng) -> Sections {
        let lens =
            [0, 1, 7, BLOCK_WORDS as u64 - 1, BLOCK_WORDS as u64, BLOCK_WORDS as u64 + 1, 20_000];
        (0..rng.below(6) as u32)
            .map(|id| {
                let len = lens[rng.below(7) as usize];
                (rng.below(5) as u32, id, (0..len).map(|_| rng.next_u64()).collect())
            })
            .collect()
    }

    /// A reader that gives a few bytes at a time and is interrupted.
    struct Dribble<'a>(&'a [u8], Rng);

    impl Read for Dribble<'_> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            if self.1.chance(0.1) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let n = (self.1.range(1, 5000) as usize).min(out.len());
            self.0.read(&mut out[..n])
        }
    }

    #[test]
    fn round_trip() {
        let mut rng = Rng::new(21);
        for _ in 0..40 {
            let sections = sample(&mut rng);
            let bytes = write(&sections);
            assert_eq!(read(&bytes[..]).unwrap(), sections);
            assert_eq!(read(Dribble(&bytes, Rng::new(1))).unwrap(), sections);
        }
    }

    #[test]
    fn skipping_still_checks() {
        let bytes = write(&vec![(1, 0, vec![5; 30_000]), (2, 0, vec![6; 3])]);
        let skip = |bytes: &[u8]| -> Result<u32, CheckpointError> {
            let mut reader = CheckpointReader::open(bytes, &identity())?;
            let mut n = 0;
            while reader.next_section()?.is_some() {
                n += 1;
            }
            Ok(n)
        };
        assert_eq!(skip(&bytes).unwrap(), 2);
        let mut bad = bytes.clone();
        bad[100_000] ^= 4;
        assert!(matches!(skip(&bad), Err(CheckpointError::Damaged { .. })));
    }

    #[test]
    fn truncated_at_every_byte() {
        let bytes = write(&vec![(1, 0, vec![1, 2, 3]), (2, 7, (0..40).collect()), (3, 0, vec![])]);
        for len in 0..bytes.len() {
            match read(&bytes[..len]) {
                Err(CheckpointError::Truncated { at, .. }) => assert_eq!(at, len as u64),
                other => panic!("{len}: {other:?}"),
            }
        }
        let mut longer = bytes;
        longer.push(0);
        assert!(matches!(read(&longer[..]), Err(CheckpointError::Damaged { .. })));
    }

    #[test]
    fn every_flipped_bit_is_caught() {
        let bytes = write(&vec![(1, 0, vec![1, 2, 3]), (2, 7, (0..40).collect())]);
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&bad[..]).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn mutations_are_refused() {
        let mut rng = Rng::new(22);
        let bytes =
            write(&vec![(1, 0, (0..900).collect()), (2, 1, vec![7; 100]), (2, 2, vec![7; 100])]);
        for round in 0..5000 {
            let mut bad = bytes.clone();
            for _ in 0..rng.range(1, 6) {
                let at = rng.below(bad.len() as u64) as usize;
                match rng.below(4) {
                    0 => bad[at] = bad[at].wrapping_add(1 + rng.below(255) as u8),
                    1 => bad.truncate(at.max(1)),
                    2 => {
                        let n = (rng.below(40) as usize).min(bad.len() - at);
                        rng.fill(&mut bad[at..at + n]);
                    }
                    _ => {
                        bad.insert(at, 0);
                    }
                }
            }
            if bad != bytes {
                assert!(read(&bad[..]).is_err(), "round {round}");
            }
        }
    }

    #[test]
    fn swapped_sections_are_refused() {
        let one = write(&vec![(2, 1, vec![7; 100])]);
        let two = write(&vec![(2, 1, vec![7; 100]), (2, 1, vec![7; 100])]);
        let section = SECTION_LEN + 804;
        assert_eq!(one[..HEADER_LEN + section], two[..HEADER_LEN + section]);
        // The second section is not the first one over again, nor can the end be that of another file.
        assert_ne!(two[HEADER_LEN..][..section], two[HEADER_LEN + section..][..section]);
        let mut spliced = two[..HEADER_LEN + section].to_vec();
        spliced.extend_from_slice(&two[HEADER_LEN + 2 * section..]);
        assert!(read(&spliced[..]).is_err());
    }

    #[test]
    fn what_does_not_belong_is_refused_by_name() {
        let bytes = write(&Vec::new());
        let other = |change: fn(&mut Identity)| {
            let mut identity = identity();
            change(&mut identity);
            CheckpointReader::open(&bytes[..], &identity).unwrap_err()
        };
        assert!(other(|i| i.uuid.0[0] = 1).to_string().contains("belongs to flash"));
        let epoch = other(|i| i.epoch = 11).to_string();
        assert!(epoch.contains("epoch 9") && epoch.contains("epoch 11"), "{epoch}");
        assert!(matches!(
            other(|i| i.geometry = Geometry::plan(65 << 20).unwrap()),
            CheckpointError::OtherGeometry
        ));
        assert!(matches!(
            read(&b"something else entirely"[..]),
            Err(CheckpointError::NotCheckpoint)
        ));
        let mut newer = bytes.clone();
        newer[12] = 2;
        let crc = crc32c::crc32c(&newer[12..HEADER_LEN]);
        newer[8..12].copy_from_slice(&crc.to_le_bytes());
        assert!(matches!(read(&newer[..]), Err(CheckpointError::Version { found: 2 })));
    }

    #[test]
    fn errors_of_the_file_are_passed_on() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::other("gone"))
            }
        }
        assert!(matches!(read(Broken), Err(CheckpointError::Io(_))));
    }
}
