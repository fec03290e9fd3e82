//! Block admission and replacement on traces: what share of reads a cache serves, and what is written to flash for it.
//!
//! The policies are those of `larder block` ([`larder_policy::block`]), over a map of lines without data, devices or time:
//! several caches side by side in one pass over the trace. Written lines count as whole lines, and a write that allocates
//! needs no read, so what is compared is the decisions.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::str::FromStr;

use larder_engine::block::WriteMode;
use larder_policy::block::{
    BlockAccess, BlockAdmission, BlockAdmissionConfig, BlockAdmissionError, BlockCandidate,
    BlockKind, BlockOp, BlockSetup, EvictionBy, LineId, MOST_WAYS, Reason, Replacement, SlotPolicy,
    Verdict, Victim, VolumeId,
};
use larder_trace::{Class, Op, Request};
use serde::Serialize;

use crate::ssd::{Geometry, Keep, Ssd, VictimPolicy};

/// Of a read or write at most this much counts; no device takes more at once.
const MOST_REQUEST: u64 = 1 << 30;

/// Where a line may lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// In one set of so many slots, chosen by its address; `set:1` is direct-mapped.
    Set(u32),
    /// Anywhere.
    Full,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Set(1) => f.write_str("direct"),
            Placement::Set(ways) => write!(f, "set:{ways}"),
            Placement::Full => f.write_str("full"),
        }
    }
}

impl FromStr for Placement {
    type Err = String;

    fn from_str(text: &str) -> Result<Placement, String> {
        let ways = match text {
            "full" => return Ok(Placement::Full),
            "direct" => Some(1),
            _ => text.strip_prefix("set:").and_then(|w| w.parse::<u32>().ok()),
        };
        let ways = ways.filter(|w| (1..=MOST_WAYS).contains(w)).map(Placement::Set);
        ways.ok_or_else(|| format!("'{text}' is no placement: write direct, set:WAYS with 1 to {MOST_WAYS} ways, or full (sparse is in larder sim run)"))
    }
}

/// One cache of a study.
#[derive(Clone, Debug)]
pub struct BlockCacheSpec {
    /// Bytes of flash; rounded down to whole groups of lines.
    pub bytes: u64,
    /// Bytes of a line, a power of two.
    pub line_bytes: u32,
    /// Where lines lie.
    pub placement: Placement,
    /// Which line leaves.
    pub replacement: Replacement,
    /// Which line enters.
    pub admission: BlockAdmissionConfig,
    /// What writes do.
    pub writes: WriteMode,
    /// A drive under it, on which the cleaner has its say (Fusion-io's study).
    pub drive: Option<StudyDrive>,
    /// Bytes of the volumes, by which tables are sized where that matters; 0 if unknown.
    pub backing_bytes: u64,
    /// Seed of hashes.
    pub seed: u64,
}

impl BlockCacheSpec {
    /// Bytes of the tables that are made before the first request: 29 for each line, and those of the drive.
    pub fn table_bytes(&self) -> u64 {
        let lines = self.bytes / u64::from(self.line_bytes.max(1));
        // Two maps of four bytes, by logical and by physical page.
        let drive = self.drive.map_or(0.0, |d| 4.0 * (2.0 + d.over_provisioning));
        (lines as f64 * (29.0 + drive)) as u64
    }
}

/// A drive under a cache of a study: one page for each slot, mapped by a translation layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StudyDrive {
    /// Physical space beyond the cache's, as a share of it.
    pub over_provisioning: f64,
    /// Which super-block is cleaned.
    pub victim: VictimPolicy,
    /// Who evicts. With [`EvictionBy::Gc`] the cleaner copies lines that are among the hottest share of their group, and
    /// drops the others from the cache.
    pub eviction: EvictionBy,
}

