//! The stream of what happens to volumes: they come, grow and go, and where they lie in the line space is decided anew.

use larder_base::Nanos;
use larder_format::block::BlockSuperblock;
use larder_format::block::superblock::MAX_NAME;

use super::digest::{Answers, Digest};
use super::tape::{Again, BlockTape, Replayed, StreamReader, unknown};
use crate::block::volumes::{
    CannotCome, CannotGrow, Coming, Found, Growth, TakenUp, grow, put_aside, take_up,
};
use larder_format::recording::bytes::put;
use larder_format::recording::{BadRecord, Cursor};

const COMES: u8 = 0;
const GROWS: u8 = 1;
const GOES: u8 = 2;

/// A volume that came, with what was found out or configured beforehand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
    /// Its store is as the cache left it.
    pub unchanged: bool,
    /// Its share: lines that others leave it, and how many it may have at most.
    pub share: (u64, Option<u64>),
    /// The stream of its admission; `None` if it was refused.
    pub stream: Option<u16>,
}

pub(super) fn put_name(out: &mut Vec<u8>, name: &str) {
    put(out, name.len() as u64);
    out.extend_from_slice(name.as_bytes());
}

pub(super) fn take_name(c: &mut Cursor<'_>) -> Result<String, BadRecord> {
    let len = c.at_most(MAX_NAME as u64, "length of a volume's name")?;
    let bytes = c.take(len as usize, "name of a volume")?;
    let (what, must) = ("the length of a volume's name", "that of UTF-8");
    let bad = |_| BadRecord::Value { what, value: len, must };
    std::str::from_utf8(bytes).map(str::to_owned).map_err(bad)
}

/// A number that may be missing.
fn put_most(out: &mut Vec<u8>, most: Option<u64>) {
    put(out, most.is_some().into());
    put(out, most.unwrap_or(0));
}

fn take_most(c: &mut Cursor<'_>, what: &'static str) -> Result<Option<u64>, BadRecord> {
    let is = c.at_most(1, what)? == 1;
    let most = c.varint(what)?;
    Ok(is.then_some(most))
}

fn note_taken(outcome: &Result<TakenUp, CannotCome>) -> Digest {
    let mut digest = Digest::default();
    match outcome {
        Ok(taken) => {
            let found = match taken.found {
                Found::New => 0,
                Found::Warm => 1,
                Found::Changed => 2,
                Found::Grown => 3,
            };
            let (first, groups) = taken.former.unwrap_or((u64::MAX, 0));
            digest.all(&[found, taken.volume.first_group, taken.volume.groups, first, groups]);
        }
        Err(CannotCome::Shrunk(had)) => digest.all(&[16, *had]),
        Err(CannotCome::TooMany(_)) => digest.add(17),
        Err(CannotCome::NoRoom) => digest.add(18),
    }
    digest
}

fn note_growth(outcome: &Result<Growth, CannotGrow>) -> Digest {
    let mut digest = Digest::default();
    match outcome {
        Ok(Growth { first_group, groups, needed, moves_from: None }) => {
            digest.all(&[0, *first_group, *groups, *needed]);
        }
        Ok(Growth { first_group, groups, needed, moves_from: Some(from) }) => {
            digest.all(&[1, *first_group, *groups, *needed, *from]);
        }
        Err(CannotGrow::Unknown) => digest.add(16),
        Err(CannotGrow::Uneven) => digest.add(17),
        Err(CannotGrow::NoRoom) => digest.add(18),
    }
    digest
}

fn note_gone(stretch: Option<(u64, u64)>) -> Digest {
    let mut digest = Digest::default();
    let (first, groups) = stretch.unwrap_or((u64::MAX, 0));
    digest.all(&[first, groups]);
    digest
}

/// The tape of what happens to volumes. A decision is put down when it is in force, a refusal when it is said; what fails
/// in between (a store that cannot be made durable) has changed nothing, and is no record.
pub struct VolumesTape(Option<BlockTape>);

impl VolumesTape {
    /// Records from now on.
    pub fn new(tape: Option<BlockTape>) -> VolumesTape {
        VolumesTape(tape)
    }

