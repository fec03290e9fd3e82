//! A volume's admission with the tape that records it.

use std::ops::Deref;

use larder_base::Nanos;
use larder_policy::block::{
    BlockAccess, BlockAdmission, BlockCandidate, BlockKind, BlockOp, Hints, LineId, Observed,
    Reason, Verdict, Victim, VolumeId,
};

use super::digest::{Answers, Digest};
use super::setup::{BlockRunSetup, VolumeSetup};
use super::tape::{Again, BlockTape, Replayed, StreamReader, unknown};
use super::volumes::{put_name, take_name};
use crate::block::api::Verdict as Said;
use larder_format::recording::bytes::put;
use larder_format::recording::{BadRecord, Cursor};

const OBSERVE: u8 = 0;
const JUDGE: u8 = 1;
const ADMIT: u8 = 2;
/// The first record of a volume that came later: what its admission is made for.
const BEGIN: u8 = 3;

fn op_and_kind(op: BlockOp, kind: BlockKind) -> u64 {
    let kind = match kind {
        BlockKind::Data => 0,
        BlockKind::Metadata => 1,
        BlockKind::Journal => 2,
        BlockKind::Unknown => 3,
    };
    u64::from(op == BlockOp::Write) << 2 | kind
}

fn take_op_and_kind(c: &mut Cursor<'_>) -> Result<(BlockOp, BlockKind), BadRecord> {
    let code = c.at_most(7, "operation and kind of an access")?;
    let op = if code & 4 == 0 { BlockOp::Read } else { BlockOp::Write };
    let kind = match code & 3 {
        0 => BlockKind::Data,
        1 => BlockKind::Metadata,
        2 => BlockKind::Journal,
        _ => BlockKind::Unknown,
    };
    Ok((op, kind))
}

fn put_access(out: &mut Vec<u8>, access: &BlockAccess) {
    put(out, access.volume.0.into());
    put(out, access.offset);
    put(out, access.bytes);
    put(out, op_and_kind(access.op, access.kind));
}

fn put_candidate(out: &mut Vec<u8>, c: &BlockCandidate) {
    put(out, c.line.volume.0.into());
    put(out, c.line.offset);
    put(out, op_and_kind(c.op, c.kind));
    let (start, end) = c.observed.sequential();
    put(out, start);
    put(out, end);
    put(out, c.observed.hints().number().into());
    match &c.victim {
        None => put(out, 0),
        Some(victim) => {
            put(out, 1 + op_and_kind(BlockOp::Read, victim.kind));
            put(out, victim.line.volume.0.into());
            put(out, victim.line.offset);
        }
    }
}

fn take_line(c: &mut Cursor<'_>) -> Result<LineId, BadRecord> {
    let volume = VolumeId(c.u32("volume")?);
    Ok(LineId { volume, offset: c.varint("offset")? })
}

fn take_candidate(c: &mut Cursor<'_>) -> Result<BlockCandidate, BadRecord> {
    let line = take_line(c)?;
    let (op, kind) = take_op_and_kind(c)?;
    let sequential = (c.varint("start of a stream")?, c.varint("end of a stream")?);
    let hints = Hints::of_number(c.at_most(Hints::MOST.into(), "hints of an access")? as u8);
    let observed = Observed::of(sequential, hints);
    let victim = match c.at_most(4, "kind of a victim")? {
        0 => None,
        code => {
            let kind =
                [BlockKind::Data, BlockKind::Metadata, BlockKind::Journal, BlockKind::Unknown]
                    [code as usize - 1];
            Some(Victim { line: take_line(c)?, kind })
        }
    };
    Ok(BlockCandidate { line, op, kind, observed, victim })
}

fn note_verdict(verdict: Verdict) -> Digest {
    let mut digest = Digest::default();
    digest.add(match verdict {
        Verdict::Admit => 0,
        Verdict::IfFree => u64::MAX,
        Verdict::Reject(reason) => {
            1 + Reason::ALL.iter().position(|&r| r == reason).unwrap_or(0) as u64
        }
    });
    digest
}

fn note_observed(observed: Observed) -> Digest {
    let mut digest = Digest::default();
    let (start, end) = observed.sequential();
    digest.all(&[start, end, observed.hints().number().into()]);
    digest
}

/// How large its tables are depends on the volume.
fn note_made(admission: &BlockAdmission) -> Digest {
    let mut digest = Digest::default();
    digest.add(admission.memory_bytes() as u64);
    digest
}