/// What a cache did after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BlockOutcome {
    /// Lines read, by clients.
    pub read_lines: u64,
    /// Of them, in the cache.
    pub hit_lines: u64,
    /// Read requests.
    pub reads: u64,
    /// Of them, wholly in the cache.
    pub whole_hits: u64,
    /// Lines of metadata read, where the trace says which are.
    pub metadata_lines: u64,
    /// Of them, in the cache.
    pub metadata_hits: u64,
    /// Bytes that clients wrote.
    pub written_bytes: u64,
    /// Bytes written to flash.
    pub flash_bytes: u64,
    /// Pages that the drive was told to write, where there is one.
    pub drive_pages: u64,
    /// Pages that its cleaner copied.
    pub copied_pages: u64,
    /// Lines that its cleaner dropped.
    pub gc_dropped: u64,
    /// Lines admitted.
    pub admitted: u64,
    /// Lines of streams that took free slots, and displaced nothing.
    pub if_free: u64,
    /// Lines rejected as part of a stream.
    pub sequential: u64,
    /// Lines rejected for too few touches.
    pub few_touches: u64,
    /// Lines rejected for the one they would displace.
    pub not_hotter: u64,
    /// Lines rejected for the few reads expected of them.
    pub few_reads: u64,
    /// Bytes of DRAM for admission.
    pub admission_memory: u64,
}

impl BlockOutcome {
    /// Share of reads that were wholly in the cache.
    pub fn hit_ratio(&self) -> f64 {
        self.whole_hits as f64 / self.reads.max(1) as f64
    }

    /// Share of lines read that were in the cache.
    pub fn line_hit_ratio(&self) -> f64 {
        self.hit_lines as f64 / self.read_lines.max(1) as f64
    }

    /// The same of metadata.
    pub fn metadata_hit_ratio(&self) -> f64 {
        self.metadata_hits as f64 / self.metadata_lines.max(1) as f64
    }

    /// Pages programmed for each that the drive was told to write: Fusion-io's flash-level write amplification. `None`
    /// without a drive.
    pub fn dlwa(&self) -> Option<f64> {
        let all = (self.drive_pages + self.copied_pages) as f64;
        (self.drive_pages > 0).then(|| all / self.drive_pages as f64)
    }

    /// Bytes written to flash for each byte that clients wrote: Fusion-io's cache-layer write amplification. Infinite for a
    /// trace without writes.
    pub fn clwa_of_writes(&self) -> f64 {
        self.flash_bytes as f64 / self.written_bytes as f64
    }
}

/// Hashes the few bytes of a line's number (the finalizer of SplitMix64). Traces are no adversaries.
#[derive(Default)]
struct LineHasher(u64);

impl Hasher for LineHasher {
    fn finish(&self) -> u64 {
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.write_u64(u64::from(b));
        }
    }

    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(23) ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

fn hash_of(line: LineId) -> u64 {
    let mut h = LineHasher::default();
    h.write_u32(line.volume.0);
    h.write_u64(line.offset);
    h.finish()
}

/// The cleaner's question.
struct Cleaner<'a> {
    eviction: EvictionBy,
    policy: &'a SlotPolicy,
    bits: &'a [u8],
    hottest: u8,
    dropped: &'a mut Vec<u32>,
}

impl Keep for Cleaner<'_> {
    fn keep(&mut self, page: u32) -> bool {
        let EvictionBy::Gc { keep } = self.eviction else { return true };
        let hotness = f64::from(self.policy.hotness(self.bits, u64::from(page)));
        let kept = hotness > 0.0 && hotness > (1.0 - keep) * f64::from(self.hottest);
        if !kept {
            self.dropped.push(page);
        }
        kept
    }
}

/// A cache of lines without data. See the [module](self).
pub struct BlockCache {
    spec: BlockCacheSpec,
    line_shift: u32,
    map: HashMap<LineId, u32, BuildHasherDefault<LineHasher>>,
    held: Vec<Option<(LineId, BlockKind)>>,
    bits: Vec<u8>,
    policy: SlotPolicy,
    ways: u32,
    groups: u64,
    /// With full placement: slots that are free.
    free: Vec<u32>,
    admission: BlockAdmission,
    ssd: Option<Ssd>,
    /// What [`SlotPolicy::hotness`] says at most.
    hottest: u8,
    dropped: Vec<u32>,
    /// What admission had said when counting began: admitted, sequential, few touches, not hotter, into free slots, few reads.
    judged: [u64; 6],
    outcome: BlockOutcome,
    counting: bool,
}

