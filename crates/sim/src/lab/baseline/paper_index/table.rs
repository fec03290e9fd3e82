//! The look-up table (§3.2): "a configurable multiple-choice hash table without chains. During lookup, pre-defined hash
//! functions are used one by one … If all hash functions are used and there is still a collision, the last collided
//! object is evicted", with a Bloom filter of 1 % (10 bits an object) for each segment.
//!
//! What the paper leaves open is filled in favour of it: an update finds the old version's entry and frees it at once.

use std::collections::BTreeMap;

use larder_base::Rng;
use larder_trace::mix;
use serde::Serialize;

use super::{SettingError, check};

/// Bits of a slot: 12 of segment number (as Larder's, so that the two compare), 4 of hash function, 2 of CLOCK.
pub const SLOT_BITS: u32 = 12 + 4 + 2;
/// Bits of a segment's Bloom filter for each object in it.
pub const BLOOM_BITS: u32 = 10;
/// Hash functions of the filter: ln 2 × 10, which makes 0.8 % false positives.
const BLOOM_FUNCTIONS: u64 = 7;
/// Placing functions that an entry can name.
const FUNCTIONS: u64 = 16;

/// What to run.
#[derive(Clone, Debug, PartialEq)]
pub struct TableConfig {
    /// Live objects before each reclaim.
    pub objects: u64,
    /// How often the whole flash is written after it was filled.
    pub turnovers: u32,
    /// Segments of the flash, 2 to 4095.
    pub segments: u16,
    /// Share of the writes that overwrite a live object, 0 to 0.9.
    pub overwrites: f64,
    /// Hash functions of the table, 1 to 64.
    pub choices: u32,
    /// Live objects over slots that the table is sized for, above 0 and at most 1.
    pub load: f64,
    /// Look-ups of present keys, and as many of absent ones.
    pub probes: u64,
    /// Seed of everything random.
    pub seed: u64,
}

/// What came out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TableReport {
    /// Hash functions.
    pub choices: u32,
    /// Live objects over slots, as sized.
    pub sized_load: f64,
    /// Slots in use at the end over all.
    pub load: f64,
    /// Bytes of slots and Bloom filters over live objects that can be found.
    pub bytes_per_object: f64,
    /// Flash reads to find an object that is there.
    pub flash_reads_per_hit: f64,
    /// Of these, reads of another object.
    pub false_reads_per_hit: f64,
    /// Flash reads to find that an object is not there.
    pub flash_reads_per_miss: f64,
    /// Insertions.
    pub insertions: u64,
    /// Objects evicted since all their places were taken.
    pub forced_evictions: u64,
    /// The same over insertions.
    pub forced_share: f64,
    /// Look-ups of present keys that would have been answered with an overwritten version: another object's entry led
    /// to it before the own one was tried.
    pub stale_answers: u64,
    /// Cache lines that a look-up of an absent key touches in the table: one for each choice.
    pub lines_per_miss: f64,
}

const NONE: u32 = u32::MAX;

/// A segment's filter.
pub(in crate::lab::baseline) struct Bloom {
    bits: Vec<u64>,
    len: u64,
}

impl Bloom {
    pub(in crate::lab::baseline) fn new(objects: u64) -> Bloom {
        let len = (objects.max(1)) * u64::from(BLOOM_BITS);
        Bloom { bits: vec![0; len.div_ceil(64) as usize], len }
    }

    fn places(&self, hash: u64) -> impl Iterator<Item = u64> + use<> {
        // Double hashing (Kirsch and Mitzenmacher).
        let (a, b) = (mix(hash ^ 0xb10), mix(hash ^ 0xf11) | 1);
        let len = self.len;
        (0..BLOOM_FUNCTIONS).map(move |i| {
            ((u128::from(a.wrapping_add(b.wrapping_mul(i))) * u128::from(len)) >> 64) as u64
        })
    }

    pub(in crate::lab::baseline) fn add(&mut self, hash: u64) {
        for at in self.places(hash) {
            self.bits[at as usize / 64] |= 1 << (at % 64);
        }
    }

    /// Bytes of memory.
    pub(in crate::lab::baseline) fn memory_bytes(&self) -> u64 {
        self.bits.len() as u64 * 8
    }

    pub(in crate::lab::baseline) fn may_hold(&self, hash: u64) -> bool {
        self.places(hash).all(|at| self.bits[at as usize / 64] & 1 << (at % 64) != 0)
    }

    fn clear(&mut self) {
        self.bits.fill(0);
    }
}

