//! The dirty data of a cache device that is not in use: whether it is whole, and a file of it. The stores are not asked, and nothing on the device
//! is written.
//!
//! What is dirty is what a start would find in the log. A store may have more of it than the log knows: a journal's last epoch, and a window that
//! was not noted.

mod export;

use std::collections::BTreeMap;
use std::ops::Range;

use larder_engine::block::writeback::overlay::{Holds, Overlay, Stretch};
use larder_engine::block::writeback::recovery::{Dirty, Recovered, Volume};
use larder_engine::block::writeback::void::Void;
use larder_engine::block::writeback::{Fault, scan};
use larder_format::block::BlockSuperblock;
use larder_format::block::superblock::WriteLogArea;
use larder_format::block::write_log::{Kind, pieces};
use larder_runtime::{AlignedBuf, Device as _, FlashDevice};
use serde::{Deserialize, Serialize};

pub use export::{ExportWish, Exported, Stretched, export};

/// Bytes that are read at a time.
const BATCH: u64 = 1 << 20;
/// What a read begins and ends at.
const UNIT: u64 = 4096;
/// Faults that are listed.
const MOST_LISTED: usize = 100;

const LOST: &str = "write these bytes anew while it is served, or export what is left and have the store recovered, which gives up the rest";
const COVERED: &str = "a later write covers it: nothing is lost if that comes to the store with it; if destaging stops there, take all by an export and give it up with a recovery of the store";
const GAP: &str =
    "export what came before them, then have the store recovered, which gives up all of it";
const DEVICE: &str = "the device fails: export what is dirty, or serve it until all is in the stores, before more is lost";

/// A volume of which the log may hold what its store lacks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DirtyVolume {
    /// Its name.
    pub name: String,
    /// Bytes that are dirty, each counted once.
    pub bytes: u64,
    /// Records that hold them, and those that these cover.
    pub records: u64,
    /// The first of them and the last, by sequence; none where there are none.
    pub sequences: Option<(u64, u64)>,
    /// Records are lost in the midst of others, or behind the last.
    pub gap: bool,
    /// Dirty bytes that cannot be read, or do not have their checksum.
    pub lost_bytes: u64,
}

/// Something that is wrong with dirty data.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DirtyFault {
    /// The volume; empty if it is not of one alone.
    pub volume: String,
    /// First byte in it; none where nobody can know which bytes it is.
    pub offset: Option<u64>,
    /// How many bytes.
    pub bytes: u64,
    /// Sequence of the record; 0 where it is none.
    pub sequence: u64,
    /// What is wrong.
    pub what: String,
    /// What to do.
    pub remedy: String,
}

/// What was found in a write log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DirtyReport {
    /// Bytes of payload that were read and compared with their checksums.
    pub looked_at: u64,
    /// Batches that were durable and are lost.
    pub damaged_batches: u64,
    /// Segments whose header is damaged. A power cut leaves one: that is no fault.
    pub damaged_segments: u64,
    /// Bytes of the log that the device did not give.
    pub unreadable_bytes: u64,
    /// The volumes of which it may hold what their stores lack.
    pub volumes: Vec<DirtyVolume>,
    /// How many faults there are.
    pub faulty: u64,
    /// The first of them.
    pub faults: Vec<DirtyFault>,
    /// It was not looked at to the end.
    pub interrupted: bool,
}

impl DirtyReport {
    fn fault(&mut self, fault: DirtyFault) {
        self.faulty += 1;
        if self.faults.len() < MOST_LISTED {
            self.faults.push(fault);
        }
    }
}

/// A write log as a start would find it.
struct Left<'a> {
    device: &'a FlashDevice,
    area: WriteLogArea,
    scanned: scan::Scan,
    found: Recovered,
    /// What was given up, by attachment number.
    voids: BTreeMap<u32, Void>,
    /// Bytes of the device, from `at` on.
    buffer: AlignedBuf,
    at: u64,
}

/// Bytes of a record, from its first; why they are lost, if they are.
struct PieceOf {
    range: Range<u64>,
    lost: Option<&'static str>,
}

