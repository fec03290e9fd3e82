//! Which policies, with which parameters, and how they are written.

use std::fmt;
use std::str::FromStr;

use larder_base::ByteSize;
use serde::{Deserialize, Serialize};

/// Names that users write, alone or joined by `+`.
pub const BLOCK_POLICY_NAMES: [&str; 8] =
    ["all", "seqr", "sseqr", "touch_count", "seqr+tc", "sseqr+tc", "two_lbs", "expected_reads"];

/// What is admitted where nobody says anything else: a stream's lines may have free slots, and displace nothing.
pub const BLOCK_ADMISSION_DEFAULT: &str = "seqr(free=on)";

/// Why an admission policy could not be read or set up.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BlockAdmissionError {
    /// No such policy.
    #[error("there is no block admission policy '{0}': choose one of {names}, or join several with '+'", names = BLOCK_POLICY_NAMES.join(", "))]
    UnknownPolicy(String),
    /// The policy has no such parameter.
    #[error("admission policy {policy} has no parameter '{name}': it has {known}")]
    UnknownParameter {
        /// Which policy.
        policy: &'static str,
        /// What was written.
        name: String,
        /// What there is.
        known: &'static str,
    },
    /// A parameter's value cannot be.
    #[error("{policy}'s {name} is '{value}': it must be {must}")]
    Parameter {
        /// Which policy.
        policy: &'static str,
        /// Which parameter.
        name: &'static str,
        /// What was given.
        value: String,
        /// What it must be.
        must: &'static str,
    },
    /// Not of the form `name(parameter=value,…)+name`.
    #[error(
        "admission '{text}' cannot be read: {problem}; write it like sseqr(window=32,length=4m)+tc(threshold=2)"
    )]
    Syntax {
        /// What was written.
        text: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// `all` in a chain, or a policy twice.
    #[error("admission '{text}' cannot be: {problem}")]
    Chain {
        /// What was written.
        text: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A table would be larger than is sensible.
    #[error("{policy} would need {need} of DRAM with {what}: at most {most} may go to it")]
    Memory {
        /// Which policy.
        policy: &'static str,
        /// What it needs.
        need: ByteSize,
        /// With which parameters.
        what: String,
        /// What it may have.
        most: ByteSize,
    },
}

/// When `touch_count` goes on to its next bitmap.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rotation {
    /// When all bitmaps together have seen this many times the cache's capacity in distinct segments: `cache:2`.
    Cache(f64),
    /// After this many accesses: `accesses:1000000`.
    Accesses(u64),
    /// After this many seconds: `time:3600`.
    Seconds(u64),
    /// Never: counts do not age. `never`.
    Never,
}

impl fmt::Display for Rotation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rotation::Cache(share) => write!(f, "cache:{share}"),
            Rotation::Accesses(n) => write!(f, "accesses:{n}"),
            Rotation::Seconds(n) => write!(f, "time:{n}"),
            Rotation::Never => f.write_str("never"),
        }
    }
}

impl FromStr for Rotation {
    type Err = ();

    fn from_str(text: &str) -> Result<Rotation, ()> {
        if text == "never" {
            return Ok(Rotation::Never);
        }
        let (kind, value) = text.split_once(':').ok_or(())?;
        let whole = || value.parse::<u64>().ok().filter(|&n| n > 0).ok_or(());
        match kind {
            "cache" => {
                let share = value.parse::<f64>().map_err(|_| ())?;
                if (0.01..=1000.0).contains(&share) { Ok(Rotation::Cache(share)) } else { Err(()) }
            }
            "accesses" => Ok(Rotation::Accesses(whole()?)),
            "time" => Ok(Rotation::Seconds(whole()?.min(u64::MAX / 1_000_000_000))),
            _ => Err(()),
        }
    }
}