/// For what a stream of a volume that came later begins: its first record.
fn take_begin(reader: &mut StreamReader<'_>) -> Result<(u64, VolumeSetup, u32), BadRecord> {
    let begun = reader.begin()?;
    if begun.tag != BEGIN {
        return Err(unknown(begun.tag));
    }
    let c = &mut reader.cursor;
    let name = take_name(c)?;
    let (bytes, seed) = (c.varint("bytes of a volume")?, c.varint("seed")?);
    let ended = reader.end()?;
    Ok((begun.now.0, VolumeSetup { name, bytes, seed }, ended.digest))
}

/// Whose admission a stream is that begins with `reader`'s first record: of a volume that came later.
///
/// # Errors
/// Another record, or none that makes sense.
pub fn later_volume(reader: &mut StreamReader<'_>) -> Result<VolumeSetup, BadRecord> {
    take_begin(reader).map(|(_, of, _)| of)
}

/// Admission that records what it is asked, if it has a tape. To look at it, it is a [`BlockAdmission`].
pub struct RecordedAdmission {
    admission: BlockAdmission,
    tape: Option<Box<BlockTape>>,
}

impl Deref for RecordedAdmission {
    type Target = BlockAdmission;
    fn deref(&self) -> &BlockAdmission {
        &self.admission
    }
}

impl RecordedAdmission {
    /// Admission without a tape.
    pub fn new(admission: BlockAdmission) -> RecordedAdmission {
        RecordedAdmission { admission, tape: None }
    }

    /// Records from now on; admission must be new.
    pub fn record(&mut self, tape: BlockTape) {
        self.tape = Some(Box::new(tape));
    }

    /// The same of a volume that came later, of which the setup knows nothing.
    pub fn record_later(&mut self, tape: BlockTape, now: Nanos, of: &VolumeSetup) {
        self.tape = Some(Box::new(tape));
        let digest = note_made(&self.admission);
        self.keep(BEGIN, now, digest, |out| {
            put_name(out, &of.name);
            put(out, of.bytes);
            put(out, of.seed);
        });
    }

    /// Hands on what is on the tape.
    pub fn flush_chunk(&mut self) {
        if self.tape.as_mut().is_some_and(|tape| !tape.flush_chunk()) {
            self.tape = None;
        }
    }

    /// Ends recording: hands on what is on the tape.
    pub fn end_recording(&mut self) {
        self.flush_chunk();
        self.tape = None;
    }

    fn keep(&mut self, tag: u8, now: Nanos, digest: Digest, fields: impl FnOnce(&mut Vec<u8>)) {
        if let Some(tape) = &mut self.tape
            && !tape.push(tag, now, fields, &Answers::default(), digest)
        {
            self.tape = None;
        }
    }

    /// [`BlockAdmission::observe`].
    pub fn observe(&mut self, access: &BlockAccess) -> Observed {
        let observed = self.admission.observe(access);
        if self.tape.is_some() {
            let digest = note_observed(observed);
            self.keep(OBSERVE, access.now, digest, |out| put_access(out, access));
        }
        observed
    }

    /// [`BlockAdmission::judge`].
    pub fn judge(&mut self, candidate: &BlockCandidate) -> Verdict {
        let verdict = self.admission.judge(candidate);
        if self.tape.is_some() {
            let digest = note_verdict(verdict);
            self.keep(JUDGE, Nanos::ZERO, digest, |out| put_candidate(out, candidate));
        }
        verdict
    }

    /// [`BlockAdmission::admit`].
    pub fn admit(&mut self, candidate: &BlockCandidate) -> Verdict {
        let verdict = self.admission.admit(candidate);
        if self.tape.is_some() {
            let digest = note_verdict(verdict);
            self.keep(ADMIT, Nanos::ZERO, digest, |out| put_candidate(out, candidate));
        }
        verdict
    }

    /// What a shard is told of `candidate`, whose victim is not known: [`admit`](Self::admit), or where admission wants to compare it
    /// with its victim (`compete`) what it says until then.
    pub fn ask(&mut self, candidate: &BlockCandidate, compete: bool) -> Said {
        let verdict = if compete { self.judge(candidate) } else { self.admit(candidate) };
        if compete && !verdict.is_admit() {
            // There will be no comparison: this is the last that admission hears of the line.
            self.admit(candidate);
        }
        match verdict {
            Verdict::Admit if compete => Said::Compete,
            Verdict::Admit => Said::Admit,
            Verdict::IfFree => Said::IfFree,
            Verdict::Reject(_) => Said::Reject,
        }
    }

