//! The file that a clean stop leaves: what DRAM knew of the flash, so that the next start is warm.
//!
//! ```text
//! header    0   8  magic "LARDERCP"                      section    0   4  kind
//!           8   4  CRC-32C of bytes 12..72                          4   4  id (a shard's number, or 0)
//!          12   4  format version, 3                                8   8  number of words
//!          16  16  UUID of the flash                               16   4  CRC-32C of the above
//!          32   8  epoch of the run that stopped                   20      blocks of up to 8,192 words (below)
//!          40   8  device size
//!          48   4  segment size
//!          52   2  number of segments                   end             a section of kind 0xffff_ffff, id = number
//!          54   2  zero                                                 of sections, words = their words, no blocks;
//!          56   8  when it was written, Unix seconds                    nothing follows
//!          64   8  run: the random number that the run drew at its start
//!
//! block     0   4  number of blocks before this one whose words are all zero: they are left out
//!           4      a bit for each line of 8 words, those in use; then the words of these lines; the other words are zero
//!                  (none of this after the last block that is in use)
//!                  CRC-32C of all that
//! ```
//!
//! In version 2, which is read too, a block is its words and their CRC-32C. What a checkpoint holds is a hash table, mostly
//! empty at first: an empty one of gigabytes is a few bytes.
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
/// The version that this code writes. It reads version 2 too. Version 1 did not say of which run it is, so it proves nothing.
pub const VERSION: u32 = 3;
const DENSE: u32 = 2;
/// Words of a whole block: 64 KiB.
pub const BLOCK_WORDS: usize = 8192;
/// Words that a bit of a block stands for.
const LINE_WORDS: usize = 8;
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
    #[error(
        "the checkpoint has version {found}, this program reads versions {DENSE} and {VERSION}"
    )]
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
    /// Of another line of runs, which began with a copy.
    #[error("the checkpoint is of another run than the one that used the flash last")]
    OtherRun,
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
    /// The run that stopped, by its number.
    pub epoch: u64,
    /// The same by the random number that it drew.
    pub run: u64,
    /// The division of the flash.
    pub geometry: Geometry,
}