/// Parameters of `seqr` and `sseqr`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SequentialConfig {
    /// Streams that are remembered. Default 32.
    pub window: u32,
    /// Bytes that may lie between the end of a stream and the access that continues it. Default 16 KiB.
    pub gap: ByteSize,
    /// Accesses that make a stream; the first of them are admitted. Default 4: with 2, as the papers have it, hot blocks that happen to
    /// be neighbours are rejected, which cost up to 8 % of the hits on the traces.
    pub run: u32,
    /// `sseqr`: bytes of each stream that are admitted before the rest is rejected. Default 4 MiB. Zero in `seqr`.
    pub length: ByteSize,
    /// What is not admitted of a stream may have free slots all the same; nothing leaves for it. Default `off`, as the papers have
    /// it.
    pub free: bool,
}

impl SequentialConfig {
    /// `seqr` with its defaults.
    pub const REJECT: SequentialConfig = SequentialConfig {
        window: 32,
        gap: ByteSize::kib(16),
        run: 4,
        length: ByteSize(0),
        free: false,
    };
    /// `sseqr` with its defaults.
    pub const SELECTIVE: SequentialConfig =
        SequentialConfig { length: ByteSize::mib(4), ..SequentialConfig::REJECT };
}

/// Parameters of `touch_count`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TouchCountConfig {
    /// Bytes of a volume that share a counter: a power of two. Default 64 KiB.
    pub segment: ByteSize,
    /// Bits of a counter: 1, 2, 4 or 8. Default 2.
    pub bits: u32,
    /// Touches from which a line is admitted, the present one included. Default 2.
    pub threshold: u32,
    /// Bitmaps whose counts are added. Default 4.
    pub bitmaps: u32,
    /// When the next bitmap takes over. Default `cache:2`.
    pub rotation: Rotation,
    /// Counters of a bitmap, a power of two. Default 0: one for each segment of the backing stores, as far as 1 byte of
    /// DRAM for each line of the cache goes; beyond that, segments share counters.
    pub counters: u64,
}

impl Default for TouchCountConfig {
    fn default() -> TouchCountConfig {
        TouchCountConfig {
            segment: ByteSize::kib(64),
            bits: 2,
            threshold: 2,
            bitmaps: 4,
            rotation: Rotation::Cache(2.0),
            counters: 0,
        }
    }
}

/// What `two_lbs` does with a line that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TwoLevelWrites {
    /// Compares counts, as for one that is read.
    Compare,
    /// Admits it.
    Admit,
    /// Rejects it while it would displace another.
    Reject,
}

impl TwoLevelWrites {
    const ALL: [TwoLevelWrites; 3] =
        [TwoLevelWrites::Compare, TwoLevelWrites::Admit, TwoLevelWrites::Reject];

    fn as_str(self) -> &'static str {
        match self {
            TwoLevelWrites::Compare => "compare",
            TwoLevelWrites::Admit => "admit",
            TwoLevelWrites::Reject => "reject",
        }
    }
}

/// Parameters of `two_lbs`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TwoLevelConfig {
    /// Bits of an access counter: 4 or 8. Default 4.
    pub bits: u32,
    /// Counters. Default 0: four for each line of the cache.
    pub counters: u64,
    /// Counters are halved once in this many times as many accesses as the cache has lines. Default 16.
    pub ageing: u32,
    /// Lines that are written. Default `compare`.
    pub writes: TwoLevelWrites,
}

impl Default for TwoLevelConfig {
    fn default() -> TwoLevelConfig {
        TwoLevelConfig { bits: 4, counters: 0, ageing: 16, writes: TwoLevelWrites::Compare }
    }
}

/// Parameters of `expected_reads`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpectedReadsConfig {
    /// Reads that a line must be expected to get for each time that it is written to flash.
    pub least: f64,
    /// How many times the reads of a line that leaves are asked of the one that displaces it.
    pub price: f64,
    /// Lines that are remembered for each that the cache has.
    pub memory: u32,
}

impl Default for ExpectedReadsConfig {
    fn default() -> ExpectedReadsConfig {
        ExpectedReadsConfig { least: 0.1, price: 1.0, memory: 2 }
    }
}

