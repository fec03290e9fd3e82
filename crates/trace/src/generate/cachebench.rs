//! Workloads in the manner of CacheLib's cachebench: popularity buckets (`pop.json`), sizes (`sizes.json`) and operation
//! ratios (`config.json`), compressed or not.
//!
//! As cachebench does it: a key's bucket is drawn by weight and the key evenly within it, the buckets scaled to
//! `numKeys`; sizes and key sizes are a property of the key; lone gets and sets go to keys that never come again.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use larder_base::Rng;
use serde::Deserialize;

use super::Draw;
use super::simple::permute;
use super::spec::Spec;
use crate::error::TraceError;
use crate::input::Input;
use crate::request::{Op, Request, mix};

/// No configuration is larger.
const MAX_JSON: usize = 4 << 20;

#[derive(Deserialize)]
struct Config {
    test_config: TestConfig,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TestConfig {
    num_keys: u64,
    num_ops: u64,
    #[serde(default)]
    pool_distributions: Vec<Distribution>,
    #[serde(flatten)]
    own: Distribution,
}

#[derive(Clone, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Distribution {
    get_ratio: f64,
    set_ratio: f64,
    del_ratio: f64,
    add_chained_ratio: f64,
    lone_get_ratio: f64,
    lone_set_ratio: f64,
    key_size_range: Vec<f64>,
    key_size_range_probability: Vec<f64>,
    pop_dist_file: String,
    val_size_dist_file: String,
    popularity_buckets: Vec<f64>,
    popularity_weights: Vec<f64>,
    val_size_range: Vec<f64>,
    val_size_range_probability: Vec<f64>,
}

fn read_json<T: for<'de> Deserialize<'de>>(
    spec: &Spec,
    directory: &Path,
    name: &str,
) -> Result<T, TraceError> {
    let plain = directory.join(name);
    let found =
        [name.to_owned(), format!("{name}.zst"), format!("{name}.xz"), format!("{name}.gz")]
            .into_iter()
            .map(|n| directory.join(n))
            .find(|p| p.is_file())
            .unwrap_or(plain);
    let shown = found.display().to_string();
    let file =
        File::open(&found).map_err(|source| TraceError::Open { file: shown.clone(), source })?;
    let raw: Box<dyn Read + Send> = Box::new(file);
    let mut input = Input::new(&shown, raw)?;
    let bytes = input.peek(MAX_JSON)?;
    if bytes.len() == MAX_JSON {
        return Err(
            spec.error(format!("{shown} is longer than {MAX_JSON} bytes: not a cachebench file"))
        );
    }
    // A key may be there twice, as `setRatio` is in Meta's own kvcache_l2_wc; the last counts.
    serde_json::from_slice::<serde_json::Value>(bytes)
        .and_then(serde_json::from_value)
        .map_err(|e| spec.error(format!("{shown} is not cachebench's JSON: {e}")))
}

/// Draws an index by weight.
struct Weighted {
    cumulative: Vec<f64>,
}

impl Weighted {
    fn new(weights: &[f64]) -> Option<Weighted> {
        let mut total = 0.0;
        let cumulative: Vec<f64> = weights
            .iter()
            .map(|w| {
                total += w;
                total
            })
            .collect();
        let sane =
            weights.iter().all(|w| w.is_finite() && *w >= 0.0) && total > 0.0 && total.is_finite();
        sane.then_some(Weighted { cumulative })
    }

    /// The index at `u`, 0 ≤ u < 1, and how far within its weight it lies.
    fn at(&self, u: f64) -> (usize, f64) {
        let last = self.cumulative.len() - 1;
        let x = u * self.cumulative[last];
        let i = self.cumulative.partition_point(|&c| c <= x).min(last);
        let low = if i == 0 { 0.0 } else { self.cumulative[i - 1] };
        let width = self.cumulative[i] - low;
        (i, if width > 0.0 { ((x - low) / width).clamp(0.0, 1.0) } else { 0.0 })
    }
}

/// Sizes: single values by weight, or, with one more bound than weights, ranges.
struct SizeDistribution {
    bounds: Vec<f64>,
    weights: Weighted,
}

impl SizeDistribution {
    fn new(bounds: &[f64], weights: &[f64]) -> Option<SizeDistribution> {
        let fits = !weights.is_empty()
            && (bounds.len() == weights.len() || bounds.len() == weights.len() + 1);
        let sane = bounds.iter().all(|b| (0.0..=1e12).contains(b));
        (fits && sane).then_some(())?;
        Some(SizeDistribution { bounds: bounds.to_vec(), weights: Weighted::new(weights)? })
    }

