//! What SIGUSR1 and the end of a run put into the log.

use larder_base::ByteSize;
use larder_block::cache::Core;
use larder_block::control::Control;
use tracing::{info, warn};

/// How recording goes, where it was asked for.
pub(super) fn record(cache: &Core) {
    if let Some(record) = cache.record_stats() {
        let ended = record.ended.unwrap_or("it goes on");
        info!("record: {} records, {}: {ended}", record.records, ByteSize(record.bytes));
    }
}

/// What stays dirty in the cache when the daemon ends, for the log: it is not lost, and its store is not up to date.
pub(super) fn dirty(cache: &Core) {
    for volume in cache.volumes() {
        let Some(back) = cache.back_status(&volume.name) else { continue };
        if back.status.dirty > 0 {
            warn!(
                "volume '{name}': {} are written to this cache and not to its store; the next start goes on with them. Before \
                 cache or store is used without the other: `larder block detach {name}` while it is served",
                ByteSize(back.status.dirty),
                name = volume.name,
            );
        }
    }
    for aside in cache.put_aside() {
        let name = &aside.name;
        if let Some(kept @ 1..) = aside.carried_bytes {
            warn!(
                "volume '{name}': {} are written to this cache and not to its store, and it was not served at the end; the cache keeps them \
                 until it is",
                ByteSize(kept),
            );
        }
    }
}

/// The counters, for the log.
pub(super) fn counters(control: &Control) {
    let status = control.status();
    let count = |name: &str| status.counters.get(name).copied().unwrap_or(0);
    let share = |part: u64, of: u64| if of == 0 { 0.0 } else { 100.0 * part as f64 / of as f64 };
    let read = count("read_lines");
    info!(
        "lines read {read}, of them {:.1} % from flash and {:.1} % shared with others; written {}; filled {}, evicted {}, \
         updated {}, dropped {}; corrupt {}, errors of the cache {}, of volumes {}",
        share(count("read_hits"), read),
        share(count("read_shared"), read),
        count("write_lines"),
        count("fills"),
        count("evicted"),
        count("updated"),
        count("dropped"),
        count("corrupt"),
        count("flash_errors"),
        count("backing_errors"),
    );
    let verdicts: Vec<String> =
        status.verdicts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    info!(
        "verdicts: {}; map: {} records, {} snapshots, {} regions with a bit{}",
        verdicts.join(", "),
        count("log_records"),
        count("log_snapshots"),
        status.cache.regions_marked,
        if status.cache.given_up.is_none() {
            ""
        } else {
            "; the cache was given up, volumes are in pass-through"
        },
    );
}
