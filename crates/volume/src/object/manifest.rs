//! What lies in the object store, as bytes.
//!
//! Below the prefix:
//!
//! | object | what it is |
//! | --- | --- |
//! | `volume.json` | [`Manifest`]: the volume |
//! | `lease.json` | [`Lease`]: who may write |
//! | `chunks/XX/NNNNNNNNNNNN` | one chunk: its number in hexadecimal, in a folder by its lowest 8 bits |
//!
//! A chunk's object is its bytes and a [`Trailer`] of 32 bytes. An absent chunk, or one that is only a trailer, is all
//! zeroes; one that is shorter than the volume's chunks is followed by zeroes. The trailer makes every version of a chunk
//! another object, with another ETag, even if the bytes are those of an earlier one: a late duplicate of a request can thus
//! never pass for the version that it was meant to follow.

use serde::{Deserialize, Serialize};

/// Name of the manifest below the prefix.
pub(super) const MANIFEST: &str = "volume.json";
/// Name of the lease below the prefix.
pub(super) const LEASE: &str = "lease.json";
/// Name of the chunks' folder below the prefix.
pub(super) const CHUNKS: &str = "chunks";
/// A record longer than this is none of ours, bytes.
pub(crate) const RECORD_BYTES: u64 = 64 << 10;
/// Smallest and largest chunk, bytes.
pub const CHUNK_BYTES: (u32, u32) = (64 << 10, 16 << 20);
/// Chunks of a volume: their ETags are in memory.
pub const MAX_CHUNKS: u64 = 1 << 22;
/// Of this format; later ones are refused.
const FORMAT: u32 = 1;
/// What the records call themselves.
const KIND: &str = "larder block volume";

/// The volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Always the same text.
    kind: String,
    /// Version of the layout.
    format: u32,
    /// The volume's own number, 32 hexadecimal digits.
    pub volume: String,
    /// Bytes.
    pub size: u64,
    /// Bytes of a chunk.
    pub chunk: u32,
    /// Raised by every attachment that may write.
    pub generation: u64,
    /// The last one that did.
    pub changed: u64,
}

impl Manifest {
    /// A new volume's.
    ///
    /// # Errors
    /// What does not fit, and the remedy.
    pub fn new(volume: [u8; 16], size: u64, chunk: Option<u32>) -> Result<Manifest, String> {
        let chunk = chunk.unwrap_or_else(|| default_chunk(size));
        let manifest = Manifest {
            kind: KIND.into(),
            format: FORMAT,
            volume: volume.iter().map(|b| format!("{b:02x}")).collect(),
            size,
            chunk,
            generation: 0,
            changed: 0,
        };
        manifest.check()?;
        Ok(manifest)
    }

    /// The same volume with another size.
    ///
    /// # Errors
    /// What does not fit, and the remedy.
    pub fn resized(&self, size: u64) -> Result<Manifest, String> {
        let manifest = Manifest { size, ..self.clone() };
        manifest.check()?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), String> {
        let (least, most) = CHUNK_BYTES;
        if !self.chunk.is_power_of_two() || self.chunk < least || self.chunk > most {
            return Err(format!(
                "chunks of {} bytes: choose a power of two from {least} to {most}",
                self.chunk
            ));
        }
        if self.size == 0 || !self.size.is_multiple_of(512) {
            return Err(format!("a size of {} bytes: choose a multiple of 512", self.size));
        }
        let chunks = self.size.div_ceil(u64::from(self.chunk));
        if chunks > MAX_CHUNKS {
            return Err(format!(
                "{} bytes are {chunks} chunks of {} bytes, and {MAX_CHUNKS} are the most: choose larger chunks",
                self.size, self.chunk
            ));
        }
        Ok(())
    }

