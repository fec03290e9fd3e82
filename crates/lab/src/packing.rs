//! `larder bench packing`: how much of a segment becomes records, against the bytes offered.
//!
//! Two questions are answered for each mix of sizes. *Once*: a segment is offered x times its own bytes, each object once,
//! and what did not fit is forgotten (the paper's Figure on 1–16 hash functions). *Steady*: the way the server works: a
//! segment is filled until [`SegmentBuilder::is_full_enough`], and what did not fit is offered to the next one.

use std::collections::VecDeque;

use larder_base::{Expiry, HashKey, KeyHasher, ObjectHash, Rng, UnixSecs};
use larder_format::Geometry;
use larder_format::page::{Kind, SMALL_MAX};
use larder_format::record::{FIXED_LEN, Filling, RecordMeta, record_len};
use serde::Serialize;

use larder_engine::segment::{Choice, Fill, NoRoom, SegmentBuilder};

/// The sizes of objects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sizes {
    /// Every record has this many bytes in all.
    Record(usize),
    /// Values log-normal with this mean, in bytes, and this standard deviation of the logarithm.
    LogNormal {
        /// Mean of the value's length.
        mean: f64,
        /// Standard deviation of its natural logarithm.
        sigma: f64,
    },
    /// Memcachier as Flashield §2 prints it: values of 257 B in the mean, 80.67 % of them below 1 KB. Both hold together only
    /// if most values are tiny and the rest just above 1 KB, so that is what this is: log-normal of mean 49 B below, 1,024 B
    /// plus an exponential tail of mean 100 B above. It is a hard case: 86 % of the bytes are large objects.
    Memcachier,
    /// The values of CacheLib's published `kvcache_reg` (mean 351 B, up to 512 KiB), as a histogram.
    CacheLib,
}

impl Sizes {
    /// The name in reports.
    pub fn name(self) -> String {
        match self {
            Sizes::Record(len) => format!("record-{len}"),
            Sizes::LogNormal { mean, sigma } => format!("lognormal-{mean}-{sigma}"),
            Sizes::Memcachier => "memcachier".into(),
            Sizes::CacheLib => "cachelib".into(),
        }
    }

    fn value_len(self, rng: &mut Rng, key_len: usize) -> usize {
        match self {
            Sizes::Record(len) => len.saturating_sub(FIXED_LEN + key_len),
            Sizes::LogNormal { mean, sigma } => log_normal(rng, mean, sigma) as usize,
            Sizes::Memcachier if rng.chance(0.8067) => {
                log_normal(rng, 49.0, 0.8).min(1023.0) as usize
            }
            Sizes::Memcachier => 1024 + (-(1.0 - rng.unit()).ln() * 100.0) as usize,
            Sizes::CacheLib => {
                let mut left = rng.below(CACHELIB.iter().map(|&(_, share)| share).sum());
                let mut low = 32;
                for &(high, share) in CACHELIB {
                    if left < share {
                        return rng.range(low, high) as usize;
                    }
                    left -= share;
                    low = high + 1;
                }
                unreachable!("the draw is below the sum of shares")
            }
        }
    }
}

/// Upper ends of value lengths and how many of a million values lie below each and above the one before, taken from the
/// cachebench configuration `kvcache_reg/sizes.json` of CacheLib (Apache-2.0).
const CACHELIB: &[(u64, u64)] = &[
    (64, 696),
    (96, 59),
    (128, 131_759),
    (160, 240_132),
    (192, 491_440),
    (224, 42_531),
    (256, 16_002),
    (320, 16_523),
    (384, 12_180),
    (512, 11_051),
    (640, 14_032),
    (768, 9_163),
    (1024, 5_382),
    (1536, 3_565),
    (2048, 1_223),
    (3072, 1_166),
    (4096, 762),
    (6144, 789),
    (8192, 228),
    (16_384, 441),
    (32_768, 260),
    (65_536, 94),
    (131_072, 69),
    (262_144, 220),
    (524_288, 234),
];

