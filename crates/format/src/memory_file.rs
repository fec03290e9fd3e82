//! The files that `-e` keeps: what was in DRAM at a clean stop, and beside it, in a file of its own, what that belongs to.
//!
//! ```text
//! FILE        0   8  magic "LARDERMF"                  object   0   1  1
//!             8   4  CRC-32C of bytes 12..44                    1   1  key length
//!            12   4  format version, 1                          2   1  state: rank, then bits fetched, stale, won, survivor
//!            16  16  id of this file                            3   1  zero
//!            32   8  run that wrote it                          4   2  application
//!            40   4  number of application names                6   2  zero
//!            44      names: length u8, bytes                    8   4  client flags
//!                    CRC-32C                                   12   4  expiry, Unix seconds
//!                                                              16   8  CAS unique
//! end         0   1  2                                         24   4  age, milliseconds
//!             1   7  zero                                      28   4  idle, milliseconds
//!             8   8  number of objects                         32   4  reads
//!            16      zero up to 52                             36  12  longest, first and last gap, milliseconds
//!            52   4  CRC-32C; nothing follows                  48   4  value length
//!                                                              52   4  CRC-32C of the above
//! FILE.meta   0   8  magic "LARDERMM"                          56      key, value
//!             8   4  CRC-32C of bytes 12..120                          CRC-32C
//!            12   4  format version, 1
//!            16  16  id of FILE          48  16  UUID of the flash, zero without
//!            32   8  run                 64   8  when it was written, Unix seconds
//!            40   8  CAS base            72   8  flush that is announced, Unix seconds, or zero
//!            80   8  objects             88   8  bytes of FILE     96  8  time of the last flush    104  16  zero
//! ```
//!
//! Every checksum of FILE starts from the one before it, so objects cannot be swapped, nor come from another file. An object is
//! handed out when it has been checked; what follows may be damaged all the same. Each object was right when FILE was
//! written: what was read before the damage can be used.

use std::io::{self, Read, Write};

use crate::le;
use crate::superblock::Uuid;

/// What FILE begins with.
pub const MAGIC: [u8; 8] = *b"LARDERMF";
/// What FILE.meta begins with.
pub const META_MAGIC: [u8; 8] = *b"LARDERMM";
/// The version of both.
pub const VERSION: u32 = 1;
/// Bytes of FILE.meta.
pub const META_LEN: usize = 120;
/// The most applications whose names a file can have.
pub const MAX_NAMES: u32 = 4096;

const HEADER_LEN: usize = 44;
const OBJECT_LEN: usize = 56;
const OBJECT: u8 = 1;
const END: u8 = 2;

/// Why a file cannot be used, or not to its end.
#[derive(Debug, thiserror::Error)]
pub enum MemoryFileError {
    /// It could not be read.
    #[error("it could not be read: {0}")]
    Io(#[from] io::Error),
    /// Another kind of file.
    #[error("it is not what Larder writes there")]
    Foreign,
    /// Written by another version.
    #[error("it has format version {found}, this program reads version {VERSION}")]
    Version {
        /// What the file says.
        found: u32,
    },
    /// FILE is not the one that FILE.meta was written for.
    #[error("it is not the file that its .meta was written for")]
    Other,
    /// It ends too early.
    #[error("it ends at byte {at}, in the middle of {what}")]
    Truncated {
        /// Where.
        at: u64,
        /// In what.
        what: &'static str,
    },
    /// A checksum is wrong, or what it says cannot be.
    #[error("it is damaged before byte {at} ({what})")]
    Damaged {
        /// Where reading had come to.
        at: u64,
        /// What is wrong.
        what: &'static str,
    },
}

/// What a FILE belongs to: FILE.meta.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// The random number that FILE bears too.
    pub id: [u8; 16],
    /// The run that wrote it.
    pub run: u64,
    /// Where the CAS of that run began.
    pub cas_base: u64,
    /// Its flash; zero for none.
    pub flash: Uuid,
    /// When it was written, Unix seconds: the latest time that the run has seen.
    pub written: u64,
    /// When a flush that a client has announced comes due, Unix seconds; 0 for none.
    pub flush_at: u64,
    /// When everything was last flushed, Unix seconds; 0 for never.
    pub flushed_at: u64,
    /// Objects in FILE.
    pub objects: u64,
    /// Bytes of FILE.
    pub bytes: u64,
}