/// One policy of a chain.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StageConfig {
    /// `seqr`, or `sseqr` if some length is admitted.
    Sequential(SequentialConfig),
    /// `touch_count`, in chains also `tc`.
    TouchCount(TouchCountConfig),
    /// `two_lbs`.
    TwoLevel(TwoLevelConfig),
    /// `expected_reads`.
    ExpectedReads(ExpectedReadsConfig),
}

/// Block admission as users write it: `all`, a policy, or several joined by `+`, each with parameters in parentheses.
///
/// `sseqr(window=64,gap=32k,length=1m)+tc(threshold=3,rotation=accesses:100000)`
///
/// In a chain a line must pass every policy, and what one rejects the next does not count: a backup leaves no touches, whether
/// it may have free slots or not. What is displayed reads back as the same. The default is [`BLOCK_ADMISSION_DEFAULT`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BlockAdmissionConfig {
    /// In order; none for `all`.
    pub stages: Vec<StageConfig>,
}

impl Default for BlockAdmissionConfig {
    fn default() -> BlockAdmissionConfig {
        let stream = SequentialConfig { free: true, ..SequentialConfig::REJECT };
        BlockAdmissionConfig { stages: vec![StageConfig::Sequential(stream)] }
    }
}

impl StageConfig {
    fn name(&self) -> &'static str {
        match self {
            StageConfig::Sequential(c) if c.length.0 == 0 => "seqr",
            StageConfig::Sequential(_) => "sseqr",
            StageConfig::TouchCount(_) => "touch_count",
            StageConfig::TwoLevel(_) => "two_lbs",
            StageConfig::ExpectedReads(_) => "expected_reads",
        }
    }

    fn known(&self) -> &'static str {
        match self {
            StageConfig::Sequential(c) if c.length.0 == 0 => "window, gap, run, free",
            StageConfig::Sequential(_) => "window, gap, run, length, free",
            StageConfig::TouchCount(_) => "segment, bits, threshold, bitmaps, rotation, counters",
            StageConfig::TwoLevel(_) => "bits, counters, ageing, writes",
            StageConfig::ExpectedReads(_) => "least, price, memory",
        }
    }

    fn parse(name: &str) -> Result<StageConfig, BlockAdmissionError> {
        match name {
            "seqr" => Ok(StageConfig::Sequential(SequentialConfig::REJECT)),
            "sseqr" => Ok(StageConfig::Sequential(SequentialConfig::SELECTIVE)),
            "touch_count" | "tc" => Ok(StageConfig::TouchCount(TouchCountConfig::default())),
            "two_lbs" => Ok(StageConfig::TwoLevel(TwoLevelConfig::default())),
            "expected_reads" => Ok(StageConfig::ExpectedReads(ExpectedReadsConfig::default())),
            other => Err(BlockAdmissionError::UnknownPolicy(other.to_owned())),
        }
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), BlockAdmissionError> {
        let policy = self.name();
        let known = self.known();
        let bad = |name, must| BlockAdmissionError::Parameter {
            policy,
            name,
            value: value.to_owned(),
            must,
        };
        let number = |name, low: u64, high: u64, must| {
            value
                .parse::<u64>()
                .ok()
                .filter(|n| (low..=high).contains(n))
                .ok_or_else(|| bad(name, must))
        };
        let real = |name, high: f64, must| {
            let value = value.parse::<f64>().ok().filter(|n| (0.0..=high).contains(n));
            value.ok_or_else(|| bad(name, must))
        };
        let size = |name, low: u64, high: u64, must| {
            let size = value.parse::<ByteSize>().ok();
            size.filter(|s| (low..=high).contains(&s.0)).ok_or_else(|| bad(name, must))
        };
        let power = |name, must| {
            if value == "auto" {
                return Ok(0);
            }
            let size = value.parse::<ByteSize>().ok().map(|s| s.0);
            size.filter(|n| n.is_power_of_two() && (64..=1 << 34).contains(n))
                .ok_or_else(|| bad(name, must))
        };
        match (self, name) {
            (StageConfig::Sequential(c), "window") => {
                c.window = number("window", 1, 1024, "a number of streams, 1 to 1024")? as u32;
            }
            (StageConfig::Sequential(c), "gap") => {
                c.gap = size("gap", 0, 1 << 30, "a size up to 1g")?;
            }
            (StageConfig::Sequential(c), "run") => {
                c.run = number("run", 2, 1 << 16, "a number of accesses, 2 to 65536")? as u32;
            }
            (StageConfig::Sequential(c), "free") => {
                c.free = match value {
                    "on" => true,
                    "off" => false,
                    _ => return Err(bad("free", "on or off")),
                };
            }
            (StageConfig::Sequential(c), "length") if c.length.0 > 0 => {
                let must = "a size from 4k to 1t; seqr admits nothing of a stream";
                c.length = size("length", 4096, 1 << 40, must)?;
            }
            (StageConfig::TouchCount(c), "segment") => {
                let must = "a power of two from 4k to 1g";
                c.segment = size("segment", 4096, 1 << 30, must)?;
                if !c.segment.0.is_power_of_two() {
                    return Err(bad("segment", must));
                }
            }
            (StageConfig::TouchCount(c), "bits") => {
                let must = "1, 2, 4 or 8";
                c.bits = number("bits", 1, 8, must)? as u32;
                if !c.bits.is_power_of_two() {
                    return Err(bad("bits", must));
                }
            }
            (StageConfig::TouchCount(c), "threshold") => {
                c.threshold = number("threshold", 1, 255, "a number of touches, 1 to 255")? as u32;
            }
            (StageConfig::TouchCount(c), "bitmaps") => {
                c.bitmaps = number("bitmaps", 1, 16, "a number of bitmaps, 1 to 16")? as u32;
            }
            (StageConfig::TouchCount(c), "rotation") => {
                let must = "cache:TIMES, accesses:NUMBER, time:SECONDS or never";
                c.rotation = value.parse().map_err(|()| bad("rotation", must))?;
            }
            (StageConfig::TouchCount(c), "counters") => {
                c.counters = power("counters", "auto, or a power of two from 64 to 16g")?;
            }
            (StageConfig::TwoLevel(c), "bits") => {
                let must = "4 or 8";
                c.bits = number("bits", 4, 8, must)? as u32;
                if !c.bits.is_power_of_two() {
                    return Err(bad("bits", must));
                }
            }
            (StageConfig::TwoLevel(c), "counters") => {
                c.counters = power("counters", "auto, or a power of two from 64 to 16g")?;
            }
            (StageConfig::TwoLevel(c), "ageing") => {
                c.ageing =
                    number("ageing", 1, 1 << 20, "1 to 1048576 times the cache's lines")? as u32;
            }
            (StageConfig::TwoLevel(c), "writes") => {
                let choice = TwoLevelWrites::ALL.into_iter().find(|w| w.as_str() == value);
                c.writes = choice.ok_or_else(|| bad("writes", "compare, admit or reject"))?;
            }
            (StageConfig::ExpectedReads(c), "least") => {
                c.least = real("least", 1000.0, "a number of reads for each write, 0 to 1000")?;
            }
            (StageConfig::ExpectedReads(c), "price") => {
                c.price = real("price", 100.0, "a number of times, 0 to 100")?;
            }
            (StageConfig::ExpectedReads(c), "memory") => {
                let must = "a number of lines for each of the cache's, 1 to 16";
                c.memory = number("memory", 1, 16, must)? as u32;
            }
            (_, other) => {
                let name = other.to_owned();
                return Err(BlockAdmissionError::UnknownParameter { policy, name, known });
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), BlockAdmissionError> {
        if let StageConfig::TouchCount(c) = self {
            let most = c.bitmaps * ((1 << c.bits) - 1);
            if c.threshold > most {
                return Err(BlockAdmissionError::Parameter {
                    policy: "touch_count",
                    name: "threshold",
                    value: c.threshold.to_string(),
                    must: "at most what the counters can hold: bitmaps × (2^bits − 1)",
                });
            }
        }
        Ok(())
    }

    /// The parameters that differ from the defaults.
    fn parameters(&self) -> Vec<String> {
        let mut out = Vec::new();
        let mut put = |differs: bool, name: &str, value: &dyn fmt::Display| {
            if differs {
                out.push(format!("{name}={value}"));
            }
        };
        match self {
            StageConfig::Sequential(c) => {
                let selective = c.length.0 > 0;
                let d =
                    if selective { SequentialConfig::SELECTIVE } else { SequentialConfig::REJECT };
                put(c.window != d.window, "window", &c.window);
                put(c.gap != d.gap, "gap", &short(c.gap.0));
                put(c.run != d.run, "run", &c.run);
                put(c.length != d.length, "length", &short(c.length.0));
                put(c.free != d.free, "free", &if c.free { "on" } else { "off" });
            }
            StageConfig::TouchCount(c) => {
                let d = TouchCountConfig::default();
                put(c.segment != d.segment, "segment", &short(c.segment.0));
                put(c.bits != d.bits, "bits", &c.bits);
                put(c.threshold != d.threshold, "threshold", &c.threshold);
                put(c.bitmaps != d.bitmaps, "bitmaps", &c.bitmaps);
                put(c.rotation != d.rotation, "rotation", &c.rotation);
                put(c.counters != d.counters, "counters", &short(c.counters));
            }
            StageConfig::TwoLevel(c) => {
                let d = TwoLevelConfig::default();
                put(c.bits != d.bits, "bits", &c.bits);
                put(c.counters != d.counters, "counters", &short(c.counters));
                put(c.ageing != d.ageing, "ageing", &c.ageing);
                put(c.writes != d.writes, "writes", &c.writes.as_str());
            }
            StageConfig::ExpectedReads(c) => {
                let d = ExpectedReadsConfig::default();
                put(c.least.to_bits() != d.least.to_bits(), "least", &c.least);
                put(c.price.to_bits() != d.price.to_bits(), "price", &c.price);
                put(c.memory != d.memory, "memory", &c.memory);
            }
        }
        out
    }
}

/// A size in the shortest exact form that reads back.
fn short(bytes: u64) -> String {
    let units = [(40, "t"), (30, "g"), (20, "m"), (10, "k")];
    let unit =
        units.into_iter().find(|&(shift, _)| bytes > 0 && bytes.is_multiple_of(1u64 << shift));
    unit.map_or_else(|| bytes.to_string(), |(shift, name)| format!("{}{name}", bytes >> shift))
}

impl fmt::Display for BlockAdmissionConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.stages.is_empty() {
            return f.write_str("all");
        }
        for (at, stage) in self.stages.iter().enumerate() {
            let joined = self.stages.len() > 1 && matches!(stage, StageConfig::TouchCount(_));
            let name = if joined { "tc" } else { stage.name() };
            write!(f, "{}{name}", if at > 0 { "+" } else { "" })?;
            let parameters = stage.parameters();
            if !parameters.is_empty() {
                write!(f, "({})", parameters.join(","))?;
            }
        }
        Ok(())
    }
}