/// Log-normal by Box and Muller.
fn log_normal(rng: &mut Rng, mean: f64, sigma: f64) -> f64 {
    let normal =
        (-2.0 * (1.0 - rng.unit()).ln()).sqrt() * (std::f64::consts::TAU * rng.unit()).cos();
    (mean.ln() - sigma * sigma / 2.0 + sigma * normal).exp()
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct PackingConfig {
    /// The device whose bytes are counted: its division gives the segment's size and what lies outside of segments.
    pub geometry: Geometry,
    /// Segments of each kind filled per figure.
    pub segments: u32,
    /// Bytes of a key.
    pub key_len: usize,
    /// Mixes of sizes.
    pub sizes: Vec<Sizes>,
    /// Numbers of page functions, 1..=16.
    pub functions: Vec<u8>,
    /// Ways to choose among their pages.
    pub choices: Vec<Choice>,
    /// Bytes offered, in segments' bytes, ascending.
    pub offered: Vec<f64>,
    /// Seed of keys and sizes.
    pub seed: u64,
}

impl PackingConfig {
    /// The figures that the documentation shows, for a device divided like `geometry`.
    pub fn standard(geometry: Geometry) -> PackingConfig {
        PackingConfig {
            geometry,
            segments: 8,
            key_len: 20,
            sizes: vec![
                Sizes::Record(280),
                Sizes::LogNormal { mean: 257.0, sigma: 1.0 },
                Sizes::Memcachier,
                Sizes::CacheLib,
            ],
            functions: vec![1, 2, 4, 8, 16],
            choices: vec![Choice::FirstFit, Choice::BestFit, Choice::Emptiest],
            offered: vec![0.5, 0.8, 1.0, 1.1, 1.2, 1.5, 2.0],
            seed: 1,
        }
    }
}

/// How the objects came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// So many bytes were offered to an empty segment, each object once.
    Once,
    /// Segments were filled in turn until full enough; what was refused came again.
    Steady,
}

/// One figure: a mix of sizes, a choice, a number of functions, an amount offered.
#[derive(Clone, Debug, Serialize)]
pub struct PackingRow {
    /// The mix.
    pub sizes: String,
    /// How the objects came.
    pub mode: Mode,
    /// How the page was chosen.
    pub choice: &'static str,
    /// Number of functions.
    pub functions: u8,
    /// Bytes of records offered per byte of segment (for [`Mode::Steady`], those offered again count again).
    pub offered: f64,
    /// Share of the segments' bytes that are records, both kinds in the proportion that the mix fills them.
    pub utilisation: f64,
    /// The same over all bytes of the device, superblocks and the remainder after the last segment included.
    pub device_utilisation: f64,
    /// Share of the small segments' bytes that are records; `None` if the mix has no small records.
    pub small_utilisation: Option<f64>,
    /// Share of the large segments' bytes that are records; `None` if the mix has no large records.
    pub large_utilisation: Option<f64>,
    /// Share of the bytes of records that are large records.
    pub large_share: f64,
    /// Bytes of a record, mean.
    pub record_bytes: f64,
    /// Of these header: mean bytes per object beside key and value.
    pub header_bytes: f64,
    /// Lost to the alignment of large records: mean bytes per object.
    pub padding_bytes: f64,
    /// Never filled: mean bytes per object.
    pub unused_bytes: f64,
    /// Pages looked at for each object that was placed.
    pub tries: f64,
    /// Share of the offers that were refused.
    pub refused: f64,
}

/// All figures.
#[derive(Clone, Debug, Serialize)]
pub struct PackingReport {
    /// Bytes of the device.
    pub device_bytes: u64,
    /// Bytes of a segment.
    pub segment_bytes: u32,
    /// Number of segments.
    pub segments: u16,
    /// Seed.
    pub seed: u64,
    /// The figures.
    pub rows: Vec<PackingRow>,
}