impl Meta {
    /// As bytes.
    pub fn encode(&self) -> [u8; META_LEN] {
        let mut out = [0; META_LEN];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &META_MAGIC);
        put(12, &VERSION.to_le_bytes());
        put(16, &self.id);
        put(32, &self.run.to_le_bytes());
        put(40, &self.cas_base.to_le_bytes());
        put(48, &self.flash.0);
        put(64, &self.written.to_le_bytes());
        put(72, &self.flush_at.to_le_bytes());
        put(80, &self.objects.to_le_bytes());
        put(88, &self.bytes.to_le_bytes());
        put(96, &self.flushed_at.to_le_bytes());
        let crc = crc32c::crc32c(&out[12..]);
        out[8..12].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// From bytes: all of the file, or its first `META_LEN + 1`.
    ///
    /// # Errors
    /// See [`MemoryFileError`].
    pub fn decode(bytes: &[u8]) -> Result<Meta, MemoryFileError> {
        if !bytes.starts_with(&META_MAGIC) {
            return Err(MemoryFileError::Foreign);
        }
        let at = bytes.len() as u64;
        if bytes.len() < META_LEN {
            return Err(MemoryFileError::Truncated { at, what: "the description" });
        }
        if bytes.len() > META_LEN || le(&bytes[8..12]) as u32 != crc32c::crc32c(&bytes[12..]) {
            return Err(MemoryFileError::Damaged { at, what: "the description" });
        }
        let found = le(&bytes[12..16]) as u32;
        if found != VERSION {
            return Err(MemoryFileError::Version { found });
        }
        let word = |at: usize| le(&bytes[at..at + 8]);
        let id = |at: usize| {
            let mut id = [0; 16];
            id.copy_from_slice(&bytes[at..at + 16]);
            id
        };
        Ok(Meta {
            id: id(16),
            run: word(32),
            cas_base: word(40),
            flash: Uuid(id(48)),
            written: word(64),
            flush_at: word(72),
            objects: word(80),
            bytes: word(88),
            flushed_at: word(96),
        })
    }
}

/// An object as FILE has it. Times are milliseconds before the file was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Object<'a> {
    /// The key, 1 to 255 bytes.
    pub key: &'a [u8],
    /// The value.
    pub value: &'a [u8],
    /// Rank in the lowest two bits, then fetched, stale, won, survivor, in this order.
    pub state: u8,
    /// The application's number; its name is in the file.
    pub app: u16,
    /// Client flags.
    pub flags: u32,
    /// Expiry, Unix seconds.
    pub expiry: u32,
    /// CAS unique.
    pub cas: u64,
    /// Since it was written.
    pub age: u32,
    /// Since the last access.
    pub idle: u32,
    /// Reads since it was written.
    pub reads: u32,
    /// Between two reads at most; from the write to the first; between the last two.
    pub gaps: [u32; 3],
}

/// Bits of [`Object::state`] that mean something.
pub const STATE_BITS: u8 = 0x3f;

/// Writes a FILE.
#[derive(Debug)]
pub struct MemoryFileWriter<W> {
    out: W,
    chain: u32,
    objects: u64,
    bytes: u64,
}

