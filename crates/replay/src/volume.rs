//! Replays block I/O against an export of an NBD server.
//!
//! One thread keeps so many requests under way over so many connections, in the order of the trace. Offsets and lengths
//! are the trace's, but for those beyond the export's end, which begin again at its start. Each volume but number 0 is
//! moved by an amount of its own, so that volumes do not share blocks.
//!
//! A request that shares bytes with one under way, of which one changes them, waits until that is answered, and what comes
//! after it in the trace waits too: no client has two such requests under way, since neither it nor the store could tell
//! what would come of them. In the trace they lay further apart in time.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use larder_runtime::{AlignedBuf, Payload};
use larder_trace::{Op as TraceOp, Reader, Request, mix};
use larder_volume::nbd::NbdBacking;
use larder_volume::op::{Done, Op};
use larder_volume::{Backing, Session, Timeouts, Uri};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use serde::Serialize;
use slab::Slab;

use crate::report::{Latency, latency, new_histogram};
use crate::{ReplayError, Snapshot};

/// Places are multiples of this when they are moved, bytes.
const SECTOR: u64 = 512;
/// Volumes are moved by multiples of this, bytes.
const STRETCH: u64 = 1 << 20;

/// How to replay.
#[derive(Clone, Debug)]
pub struct VolumeOptions {
    /// The export.
    pub target: Uri,
    /// Connections, where the server takes several.
    pub connections: usize,
    /// Requests under way on each.
    pub depth: usize,
    /// Replay at the recorded times divided by this; `None` is a closed loop.
    pub speed: Option<f64>,
    /// Requests at the start that are sent and not counted.
    pub warmup: u64,
    /// A connection that answers nothing for so long has failed.
    pub timeout: Duration,
}

/// One kind of request.
#[derive(Clone, Debug, Serialize)]
pub struct VolumeOpReport {
    /// `read`, `write`, `trim` or `all`.
    pub op: &'static str,
    /// Requests answered.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
    /// From sending (timed: from when it was due) to the whole reply.
    pub service_us: Latency,
}

/// The result. Everything but `warmup` counts what comes after the warm-up.
#[derive(Clone, Debug, Serialize)]
pub struct VolumeReport {
    /// The export.
    pub target: String,
    /// Its bytes.
    pub size: u64,
    /// Connections.
    pub connections: usize,
    /// Requests under way at most.
    pub depth: usize,
    /// Factor on the recorded times; absent in a closed loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed: Option<f64>,
    /// Requests sent before counting began.
    pub warmup: u64,
    /// Requests answered.
    pub requests: u64,
    /// From the first counted request to the last reply.
    pub seconds: f64,
    /// Requests a second.
    pub requests_per_second: f64,
    /// Reads among all requests.
    pub read_share: f64,
    /// By kind, and all of them.
    pub operations: Vec<VolumeOpReport>,
    /// Requests that were moved because they lie beyond the export's end.
    pub moved: u64,
    /// Records without a length.
    pub empty: u64,
    /// Requests that failed.
    pub errors: u64,
    /// The first of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_error: Option<String>,
    /// Requests that waited for one whose bytes they share.
    pub overlapping: u64,
    /// Furthest behind its time that a request was sent, milliseconds.
    pub behind_ms: f64,
    /// Malformed records of the trace passed over.
    pub skipped_records: u64,
}

/// What kinds are told apart.
const KINDS: [&str; 3] = ["read", "write", "trim"];

struct Tally {
    counts: [u64; 3],
    bytes: [u64; 3],
    times: [Histogram<u64>; 3],
    all: Histogram<u64>,
    moved: u64,
    empty: u64,
    overlapping: u64,
    errors: u64,
    first_error: Option<String>,
}

impl Tally {
    fn new() -> Tally {
        Tally {
            counts: [0; 3],
            bytes: [0; 3],
            times: [(); 3].map(|()| new_histogram()),
            all: new_histogram(),
            moved: 0,
            empty: 0,
            overlapping: 0,
            errors: 0,
            first_error: None,
        }
    }
}