/// Measures packing. `progress` is told the share that is done, 0 to 1.
pub fn run(config: &PackingConfig, progress: &mut dyn FnMut(f64)) -> PackingReport {
    let total = config.sizes.len() * config.functions.len() * config.choices.len();
    let mut rows = Vec::new();
    let mut done = 0;
    for &sizes in &config.sizes {
        for &choice in &config.choices {
            for &functions in &config.functions {
                let bench = Bench::new(config, sizes, choice, functions);
                rows.extend(bench.once());
                rows.push(bench.steady());
                done += 1;
                progress(done as f64 / total as f64);
            }
        }
    }
    PackingReport {
        device_bytes: config.geometry.device_bytes(),
        segment_bytes: config.geometry.segment_bytes(),
        segments: config.geometry.segments(),
        seed: config.seed,
        rows,
    }
}

/// The bounds of one combination.
struct Bench<'a> {
    config: &'a PackingConfig,
    sizes: Sizes,
    choice: Choice,
    functions: u8,
    /// Bytes of small and of large records per object of the mix.
    mix: [f64; 2],
    /// Longest values are written from here.
    filler: Vec<u8>,
}

const KINDS: [Kind; 2] = [Kind::Small, Kind::Large];

impl<'a> Bench<'a> {
    fn new(config: &'a PackingConfig, sizes: Sizes, choice: Choice, functions: u8) -> Bench<'a> {
        let mut bench = Bench {
            config,
            sizes,
            choice,
            functions,
            mix: [0.0; 2],
            filler: vec![0x5a; config.geometry.segment_bytes() as usize],
        };
        let mut source = Source::new(&bench, None, 0);
        const DRAWN: u32 = 1 << 17;
        for _ in 0..DRAWN {
            let object = source.next();
            bench.mix[usize::from(object.len > SMALL_MAX)] += object.len as f64 / f64::from(DRAWN);
        }
        bench
    }

    /// Whether the mix has records of this kind worth a segment.
    fn has(&self, kind: Kind) -> bool {
        self.mix[kind as usize] > 0.0
    }

    fn builder(&self, kind: Kind, generation: u64) -> SegmentBuilder<Vec<u8>> {
        let filling = Filling { salt: 1, segment: 1, generation };
        let buffer = vec![0; self.config.geometry.segment_bytes() as usize];
        SegmentBuilder::new(kind, filling, buffer).with_choice(self.choice, self.functions)
    }

    fn offer(&self, builder: &mut SegmentBuilder<Vec<u8>>, object: &Object) -> Result<(), NoRoom> {
        let key = object.key(self.config.key_len);
        let value = &self.filler[..object.value_len];
        builder.offer(object.hash, &object.meta, &key, value).map(drop)
    }

    fn once(&self) -> Vec<PackingRow> {
        let steps = &self.config.offered;
        let mut sums = vec![[Fill::default(); 2]; steps.len()];
        for kind in KINDS.into_iter().filter(|&k| self.has(k)) {
            let mut source = Source::new(self, Some(kind), 1);
            for generation in 0..self.config.segments {
                let mut builder = self.builder(kind, u64::from(generation));
                for (sum, &offered) in sums.iter_mut().zip(steps) {
                    let goal = (builder.fill().capacity as f64 * offered) as u64;
                    while builder.fill().offered_bytes < goal {
                        // A refusal shows in the builder's own figures.
                        let _ = self.offer(&mut builder, &source.next());
                    }
                    add(&mut sum[kind as usize], builder.fill());
                }
            }
        }
        steps
            .iter()
            .zip(sums)
            .map(|(&offered, fills)| self.row(Mode::Once, Some(offered), fills))
            .collect()
    }

    fn steady(&self) -> PackingRow {
        let mut fills = [Fill::default(); 2];
        for kind in KINDS.into_iter().filter(|&k| self.has(k)) {
            let mut source = Source::new(self, Some(kind), 2);
            let mut waiting: VecDeque<Object> = VecDeque::new();
            // The first segment starts without refused objects and is left out.
            for generation in 0..=self.config.segments {
                let mut builder = self.builder(kind, u64::from(generation));
                let mut again = waiting.len();
                while !builder.is_full_enough() {
                    let object = if again > 0 { waiting.pop_front() } else { None };
                    again = again.saturating_sub(1);
                    let object = object.unwrap_or_else(|| source.next());
                    if self.offer(&mut builder, &object) == Err(NoRoom::Full) {
                        waiting.push_back(object);
                    }
                }
                if generation > 0 {
                    add(&mut fills[kind as usize], builder.fill());
                }
            }
        }
        self.row(Mode::Steady, None, fills)
    }

    fn row(&self, mode: Mode, offered: Option<f64>, fills: [Fill; 2]) -> PackingRow {
        let share = |f: &Fill| (f.capacity > 0).then(|| f.utilisation());
        let [small, large] = [share(&fills[0]), share(&fills[1])];
        // The mix brings so many bytes of each kind per object; each kind needs segments for them by its own utilisation.
        let bytes: f64 = self.mix.iter().sum();
        let needed: f64 =
            self.mix.iter().zip([small, large]).filter_map(|(b, u)| u.map(|u| b / u)).sum();
        let utilisation = bytes / needed;
        let weight = |f: fn(&Fill) -> f64| -> f64 {
            // Means per object of the mix: what each kind takes per byte of record, times its bytes per object.
            fills
                .iter()
                .zip(self.mix)
                .filter(|(fill, _)| fill.record_bytes > 0)
                .map(|(fill, bytes)| f(fill) / fill.record_bytes as f64 * bytes)
                .sum()
        };
        let objects = weight(|f| f.records as f64);
        let geometry = &self.config.geometry;
        let in_segments = geometry.capacity() as f64 / geometry.device_bytes() as f64;
        let offers: u64 = fills.iter().map(|f| f.offered).sum();
        PackingRow {
            sizes: self.sizes.name(),
            mode,
            choice: match self.choice {
                Choice::FirstFit => "first_fit",
                Choice::BestFit => "best_fit",
                Choice::Emptiest => "emptiest",
            },
            functions: self.functions,
            offered: offered.unwrap_or_else(|| {
                weight(|f| f.offered_bytes as f64) / weight(|f| f.capacity as f64)
            }),
            utilisation,
            device_utilisation: utilisation * in_segments,
            small_utilisation: small,
            large_utilisation: large,
            large_share: self.mix[1] / bytes,
            record_bytes: bytes / objects,
            header_bytes: weight(|f| (f.record_bytes - f.payload_bytes) as f64) / objects,
            padding_bytes: weight(|f| f.padding as f64) / objects,
            unused_bytes: weight(|f| (f.capacity - f.record_bytes - f.padding) as f64) / objects,
            tries: fills[0].tries as f64 / fills[0].records.max(1) as f64,
            refused: fills.iter().map(|f| f.refused).sum::<u64>() as f64 / offers.max(1) as f64,
        }
    }
}

fn add(sum: &mut Fill, fill: &Fill) {
    sum.capacity += fill.capacity;
    sum.records += fill.records;
    sum.record_bytes += fill.record_bytes;
    sum.payload_bytes += fill.payload_bytes;
    sum.dead += fill.dead;
    sum.dead_bytes += fill.dead_bytes;
    sum.padding += fill.padding;
    sum.offered += fill.offered;
    sum.offered_bytes += fill.offered_bytes;
    sum.refused += fill.refused;
    sum.tries += fill.tries;
}

/// An object to offer.
struct Object {
    id: u64,
    hash: ObjectHash,
    meta: RecordMeta,
    value_len: usize,
    len: usize,
}

impl Object {
    fn key(&self, len: usize) -> Vec<u8> {
        key(self.id, len)
    }
}

fn key(id: u64, len: usize) -> Vec<u8> {
    format!("{id:0len$}").into_bytes()
}

/// Draws objects of a mix, of one kind if asked.
struct Source {
    sizes: Sizes,
    kind: Option<Kind>,
    key_len: usize,
    longest: usize,
    hasher: KeyHasher,
    rng: Rng,
    id: u64,
}

impl Source {
    fn new(bench: &Bench<'_>, kind: Option<Kind>, stream: u64) -> Source {
        Source {
            sizes: bench.sizes,
            kind,
            key_len: bench.config.key_len,
            longest: bench.config.geometry.segment_bytes() as usize,
            hasher: KeyHasher::new(HashKey([7; 16])),
            rng: Rng::new(bench.config.seed).fork(stream),
            id: 0,
        }
    }