    /// From its bytes.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn decode(bytes: &[u8]) -> Result<Manifest, String> {
        /// What every version has: so that a later one is not called malformed.
        #[derive(Deserialize)]
        struct Head {
            kind: String,
            format: u32,
        }
        let head: Head = serde_json::from_slice(bytes)
            .map_err(|e| format!("its {MANIFEST} is not a volume's: {e}"))?;
        if head.kind != KIND {
            return Err(format!("its {MANIFEST} is not a volume's but a '{:.40}'", head.kind));
        }
        if head.format != FORMAT {
            return Err(format!(
                "its {MANIFEST} is of format {}, and this version of Larder knows {FORMAT}: use a newer one",
                head.format
            ));
        }
        let manifest: Manifest = serde_json::from_slice(bytes)
            .map_err(|e| format!("its {MANIFEST} is malformed: {e}"))?;
        manifest.check().map_err(|e| format!("its {MANIFEST} has {e}"))?;
        manifest.number().ok_or_else(|| format!("its {MANIFEST} has a malformed volume number"))?;
        Ok(manifest)
    }

    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }

    /// The volume's number.
    pub fn number(&self) -> Option<[u8; 16]> {
        let mut out = [0u8; 16];
        if self.volume.len() != 32 || !self.volume.is_ascii() {
            return None;
        }
        for (byte, digits) in out.iter_mut().zip(self.volume.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).ok()?;
            *byte = u8::from_str_radix(digits, 16).ok()?;
        }
        Some(out)
    }
}

/// 1 MiB, or what keeps a large volume at a million chunks.
fn default_chunk(size: u64) -> u32 {
    let wanted = (size >> 20).next_power_of_two().clamp(1 << 20, u64::from(CHUNK_BYTES.1));
    wanted as u32
}

/// Who may write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// For people: host and process.
    pub holder: String,
    /// What tells one attachment from another.
    pub nonce: u64,
    /// Raised with every renewal.
    pub sequence: u64,
    /// Not renewed for so long it is free, milliseconds.
    pub ttl_ms: u64,
    /// Let go in good order.
    pub free: bool,
    /// The holder's running system and its space of process numbers: who is in the same can see whether it lives.
    pub system: String,
    /// Its process.
    pub process: u32,
    /// When that was started, in the system's ticks.
    pub started: u64,
}

impl Lease {
    /// From its bytes.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn decode(bytes: &[u8]) -> Result<Lease, String> {
        serde_json::from_slice(bytes).map_err(|e| format!("its {LEASE} is malformed: {e}"))
    }

    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }
}

/// Bytes of a [`Trailer`].
pub const TRAILER_BYTES: usize = 32;
const TRAILER_MAGIC: [u8; 8] = *b"LARDERCK";

/// What stands at the end of each chunk's object: magic (8), generation (8), sequence (8), bytes before it (4), their
/// CRC-32C (4); numbers are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trailer {
    /// The attachment that wrote it.
    pub generation: u64,
    /// Counts its writes: with the generation, no two objects have the same.
    pub sequence: u64,
    /// Bytes before the trailer.
    pub len: u32,
    /// CRC-32C of them.
    pub sum: u32,
}

impl Trailer {
    /// Of `data`.
    pub fn of(data: &[u8], generation: u64, sequence: u64) -> Trailer {
        Trailer { generation, sequence, len: data.len() as u32, sum: crc32c::crc32c(data) }
    }