/// A request under way.
struct Sent {
    since: Instant,
    kind: usize,
    place: Place,
    counted: bool,
}

/// Where a request lies in the export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    offset: u64,
    /// Bytes.
    len: u64,
    /// It is not where the trace has it.
    moved: bool,
}

/// The next request of the trace.
#[derive(Clone, Copy)]
struct Next {
    op: TraceOp,
    /// Of the trace's clock, nanoseconds.
    time: Option<u64>,
    place: Place,
    /// It has waited for another.
    waited: bool,
}

/// The place of a request in an export of `size` bytes, and whether it was moved. Its length is at most `most`.
fn place(request: &Request, shift: u64, size: u64, most: u64) -> Place {
    let len = request.size.min(most).min(size);
    let offset = request.offset.wrapping_add(shift);
    if offset.checked_add(len).is_some_and(|end| end <= size) {
        return Place { offset, len, moved: false };
    }
    let room = size - len + 1;
    Place { offset: offset % room / SECTOR * SECTOR, len, moved: true }
}

/// Whether a request under way shares bytes with `next`, and one of the two changes them.
fn excludes<'a>(under_way: impl IntoIterator<Item = &'a Sent>, next: &Next) -> bool {
    let Place { offset, len, .. } = next.place;
    under_way.into_iter().any(|sent| {
        (sent.kind != 0 || next.op != TraceOp::Read)
            && offset < sent.place.offset + sent.place.len
            && sent.place.offset < offset + len
    })
}

struct Replayer<'a> {
    options: &'a VolumeOptions,
    session: Box<dyn Session>,
    size: u64,
    most: u64,
    /// By the session's token.
    under_way: Slab<Sent>,
    /// Buffers of reads that are over.
    buffers: Vec<AlignedBuf>,
    data: Payload,
    tally: Tally,
    completed: u64,
    reads: u64,
    /// When a request was last answered, and that none has been for longer than the time-out.
    heard: Instant,
    silent: bool,
}

impl Replayer<'_> {
    /// Volumes lie apart, and each at the same place in every run.
    fn shift(&self, volume: u32) -> u64 {
        let stretches = (self.size / STRETCH).max(1);
        if volume == 0 { 0 } else { mix(u64::from(volume)) % stretches * STRETCH }
    }

    /// What is to be done for a request of the trace.
    fn place(&self, request: &Request) -> Result<Next, ReplayError> {
        if !request.op.is_block() {
            return Err(ReplayError::NotBlocks(request.op.name()));
        }
        let place = place(request, self.shift(request.app), self.size, self.most);
        Ok(Next { op: request.op, time: request.time.map(|t| t.0), place, waited: false })
    }

    fn send(&mut self, next: Next, since: Instant, counted: bool) {
        let Place { offset, len, moved } = next.place;
        if len == 0 {
            self.tally.empty += u64::from(counted);
            return;
        }
        self.tally.moved += u64::from(counted && moved);
        self.tally.overlapping += u64::from(counted && next.waited);
        let (kind, op) = match next.op {
            TraceOp::Read => {
                let mut buf = self.buffers.pop().unwrap_or_else(|| AlignedBuf::zeroed(0));
                if buf.capacity() < len as usize {
                    buf = AlignedBuf::zeroed(len as usize);
                }
                buf.set_len(len as usize);
                (0, Op::Read { offset, buf })
            }
            TraceOp::Write => {
                let data = self.data.part(0, len as usize);
                (1, Op::Write { offset, data, fua: false })
            }
            _ => (2, Op::Trim { offset, len: len as u32, fua: false }),
        };
        let index = self.under_way.insert(Sent { since, kind, place: next.place, counted });
        self.session.submit(index as u64, op);
    }

    fn take_answers(&mut self) {
        while let Some(Done { token, op, outcome }) = self.session.pop() {
            let Some(sent) = self.under_way.try_remove(token as usize) else { continue };
            if let Op::Read { buf, .. } = op
                && self.buffers.len() < 64
            {
                self.buffers.push(buf);
            }
            self.completed += 1;
            self.reads += u64::from(sent.kind == 0);
            let tally = &mut self.tally;
            if let Err(failure) = outcome {
                tally.errors += 1;
                tally.first_error.get_or_insert_with(|| failure.to_string());
                // It had so long to answer this one, and has answered no other meanwhile.
                let timeout = self.options.timeout;
                self.silent = sent.since.elapsed().min(self.heard.elapsed()) >= timeout;
                continue;
            }
            self.heard = Instant::now();
            if sent.counted {
                let nanos = sent.since.elapsed().as_nanos() as u64;
                tally.counts[sent.kind] += 1;
                tally.bytes[sent.kind] += sent.place.len;
                tally.times[sent.kind].saturating_record(nanos);
                tally.all.saturating_record(nanos);
            }
        }
    }

    fn busy(&self) -> usize {
        self.under_way.len()
    }
}