/// What a look-up did.
#[derive(Default)]
struct Looked {
    reads: u64,
    found: bool,
    stale: bool,
    tried: u64,
}

struct Run<'a> {
    config: &'a TableConfig,
    rng: Rng,
    salt: u64,
    /// Records on flash, dead ones too.
    ring: u64,
    per_segment: u64,
    /// Key of each record of the ring.
    keys: Vec<u32>,
    live: Vec<bool>,
    /// The record that each slot of the table names. A real slot holds segment, function and CLOCK bits; these follow
    /// from the record.
    slots: Vec<u32>,
    used: u64,
    filters: Vec<Bloom>,
    /// Overwritten records that are still on flash, by key.
    dead: BTreeMap<u32, Vec<u32>>,
    next_key: u32,
    insertions: u64,
    forced: u64,
}

impl TableConfig {
    fn check(&self) -> Result<(), SettingError> {
        check("objects", self.objects, (1000..=1 << 30).contains(&self.objects), "1000 to 2^30")?;
        let good =
            (2..=4095).contains(&self.segments) && u64::from(self.segments) * 4 <= self.objects;
        check("segments", self.segments, good, "2 to 4095, with 4 objects each at least")?;
        let good = (0.0..=0.9).contains(&self.overwrites);
        check("overwrites", self.overwrites, good, "between 0 and 0.9")?;
        check("choices", self.choices, (1..=64).contains(&self.choices), "1 to 64")?;
        let good = self.load > 0.0 && self.load <= 1.0;
        check("load", self.load, good, "above 0 and at most 1")
    }

    /// Records on flash such that `objects` are alive when a share of the writes kills a live one chosen evenly.
    fn ring(&self) -> u64 {
        let p = self.overwrites;
        let records = if p > 0.0 {
            self.objects as f64 * (1.0 / (1.0 - p)).ln() / p
        } else {
            self.objects as f64
        };
        (records as u64).next_multiple_of(u64::from(self.segments))
    }
}

/// Fills the flash, writes it over `turnovers` times in FIFO order, and looks keys up. `progress` is told the share done.
///
/// # Errors
/// A setting out of its range.
pub fn run(
    config: &TableConfig,
    progress: &mut dyn FnMut(f64),
) -> Result<TableReport, SettingError> {
    config.check()?;
    let ring = config.ring();
    let per_segment = ring / u64::from(config.segments);
    let mut rng = Rng::new(config.seed);
    let mut run = Run {
        config,
        salt: rng.next_u64(),
        rng,
        ring,
        per_segment,
        keys: vec![0; ring as usize],
        live: vec![false; ring as usize],
        slots: vec![NONE; (config.objects as f64 / config.load).ceil() as usize],
        used: 0,
        filters: (0..config.segments).map(|_| Bloom::new(per_segment)).collect(),
        dead: BTreeMap::new(),
        next_key: 0,
        insertions: 0,
        forced: 0,
    };
    let writes = ring * u64::from(config.turnovers + 1);
    for serial in 0..writes {
        run.write(serial);
        if serial.is_multiple_of(1 << 16) {
            progress(serial as f64 / writes as f64);
        }
    }
    Ok(run.measure())
}