/// Writes a checkpoint. Writes are of a block each, up to 64 KiB; of what is hardly used, a few bytes.
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
        put(64, &identity.run.to_le_bytes());
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
        let (mut left, mut empty) = (len, 0);
        let mut block = Vec::with_capacity(BLOCK_WORDS);
        let mut bytes = Vec::with_capacity(BLOCK_WORDS * 8 + BLOCK_WORDS / LINE_WORDS / 8 + 8);
        while left > 0 {
            let count = left.min(BLOCK_WORDS as u64);
            block.clear();
            block.extend(words.by_ref().take(count as usize));
            assert!(block.len() as u64 == count, "as many words as were announced");
            left -= count;
            if block.iter().all(|&word| word == 0) {
                empty += 1;
            } else {
                self.block(std::mem::take(&mut empty), &block, &mut bytes)?;
            }
        }
        if empty > 0 {
            self.block(empty, &[], &mut bytes)?;
        }
        assert!(words.next().is_none(), "more words than the {len} announced");
        self.sections += 1;
        self.words += len;
        Ok(())
    }

    /// Writes a block after `empty` ones, by way of `bytes`.
    fn block(&mut self, empty: u32, words: &[u64], bytes: &mut Vec<u8>) -> io::Result<()> {
        bytes.clear();
        bytes.extend_from_slice(&empty.to_le_bytes());
        let used = |line: &[u64]| line.iter().any(|&word| word != 0);
        let lines = || words.chunks(LINE_WORDS);
        let mut bits = vec![0u8; lines().len().div_ceil(8)];
        for (i, _) in lines().enumerate().filter(|(_, line)| used(line)) {
            bits[i / 8] |= 1 << (i % 8);
        }
        bytes.extend_from_slice(&bits);
        for word in lines().filter(|line| used(line)).flatten() {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        self.chain = crc32c::crc32c_append(self.chain, bytes);
        bytes.extend_from_slice(&self.chain.to_le_bytes());
        self.out.write_all(bytes)
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
    version: u32,
    /// Words of the present section that have not been read.
    left: u64,
    /// Words before the block that were zero, and the block.
    zeros: u64,
    block: Vec<u64>,
    bytes: Vec<u8>,
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
            version: VERSION,
            left: 0,
            zeros: 0,
            block: Vec::new(),
            bytes: Vec::new(),
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
        reader.version = found;
        if ![DENSE, VERSION].contains(&found) {
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
        if le(&header[64..72]) != expected.run {
            return Err(CheckpointError::OtherRun);
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
            (0..self.zeros).for_each(|_| take(0));
            self.block.iter().for_each(|&word| take(word));
        }
        Ok(())
    }

    /// The same for words that are not zero, each with its number: for who has zeros already.
    pub fn read_used(&mut self, mut take: impl FnMut(u64, u64)) -> Result<(), CheckpointError> {
        let mut at = 0;
        while self.left > 0 {
            self.next_block()?;
            at += self.zeros;
            for &word in &self.block {
                if word != 0 {
                    take(at, word);
                }
                at += 1;
            }
        }
        Ok(())
    }

    fn next_block(&mut self) -> Result<(), CheckpointError> {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        let read = self.read_block(&mut bytes);
        self.bytes = bytes;
        read
    }

    /// Reads so many bytes to the end of `bytes`; returns where they begin.
    fn extend(&mut self, bytes: &mut Vec<u8>, count: usize) -> Result<usize, CheckpointError> {
        let at = bytes.len();
        bytes.resize(at + count, 0);
        self.fill(&mut bytes[at..], "a block")?;
        Ok(at)
    }

    fn read_block(&mut self, bytes: &mut Vec<u8>) -> Result<(), CheckpointError> {
        let block = BLOCK_WORDS as u64;
        self.zeros = 0;
        if self.version != DENSE {
            self.extend(bytes, 4)?;
            let empty = le(&bytes[..4]);
            if empty > self.left.div_ceil(block) {
                return Err(self.damaged("a block"));
            }
            self.zeros = (empty * block).min(self.left);
        }
        let count = (self.left - self.zeros).min(block) as usize;
        let lines = count.div_ceil(LINE_WORDS);
        let bits = match self.version {
            DENSE => vec![u8::MAX; lines.div_ceil(8)],
            _ => {
                let at = self.extend(bytes, lines.div_ceil(8))?;
                bytes[at..].to_vec()
            }
        };
        let is_used = |line: usize| bits[line / 8] & 1 << (line % 8) != 0;
        let words_of = |line: usize| (count - line * LINE_WORDS).min(LINE_WORDS);
        let used: usize = (0..lines).filter(|&line| is_used(line)).map(words_of).sum();
        let first = self.extend(bytes, used * 8)?;
        let end = self.extend(bytes, 4)?;
        self.chain = crc32c::crc32c_append(self.chain, &bytes[..end]);
        if le(&bytes[end..]) as u32 != self.chain {
            return Err(self.damaged("a block"));
        }
        let mut words = bytes[first..end].chunks_exact(8).map(le);
        self.block.clear();
        for line in 0..lines {
            let count = words_of(line);
            if is_used(line) {
                self.block.extend(words.by_ref().take(count));
            } else {
                self.block.resize(self.block.len() + count, 0);
            }
        }
        self.left -= self.zeros + count as u64;
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
        Identity {
            uuid: Uuid([4; 16]),
            epoch: 9,
            run: 77,
            geometry: Geometry::plan(64 << 20).unwrap(),
        }
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
                // All in use, hardly any, or none.
                let chance = [1.0, 0.0001, 0.0][rng.below(3) as usize];
                let word = |rng: &mut Rng| if rng.chance(chance) { rng.next_u64() } else { 0 };
                (rng.below(5) as u32, id, (0..len).map(|_| word(rng)).collect())
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

    /// What is not used takes no room, and whoever has zeros already is not handed them.
    #[test]
    fn what_is_empty_is_left_out() {
        let many = 5_000 * BLOCK_WORDS as u64;
        let mut writer = CheckpointWriter::create(Vec::new(), &identity(), 1234).unwrap();
        writer.section(1, 0, many, std::iter::repeat_n(0, many as usize)).unwrap();
        let one = many / 2 + 77;
        writer.section(2, 0, many, (0..many).map(|i| u64::from(i == one) * 9)).unwrap();
        let bytes = writer.finish().unwrap();
        assert!(bytes.len() < 1000, "{} bytes for 640 MB of nothing", bytes.len());
        let mut reader = CheckpointReader::open(&bytes[..], &identity()).unwrap();
        let mut used = Vec::new();
        while let Some(section) = reader.next_section().unwrap() {
            reader.read_used(|at, word| used.push((section.kind, at, word))).unwrap();
        }
        assert_eq!(used, [(2, one, 9)]);
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
        let section = SECTION_LEN + 4 + 2 + 800 + 4;
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
        assert!(matches!(other(|i| i.run = 78), CheckpointError::OtherRun));
        assert!(matches!(
            other(|i| i.geometry = Geometry::plan(65 << 20).unwrap()),
            CheckpointError::OtherGeometry
        ));
        assert!(matches!(
            read(&b"something else entirely"[..]),
            Err(CheckpointError::NotCheckpoint)
        ));
        let mut newer = bytes.clone();
        newer[12] = 4;
        let crc = crc32c::crc32c(&newer[12..HEADER_LEN]);
        newer[8..12].copy_from_slice(&crc.to_le_bytes());
        assert!(matches!(read(&newer[..]), Err(CheckpointError::Version { found: 4 })));
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