impl<W: Write> MemoryFileWriter<W> {
    /// Begins a file. `names` are the applications' from number 1 on; longer ones than 255 bytes are cut, which no prefix is.
    ///
    /// # Errors
    /// Of `out`.
    pub fn create<'n>(
        out: W,
        id: [u8; 16],
        run: u64,
        names: impl IntoIterator<Item = &'n [u8]>,
    ) -> io::Result<MemoryFileWriter<W>> {
        let (mut list, mut count) = (Vec::new(), 0u32);
        for name in names.into_iter().take(MAX_NAMES as usize) {
            let name = &name[..name.len().min(255)];
            list.push(name.len() as u8);
            list.extend_from_slice(name);
            count += 1;
        }
        let mut header = [0; HEADER_LEN];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(12, &VERSION.to_le_bytes());
        put(16, &id);
        put(32, &run.to_le_bytes());
        put(40, &count.to_le_bytes());
        let chain = crc32c::crc32c(&header[12..]);
        header[8..12].copy_from_slice(&chain.to_le_bytes());
        let mut writer = MemoryFileWriter { out, chain, objects: 0, bytes: 0 };
        writer.put(&header)?;
        writer.checked(&[&list])?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.bytes += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    /// Some bytes and their checksum.
    fn checked(&mut self, pieces: &[&[u8]]) -> io::Result<()> {
        for piece in pieces {
            self.chain = crc32c::crc32c_append(self.chain, piece);
            self.put(piece)?;
        }
        let chain = self.chain.to_le_bytes();
        self.put(&chain)
    }

    /// Writes an object.
    ///
    /// # Errors
    /// Of what it is written to; also for a key or a value that is too long.
    pub fn object(&mut self, o: &Object<'_>) -> io::Result<()> {
        let too_long = || io::Error::other("a key or a value is too long to be kept");
        let key_len = u8::try_from(o.key.len()).map_err(|_| too_long())?;
        let value_len = u32::try_from(o.value.len()).map_err(|_| too_long())?;
        let mut head = [0; OBJECT_LEN - 4];
        let mut put = |at: usize, bytes: &[u8]| head[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &[OBJECT, key_len, o.state & STATE_BITS]);
        put(4, &o.app.to_le_bytes());
        put(8, &o.flags.to_le_bytes());
        put(12, &o.expiry.to_le_bytes());
        put(16, &o.cas.to_le_bytes());
        put(24, &o.age.to_le_bytes());
        put(28, &o.idle.to_le_bytes());
        put(32, &o.reads.to_le_bytes());
        for (i, gap) in o.gaps.iter().enumerate() {
            put(36 + 4 * i, &gap.to_le_bytes());
        }
        put(48, &value_len.to_le_bytes());
        self.checked(&[&head])?;
        self.checked(&[o.key, o.value])?;
        self.objects += 1;
        Ok(())
    }

    /// Writes the end; the number of objects and of bytes. The caller flushes and syncs what comes back.
    ///
    /// # Errors
    /// Of what it is written to.
    pub fn finish(mut self) -> io::Result<(W, u64, u64)> {
        let mut end = [0; OBJECT_LEN - 4];
        end[0] = END;
        end[8..16].copy_from_slice(&self.objects.to_le_bytes());
        self.checked(&[&end])?;
        Ok((self.out, self.objects, self.bytes))
    }
}

/// Reads a FILE, in memory of its largest object, or of `largest` bytes if that is less.
#[derive(Debug)]
pub struct MemoryFileReader<R> {
    input: R,
    chain: u32,
    at: u64,
    names: Vec<Vec<u8>>,
    largest: usize,
    buffer: Vec<u8>,
    objects: u64,
    ended: bool,
}

/// What [`MemoryFileReader::next_object`] comes to.
#[derive(Debug, PartialEq, Eq)]
pub enum Next<'a> {
    /// An object.
    Object(Object<'a>),
    /// An object with more bytes of key and value than the reader was told to take: it has been checked, and is left out.
    TooLarge,
    /// The end: the whole file has been checked, and nothing follows.
    End,
}