impl FromStr for BlockAdmissionConfig {
    type Err = BlockAdmissionError;

    fn from_str(text: &str) -> Result<BlockAdmissionConfig, BlockAdmissionError> {
        let syntax = |problem| BlockAdmissionError::Syntax { text: text.to_owned(), problem };
        let chain = |problem| BlockAdmissionError::Chain { text: text.to_owned(), problem };
        let mut stages: Vec<StageConfig> = Vec::new();
        let parts: Vec<&str> = text.split('+').map(str::trim).collect();
        for &part in &parts {
            let (name, arguments) = match part.split_once('(') {
                None => (part, None),
                Some((name, rest)) => {
                    let inner = rest
                        .strip_suffix(')')
                        .ok_or_else(|| syntax("a parenthesis is not closed"))?;
                    (name.trim_end(), Some(inner))
                }
            };
            if name.is_empty() {
                return Err(syntax("a policy's name is missing"));
            }
            if name == "all" {
                if parts.len() > 1 {
                    return Err(chain("'all' rejects nothing and stands alone"));
                }
                if arguments.is_some_and(|a| !a.trim().is_empty()) {
                    return Err(syntax("'all' has no parameters"));
                }
                continue;
            }
            let mut stage = StageConfig::parse(name)?;
            for argument in arguments.into_iter().flat_map(|a| a.split(',')) {
                if argument.trim().is_empty() {
                    continue;
                }
                let (key, value) =
                    argument.split_once('=').ok_or_else(|| syntax("a parameter has no '='"))?;
                stage.set(key.trim(), value.trim())?;
            }
            stage.check()?;
            let same =
                |s: &StageConfig| std::mem::discriminant(s) == std::mem::discriminant(&stage);
            if stages.iter().any(same) {
                return Err(chain("a policy of the same kind is there twice"));
            }
            stages.push(stage);
        }
        Ok(BlockAdmissionConfig { stages })
    }
}

