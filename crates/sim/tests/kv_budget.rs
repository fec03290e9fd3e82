//! What a write budget holds a key-value cache to: no hour above it, and spent where there is something to spend it on.

use larder_base::ByteSize;
use larder_policy::admission::AdmissionConfig;
use larder_policy::budget::{WriteBudgetConfig, YEAR_SECONDS};
use larder_sim::kv::{CacheConfig, HybridCache, Server, Sizes};
use larder_trace::generate;

const SERVER: Server =
    Server { memory: 6 << 20, flash: 24 << 20, object: 20_060, max_item: 1 << 20 };
/// Requests a second.
const RATE: u64 = 5;
const HOURS: u64 = 10;

/// Bytes written to flash in each hour.
fn hours(policy: &str, budget: WriteBudgetConfig) -> Vec<u64> {
    let admission = AdmissionConfig::from_name(policy).unwrap();
    let sizes = Sizes::Server(SERVER);
    let config = CacheConfig { sizes, admission, budget, ..CacheConfig::default() };
    let mut cache = HybridCache::new(&config).unwrap();
    let requests = HOURS * 3600 * RATE;
    let spec =
        format!("zipf?objects=6000&requests={requests}&skew=0.8&rate={RATE}&value=10000..30000");
    let mut written = Vec::new();
    let mut last = 0;
    for (i, request) in (1..).zip(generate::parse(&spec).unwrap()) {
        cache.request(&request.unwrap());
        if i % (3600 * RATE) == 0 {
            let now = cache.counters().flash_bytes;
            written.push(now - last);
            last = now;
        }
    }
    written
}

/// Large records: few fit a segment, and what finds no room in one is neither charged twice nor lost. An hour may have a tenth of an
/// hour's savings besides its own, and a segment that was begun.
#[test]
fn an_hour_keeps_to_the_budget_and_all_hours_spend_it() {
    let free: u64 = hours("all", WriteBudgetConfig::default())[HOURS as usize / 2..].iter().sum();
    let rate = 0.1 * free as f64 / (HOURS as f64 / 2.0 * 3600.0);
    for policy in ["expected_reads", "flashiness", "reject_first", "all"] {
        let budget = WriteBudgetConfig {
            tbw: Some(ByteSize((rate * YEAR_SECONDS) as u64)),
            years: 1.0,
            device_write_amplification: 1.0,
            burst_hours: 0.1,
            first_fill: false,
            ..WriteBudgetConfig::default()
        };
        let parts: Vec<f64> =
            hours(policy, budget).iter().map(|&bytes| bytes as f64 / (rate * 3600.0)).collect();
        // The first hours learn.
        let spent = parts[2..].iter().sum::<f64>() / (HOURS - 2) as f64;
        assert!(spent >= 0.95, "{policy}: {spent}: {parts:?}");
        // They may have saved a tenth of an hour for the others.
        let all = parts.iter().sum::<f64>() / HOURS as f64;
        assert!(all <= 1.0, "{policy}: {all}: {parts:?}");
        assert!(parts.iter().all(|&part| part <= 1.1), "{policy}: {parts:?}");
    }
}