    fn next(&mut self) -> Object {
        loop {
            let value_len = self.sizes.value_len(&mut self.rng, self.key_len);
            let expires = !matches!(self.sizes, Sizes::Record(_));
            let meta = RecordMeta {
                cas: self.id,
                // Objects of one size are as long as they are said to be; the others carry an expiry.
                expiry: if expires { Expiry(2_000_000_000) } else { Expiry::NEVER },
                last_access: UnixSecs(1_900_000_000),
                fetched: true,
                ..RecordMeta::default()
            };
            let len = record_len(&meta, self.key_len, value_len);
            let kind = if len > SMALL_MAX { Kind::Large } else { Kind::Small };
            if len > self.longest || self.kind.is_some_and(|k| k != kind) {
                continue;
            }
            self.id += 1;
            let hash = self.hasher.hash(&key(self.id, self.key_len));
            return Object { id: self.id, hash, meta, value_len, len };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_engine::segment::FUNCTIONS;

    fn rows(sizes: Sizes) -> Vec<PackingRow> {
        let geometry = Geometry::plan(1 << 30).unwrap();
        let config = PackingConfig {
            segments: 2,
            sizes: vec![sizes],
            functions: vec![1, 16],
            ..PackingConfig::standard(geometry)
        };
        let mut last = 0.0;
        let report = run(&config, &mut |share| last = share);
        assert_eq!(last, 1.0);
        for row in &report.rows {
            assert!(row.utilisation > 0.3 && row.utilisation <= 1.0, "{row:?}");
            assert!(row.device_utilisation < row.utilisation);
        }
        report.rows
    }

    /// What the design asks for: 93 % at one size, 95 % at mixed sizes, as the server fills its segments.
    #[test]
    fn the_targets_are_met() {
        for (sizes, target) in [
            (Sizes::Record(280), 0.93),
            (Sizes::LogNormal { mean: 257.0, sigma: 1.0 }, 0.95),
            (Sizes::Memcachier, 0.95),
            (Sizes::CacheLib, 0.95),
        ] {
            let rows = rows(sizes);
            let steady = rows
                .iter()
                .find(|r| {
                    r.mode == Mode::Steady && r.functions == FUNCTIONS && r.choice == "first_fit"
                })
                .unwrap();
            assert!(steady.device_utilisation >= target, "{steady:#?}");
        }
    }

    #[test]
    fn figures_agree_with_each_other() {
        for row in rows(Sizes::Record(280)) {
            assert!((row.record_bytes - 280.0).abs() < 1e-6);
            assert!((row.header_bytes - 21.0).abs() < 1e-6);
            // 14 records of 280 bytes are all that a page can hold.
            assert!(row.utilisation <= 14.0 * 280.0 / 4096.0 + 1e-9);
            let per_object = row.record_bytes + row.padding_bytes + row.unused_bytes;
            assert!((row.record_bytes / per_object - row.utilisation).abs() < 1e-6);
            if row.mode == Mode::Once {
                let all = row.offered.min(1.0) + 0.01;
                assert!(row.utilisation <= all, "{row:?}");
            }
        }
    }

    #[test]
    fn the_mixes_are_what_they_say() {
        let mut rng = Rng::new(3);
        for (sizes, mean, below_1k) in [
            (Sizes::Memcachier, 257.0, 0.8067),
            (Sizes::LogNormal { mean: 257.0, sigma: 1.0 }, 257.0, 0.971),
            (Sizes::CacheLib, 351.0, 0.991),
        ] {
            let n = 400_000;
            let (mut sum, mut below) = (0.0, 0.0);
            for _ in 0..n {
                let len = sizes.value_len(&mut rng, 20);
                sum += len as f64 / f64::from(n);
                below += f64::from(u8::from(len < 1024)) / f64::from(n);
            }
            assert!((sum / mean - 1.0).abs() < 0.05, "{sizes:?}: {sum}");
            assert!((below - below_1k).abs() < 0.005, "{sizes:?}: {below}");
        }
    }
}