impl BlockCache {
    /// An empty cache.
    ///
    /// # Errors
    /// When there is not room for one group of lines, the line is no power of two, there are 2^32 lines or more, or admission cannot be set up; with the remedy.
    pub fn new(spec: BlockCacheSpec) -> Result<BlockCache, String> {
        let line = spec.line_bytes;
        if !line.is_power_of_two() || !(512..=1 << 20).contains(&line) {
            return Err(format!(
                "a line of {line} bytes: it must be a power of two from 512 to 1 MiB"
            ));
        }
        let ways = match spec.placement {
            Placement::Set(ways) => ways,
            Placement::Full => MOST_WAYS,
        };
        let groups = spec.bytes / u64::from(line) / u64::from(ways);
        let slots = groups * u64::from(ways);
        if slots == 0 || slots >= 1 << 32 {
            return Err(format!(
                "a cache of {} bytes has {slots} lines of {line} bytes in groups of {ways}: at least one group and fewer than 2^32 lines are needed",
                spec.bytes
            ));
        }
        let setup = BlockSetup {
            line_bytes: line,
            lines: slots,
            backing_bytes: if spec.backing_bytes > 0 {
                spec.backing_bytes
            } else {
                spec.bytes.saturating_mul(16)
            },
            seed: spec.seed,
        };
        let admission = BlockAdmission::new(&spec.admission, &setup);
        let admission = admission.map_err(|e: BlockAdmissionError| e.to_string())?;
        let ssd = spec.drive.map(|drive| {
            let geometry = Geometry {
                logical_pages: slots as u32,
                pages_per_block: 1 << (slots / 64).clamp(16, 16_384).ilog2(),
                over_provisioning: drive.over_provisioning,
                streams: 1,
                separate_cleaning: false,
                victim: drive.victim,
            };
            Ssd::new(geometry, spec.seed).map_err(|e| e.to_string())
        });
        let ssd = ssd.transpose()?;
        let outcome = BlockOutcome {
            admission_memory: admission.memory_bytes() as u64,
            ..BlockOutcome::default()
        };
        Ok(BlockCache {
            line_shift: line.trailing_zeros(),
            map: HashMap::default(),
            held: vec![None; slots as usize],
            bits: vec![0; slots as usize],
            policy: SlotPolicy::new(spec.replacement, ways, slots),
            ways,
            groups,
            free: if spec.placement == Placement::Full {
                (0..slots as u32).rev().collect()
            } else {
                Vec::new()
            },
            admission,
            ssd,
            hottest: 0,
            dropped: Vec::new(),
            judged: [0; 6],
            outcome,
            counting: false,
            spec,
        })
    }

    /// The warm-up is over: everything counts from now on.
    pub fn count(&mut self) {
        self.counting = true;
        let admission_memory = self.outcome.admission_memory;
        self.outcome = BlockOutcome { admission_memory, ..BlockOutcome::default() };
        self.judged = self.verdicts();
        if let Some(ssd) = &mut self.ssd {
            ssd.reset_traffic();
        }
    }

    /// What admission said since the start: admitted, sequential, few touches, not hotter, into free slots, few reads.
    fn verdicts(&self) -> [u64; 6] {
        let v = self.admission.verdicts();
        let not_hotter = v.rejected(Reason::NotHotter) + v.rejected(Reason::MetadataVictim);
        let rejected = |reason| v.rejected(reason);
        [
            v.admitted,
            rejected(Reason::Sequential),
            rejected(Reason::FewTouches),
            not_hotter,
            v.if_free,
            rejected(Reason::FewReads),
        ]
    }