    fn keep(&mut self, tag: u8, now: Nanos, digest: Digest, fields: impl FnOnce(&mut Vec<u8>)) {
        if let Some(tape) = &mut self.0
            && !tape.push(tag, now, fields, &Answers::default(), digest)
        {
            self.0 = None;
        }
    }

    /// A volume came, or could not.
    pub fn came(&mut self, now: Nanos, of: &Arrival, outcome: &Result<TakenUp, CannotCome>) {
        self.keep(COMES, now, note_taken(outcome), |out| {
            put_name(out, &of.name);
            put(out, of.bytes);
            put(out, of.unchanged.into());
            put(out, of.share.0);
            put_most(out, of.share.1);
            put_most(out, of.stream.map(u64::from));
        });
    }

    /// A volume grew to `bytes`, or could not.
    pub fn grew(
        &mut self,
        now: Nanos,
        name: &str,
        bytes: u64,
        outcome: &Result<Growth, CannotGrow>,
    ) {
        self.keep(GROWS, now, note_growth(outcome), |out| {
            put_name(out, name);
            put(out, bytes);
        });
    }

    /// A volume was put aside; `stretch` is what it keeps of the line space, and `durable` whether all of it was in its
    /// store.
    pub fn went(&mut self, now: Nanos, name: &str, durable: bool, stretch: Option<(u64, u64)>) {
        self.keep(GOES, now, note_gone(stretch), |out| {
            put_name(out, name);
            put(out, durable.into());
        });
    }

    /// Hands on what is on the tape.
    pub fn flush_chunk(&mut self) {
        if self.0.as_mut().is_some_and(|tape| !tape.flush_chunk()) {
            self.0 = None;
        }
    }

    /// Ends recording: hands on what is on the tape.
    pub fn end_recording(&mut self) {
        self.flush_chunk();
        self.0 = None;
    }
}

/// The list of volumes as it is decided again.
pub struct ReplayedVolumes {
    superblock: BlockSuperblock,
}

impl ReplayedVolumes {
    /// As it was when the run began.
    pub(super) fn new(superblock: BlockSuperblock) -> ReplayedVolumes {
        ReplayedVolumes { superblock }
    }

    /// Reads the next record of the stream, decides again, and says what was decided then and now.
    ///
    /// # Errors
    /// A record that makes no sense.
    pub fn replay(&mut self, reader: &mut StreamReader<'_>) -> Replayed {
        let begun = reader.begin()?;
        let (c, sb) = (&mut reader.cursor, &mut self.superblock);
        let name = take_name(c)?;
        if name.is_empty() {
            let what = "the length of a volume's name";
            return Err(BadRecord::Value { what, value: 0, must: "at least 1" });
        }
        let (input, digest) = match begun.tag {
            COMES => {
                let bytes = c.varint("bytes of a volume")?;
                let unchanged = c.at_most(1, "whether a store is unchanged")? == 1;
                let floor = c.varint("floor")?;
                let ceiling = take_most(c, "ceiling")?;
                let stream = take_most(c, "stream")?;
                let coming = Coming { name: name.clone(), bytes, unchanged, identity: [0; 64] };
                let how = if unchanged { "unchanged" } else { "not known to be unchanged" };
                let most = ceiling.map_or_else(String::new, |c| c.to_string());
                let of = stream.map_or_else(String::new, |s| format!(", admission in stream {s}"));
                let input = format!(
                    "volume '{name}' of {bytes} bytes comes, its store {how}, its share {floor}..{most} lines{of}"
                );
                (input, note_taken(&take_up(sb, &coming)))
            }
            GROWS => {
                let bytes = c.varint("bytes of a volume")?;
                let input = format!("volume '{name}' grows to {bytes} bytes");
                (input, note_growth(&grow(sb, &name, bytes, [0; 64])))
            }
            GOES => {
                let durable = c.at_most(1, "whether a volume is durable")? == 1;
                let how = if durable { "durable" } else { "not all of it durable" };
                let input = format!("volume '{name}' goes, {how}");
                (input, note_gone(put_aside(sb, &name, [0; 64])))
            }
            other => return Err(unknown(other)),
        };
        let ended = reader.end()?;
        let (nanos, replayed) = (begun.now.0, digest.finish());
        Ok(Again { nanos, input, recorded: ended.digest, replayed })
    }
}
