//! What a store cannot do itself, done by what it can: zeroes written out where there is no other way, and a flush
//! behind a write that must be durable.

use std::io;
use std::os::fd::RawFd;
use std::time::Instant;

use larder_runtime::{AlignedBuf, Payload};
use mio::Registry;
use mio::event::Event;

use super::Session;
use crate::op::{Done, Failure, FailureKind, Op, Outcome};

/// Zeroes are written in pieces of this size, bytes.
const PIECE: usize = 1 << 20;
/// So many of them at a time.
const PIECES: u32 = 4;

/// Where an operation is.
#[derive(Debug)]
enum Stage {
    /// With the store as it came.
    Whole,
    /// Its zeroes are being written: from `at` on they have not been asked for yet.
    Zeroing { op: Op, at: u64, under_way: u32, failure: Option<Failure> },
    /// Done but for being durable.
    Flushing { op: Op },
    /// Not in use.
    Free,
}

#[derive(Debug)]
struct Task {
    token: u64,
    stage: Stage,
    /// A flush must follow.
    flush: bool,
}

/// A session that can do everything, above one that says [`FailureKind::Unsupported`] to what it cannot.
#[derive(Debug)]
pub struct Steps<S> {
    raw: S,
    tasks: Vec<Task>,
    free: Vec<usize>,
    zeroes: Option<Payload>,
}

impl<S: Session> Steps<S> {
    /// Above `raw`, which must hand back every operation that it is given, with its buffer.
    pub fn new(raw: S) -> Steps<S> {
        Steps { raw, tasks: Vec::new(), free: Vec::new(), zeroes: None }
    }

    fn zeroes(&mut self) -> Payload {
        self.zeroes.get_or_insert_with(|| Payload::new(AlignedBuf::zeroed(PIECE))).clone()
    }

    /// Goes on with `index`, which has no operation of its own under way below.
    fn finish(&mut self, index: usize, op: Op, outcome: Outcome) -> Option<Done> {
        let task = &mut self.tasks[index];
        if outcome.is_ok() && task.flush {
            task.flush = false;
            task.stage = Stage::Flushing { op };
            self.raw.submit(index as u64, Op::Flush);
            return None;
        }
        task.stage = Stage::Free;
        let token = task.token;
        self.free.push(index);
        Some(Done { token, op, outcome })
    }

    /// Asks for the next pieces of zeroes.
    fn zero(&mut self, index: usize) {
        let payload = self.zeroes();
        let Stage::Zeroing { op, at, under_way, failure } = &mut self.tasks[index].stage else {
            return;
        };
        let (start, len) = op.range();
        while failure.is_none() && *under_way < PIECES && *at < start + len {
            let now = (start + len - *at).min(PIECE as u64) as usize;
            let data = payload.part(0, now);
            self.raw.submit(index as u64, Op::Write { offset: *at, data, fua: false });
            *at += now as u64;
            *under_way += 1;
        }
    }

    fn step(&mut self, done: Done) -> Option<Done> {
        let Done { token, op, outcome } = done;
        let index = token as usize;
        match std::mem::replace(&mut self.tasks[index].stage, Stage::Free) {
            Stage::Whole => {
                if let (Op::WriteZeroes { offset, fast: false, .. }, Err(failure)) = (&op, &outcome)
                    && failure.kind == FailureKind::Unsupported
                {
                    let at = *offset;
                    self.tasks[index].stage =
                        Stage::Zeroing { op, at, under_way: 0, failure: None };
                    self.zero(index);
                    return None;
                }
                // A trim is advice.
                let ignored = matches!((&op, &outcome), (Op::Trim { .. }, Err(f)) if f.kind == FailureKind::Unsupported);
                let outcome = if ignored { Ok(Vec::new()) } else { outcome };
                self.finish(index, op, outcome)
            }
            Stage::Zeroing { op, at, mut under_way, mut failure } => {
                under_way -= 1;
                if let Err(f) = outcome {
                    failure.get_or_insert(f);
                }
                let (start, len) = op.range();
                if under_way == 0 && (failure.is_some() || at >= start + len) {
                    return self.finish(index, op, failure.map_or(Ok(Vec::new()), Err));
                }
                self.tasks[index].stage = Stage::Zeroing { op, at, under_way, failure };
                self.zero(index);
                None
            }
            Stage::Flushing { op } => self.finish(index, op, outcome),
            Stage::Free => None,
        }
    }
}

impl<S: Session> Session for Steps<S> {
    fn fd(&self) -> RawFd {
        self.raw.fd()
    }

    fn attach(&mut self, registry: &Registry, first: usize) -> io::Result<()> {
        self.raw.attach(registry, first)
    }

    fn detach(&mut self, registry: &Registry) {
        self.raw.detach(registry);
    }

    fn ready(&mut self, at: usize, event: &Event, now: Instant) {
        self.raw.ready(at, event, now);
    }

    fn submit(&mut self, token: u64, mut op: Op) {
        let mut flush = false;
        match &mut op {
            // Zeroes may have to be written in pieces: durable together, at the end.
            Op::WriteZeroes { fua, .. } => flush = std::mem::take(fua),
            Op::Write { fua, .. } | Op::Trim { fua, .. } if !self.raw.native_fua() => {
                flush = std::mem::take(fua);
            }
            _ => {}
        }
        let task = Task { token, stage: Stage::Whole, flush };
        let index = match self.free.pop() {
            Some(index) => {
                self.tasks[index] = task;
                index
            }
            None => {
                self.tasks.push(task);
                self.tasks.len() - 1
            }
        };
        self.raw.submit(index as u64, op);
    }

    fn flush(&mut self, now: Instant) {
        self.raw.flush(now);
    }