    /// What it was made from.
    pub fn spec(&self) -> &BlockCacheSpec {
        &self.spec
    }

    /// What it did.
    pub fn outcome(&self) -> BlockOutcome {
        let now = self.verdicts();
        let since = |i: usize| now[i].saturating_sub(self.judged[i]);
        let traffic = self.ssd.as_ref().map(Ssd::traffic).unwrap_or_default();
        BlockOutcome {
            drive_pages: traffic.host_pages,
            copied_pages: traffic.copied_pages,
            gc_dropped: traffic.dropped_pages,
            admitted: since(0),
            sequential: since(1),
            few_touches: since(2),
            not_hotter: since(3),
            if_free: since(4),
            few_reads: since(5),
            ..self.outcome
        }
    }

    /// Serves one block request; others do nothing.
    pub fn request(&mut self, request: &Request) {
        let volume = VolumeId(request.app);
        if request.size == 0 || !request.op.is_block() {
            return;
        }
        let first = request.offset >> self.line_shift;
        let last = request.offset.saturating_add(request.size - 1) >> self.line_shift;
        let shift = self.line_shift;
        let line = |n: u64| LineId { volume, offset: n << shift };
        if request.op == Op::Trim {
            let mut gone: Vec<LineId> = if last - first < self.map.len() as u64 {
                (first..=last).map(line).collect()
            } else {
                let within = |l: &&LineId| {
                    l.volume == volume && (first..=last).contains(&(l.offset >> shift))
                };
                self.map.keys().filter(within).copied().collect()
            };
            // The order of free slots must not depend on the map's.
            gone.sort_unstable();
            gone.into_iter().for_each(|line| self.drop_line(line));
            return;
        }
        let last = last.min(first + (MOST_REQUEST >> shift));
        let kind = match request.class {
            Class::Unstated => BlockKind::Unknown,
            Class::Data => BlockKind::Data,
            Class::Metadata => BlockKind::Metadata,
        };
        let op = if request.op == Op::Read { BlockOp::Read } else { BlockOp::Write };
        let observed = self.admission.observe(&BlockAccess {
            volume,
            offset: request.offset,
            bytes: request.size,
            op,
            kind,
            now: request.time.unwrap_or_default(),
        });
        let mut hits = 0;
        for n in first..=last {
            let line = line(n);
            let slot = self.map.get(&line).copied();
            hits += u64::from(slot.is_some());
            match (op, self.spec.writes, slot) {
                (BlockOp::Read, _, Some(slot)) => self.policy.hit(&mut self.bits, u64::from(slot)),
                (BlockOp::Write, WriteMode::WriteThrough | WriteMode::WriteUpdate, Some(slot)) => {
                    self.policy.hit(&mut self.bits, u64::from(slot));
                    self.write_slot(slot);
                }
                (BlockOp::Write, WriteMode::WriteAround, _) => self.drop_line(line),
                (BlockOp::Write, WriteMode::WriteUpdate, None) => {}
                (BlockOp::Read, _, None) | (BlockOp::Write, WriteMode::WriteThrough, None) => {
                    let candidate = BlockCandidate { line, op, kind, observed, victim: None };
                    self.offer(candidate);
                }
            }
        }
        let lines = last - first + 1;
        if op == BlockOp::Write {
            self.outcome.written_bytes += request.size;
        } else if self.counting {
            self.outcome.read_lines += lines;
            self.outcome.hit_lines += hits;
            self.outcome.reads += 1;
            self.outcome.whole_hits += u64::from(hits == lines);
            if kind == BlockKind::Metadata {
                self.outcome.metadata_lines += lines;
                self.outcome.metadata_hits += hits;
            }
        }
    }

    /// Whether a slot is free for a line.
    fn has_free(&self, line: LineId) -> bool {
        match self.spec.placement {
            Placement::Full => !self.free.is_empty(),
            Placement::Set(ways) => {
                let mut slots = self.slots_of(line, ways).1;
                slots.any(|slot| self.held[slot as usize].is_none())
            }
        }
    }