    /// What a shard is told of lines that are read ahead of one of which it was told `said`.
    pub fn ahead(&self, said: Said) -> Said {
        match (said, self.admission.judge_ahead()) {
            (Said::Admit, Verdict::IfFree) => Said::IfFree,
            (Said::Admit, Verdict::Reject(_)) => Said::Reject,
            (said, _) => said,
        }
    }

    /// [`BlockAdmission::count`]: a verdict that was somebody else's. Not recorded, since nothing depends on it.
    pub fn count(&mut self, verdict: Verdict) {
        self.admission.count(verdict);
    }

    /// Reads the first record of a stream of a volume that came later: its admission, and what was decided then and now.
    ///
    /// # Errors
    /// Another record, or one that makes no sense.
    pub fn replay_later(
        setup: &BlockRunSetup,
        reader: &mut StreamReader<'_>,
    ) -> Result<(RecordedAdmission, Again), BadRecord> {
        let (nanos, of, recorded) = take_begin(reader)?;
        let made = setup.admission_of(&of).map_err(|_| BadRecord::Value {
            what: "the bytes of a volume",
            value: of.bytes,
            must: "so many that tables of admission can be had for them",
        })?;
        let replayed = note_made(&made.admission).finish();
        let input = format!("admission of volume '{}' of {} bytes begins", of.name, of.bytes);
        Ok((made, Again { nanos, input, recorded, replayed }))
    }

    /// Reads the next record of a stream, asks the same, and says what was decided then and now.
    ///
    /// # Errors
    /// A record that makes no sense.
    pub fn replay(&mut self, reader: &mut StreamReader<'_>) -> Replayed {
        let begun = reader.begin()?;
        let c = &mut reader.cursor;
        let (input, digest) = match begun.tag {
            OBSERVE => {
                let volume = VolumeId(c.u32("volume")?);
                let (offset, bytes) = (c.varint("offset")?, c.varint("bytes")?);
                let (op, kind) = take_op_and_kind(c)?;
                let access = BlockAccess { volume, offset, bytes, op, kind, now: begun.now };
                (format!("{access:?}"), note_observed(self.admission.observe(&access)))
            }
            JUDGE | ADMIT => {
                let candidate = take_candidate(c)?;
                let verdict = match begun.tag {
                    JUDGE => self.admission.judge(&candidate),
                    _ => self.admission.admit(&candidate),
                };
                (format!("{candidate:?}"), note_verdict(verdict))
            }
            other => return Err(unknown(other)),
        };
        let ended = reader.end()?;
        let (nanos, replayed) = (begun.now.0, digest.finish());
        Ok(Again { nanos, input, recorded: ended.digest, replayed })
    }
}

#[cfg(test)]
mod tests {
    use larder_policy::block::BlockSetup;

    use super::*;

    /// A chain that compares lines with their victims: what it refuses before it comes to that is learnt of as well.
    #[test]
    fn admission_hears_of_lines_that_never_compete() {
        let config = "two_lbs+expected_reads(least=1000)".parse().unwrap();
        let setup = BlockSetup { line_bytes: 4096, lines: 64, backing_bytes: 1 << 30, seed: 1 };
        let mut admission = RecordedAdmission::new(BlockAdmission::new(&config, &setup).unwrap());
        let volume = VolumeId(0);
        let candidate = |n: u64, observed| BlockCandidate {
            line: LineId { volume, offset: n * 40_960 },
            op: BlockOp::Read,
            kind: BlockKind::Unknown,
            observed,
            victim: None,
        };
        for n in 0..20_000 {
            let (offset, bytes, now) = (n * 40_960, 4096, Nanos::ZERO);
            let (op, kind) = (BlockOp::Read, BlockKind::Unknown);
            let observed = admission.observe(&BlockAccess { volume, offset, bytes, op, kind, now });
            assert_eq!(admission.ask(&candidate(n, observed), true), Said::Reject);
        }
        assert_eq!(admission.verdicts().rejected(Reason::FewReads), 20_000, "each is counted once");
        let said = admission.explain(&candidate(30_000, Observed::default()));
        assert!(said.contains("its like was read 0.0") && !said.contains("supposed"), "{said}");
    }
}