    /// As bytes.
    pub fn encode(&self) -> [u8; TRAILER_BYTES] {
        let mut out = [0u8; TRAILER_BYTES];
        out[..8].copy_from_slice(&TRAILER_MAGIC);
        out[8..16].copy_from_slice(&self.generation.to_le_bytes());
        out[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        out[24..28].copy_from_slice(&self.len.to_le_bytes());
        out[28..].copy_from_slice(&self.sum.to_le_bytes());
        out
    }

    /// From the end of an object.
    pub fn decode(object: &[u8]) -> Option<Trailer> {
        let bytes = object.get(object.len().checked_sub(TRAILER_BYTES)?..)?;
        let long = |at: usize| bytes[at..at + 8].try_into().ok().map(u64::from_le_bytes);
        let short = |at: usize| bytes[at..at + 4].try_into().ok().map(u32::from_le_bytes);
        if bytes[..8] != TRAILER_MAGIC {
            return None;
        }
        Some(Trailer {
            generation: long(8)?,
            sequence: long(16)?,
            len: short(24)?,
            sum: short(28)?,
        })
    }

    /// The bytes of a whole object, if they are those that were written.
    pub fn check(object: &[u8]) -> Option<(&[u8], Trailer)> {
        let trailer = Trailer::decode(object)?;
        let data = &object[..object.len() - TRAILER_BYTES];
        (data.len() == trailer.len as usize && crc32c::crc32c(data) == trailer.sum)
            .then_some((data, trailer))
    }
}

/// The name of a chunk's object below the prefix.
pub(super) fn chunk_name(chunk: u64) -> String {
    format!("{CHUNKS}/{:02x}/{chunk:012x}", chunk & 0xff)
}

/// The chunk of that name below the prefix; `None` for what is not a chunk's name.
pub(super) fn chunk_of(name: &str) -> Option<u64> {
    let digits = name.rsplit('/').next()?;
    let chunk = u64::from_str_radix(digits, 16).ok()?;
    (chunk_name(chunk) == name).then_some(chunk)
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_base::Rng;

    #[test]
    fn manifests() {
        let manifest = Manifest::new([0xab; 16], 10 << 30, None).unwrap();
        assert_eq!(manifest.chunk, 1 << 20);
        assert_eq!(Manifest::decode(&manifest.encode()).unwrap(), manifest);
        assert_eq!(manifest.number(), Some([0xab; 16]));
        assert_eq!(Manifest::new([1; 16], 8 << 40, None).unwrap().chunk, 8 << 20);
        for (size, chunk, what) in [
            (0, None, "a multiple of 512"),
            (513, None, "a multiple of 512"),
            (1 << 30, Some(3 << 20), "a power of two"),
            (1 << 30, Some(32 << 20), "a power of two"),
            (1 << 40, Some(64 << 10), "larger chunks"),
        ] {
            let error = Manifest::new([1; 16], size, chunk).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
        let text = String::from_utf8(manifest.encode()).unwrap();
        for (from, to, what) in [
            ("\"format\": 1", "\"format\": 2", "use a newer one"),
            ("larder block", "other", "is not a volume's"),
            ("1048576", "1048577", "a power of two"),
            ("abab", "xxxx", "volume number"),
            ("\"size\"", "\"sizes\"", "malformed"),
            ("{", "", "is not a volume's"),
        ] {
            let error = Manifest::decode(text.replacen(from, to, 1).as_bytes()).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
    }

    #[test]
    fn trailers() {
        let data = b"some bytes".to_vec();
        let trailer = Trailer::of(&data, 7, 9);
        let mut object = data.clone();
        object.extend(trailer.encode());
        assert_eq!(Trailer::check(&object), Some((&data[..], trailer)));
        for at in 0..object.len() {
            let mut other = object.clone();
            other[at] ^= 1;
            // Generation and sequence are not covered: ETags tell those apart.
            let covered = !(data.len() + 8..data.len() + 24).contains(&at);
            assert_eq!(Trailer::check(&other).is_none(), covered, "{at}");
            assert_eq!(Trailer::check(&object[..at]), None);
        }
    }

    #[test]
    fn names() {
        for chunk in [0, 1, 255, 256, 0xabcdef, MAX_CHUNKS] {
            assert_eq!(chunk_of(&chunk_name(chunk)), Some(chunk));
        }
        for name in ["", "chunks", "chunks/00/1", "chunks/01/000000000000", "x/00/000000000000"] {
            assert_eq!(chunk_of(name), None, "{name}");
        }
    }

    /// Whatever is found in a bucket, it is refused or it holds.
    #[test]
    fn mutated_records() {
        let mut rng = Rng::new(5);
        let manifest = Manifest::new([3; 16], 1 << 30, None).unwrap().encode();
        let lease = Lease {
            holder: "h".into(),
            nonce: 1,
            sequence: 2,
            ttl_ms: 3,
            free: false,
            system: "s".into(),
            process: 4,
            started: 5,
        };
        let mut kept = 0;
        for _ in 0..4_000 {
            for text in [&manifest, &lease.encode()] {
                let mut text = text.clone();
                for _ in 0..rng.range(1, 4) {
                    let at = rng.below(text.len() as u64) as usize;
                    match rng.below(3) {
                        0 => text[at] = rng.next_u64() as u8,
                        1 => drop(text.remove(at)),
                        _ => text.insert(at, b"{}[]\",:0123456789"[rng.below(17) as usize]),
                    }
                }
                if let Ok(found) = Manifest::decode(&text) {
                    assert!(found.size.div_ceil(u64::from(found.chunk)) <= MAX_CHUNKS);
                    kept += 1;
                }
                let _ = Lease::decode(&text);
                let _ = Trailer::check(&text);
                let _ = chunk_of(&String::from_utf8_lossy(&text));
            }
        }
        assert!(kept > 10);
    }
}