    fn at(&self, u: f64) -> u64 {
        let (i, within) = self.weights.at(u);
        match self.bounds.get(i + 1) {
            Some(high) if self.bounds.len() == self.weights.cumulative.len() + 1 => {
                (self.bounds[i] + within * (high - self.bounds[i])) as u64
            }
            _ => self.bounds[i] as u64,
        }
    }
}

struct CacheBench {
    /// First key of every bucket, and the number of keys behind the last.
    edges: Vec<u64>,
    popularity: Weighted,
    keys: u64,
    sizes: SizeDistribution,
    key_sizes: Option<SizeDistribution>,
    ops: Weighted,
    lone: u64,
}

const OPS: [(Op, bool); 6] = [
    (Op::Get, false),
    (Op::Set, false),
    (Op::Delete, false),
    // A chained item has no like here: it is a store.
    (Op::Set, false),
    (Op::Get, true),
    (Op::Set, true),
];

pub(crate) fn build(spec: &mut Spec) -> Result<(u64, Box<dyn Draw>), TraceError> {
    let directory = spec.text("dir").ok_or_else(|| {
        spec.error("dir is missing: the directory with config.json (gen:cachebench?dir=PATH)")
    })?;
    let directory = PathBuf::from(directory);
    let config: Config = read_json(spec, &directory, "config.json")?;
    let test = config.test_config;
    let own = test.pool_distributions.into_iter().next().unwrap_or(test.own);
    let (mut buckets, mut weights) =
        (own.popularity_buckets.clone(), own.popularity_weights.clone());
    if !own.pop_dist_file.is_empty() {
        let d: Distribution = read_json(spec, &directory, &own.pop_dist_file)?;
        (buckets, weights) = (d.popularity_buckets, d.popularity_weights);
    }
    let (mut bounds, mut size_weights) =
        (own.val_size_range.clone(), own.val_size_range_probability.clone());
    if !own.val_size_dist_file.is_empty() {
        let d: Distribution = read_json(spec, &directory, &own.val_size_dist_file)?;
        (bounds, size_weights) = (d.val_size_range, d.val_size_range_probability);
    }
    let bad = |what: &str| spec.error(format!("{} in {}", what, directory.display()));
    let popularity = Weighted::new(&weights)
        .filter(|_| weights.len() == buckets.len())
        .ok_or_else(|| bad("popularityWeights and popularityBuckets must be as many, none negative, not all zero"))?;
    let total: f64 = buckets.iter().sum();
    if !(total.is_finite() && total > 0.0 && buckets.iter().all(|b| *b >= 0.0)) {
        return Err(bad("popularityBuckets must be counts of keys"));
    }
    let sizes = SizeDistribution::new(&bounds, &size_weights).ok_or_else(|| {
        bad("valSizeRange must have as many values as valSizeRangeProbability, or one more")
    })?;
    let key_sizes = SizeDistribution::new(&own.key_size_range, &own.key_size_range_probability);
    let ops = Weighted::new(&[
        own.get_ratio,
        own.set_ratio,
        own.del_ratio,
        own.add_chained_ratio,
        own.lone_get_ratio,
        own.lone_set_ratio,
    ])
    .ok_or_else(|| bad("the operations' ratios must not be negative, nor all zero"))?;
    let keys = spec.number("objects", test.num_keys.clamp(1, 1 << 40), 1..=1 << 40)?;
    let requests = spec.number("requests", test.num_ops.clamp(1, 1 << 50), 1..=1 << 50)?;
    let mut seen = 0.0;
    let mut edges = vec![0u64];
    for b in &buckets {
        seen += b;
        // Every bucket keeps at least the possibility of one key: an edge may coincide with the one before.
        edges.push(((seen / total) * keys as f64).round() as u64);
    }
    Ok((requests, Box::new(CacheBench { edges, popularity, keys, sizes, key_sizes, ops, lone: 0 })))
}