    /// The group of a line, and its slots.
    fn slots_of(&self, line: LineId, ways: u32) -> (u64, std::ops::Range<u32>) {
        let group = ((u128::from(hash_of(line)) * u128::from(self.groups)) >> 64) as u64;
        let first = (group * u64::from(ways)) as u32;
        (group, first..first + ways)
    }

    /// A slot that is free for a line, and its group.
    fn free_slot(&mut self, line: LineId) -> (Option<u32>, u64) {
        match self.spec.placement {
            Placement::Full => match self.free.last() {
                Some(&slot) => (Some(slot), u64::from(slot / self.ways)),
                None => (None, self.policy.next_group(self.groups)),
            },
            Placement::Set(ways) => {
                let (group, mut slots) = self.slots_of(line, ways);
                (slots.find(|&slot| self.held[slot as usize].is_none()), group)
            }
        }
    }

    fn offer(&mut self, mut candidate: BlockCandidate) {
        // Rejected whatever it would displace: nobody is asked for a victim.
        let said = self.admission.judge(&candidate);
        if let Verdict::Reject(_) = said {
            self.admission.admit(&candidate);
            return;
        }
        if said == Verdict::IfFree && !self.has_free(candidate.line) {
            return self.admission.without_slot(&candidate);
        }
        let (free, group) = self.free_slot(candidate.line);
        let slot = match free {
            Some(slot) => slot,
            None => {
                let Some(victim) = self.policy.victim(&mut self.bits, group, |_| true) else {
                    return;
                };
                victim as u32
            }
        };
        let victim = self.held[slot as usize];
        candidate.victim = victim.map(|(line, kind)| Victim { line, kind });
        if let Verdict::Reject(_) = self.admission.admit(&candidate) {
            return;
        }
        if let Some((old, _)) = victim {
            self.policy.evict(&mut self.bits, u64::from(slot), hash_of(old));
            self.map.remove(&old);
        } else if self.spec.placement == Placement::Full {
            self.free.pop();
        }
        self.policy.insert(&mut self.bits, u64::from(slot), hash_of(candidate.line));
        self.held[slot as usize] = Some((candidate.line, candidate.kind));
        self.map.insert(candidate.line, slot);
        self.write_slot(slot);
    }

    /// A line is written to its slot, and the drive cleans if it must.
    fn write_slot(&mut self, slot: u32) {
        self.outcome.flash_bytes += 1 << self.line_shift;
        let (Some(ssd), Some(drive)) = (&mut self.ssd, self.spec.drive) else { return };
        self.hottest = self.hottest.max(self.policy.hotness(&self.bits, u64::from(slot)));
        let mut cleaner = Cleaner {
            eviction: drive.eviction,
            policy: &self.policy,
            bits: &self.bits,
            hottest: self.hottest,
            dropped: &mut self.dropped,
        };
        ssd.write(slot, 0, &mut cleaner);
        let mut dropped = std::mem::take(&mut self.dropped);
        for slot in dropped.drain(..) {
            if let Some((line, _)) = self.held[slot as usize] {
                self.drop_line(line);
            }
        }
        self.dropped = dropped;
    }