impl<R: Read> MemoryFileReader<R> {
    /// Reads the head of the file that `meta` was written for. Objects of more than `largest` bytes of key and value are left
    /// out.
    ///
    /// # Errors
    /// See [`MemoryFileError`].
    pub fn open(
        input: R,
        meta: &Meta,
        largest: usize,
    ) -> Result<MemoryFileReader<R>, MemoryFileError> {
        let mut reader = MemoryFileReader {
            input,
            chain: 0,
            at: 0,
            names: Vec::new(),
            largest,
            buffer: Vec::new(),
            objects: 0,
            ended: false,
        };
        let mut header = [0; HEADER_LEN];
        reader.fill(&mut header[..8], "the head")?;
        if header[..8] != MAGIC {
            return Err(MemoryFileError::Foreign);
        }
        reader.fill(&mut header[8..], "the head")?;
        reader.chain = crc32c::crc32c(&header[12..]);
        if le(&header[8..12]) as u32 != reader.chain {
            return Err(reader.damaged("the head"));
        }
        let found = le(&header[12..16]) as u32;
        if found != VERSION {
            return Err(MemoryFileError::Version { found });
        }
        if header[16..32] != meta.id || le(&header[32..40]) != meta.run {
            return Err(MemoryFileError::Other);
        }
        let count = le(&header[40..44]) as u32;
        if count > MAX_NAMES {
            return Err(reader.damaged("too many applications"));
        }
        for _ in 0..count {
            let mut name = [0; 256];
            reader.fill(&mut name[..1], "the applications")?;
            let len = usize::from(name[0]);
            reader.fill(&mut name[1..=len], "the applications")?;
            reader.chain = crc32c::crc32c_append(reader.chain, &name[..=len]);
            reader.names.push(name[1..=len].to_vec());
        }
        reader.check("the applications")?;
        Ok(reader)
    }

    /// The applications' names from number 1 on.
    pub fn names(&self) -> impl Iterator<Item = &[u8]> {
        self.names.iter().map(|n| &n[..])
    }

    /// Bytes read so far.
    pub fn position(&self) -> u64 {
        self.at
    }