impl Draw for CacheBench {
    fn draw(&mut self, _index: u64, rng: &mut Rng) -> Request {
        let (op, lone) = OPS[self.ops.at(rng.unit()).0];
        let id = if lone {
            self.lone += 1;
            1 << 62 | self.lone
        } else {
            let (bucket, _) = self.popularity.at(rng.unit());
            let (low, high) = (self.edges[bucket].min(self.keys - 1), self.edges[bucket + 1]);
            permute(low + rng.below(high.saturating_sub(low).max(1)), self.keys)
        };
        let unit = |salt: u64| (mix(id ^ salt) >> 11) as f64 / (1u64 << 53) as f64;
        let key_size =
            self.key_sizes.as_ref().map_or(0, |k| k.at(unit(0x6b65_7973)).min(250) as u32);
        Request { op, key_size, ..Request::get(id, self.sizes.at(unit(0x7369_7a65))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::parse;

    fn write(directory: &Path, name: &str, text: &str) {
        std::fs::write(directory.join(name), text).unwrap();
    }

    #[test]
    fn follows_the_files() {
        let dir = tempfile::tempdir().unwrap();
        write(
            dir.path(),
            "config.json",
            r#"{"test_config": {"numKeys": 1000, "numOps": 50000, "getRatio": 0.7, "setRatio": 0.2, "loneGetRatio": 0.1,
                "keySizeRange": [8, 16], "keySizeRangeProbability": [1.0],
                "popDistFile": "pop.json", "valSizeDistFile": "sizes.json"}}"#,
        );
        write(
            dir.path(),
            "pop.json",
            r#"{"popularityBuckets": [1, 9], "popularityWeights": [3, 1]}"#,
        );
        let sizes = r#"{"valSizeRange": [100, 5000], "valSizeRangeProbability": [0.9, 0.1]}"#;
        std::fs::write(
            dir.path().join("sizes.json.zst"),
            zstd::encode_all(sizes.as_bytes(), 1).unwrap(),
        )
        .unwrap();
        let spec = format!("cachebench?dir={}", dir.path().display());
        let all: Vec<Request> = parse(&spec).unwrap().map(|r| r.unwrap()).collect();
        assert_eq!(all.len(), 50_000);
        let share = |f: &dyn Fn(&Request) -> bool| {
            all.iter().filter(|r| f(r)).count() as f64 / all.len() as f64
        };
        assert!((share(&|r| r.op == Op::Set) - 0.2).abs() < 0.01);
        assert!((share(&|r| r.id >> 62 == 1) - 0.1).abs() < 0.01);
        // A tenth of the keys takes three quarters of the requests that are not lone.
        let hot: std::collections::HashSet<u64> = (0..100).map(|k| permute(k, 1000)).collect();
        assert!((share(&|r| hot.contains(&r.id)) - 0.9 * 0.75).abs() < 0.01);
        assert!(all.iter().all(|r| matches!(r.size, 100 | 5000) && (8..=16).contains(&r.key_size)));
        let mut size_of = std::collections::BTreeMap::new();
        assert!(
            all.iter().all(|r| *size_of.entry(r.id).or_insert(r.size) == r.size),
            "a key has one size"
        );
    }

    #[test]
    #[cfg_attr(without = "shared", ignore = "needs the shared traces (LARDER_SHARED=DIR)")]
    fn shared_workloads_load() {
        let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
        let root = std::env::var_os("LARDER_SHARED").map_or_else(beside, Into::into);
        let root = root.join("traces/cachelib");
        for name in ["cdn", "kvcache_reg", "kvcache_l2_reg", "graph_cache_leader_fbobj"] {
            let dir = root.join(name);
            let spec = format!("cachebench?dir={}&objects=100000&requests=20000", dir.display());
            let all: Vec<Request> = parse(&spec).unwrap().map(|r| r.unwrap()).collect();
            assert_eq!(all.len(), 20_000);
            assert!(all.iter().filter(|r| r.op == Op::Get).count() > 15_000, "{name}");
        }
    }

    #[test]
    fn a_key_that_is_there_twice_counts_as_it_was_said_last() {
        let dir = tempfile::tempdir().unwrap();
        write(
            dir.path(),
            "config.json",
            r#"{"test_config": {"numKeys": 100, "numOps": 1000, "poolDistributions": [{"getRatio": 0.5, "setRatio": 0.9,
                "loneSetRatio": 0.0, "setRatio": 0.5, "popularityBuckets": [1], "popularityWeights": [1],
                "valSizeRange": [100], "valSizeRangeProbability": [1.0]}]}}"#,
        );
        let spec = format!("cachebench?dir={}", dir.path().display());
        let sets = parse(&spec).unwrap().filter(|r| r.as_ref().unwrap().op == Op::Set).count();
        assert!((430..570).contains(&sets), "{sets} of 1000");
    }

    #[test]
    fn bad_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let spec = format!("cachebench?dir={}", dir.path().display());
        let error = |s: &str| parse(s).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error("cachebench").contains("dir is missing"));
        assert!(error(&spec).contains("config.json"));
        for (config, says) in [
            ("{", "not cachebench's JSON"),
            (r#"{"test_config": {"numKeys": 1, "numOps": 1}}"#, "popularityWeights"),
            (
                r#"{"test_config": {"numKeys": 1, "numOps": 1, "popularityBuckets": [1], "popularityWeights": [-1]}}"#,
                "popularityWeights",
            ),
        ] {
            write(dir.path(), "config.json", config);
            assert!(error(&spec).contains(says), "{config}: {}", error(&spec));
        }
    }
}