    fn turn(&mut self, now: Instant) {
        self.raw.turn(now);
    }

    fn pop(&mut self) -> Option<Done> {
        loop {
            let done = self.raw.pop()?;
            if let Some(done) = self.step(done) {
                return Some(done);
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.tasks.len() - self.free.len()
    }

    fn wake_at(&self) -> Option<Instant> {
        self.raw.wake_at()
    }

    fn rest(&mut self) {
        self.raw.rest();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_base::Rng;

    /// A store in memory that does one operation at a time, in any order, and knows little.
    struct Poor {
        bytes: Vec<u8>,
        durable: Vec<u8>,
        queue: Vec<(u64, Op)>,
        rng: Rng,
        fails: bool,
        zeroes: bool,
        fua: bool,
    }

    impl Session for Poor {
        fn fd(&self) -> RawFd {
            -1
        }
        fn submit(&mut self, token: u64, op: Op) {
            self.queue.push((token, op));
        }
        fn flush(&mut self, _: Instant) {}
        fn turn(&mut self, _: Instant) {}
        fn in_flight(&self) -> usize {
            self.queue.len()
        }
        fn native_fua(&self) -> bool {
            self.fua
        }
        fn pop(&mut self) -> Option<Done> {
            if self.queue.is_empty() {
                return None;
            }
            let at = self.rng.below(self.queue.len() as u64) as usize;
            let (token, op) = self.queue.swap_remove(at);
            let not = |kind| Err(Failure::new(kind, "no"));
            let outcome = match &op {
                _ if self.fails && self.rng.chance(0.3) => not(FailureKind::Failed),
                Op::Write { offset, data, fua } => {
                    assert!(self.fua || !fua);
                    self.bytes[*offset as usize..][..data.len()].copy_from_slice(data);
                    Ok(vec![])
                }
                Op::WriteZeroes { offset, len, fua, .. } if self.zeroes => {
                    assert!(!fua, "the flush comes at the end");
                    self.bytes[*offset as usize..][..*len as usize].fill(0);
                    Ok(vec![])
                }
                Op::Flush => {
                    self.durable.clone_from(&self.bytes);
                    Ok(vec![])
                }
                _ => not(FailureKind::Unsupported),
            };
            Some(Done { token, op, outcome })
        }
    }

    fn poor(size: usize, zeroes: bool, fails: bool) -> Steps<Poor> {
        let (bytes, durable) = (vec![7; size], vec![7; size]);
        let rng = Rng::new(3);
        Steps::new(Poor { bytes, durable, queue: vec![], rng, fails, zeroes, fua: false })
    }

    #[test]
    fn zeroes_are_written_where_there_is_no_other_way() {
        for (zeroes, fua) in [(false, false), (false, true), (true, true)] {
            let mut steps = poor(20 << 20, zeroes, false);
            let (offset, len) = (1000, 15 << 20);
            steps.submit(9, Op::WriteZeroes { offset, len, fua, may_punch: true, fast: false });
            let done = steps.pop().expect("it ends");
            assert_eq!((done.token, done.outcome), (9, Ok(vec![])));
            assert!(steps.raw.bytes[1000..][..15 << 20].iter().all(|&b| b == 0));
            assert_eq!((steps.raw.bytes[999], steps.raw.bytes[1000 + (15 << 20)]), (7, 7));
            assert_eq!(steps.raw.durable == steps.raw.bytes, fua);
            assert_eq!(steps.in_flight(), 0);
        }
        let mut steps = poor(1 << 20, false, false);
        let (offset, len) = (0, 1000);
        steps.submit(1, Op::WriteZeroes { offset, len, fua: false, may_punch: true, fast: true });
        assert_eq!(steps.pop().unwrap().outcome.unwrap_err().kind, FailureKind::Unsupported);
        steps.submit(2, Op::Trim { offset, len, fua: false });
        assert_eq!(steps.pop().unwrap().outcome, Ok(vec![]));
        assert!(steps.raw.bytes.iter().all(|&b| b == 7));
    }

    #[test]
    fn a_write_that_must_be_durable_is_flushed() {
        let mut steps = poor(4096, true, false);
        let data = Payload::new(AlignedBuf::zeroed(10));
        steps.submit(1, Op::Write { offset: 0, data: data.clone(), fua: true });
        let done = steps.pop().unwrap();
        assert!(matches!(done.op, Op::Write { .. }));
        assert!(steps.raw.durable == steps.raw.bytes);
        steps.submit(1, Op::Write { offset: 100, data, fua: false });
        steps.pop().unwrap().outcome.unwrap();
        assert!(steps.raw.durable != steps.raw.bytes);
    }

    /// Whatever fails, each operation ends once.
    #[test]
    fn each_ends_once() {
        let mut steps = poor(16 << 20, false, true);
        let mut rng = Rng::new(1);
        let (mut ended, mut failed) = (0, 0);
        for round in 0..300u64 {
            for i in 0..4 {
                let (offset, len) = (rng.below(1 << 20), rng.range(1, 8 << 20) as u32);
                let fua = rng.chance(0.5);
                steps.submit(
                    round * 4 + i,
                    Op::WriteZeroes { offset, len, fua, may_punch: false, fast: false },
                );
            }
            let mut tokens = Vec::new();
            while let Some(done) = steps.pop() {
                tokens.push(done.token - round * 4);
                failed += u32::from(done.outcome.is_err());
                ended += 1;
            }
            tokens.sort_unstable();
            assert_eq!(tokens, [0, 1, 2, 3]);
            assert_eq!(steps.in_flight(), 0);
        }
        assert!(failed > 100 && failed < ended);
    }
}