    /// The next object.
    ///
    /// # Errors
    /// See [`MemoryFileError`]; what came before can be used.
    pub fn next_object(&mut self) -> Result<Next<'_>, MemoryFileError> {
        if self.ended {
            return Ok(Next::End);
        }
        let mut head = [0; OBJECT_LEN - 4];
        self.fill(&mut head, "an object")?;
        self.chain = crc32c::crc32c_append(self.chain, &head);
        self.check("an object")?;
        if head[0] == END {
            if le(&head[8..16]) != self.objects {
                return Err(self.damaged("objects are missing"));
            }
            if read_some(&mut self.input, &mut [0])? != 0 {
                return Err(self.damaged("something follows the end"));
            }
            self.ended = true;
            return Ok(Next::End);
        }
        let (key_len, value_len) = (usize::from(head[1]), le(&head[48..52]) as usize);
        if head[0] != OBJECT || key_len == 0 || head[2] & !STATE_BITS != 0 {
            return Err(self.damaged("an object that cannot be"));
        }
        let len = key_len + value_len;
        let fits = len <= self.largest;
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut left = len;
        buffer.clear();
        while left > 0 {
            // Room is made as bytes come, not as a length says.
            let (from, count) = (if fits { buffer.len() } else { 0 }, left.min(64 << 10));
            buffer.resize(from + count, 0);
            self.fill(&mut buffer[from..], "a value")?;
            self.chain = crc32c::crc32c_append(self.chain, &buffer[from..]);
            left -= count;
        }
        self.buffer = buffer;
        self.check("a value")?;
        self.objects += 1;
        if !fits {
            return Ok(Next::TooLarge);
        }
        let word = |at: usize| le(&head[at..at + 4]) as u32;
        Ok(Next::Object(Object {
            key: &self.buffer[..key_len],
            value: &self.buffer[key_len..],
            state: head[2],
            app: le(&head[4..6]) as u16,
            flags: word(8),
            expiry: word(12),
            cas: le(&head[16..24]),
            age: word(24),
            idle: word(28),
            reads: word(32),
            gaps: [word(36), word(40), word(44)],
        }))
    }

    /// Reads a checksum, which must be that of all before it.
    fn check(&mut self, what: &'static str) -> Result<(), MemoryFileError> {
        let mut crc = [0; 4];
        self.fill(&mut crc, what)?;
        if u32::from_le_bytes(crc) == self.chain { Ok(()) } else { Err(self.damaged(what)) }
    }

    fn fill(&mut self, out: &mut [u8], what: &'static str) -> Result<(), MemoryFileError> {
        let mut filled = 0;
        while filled < out.len() {
            let count = read_some(&mut self.input, &mut out[filled..])?;
            filled += count;
            self.at += count as u64;
            if count == 0 {
                return Err(MemoryFileError::Truncated { at: self.at, what });
            }
        }
        Ok(())
    }

    fn damaged(&self, what: &'static str) -> MemoryFileError {
        MemoryFileError::Damaged { at: self.at, what }
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

    fn meta() -> Meta {
        Meta {
            id: [7; 16],
            run: 99,
            cas_base: 1 << 60,
            flash: Uuid([3; 16]),
            written: 1_000_000,
            flush_at: 5,
            flushed_at: 6,
            objects: 3,
            bytes: 1234,
        }
    }

    /// Key, value, and the rest of an object.
    type Kept = (Vec<u8>, Vec<u8>, Object<'static>);

    fn sample(rng: &mut Rng) -> Vec<Kept> {
        (0..rng.below(8))
            .map(|i| {
                let key = vec![b'a' + i as u8; rng.range(1, 255) as usize];
                let len = [0, 1, 300, 70_000, 200_000][rng.below(5) as usize];
                let mut value = vec![0; len];
                rng.fill(&mut value);
                let mut word = || rng.next_u64() as u32;
                let rest = Object {
                    state: word() as u8 & STATE_BITS,
                    app: word() as u16,
                    flags: word(),
                    expiry: word(),
                    cas: u64::from(word()) << 20,
                    age: word(),
                    idle: word(),
                    reads: word(),
                    gaps: [word(), word(), word()],
                    ..Object::default()
                };
                (key, value, rest)
            })
            .collect()
    }

    fn write(objects: &[Kept]) -> Vec<u8> {
        let names: [&[u8]; 2] = [b"one", b"two"];
        let mut writer = MemoryFileWriter::create(Vec::new(), [7; 16], 99, names).unwrap();
        for (key, value, rest) in objects {
            writer.object(&Object { key, value, ..*rest }).unwrap();
        }
        let (bytes, count, len) = writer.finish().unwrap();
        assert_eq!((count, len), (objects.len() as u64, bytes.len() as u64));
        bytes
    }

    /// All objects, how many were too large, and how it ended.
    fn read(bytes: &[u8], largest: usize) -> (Vec<Kept>, usize, Result<(), MemoryFileError>) {
        let (mut all, mut too_large) = (Vec::new(), 0);
        let mut reader = match MemoryFileReader::open(bytes, &meta(), largest) {
            Err(e) => return (all, too_large, Err(e)),
            Ok(reader) => reader,
        };
        assert_eq!(reader.names().collect::<Vec<_>>(), [b"one", b"two"]);
        loop {
            match reader.next_object() {
                Err(e) => return (all, too_large, Err(e)),
                Ok(Next::End) => return (all, too_large, Ok(())),
                Ok(Next::TooLarge) => too_large += 1,
                Ok(Next::Object(o)) => {
                    let rest = Object { key: b"", value: b"", ..o };
                    all.push((o.key.to_vec(), o.value.to_vec(), rest));
                }
            }
        }
    }

    #[test]
    fn round_trip() {
        let mut rng = Rng::new(31);
        for _ in 0..60 {
            let objects = sample(&mut rng);
            let (all, too_large, end) = read(&write(&objects), usize::MAX);
            end.unwrap();
            assert_eq!((all, too_large), (objects, 0));
        }
    }

    #[test]
    fn what_is_too_large_is_passed_over_in_little_memory() {
        let objects: Vec<Kept> = [10, 1_000_000, 20]
            .iter()
            .map(|&n| (b"k".to_vec(), vec![1; n], Object::default()))
            .collect();
        let bytes = write(&objects);
        let (all, too_large, end) = read(&bytes, 100);
        end.unwrap();
        assert_eq!((all.len(), too_large), (2, 1));
        let mut reader = MemoryFileReader::open(&bytes[..], &meta(), 100).unwrap();
        while reader.next_object().unwrap() != Next::End {}
        assert!(reader.buffer.capacity() <= 128 << 10, "{}", reader.buffer.capacity());
    }

    #[test]
    fn truncated_at_every_byte_gives_what_was_whole_and_says_where() {
        let objects = sample(&mut Rng::new(3)).into_iter().map(|(k, mut v, r)| {
            v.truncate(50);
            (k, v, r)
        });
        let objects: Vec<Kept> = objects.collect();
        let bytes = write(&objects);
        for len in 0..bytes.len() {
            let (all, _, end) = read(&bytes[..len], 1 << 20);
            assert!(
                matches!(end, Err(MemoryFileError::Truncated { at, .. }) if at == len as u64),
                "{len}: {end:?}"
            );
            assert_eq!(all[..], objects[..all.len()]);
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(matches!(read(&longer, 1 << 20).2, Err(MemoryFileError::Damaged { .. })));
    }

    /// Whatever is changed: what is handed out is what was written, in its order, and the end is not believed.
    #[test]
    fn mutations_never_give_another_object() {
        let mut rng = Rng::new(32);
        for round in 0..400 {
            let objects = sample(&mut rng);
            let bytes = write(&objects);
            for _ in 0..10 {
                let mut bad = bytes.clone();
                for _ in 0..rng.range(1, 4) {
                    let at = rng.below(bad.len() as u64) as usize;
                    match rng.below(4) {
                        0 => bad[at] = bad[at].wrapping_add(1 + rng.below(255) as u8),
                        1 => bad.truncate(at.max(1)),
                        2 => {
                            let n = (rng.below(40) as usize).min(bad.len() - at);
                            rng.fill(&mut bad[at..at + n]);
                        }
                        _ => bad.insert(at, 0),
                    }
                }
                let (all, _, end) = read(&bad, 1 << 20);
                assert!(end.is_err() || bad == bytes, "round {round}");
                assert_eq!(all[..], objects[..all.len()], "round {round}");
            }
        }
    }

    #[test]
    fn another_file_is_refused_by_name() {
        let bytes = write(&sample(&mut Rng::new(5)));
        let open = |bytes: &[u8], m: &Meta| MemoryFileReader::open(bytes, m, 100).err().unwrap();
        for other in [Meta { id: [8; 16], ..meta() }, Meta { run: 98, ..meta() }] {
            assert!(matches!(open(&bytes, &other), MemoryFileError::Other));
        }
        assert!(matches!(open(b"something else", &meta()), MemoryFileError::Foreign));
        let mut newer = bytes.clone();
        newer[12] = 2;
        let crc = crc32c::crc32c(&newer[12..HEADER_LEN]);
        newer[8..12].copy_from_slice(&crc.to_le_bytes());
        assert!(matches!(open(&newer, &meta()), MemoryFileError::Version { found: 2 }));
    }

    #[test]
    fn the_description_is_whole_or_refused() {
        let bytes = meta().encode();
        assert_eq!(Meta::decode(&bytes).unwrap(), meta());
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Meta::decode(&bad).is_err(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            let foreign = matches!(Meta::decode(&bytes[..len]), Err(MemoryFileError::Foreign));
            assert_eq!(foreign, len < 8, "{len}");
            assert!(Meta::decode(&bytes[..len]).is_err());
        }
        assert!(Meta::decode(&[&bytes[..], b"x"].concat()).is_err());
        assert!(matches!(Meta::decode(b"Tmain\nKx y\n"), Err(MemoryFileError::Foreign)));
    }
}