impl Run<'_> {
    fn hash(&self, key: u64) -> u64 {
        mix(key ^ self.salt)
    }

    fn slot(&self, hash: u64, choice: u32) -> usize {
        let h = mix(hash ^ u64::from(choice).rotate_left(40));
        ((u128::from(h) * self.slots.len() as u128) >> 64) as usize
    }

    fn segment(&self, record: u32) -> usize {
        (u64::from(record) / self.per_segment) as usize
    }

    /// The function that placed a record: any of the 16, differing from version to version.
    fn function(&self, record: u32) -> u64 {
        mix(u64::from(record) ^ self.salt.rotate_left(7)) % FUNCTIONS
    }

    fn write(&mut self, serial: u64) {
        let record = (serial % self.ring) as u32;
        if u64::from(record).is_multiple_of(self.per_segment) {
            self.reclaim(record, serial >= self.ring);
        }
        let victim = self.rng.chance(self.config.overwrites).then(|| self.pick(serial)).flatten();
        let key = match victim {
            Some(old) => {
                self.kill(old);
                let key = self.keys[old as usize];
                self.dead.entry(key).or_default().push(old);
                key
            }
            None => {
                self.next_key += 1;
                self.next_key
            }
        };
        self.keys[record as usize] = key;
        self.live[record as usize] = true;
        let hash = self.hash(u64::from(key));
        let segment = self.segment(record);
        self.filters[segment].add(hash);
        self.insert(hash, record);
    }

    fn reclaim(&mut self, first: u32, written: bool) {
        let segment = self.segment(first);
        self.filters[segment].clear();
        if !written {
            return;
        }
        for record in first..first + self.per_segment as u32 {
            self.kill(record);
            let key = self.keys[record as usize];
            if let Some(versions) = self.dead.get_mut(&key) {
                versions.retain(|&v| v != record);
                if versions.is_empty() {
                    self.dead.remove(&key);
                }
            }
        }
    }

    /// The record is no object's present version any more: its entry, if it still has one, is freed.
    fn kill(&mut self, record: u32) {
        if !std::mem::replace(&mut self.live[record as usize], false) {
            return;
        }
        let hash = self.hash(u64::from(self.keys[record as usize]));
        for choice in 0..self.config.choices {
            let at = self.slot(hash, choice);
            if self.slots[at] == record {
                self.slots[at] = NONE;
                self.used -= 1;
                return;
            }
        }
    }

    fn insert(&mut self, hash: u64, record: u32) {
        self.insertions += 1;
        let mut at = 0;
        for choice in 0..self.config.choices {
            at = self.slot(hash, choice);
            if self.slots[at] == NONE {
                self.slots[at] = record;
                self.used += 1;
                return;
            }
        }
        // "the last collided object is evicted to make space for the new key"
        let evicted = std::mem::replace(&mut self.slots[at], record);
        self.live[evicted as usize] = false;
        self.forced += 1;
    }

    /// A live record, evenly chosen, if a few draws find one.
    fn pick(&mut self, serial: u64) -> Option<u32> {
        let written = serial.min(self.ring);
        (written > 0).then_some(())?;
        (0..16).map(|_| self.rng.below(written) as u32).find(|&r| self.live[r as usize])
    }

    fn look(&self, key: u64) -> Looked {
        let hash = self.hash(key);
        let mut looked = Looked::default();
        for choice in 0..self.config.choices {
            looked.tried += 1;
            let record = self.slots[self.slot(hash, choice)];
            if record == NONE || !self.filters[self.segment(record)].may_hold(hash) {
                continue;
            }
            looked.reads += 1;
            if u64::from(self.keys[record as usize]) == key {
                looked.found = true;
                return looked;
            }
            // Another's entry: the function it names is applied to this key, in that segment. If an overwritten version
            // lies just there, it is taken for the answer.
            let stale =
                u32::try_from(key).ok().and_then(|k| self.dead.get(&k)).is_some_and(|old| {
                    old.iter().any(|&v| {
                        self.segment(v) == self.segment(record)
                            && self.function(v) == self.function(record)
                    })
                });
            if stale {
                looked.stale = true;
                return looked;
            }
        }
        looked
    }

    fn measure(&mut self) -> TableReport {
        let probes = self.config.probes.max(1);
        let (mut reads, mut found, mut stale) = (0, 0u64, 0);
        for _ in 0..probes {
            let Some(record) = self.pick(self.ring) else { continue };
            let looked = self.look(u64::from(self.keys[record as usize]));
            stale += u64::from(looked.stale);
            if looked.found {
                found += 1;
                reads += looked.reads;
            }
        }
        let (mut vain, mut tried) = (0, 0);
        for n in 0..probes {
            let looked = self.look(1 << 40 | n);
            vain += looked.reads;
            tried += looked.tried;
        }
        let live = self.live.iter().filter(|&&l| l).count() as f64;
        let bits = self.slots.len() as f64 * f64::from(SLOT_BITS)
            + self.filters.iter().map(|f| f.len as f64).sum::<f64>();
        let per_hit = reads as f64 / found.max(1) as f64;
        TableReport {
            choices: self.config.choices,
            sized_load: self.config.load,
            load: self.used as f64 / self.slots.len() as f64,
            bytes_per_object: bits / 8.0 / live.max(1.0),
            flash_reads_per_hit: per_hit,
            false_reads_per_hit: per_hit - 1.0,
            flash_reads_per_miss: vain as f64 / probes as f64,
            insertions: self.insertions,
            forced_evictions: self.forced,
            forced_share: self.forced as f64 / self.insertions as f64,
            stale_answers: stale,
            lines_per_miss: tried as f64 / probes as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(choices: u32, load: f64) -> TableConfig {
        TableConfig {
            objects: 40_000,
            turnovers: 2,
            segments: 64,
            overwrites: 0.1,
            choices,
            load,
            probes: 40_000,
            seed: 1,
        }
    }

    fn measure(config: &TableConfig) -> TableReport {
        run(config, &mut |_| {}).unwrap()
    }

    /// An occupied choice costs a false read with the filter's 0.8 %: k choices at load α cost 1 − (1 − 0.0082)^(α k) or so.
    #[test]
    fn misses_cost_what_the_filters_let_through() {
        for (choices, load) in [(4, 0.8), (16, 0.8), (16, 0.95)] {
            let r = measure(&config(choices, load));
            let expected = 0.0082 * r.load * f64::from(choices);
            assert!(
                (r.flash_reads_per_miss / expected - 1.0).abs() < 0.25,
                "{choices} {load}: {} against {expected}",
                r.flash_reads_per_miss
            );
            assert_eq!(r.lines_per_miss, f64::from(choices));
        }
    }

    /// More choices evict less; the share is that of finding all choices taken.
    #[test]
    fn choices_against_forced_evictions() {
        let shares: Vec<f64> =
            [1, 2, 4, 8, 16].map(|k| measure(&config(k, 0.9)).forced_share).to_vec();
        assert!(shares.windows(2).all(|w| w[1] < w[0]), "{shares:?}");
        assert!(shares[0] > 0.2 && shares[4] > 0.0, "{shares:?}");
        // With eight at half load all choices are taken once in 2^8 insertions, two thirds of which come when the
        // flash is full; while it fills the mean over loads from 0 to a half is a ninth of that.
        let half = measure(&config(8, 0.5));
        let expected = half.load.powi(8) * (2.0 + 1.0 / 9.0) / 3.0;
        assert!((half.forced_share / expected - 1.0).abs() < 0.25, "{half:?} {expected}");
        // One choice, no overwrites: n objects thrown into n / 0.9 slots leave 1 − e^−0.9 of them in use. Of those that
        // fill the flash the others are lost; afterwards a slot is found taken with the probability of its being in use.
        let r = measure(&TableConfig { overwrites: 0.0, ..config(1, 0.9) });
        let used = 1.0 - (-0.9f64).exp();
        assert!((r.load - used).abs() < 0.01, "{r:?}");
        let expected = (1.0 - used / 0.9 + 2.0 * used) / 3.0;
        assert!((r.forced_share - expected).abs() < 0.01, "{r:?} {expected}");
    }

    #[test]
    fn hits_read_once_and_a_little() {
        let r = measure(&config(16, 0.9));
        assert!((1.0..1.1).contains(&r.flash_reads_per_hit), "{r:?}");
        // 18 bits a slot and 10 bits a record on flash, the dead ones too.
        let dead = (1.0f64 / 0.9).ln() / 0.1;
        let expected = (18.0 / 0.9 + 10.0 * dead) / 8.0;
        assert!((r.bytes_per_object / expected - 1.0).abs() < 0.1, "{r:?} {expected}");
        assert_eq!(r, measure(&config(16, 0.9)));
        assert_ne!(r, measure(&TableConfig { seed: 2, ..config(16, 0.9) }));
    }

    /// Few segments and many overwrites: an entry of another object leads to an overwritten version now and then. The
    /// paper's index has nothing against it.
    #[test]
    fn old_versions_can_come_back() {
        let c = TableConfig { segments: 2, overwrites: 0.5, ..config(16, 0.9) };
        let r = measure(&c);
        assert!(r.stale_answers > 0, "{r:?}");
        assert_eq!(measure(&TableConfig { overwrites: 0.0, ..c }).stale_answers, 0);
    }

    #[test]
    fn filters_hold_what_was_added() {
        let mut f = Bloom::new(5000);
        (0..5000).for_each(|n| f.add(mix(n)));
        assert!((0..5000).all(|n| f.may_hold(mix(n))));
        let wrong = (5000..105_000).filter(|&n| f.may_hold(mix(n))).count() as f64 / 100_000.0;
        assert!((0.006..0.011).contains(&wrong), "{wrong}");
        f.clear();
        assert!(!f.may_hold(mix(7)));
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let bad = |c: TableConfig| run(&c, &mut |_| {}).unwrap_err().to_string();
        assert_eq!(bad(config(0, 0.9)), "choices is 0: it must be 1 to 64");
        assert!(bad(config(8, 1.5)).starts_with("load is 1.5"));
        assert!(bad(TableConfig { objects: 3, ..config(8, 0.5) }).starts_with("objects is 3"));
    }
}