/// Replays block I/O. `progress` is called about five times a second.
///
/// # Errors
/// When the export cannot be opened, or the trace cannot be read or holds something else than block I/O. Requests that fail
/// are counted.
pub fn run_volume(
    mut trace: Box<dyn Reader>,
    options: &VolumeOptions,
    mut progress: impl FnMut(&Snapshot),
) -> Result<VolumeReport, ReplayError> {
    let timeout = Timeouts {
        silence: options.timeout,
        give_up: Some(options.timeout),
        ..Timeouts::default()
    };
    let backing = NbdBacking::open(&options.target, false, timeout)?;
    let about = backing.capabilities();
    let session = backing.session_over(options.connections)?;
    let mut poll = Poll::new().map_err(ReplayError::Poll)?;
    poll.registry()
        .register(&mut SourceFd(&session.fd()), Token(0), Interest::READABLE)
        .map_err(ReplayError::Poll)?;
    let mut events = Events::with_capacity(4);
    let most = u64::from(about.maximum);
    let mut data = AlignedBuf::zeroed(most as usize);
    // Bytes that no store takes for zeroes.
    data.chunks_exact_mut(8)
        .zip(1u64..)
        .for_each(|(b, i)| b.copy_from_slice(&mix(i).to_le_bytes()));
    let mut replayer = Replayer {
        options,
        session,
        size: about.size,
        most,
        under_way: Slab::new(),
        buffers: Vec::new(),
        data: Payload::new(data),
        tally: Tally::new(),
        completed: 0,
        reads: 0,
        heard: Instant::now(),
        silent: false,
    };
    let depth = options.connections.max(1) * options.depth.max(1);
    let started = Instant::now();
    let (mut sent, mut counting_since) = (0u64, started);
    let mut next: Option<Next> = None;
    let (mut ended, mut behind) = (false, Duration::ZERO);
    let mut said = started;
    loop {
        let now = Instant::now();
        let mut wait: Option<Instant> = None;
        let mut blocked = false;
        while replayer.busy() < depth && !ended {
            if next.is_none() {
                let request = trace.next().transpose()?;
                next = request.map(|r| replayer.place(&r)).transpose()?;
            }
            let Some(request) = &mut next else {
                ended = true;
                break;
            };
            let mut since = now;
            if let Some(speed) = replayer.options.speed {
                let time = request.time.ok_or(ReplayError::Untimed)?;
                let due = started + Duration::from_secs_f64(time as f64 / 1e9 / speed);
                if due > now {
                    wait = Some(due);
                    break;
                }
                behind = behind.max(now - due);
                since = due;
            }
            if excludes(replayer.under_way.iter().map(|(_, sent)| sent), request) {
                (request.waited, blocked) = (true, true);
                break;
            }
            if sent == options.warmup {
                counting_since = now;
            }
            let counted = sent >= options.warmup;
            sent += 1;
            replayer.send(*request, since, counted);
            next = None;
        }
        replayer.session.flush(now);
        replayer.take_answers();
        // A server that is gone answers none of the rest either.
        ended |= replayer.silent;
        if ended && replayer.busy() == 0 {
            break;
        }
        let room = !ended && replayer.busy() < depth;
        if !room || blocked || wait.is_some() {
            let wake = replayer.session.wake_at();
            let until = [wait, wake].into_iter().flatten().min();
            let tick = Duration::from_millis(200);
            let timeout = until.map_or(tick, |at| at.saturating_duration_since(Instant::now()));
            match poll.poll(&mut events, Some(timeout.min(tick))) {
                Err(e) if e.kind() != std::io::ErrorKind::Interrupted => {
                    return Err(ReplayError::Poll(e));
                }
                _ => {}
            }
            replayer.session.turn(Instant::now());
            replayer.take_answers();
        }
        if said.elapsed() >= Duration::from_millis(200) {
            said = Instant::now();
            progress(&Snapshot {
                elapsed: started.elapsed(),
                completed: replayer.completed,
                gets: replayer.reads,
                hits: 0,
                errors: replayer.tally.errors,
                fraction: trace.progress().fraction(),
            });
        }
    }
    let seconds = counting_since.elapsed().as_secs_f64();
    let tally = replayer.tally;
    let requests: u64 = tally.counts.iter().sum();
    let kinds = KINDS.iter().enumerate().filter(|(i, _)| tally.counts[*i] > 0);
    let mut operations: Vec<VolumeOpReport> = kinds
        .map(|(i, op)| VolumeOpReport {
            op,
            count: tally.counts[i],
            bytes: tally.bytes[i],
            service_us: latency(&tally.times[i]),
        })
        .collect();
    operations.push(VolumeOpReport {
        op: "all",
        count: requests,
        bytes: tally.bytes.iter().sum(),
        service_us: latency(&tally.all),
    });
    Ok(VolumeReport {
        target: options.target.to_string(),
        size: about.size,
        connections: options.connections,
        depth,
        speed: options.speed,
        warmup: options.warmup.min(sent),
        requests,
        seconds,
        requests_per_second: requests as f64 / seconds.max(1e-9),
        read_share: tally.counts[0] as f64 / requests.max(1) as f64,
        operations,
        moved: tally.moved,
        empty: tally.empty,
        overlapping: tally.overlapping,
        errors: tally.errors,
        first_error: tally.first_error,
        behind_ms: behind.as_secs_f64() * 1e3,
        skipped_records: trace.skipped(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_share_bytes_and_change_them_are_not_under_way_together() {
        let place = |offset, len| Place { offset, len, moved: false };
        let sent = |kind, at, len| Sent {
            since: Instant::now(),
            kind,
            place: place(at, len),
            counted: true,
        };
        let under_way = [sent(0, 0, 4096), sent(1, 8192, 512), sent(2, 16_384, 4096)];
        let waits = |op, at, len| {
            excludes(&under_way, &Next { op, time: None, place: place(at, len), waited: false })
        };
        assert!(!waits(TraceOp::Read, 0, 4096), "two reads");
        assert!(waits(TraceOp::Write, 4095, 512) && waits(TraceOp::Trim, 0, 1));
        assert!(waits(TraceOp::Read, 4096, 8192) && waits(TraceOp::Read, 20_479, 1));
        assert!(!waits(TraceOp::Write, 4096, 4096) && !waits(TraceOp::Write, 8704, 7680));
    }

    #[test]
    fn places_lie_within_the_export() {
        let request = |offset, size| Request::block(TraceOp::Read, 0, offset, size);
        let here = |offset, len| Place { offset, len, moved: false };
        assert_eq!(place(&request(4096, 512), 0, 8192, 1 << 20), here(4096, 512));
        assert_eq!(place(&request(7680, 512), 0, 8192, 1 << 20), here(7680, 512));
        let mut rng = larder_base::Rng::new(1);
        for _ in 0..20_000 {
            let size = rng.range(1, 1 << 24);
            let (offset, len) = (rng.next_u64() >> rng.below(60), rng.below(1 << 26));
            let shift = rng.below(1 << 24);
            let place = place(&request(offset, len), shift, size, 1 << 20);
            assert!(place.offset + place.len <= size && place.len <= 1 << 20);
        }
    }
}