impl TryFrom<String> for BlockAdmissionConfig {
    type Error = BlockAdmissionError;

    fn try_from(text: String) -> Result<BlockAdmissionConfig, BlockAdmissionError> {
        text.parse()
    }
}

impl From<BlockAdmissionConfig> for String {
    fn from(config: BlockAdmissionConfig) -> String {
        config.to_string()
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;
    use proptest::prelude::*;

    use super::*;

    fn stage() -> impl Strategy<Value = StageConfig> {
        let sequential = (1u32..=1024, 0u64..1 << 30, 2u32..100, 0u64..1 << 34, any::<bool>())
            .prop_map(|(window, gap, run, length, free)| {
                let length = if length < 4096 { 0 } else { length };
                StageConfig::Sequential(SequentialConfig {
                    window,
                    gap: ByteSize(gap),
                    run,
                    length: ByteSize(length),
                    free,
                })
            });
        let rotation = prop_oneof![
            (1u32..100_000).prop_map(|n| Rotation::Cache(f64::from(n) / 100.0)),
            (1u64..u64::MAX).prop_map(Rotation::Accesses),
            (1u64..1 << 30).prop_map(Rotation::Seconds),
            Just(Rotation::Never),
        ];
        let touch = (12u32..=30, 0u32..4, 1u32..=16, rotation, 0u32..30).prop_map(
            |(segment, bits, bitmaps, rotation, counters)| {
                StageConfig::TouchCount(TouchCountConfig {
                    segment: ByteSize(1 << segment),
                    bits: 1 << bits,
                    threshold: bitmaps.min(3),
                    bitmaps,
                    rotation,
                    counters: if counters < 6 { 0 } else { 1 << counters },
                })
            },
        );
        let two = (2u32..4, 0u32..30, 1u32..1000, 0usize..3).prop_map(
            |(bits, counters, ageing, writes)| {
                let counters = if counters < 6 { 0 } else { 1 << counters };
                StageConfig::TwoLevel(TwoLevelConfig {
                    bits: 1 << bits,
                    counters,
                    ageing,
                    writes: TwoLevelWrites::ALL[writes],
                })
            },
        );
        let expected = (0u32..10_000, 0u32..1000, 1u32..=16).prop_map(|(least, price, memory)| {
            StageConfig::ExpectedReads(ExpectedReadsConfig {
                least: f64::from(least) / 100.0,
                price: f64::from(price) / 10.0,
                memory,
            })
        });
        prop_oneof![sequential, touch, two, expected]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn what_is_displayed_reads_back(mut stages in proptest::collection::vec(stage(), 0..4)) {
            let mut kinds = Vec::new();
            stages.retain(|s| {
                let kind = std::mem::discriminant(s);
                let fresh = !kinds.contains(&kind);
                kinds.push(kind);
                fresh
            });
            let config = BlockAdmissionConfig { stages };
            let text = config.to_string();
            prop_assert_eq!(text.parse::<BlockAdmissionConfig>(), Ok(config.clone()), "{}", text);
        }
    }

    #[test]
    fn names_are_displayed_as_written() {
        for name in BLOCK_POLICY_NAMES {
            assert_eq!(name.parse::<BlockAdmissionConfig>().unwrap().to_string(), name);
        }
        assert_eq!(BLOCK_ADMISSION_DEFAULT.parse(), Ok(BlockAdmissionConfig::default()));
        assert_eq!(BlockAdmissionConfig::default().to_string(), BLOCK_ADMISSION_DEFAULT);
        let both = "sseqr(length=1m,free=on)";
        assert_eq!(both.parse::<BlockAdmissionConfig>().unwrap().to_string(), both);
        assert_eq!("seqr(free=off)".parse::<BlockAdmissionConfig>().unwrap().to_string(), "seqr");
        let long = "sseqr(window=64,gap=32k,length=1m)+tc(threshold=3,rotation=accesses:100000)";
        assert_eq!(long.parse::<BlockAdmissionConfig>().unwrap().to_string(), long);
        let loose = " sseqr( window = 32 , length=4096k ) + touch_count ";
        assert_eq!(loose.parse::<BlockAdmissionConfig>().unwrap().to_string(), "sseqr+tc");
    }

    #[test]
    fn errors_name_value_and_remedy() {
        for (text, parts) in [
            ("lru", &["'lru'", "seqr", "two_lbs"][..]),
            ("", &["name is missing", "write it like"]),
            ("seqr+", &["name is missing"]),
            ("seqr(window=0)", &["seqr's window", "'0'", "1 to 1024"]),
            ("seqr(length=4m)", &["seqr has no parameter 'length'", "window, gap, run, free"]),
            ("seqr(free=yes)", &["seqr's free", "'yes'", "on or off"]),
            ("sseqr(length=0)", &["'0'", "from 4k to 1t"]),
            ("tc(segment=5000)", &["touch_count's segment", "'5000'", "power of two"]),
            ("tc(bits=3)", &["'3'", "1, 2, 4 or 8"]),
            ("tc(bits=1,bitmaps=2,threshold=3)", &["threshold", "'3'", "bitmaps"]),
            ("tc(rotation=cache:0)", &["'cache:0'", "accesses:NUMBER"]),
            ("tc(counters=1000)", &["'1000'", "power of two"]),
            ("two_lbs(bits=2)", &["'2'", "4 or 8"]),
            ("two_lbs(writes=maybe)", &["'maybe'", "compare"]),
            ("expected_reads(least=-1)", &["expected_reads's least", "'-1'", "0 to 1000"]),
            ("expected_reads(price=nan)", &["price", "'nan'", "0 to 100"]),
            ("expected_reads(memory=0)", &["memory", "'0'", "1 to 16"]),
            ("expected_reads(window=3)", &["no parameter 'window'", "least, price, memory"]),
            ("seqr(window", &["parenthesis"]),
            ("seqr(window)", &["no '='"]),
            ("all+tc", &["stands alone"]),
            ("seqr+sseqr", &["twice"]),
            ("all(x=1)", &["no parameters"]),
        ] {
            let error = text.parse::<BlockAdmissionConfig>().unwrap_err().to_string();
            for part in parts {
                assert!(error.contains(part), "'{text}': '{error}' lacks '{part}'");
            }
        }
    }

    #[test]
    fn any_text_gets_an_answer() {
        let mut rng = Rng::new(11);
        let alphabet = b"seqrtcwo_lbs(),=+:0189kmgt window.gap";
        for _ in 0..20_000 {
            let len = rng.below(40);
            let text: String = (0..len)
                .map(|_| char::from(alphabet[rng.below(alphabet.len() as u64) as usize]))
                .collect();
            if let Ok(config) = text.parse::<BlockAdmissionConfig>() {
                assert_eq!(config.to_string().parse(), Ok(config));
            }
        }
    }
}