impl<'a> Left<'a> {
    /// Reads the log; `None` where nothing may be dirty.
    fn read(device: &'a FlashDevice, sb: &BlockSuperblock) -> Option<Left<'a>> {
        let area = sb.write_log?;
        let written = sb.volumes.iter().filter_map(|v| v.write_back);
        let asked: Vec<(u32, u64)> =
            written.filter(|w| w.holds.may_be_dirty()).map(|w| (w.attachment, w.began)).collect();
        if asked.is_empty() {
            return None;
        }
        let mut read =
            |at: u64, out: &mut [u8]| device.read_at(at, out).map_err(|_| scan::ReadFailed);
        let mut scanned = scan::scan(&area, sb.uuid, &mut read);
        let found = scanned.recover(&asked, Fault::default());
        let written = sb.volumes.iter().filter_map(|v| v.write_back);
        let void = |attachment| sb.given_up_of(attachment);
        let voids =
            written.map(|w| (w.attachment, Void::new(w.cut, &void(w.attachment)))).collect();
        Some(Left { device, area, scanned, found, voids, buffer: AlignedBuf::zeroed(0), at: 0 })
    }

    fn volume(&self, attachment: u32) -> Volume {
        self.found.volumes.get(&attachment).cloned().unwrap_or_default()
    }

    /// What of it was given up.
    fn void(&self, attachment: u32) -> Void {
        self.voids.get(&attachment).cloned().unwrap_or_default()
    }

    /// Payload in the log's area, through a buffer: what is looked at lies in the order of the log.
    fn payload(&mut self, place: u64, len: u64) -> Option<&[u8]> {
        let (start, end) = (self.area.at + place, self.area.at + place + len);
        if start < self.at || end > self.at + self.buffer.len() as u64 {
            let area_end = self.area.at
                + u64::from(self.area.segments) * u64::from(self.area.geometry.bytes());
            let from = start / UNIT * UNIT;
            let least = end.next_multiple_of(UNIT);
            let to = (from + BATCH).min(area_end).max(least);
            if !(self.load(from, to) || self.load(from, least)) {
                return None;
            }
        }
        let skip = (start - self.at) as usize;
        self.buffer.get(skip..skip + len as usize)
    }

    fn load(&mut self, from: u64, to: u64) -> bool {
        let mut buffer = AlignedBuf::zeroed((to - from) as usize);
        let done = self.device.read_at(from, &mut buffer).is_ok();
        if !done {
            buffer = AlignedBuf::zeroed(0);
        }
        (self.buffer, self.at) = (buffer, from);
        done
    }

    /// Hears the 4 KiB pieces of a write that cover these bytes of it, and what they hold where that is what it should be.
    fn each_piece(
        &mut self,
        dirty: &Dirty,
        of: Range<u64>,
        mut each: impl FnMut(PieceOf, &[u8]) -> bool,
    ) -> bool {
        let record = dirty.entry.record;
        let sums = self.scanned.sums(&dirty.entry).to_vec();
        let cover = pieces::cover(of, record.length);
        let mut at = cover.start;
        while at < cover.end {
            let end = (at + pieces::PIECE as u64).min(cover.end);
            let range = at..end;
            let number = (at / pieces::PIECE as u64) as usize;
            let unreadable = record.flags.unreadable;
            let bytes = match unreadable {
                true => None,
                false => self.payload(dirty.entry.place + at, end - at),
            };
            let lost = match bytes {
                None => Some("it cannot be read"),
                Some(bytes) if pieces::check(&sums, number, bytes).is_err() => {
                    Some("it does not have its checksum")
                }
                Some(_) => None,
            };
            if !each(PieceOf { range, lost }, bytes.unwrap_or(&[])) {
                return false;
            }
            at = end;
        }
        true
    }
}

/// What is listed of a volume as unreadable, but for what was given up.
fn listed(volume: &Volume, void: &Void) -> Vec<Range<u64>> {
    if void.lists(volume.frontier) {
        return Vec::new();
    }
    let all = volume.unreadable.iter().map(|e| e.offset..e.offset + e.length);
    let all = all.map(|range| void.within_end(volume.frontier, range));
    all.filter(|range| !range.is_empty()).collect()
}

/// What of a volume is dirty: of each byte the last version, but for what was given up.
fn overlay(volume: &Volume, void: &Void) -> Overlay {
    let mut overlay = Overlay::default();
    for dirty in &volume.records {
        let record = &dirty.entry.record;
        let holds = match record.kind {
            Kind::Write => Holds::Bytes,
            Kind::Zero => Holds::Zeros,
            Kind::Trim => Holds::Trimmed,
            Kind::Mark | Kind::Frontier => continue,
        };
        let range = void.counts(record.sequence, record.offset..record.offset + record.length);
        overlay.show(range, record.sequence, holds);
    }
    overlay
}

/// Looks at the dirty data on a device that is not in use; `None` where nothing may be dirty. `go_on` hears how many bytes of how many were looked
/// at, and may say no.
pub(in crate::block) fn look(
    device: &FlashDevice,
    sb: &BlockSuperblock,
    go_on: &mut dyn FnMut(u64, u64) -> bool,
) -> Option<DirtyReport> {
    let mut left = Left::read(device, sb)?;
    let mut report = DirtyReport::default();
    let bytes = |all: &[Range<u64>]| all.iter().map(|range| range.end - range.start).sum();
    report.damaged_batches = bytes(&left.found.chain.damaged);
    report.unreadable_bytes = bytes(&left.scanned.unreadable);
    report.damaged_segments = left.scanned.damaged.len() as u64;
    let records = left.found.volumes.values().flat_map(|volume| &volume.records);
    let all = records.map(|dirty| dirty.entry.record.payload_bytes()).sum();
    for volume in &sb.volumes {
        let Some(written) = volume.write_back.filter(|w| w.holds.may_be_dirty()) else { continue };
        let mut dirty = DirtyVolume { name: volume.name.clone(), ..DirtyVolume::default() };
        let mut steps = |done| go_on(done, all);
        let of = written.attachment;
        look_at_volume(&mut left, of, &mut dirty, &mut report, &mut Vec::new(), &mut steps);
        report.volumes.push(dirty);
        if report.interrupted {
            return Some(report);
        }
    }
    if report.damaged_batches > 0 {
        let what =
            format!("batches that were durable are damaged or gone: {}", report.damaged_batches);
        let gap = report.volumes.iter().any(|v| v.gap);
        let remedy = match gap {
            true => "see what is said of the volumes".to_owned(),
            false => "no volume misses a write for it; flush the volumes while they are served, and see to the device".to_owned(),
        };
        report.fault(DirtyFault { what, remedy, ..DirtyFault::default() });
    }
    if report.unreadable_bytes > 0 {
        let what = format!("{} bytes of the write log cannot be read", report.unreadable_bytes);
        report.fault(DirtyFault { what, remedy: DEVICE.to_owned(), ..DirtyFault::default() });
    }
    Some(report)
}

/// `records` gets those of which something is lost that shows.
fn look_at_volume(
    left: &mut Left<'_>,
    attachment: u32,
    dirty: &mut DirtyVolume,
    report: &mut DirtyReport,
    records: &mut Vec<u64>,
    go_on: &mut dyn FnMut(u64) -> bool,
) {
    let volume = left.volume(attachment);
    let void = left.void(attachment);
    let shows = overlay(&volume, &void);
    dirty.bytes = shows.bytes();
    dirty.records = volume.records.len() as u64;
    let sequence = |dirty: &Dirty| dirty.entry.record.sequence;
    dirty.sequences = volume.records.first().map(sequence).zip(volume.records.last().map(sequence));
    dirty.gap = volume.gap;
    for one in &volume.records {
        if !go_on(report.looked_at) {
            report.interrupted = true;
            return;
        }
        let record = one.entry.record;
        if record.kind != Kind::Write || void.has(record.sequence) {
            continue;
        }
        let mut lost: Vec<(Range<u64>, &'static str)> = Vec::new();
        left.each_piece(one, 0..record.length, |piece, _| {
            if let Some(why) = piece.lost {
                match lost.last_mut() {
                    Some((range, of)) if range.end == piece.range.start && *of == why => {
                        range.end = piece.range.end;
                    }
                    _ => lost.push((piece.range, why)),
                }
            }
            true
        });
        report.looked_at += record.payload_bytes();
        for (range, why) in lost {
            let range = record.offset + range.start..record.offset + range.end;
            let mut seen = Vec::new();
            shows.look(range.clone(), |stretch| match stretch {
                Stretch::Dirty(d) if d.sequence == record.sequence => seen.push((d.at, d.len)),
                _ => {}
            });
            let fault = |at, bytes, remedy: &str| DirtyFault {
                volume: dirty.name.clone(),
                offset: Some(at),
                bytes,
                sequence: record.sequence,
                what: why.to_owned(),
                remedy: remedy.to_owned(),
            };
            if seen.is_empty() {
                report.fault(fault(range.start, range.end - range.start, COVERED));
            } else if records.last() != Some(&record.sequence) {
                records.push(record.sequence);
            }
            for (at, bytes) in seen {
                report.fault(fault(at, bytes, LOST));
                dirty.lost_bytes += bytes;
            }
        }
    }
    for lost in listed(&volume, &void) {
        report.fault(DirtyFault {
            volume: dirty.name.clone(),
            offset: Some(lost.start),
            bytes: lost.end - lost.start,
            sequence: 0,
            what: "it could not be read when it was to be destaged".to_owned(),
            remedy: LOST.to_owned(),
        });
        dirty.lost_bytes += lost.end - lost.start;
    }
    if volume.gap {
        report.fault(DirtyFault {
            volume: dirty.name.clone(),
            offset: None,
            bytes: 0,
            sequence: volume.last + 1,
            what: format!(
                "writes from number {} on are lost, of bytes that nobody knows",
                volume.last + 1
            ),
            remedy: GAP.to_owned(),
        });
    }
}

/// What is dirty of a volume behind a byte, and before it.
#[derive(Debug, Default)]
pub(super) struct Behind {
    /// Bytes behind it,
    pub beyond: u64,
    /// from the first to the last,
    pub range: Range<u64>,
    /// and before it.
    pub below: u64,
    /// Records are lost in the midst of others.
    pub gap: bool,
    /// The store has all up to here,
    pub frontier: u64,
    /// the last record,
    pub last: u64,
    /// and the number of the marker that the log knows.
    pub marker: u64,
    /// Where the furthest of the records ends that came behind an end that was given up before.
    pub furthest: u64,
}

/// Looks for what is dirty of the volume with this attachment number from `end` on.
pub(super) fn dirty_beyond(
    device: &FlashDevice,
    sb: &BlockSuperblock,
    attachment: u32,
    end: u64,
) -> Behind {
    let Some(left) = Left::read(device, sb) else { return Behind::default() };
    let volume = left.volume(attachment);
    let shows = overlay(&volume, &left.void(attachment));
    let written = sb.volumes.iter().filter_map(|v| v.write_back);
    let cut = written.filter(|w| w.attachment == attachment).find_map(|w| w.cut);
    let records = volume.records.iter().map(|dirty| dirty.entry.record);
    let later = records.filter(|record| cut.is_some_and(|cut| record.sequence > cut.last));
    let furthest = later.map(|record| record.offset + record.length).max().unwrap_or(0);
    let Volume { frontier, last, marker, gap, .. } = volume;
    let mut behind = Behind { gap, frontier, last, marker, furthest, ..Behind::default() };
    shows.look(end..u64::MAX, |stretch| {
        if let Stretch::Dirty(dirty) = stretch {
            if behind.beyond == 0 {
                behind.range.start = dirty.at;
            }
            behind.beyond += dirty.len;
            behind.range.end = dirty.at + dirty.len;
        }
    });
    behind.below = shows.bytes() - behind.beyond;
    behind
}

/// What of a volume cannot be read, and was not given up.
#[derive(Debug, Default)]
pub(super) struct Lost {
    /// Bytes that a reader would miss,
    pub bytes: u64,
    /// and dirty bytes that there are.
    pub dirty: u64,
    /// Records are lost in the midst of others.
    pub gap: bool,
    /// What was given up, if that is too.
    pub void: Void,
}

/// Reads all that is dirty of the volume with this attachment number.
pub(super) fn lost(device: &FlashDevice, sb: &BlockSuperblock, attachment: u32) -> Lost {
    let Some(mut left) = Left::read(device, sb) else { return Lost::default() };
    let volume = left.volume(attachment);
    let (mut dirty, mut report) = (DirtyVolume::default(), DirtyReport::default());
    let mut records = Vec::new();
    look_at_volume(&mut left, attachment, &mut dirty, &mut report, &mut records, &mut |_| true);
    let void = left.void(attachment);
    let (shows, listed) = (overlay(&volume, &void), listed(&volume, &void));
    // A record goes as a whole.
    let mut bytes = 0;
    for one in volume.records.iter().map(|dirty| dirty.entry.record) {
        if records.binary_search(&one.sequence).is_err() {
            continue;
        }
        shows.look(one.offset..one.offset + one.length, |stretch| match stretch {
            Stretch::Dirty(d) if d.sequence == one.sequence => bytes += d.len,
            _ => {}
        });
    }
    for range in &listed {
        shows.look(range.clone(), |stretch| match stretch {
            Stretch::Clean(_, len) => bytes += len,
            Stretch::Dirty(_) => {}
        });
    }
    let position = (!listed.is_empty()).then_some(volume.frontier);
    let mut void = void.with(records, position);
    void.let_go(volume.frontier);
    Lost { bytes, dirty: dirty.bytes, gap: volume.gap, void }
}
