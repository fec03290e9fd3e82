//! The counters of the engine and of the map's log, with their names and what they count.

use larder_engine::block::{BlockStats, LogStats};

/// A counter: its name, what it counts and in what unit, and where it is.
type Counter<T> = (&'static str, &'static str, fn(&T) -> u64);

const ENGINE: [Counter<BlockStats>; 20] = [
    ("read_lines", "Lines of the cache that clients read", |e| e.read_lines),
    ("read_hits", "Lines that clients read and that came from the cache device", |e| e.read_hits),
    (
        "read_shared",
        "Lines that clients read and that came with a fetch or fill that was under way",
        |e| e.read_shared,
    ),
    ("write_lines", "Lines that clients wrote, zeroed or trimmed", |e| e.write_lines),
    ("write_hits", "Lines that clients wrote, zeroed or trimmed and that were cached", |e| {
        e.write_hits
    }),
    ("fills", "Lines that were filled: new ones on the cache device", |e| e.fills),
    ("fill_rejected", "Lines not filled because admission, a share or a pin said no", |e| {
        e.fill_rejected
    }),
    (
        "fill_dropped",
        "Lines not filled because too many fills were under way or every place was busy",
        |e| e.fill_dropped,
    ),
    ("fill_cancelled", "Lines whose fill was given up because a write came in between", |e| {
        e.fill_cancelled
    }),
    ("evicted", "Lines evicted to make room", |e| e.evicted),
    ("updated", "Lines that were cached and that a write updated beside the volume's store", |e| {
        e.updated
    }),
    ("dropped", "Lines dropped by a write, a trim or an error", |e| e.dropped),
    (
        "corrupt",
        "Lines that did not have their checksum: dropped, and read from the volume's store",
        |e| e.corrupt,
    ),
    ("flash_errors", "Reads and writes of the cache device that failed", |e| e.flash_errors),
    ("backing_errors", "Reads and changes of volumes' stores that failed", |e| e.backing_errors),
    ("flash_lines_written", "Lines written to the cache device", |e| e.flash_lines_written),
    ("copied", "Lines that the cleaner of a log of segments moved on the cache device", |e| {
        e.copied
    }),
    ("cleaned", "Segments that the cleaner has emptied", |e| e.cleaned),
    ("waited", "Parts of requests, each in one group of 16 lines, that waited for another", |e| {
        e.waited
    }),
    (
        LONGEST_WAIT,
        "The longest time, in microseconds, that a part of a request waited for another",
        |e| e.longest_wait.0 / 1000,
    ),
];

const LOG: [Counter<LogStats>; 6] = [
    ("log_records", "Records that the map's log wrote: a slot, or a page of the table", |l| {
        l.records
    }),
    ("log_batches", "Batches that the map's log made durable", |l| l.batches),
    ("log_snapshots", "Snapshots of the map that were written", |l| l.snapshots),
    ("log_bytes", "Bytes written to the cache device for the map: log, snapshots and marks", |l| {
        l.bytes
    }),
    ("regions_marked", "Regions that were marked as being written to, each time", |l| {
        l.intents_set
    }),
    ("regions_cleared", "Regions whose mark was taken away, each time", |l| l.intents_cleared),
];

const RESTS: (&str, &str) =
    ("fill_rests", "Times that filling rested because the file system of the cache was full");

/// The one that is no count.
pub(super) const LONGEST_WAIT: &str = "longest_wait_microseconds";

/// All of them by name; `rests`: how often filling rested.
pub(super) fn counters(
    engine: &BlockStats,
    log: &LogStats,
    rests: u64,
) -> impl Iterator<Item = (&'static str, u64)> {
    let engine = ENGINE.iter().map(move |(name, _, of)| (*name, of(engine)));
    let log = LOG.iter().map(move |(name, _, of)| (*name, of(log)));
    engine.chain(log).chain([(RESTS.0, rests)])
}

/// What the counter of that name counts, and in what unit.
pub(super) fn help(name: &str) -> Option<&'static str> {
    let engine = ENGINE.iter().map(|(name, help, _)| (*name, *help));
    let mut all = engine.chain(LOG.iter().map(|(name, help, _)| (*name, *help))).chain([RESTS]);
    all.find(|(known, _)| *known == name).map(|(_, help)| help)
}