    fn drop_line(&mut self, line: LineId) {
        if let Some(slot) = self.map.remove(&line) {
            self.policy.remove(&mut self.bits, u64::from(slot));
            self.held[slot as usize] = None;
            if let Some(ssd) = &mut self.ssd
                && ssd.is_mapped(slot)
            {
                ssd.trim(slot);
            }
            if self.spec.placement == Placement::Full {
                self.free.push(slot);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use larder_trace::{Options, open};

    use super::*;

    fn spec(admission: &str, bytes: u64) -> BlockCacheSpec {
        BlockCacheSpec {
            bytes,
            line_bytes: 4096,
            placement: Placement::Full,
            replacement: Replacement::Lru,
            admission: admission.parse().unwrap(),
            writes: WriteMode::WriteThrough,
            drive: None,
            backing_bytes: 0,
            seed: 1,
        }
    }

    #[test]
    fn what_the_warm_up_did_is_left_out() {
        let drive = StudyDrive {
            over_provisioning: 0.1,
            victim: VictimPolicy::Greedy,
            eviction: EvictionBy::Cache,
        };
        let of = |warmup: usize| {
            let spec = BlockCacheSpec { drive: Some(drive), ..spec("touch_count", 1 << 20) };
            let mut cache = BlockCache::new(spec).unwrap();
            for i in 0..2_000u64 {
                if i as usize == warmup {
                    cache.count();
                }
                let op = if i % 2 == 0 { Op::Read } else { Op::Write };
                cache.request(&Request::block(op, 0, i / 4 % 200 * 4096, 4096));
            }
            cache.outcome()
        };
        let (all, late) = (of(0), of(1_000));
        // From then on the lines that are asked for are there: reads change nothing, writes go to flash.
        assert!(all.admitted >= 200 && all.few_touches > 0, "{all:?}");
        assert_eq!((late.admitted, late.few_touches), (0, 0), "{late:?}");
        assert_eq!((late.reads, late.whole_hits), (500, 500), "{late:?}");
        assert_eq!(late.written_bytes, 500 * 4096);
        assert_eq!((late.flash_bytes, late.drive_pages), (500 * 4096, 500), "{late:?}");
    }

    fn run(specs: Vec<BlockCacheSpec>, trace: &str) -> Vec<BlockOutcome> {
        let mut caches: Vec<_> = specs.into_iter().map(|s| BlockCache::new(s).unwrap()).collect();
        caches.iter_mut().for_each(BlockCache::count);
        for request in open(trace, &Options::default()).unwrap().reader {
            let request = request.unwrap();
            caches.iter_mut().for_each(|c| c.request(&request));
        }
        caches.iter().map(BlockCache::outcome).collect()
    }

    #[test]
    fn accounts_agree_under_any_requests() {
        let mut rng = larder_base::Rng::new(3);
        for placement in [Placement::Full, Placement::Set(1), Placement::Set(8)] {
            for writes in WriteMode::ALL {
                for replacement in Replacement::ALL {
                    let drive = StudyDrive {
                        over_provisioning: 0.1,
                        victim: VictimPolicy::Greedy,
                        eviction: EvictionBy::Gc { keep: 0.3 },
                    };
                    let mut cache = BlockCache::new(BlockCacheSpec {
                        drive: (replacement == Replacement::Lru).then_some(drive),
                        placement,
                        writes,
                        replacement,
                        ..spec("sseqr(length=64k)+tc+two_lbs", 1 << 20)
                    })
                    .unwrap();
                    cache.count();
                    for _ in 0..3_000 {
                        let op = [Op::Read, Op::Read, Op::Write, Op::Trim][rng.below(4) as usize];
                        let offset = rng.below(600) * 4096 + rng.below(2) * 512;
                        let (app, size) = (rng.below(2) as u32, rng.below(32_768));
                        cache.request(&Request { op, app, offset, size, ..Request::get(0, 0) });
                    }
                    if let Some(ssd) = &cache.ssd {
                        ssd.validate();
                        let agree =
                            |slot: usize| ssd.is_mapped(slot as u32) == cache.held[slot].is_some();
                        assert!((0..cache.held.len()).all(agree));
                    }
                    let held = cache.held.iter().flatten().count();
                    assert_eq!(held, cache.map.len());
                    assert!(cache.map.iter().all(|(line, &slot)| {
                        cache.held[slot as usize].is_some_and(|(l, _)| l == *line)
                    }));
                    if placement == Placement::Full {
                        assert_eq!(cache.free.len() + held, cache.held.len());
                    }
                    let o = cache.outcome();
                    assert!(
                        o.hit_lines > 0 && o.hit_lines < o.read_lines && o.whole_hits < o.reads
                    );
                    assert!(o.flash_bytes >= o.admitted * 4096);
                }
            }
        }
    }

    /// Fusion-io's finding, in small: a backup under admit-all costs hits and flash; rejected, it costs neither.
    #[test]
    fn a_backup_is_kept_out() {
        let trace = "gen:oltp-backup?scale=0.0005";
        let cache = 50 << 20;
        let found =
            run(vec![spec("all", cache), spec("seqr", cache), spec("seqr+tc", cache)], trace);
        let (all, seqr, both) = (found[0], found[1], found[2]);
        assert!(seqr.line_hit_ratio() > all.line_hit_ratio() + 0.05, "{all:?} {seqr:?}");
        assert!(seqr.flash_bytes * 2 < all.flash_bytes, "{all:?} {seqr:?}");
        assert!(both.flash_bytes < seqr.flash_bytes, "{both:?} {seqr:?}");
        assert!(seqr.sequential > 0 && both.few_touches > 0 && all.admitted > 0);
    }

    #[test]
    fn metadata_first_keeps_metadata() {
        let trace = "gen:specsfs?scale=0.0005";
        let found = run(vec![spec("all", 8 << 20), spec("two_lbs", 8 << 20)], trace);
        assert!(found[1].metadata_hit_ratio() > found[0].metadata_hit_ratio(), "{found:?}");
        assert!(found[1].flash_bytes < found[0].flash_bytes, "{found:?}");
    }

    /// Fusion-io's table in small: admit-all with a tail-dropping cleaner that copies whatever is valid writes many times
    /// what clients do; sequence rejection and a cleaner that drops cold lines a fraction of that, at more hits.
    #[test]
    fn the_cleaner_may_evict() {
        let trace = "gen:oltp-backup?scale=0.0005";
        let drive =
            |victim, eviction| Some(StudyDrive { over_provisioning: 0.1, victim, eviction });
        let cache = 50 << 20;
        let with = |admission, drive| BlockCacheSpec { drive, ..spec(admission, cache) };
        let gc = EvictionBy::Gc { keep: 0.5 };
        let found = run(
            vec![
                with("all", drive(VictimPolicy::Fifo, EvictionBy::Cache)),
                with("all", drive(VictimPolicy::CostBenefit, gc)),
                with("seqr", drive(VictimPolicy::CostBenefit, gc)),
                spec("all", cache),
            ],
            trace,
        );
        let dlwa = |o: &BlockOutcome| o.dlwa().unwrap();
        let (all, dropping, both, none) = (found[0], found[1], found[2], found[3]);
        assert_eq!(none.dlwa(), None);
        assert_eq!((all.hit_lines, all.flash_bytes), (none.hit_lines, none.flash_bytes));
        assert_eq!(all.drive_pages * 4096, all.flash_bytes);
        assert_eq!(all.gc_dropped, 0);
        assert!(dlwa(&all) > 2.0, "{all:?}");
        assert!(dlwa(&dropping) < 0.6 * dlwa(&all) && dropping.gc_dropped > 1000, "{dropping:?}");
        let total = |o: &BlockOutcome| o.clwa_of_writes() * dlwa(o);
        assert!(
            total(&both) < 0.3 * total(&all) && both.line_hit_ratio() > all.line_hit_ratio(),
            "{found:?}"
        );
    }

    #[test]
    fn names_and_refusals() {
        for text in ["direct", "set:4", "full"] {
            assert_eq!(text.parse::<Placement>().unwrap().to_string(), text);
        }
        assert!("set:64".parse::<Placement>().unwrap_err().contains("'set:64'"));
        for writes in WriteMode::ALL {
            assert_eq!(writes.as_str().parse(), Ok(writes));
        }
        assert!("back".parse::<WriteMode>().unwrap_err().to_string().contains("hdd-upd"));
        assert!(BlockCache::new(spec("all", 4096)).is_err());
        assert!(
            BlockCache::new(BlockCacheSpec { line_bytes: 3000, ..spec("all", 1 << 20) }).is_err()
        );
    }
}
