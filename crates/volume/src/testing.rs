//! What tests ask stores with.
#![allow(missing_docs, reason = "for tests")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use larder_base::Rng;
use larder_runtime::{AlignedBuf, Payload};
use parking_lot::{Condvar, Mutex};

use crate::op::{Done, Op};
use crate::{Backing, Session};

/// Runs until so many operations have ended.
pub fn run(session: &mut dyn Session, count: usize) -> Vec<Done> {
    let mut list = Vec::new();
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        session.turn(Instant::now());
        while let Some(done) = session.pop() {
            list.push(done);
        }
        if list.len() >= count {
            return list;
        }
        assert!(Instant::now() < end, "{} of {count} ended", list.len());
        session.flush(Instant::now());
        std::thread::sleep(Duration::from_micros(200));
    }
}

pub fn one(session: &mut dyn Session, op: Op) -> Done {
    session.submit(1, op);
    run(session, 1).pop().unwrap()
}

/// Random operations on parts that do not overlap, against a plain copy.
pub fn against_a_model(session: &mut dyn Session, size: usize, seed: u64, rounds: u64) -> Vec<u8> {
    let mut model = vec![0u8; size];
    let mut rng = Rng::new(seed);
    for _ in 0..rounds {
        let mut expected = Vec::new();
        let part = size / 16;
        for i in 0..16usize {
            let grain = if rng.chance(0.5) { 4096 } else { 1 };
            let from = rng.below(part as u64 / 2) as usize / grain * grain;
            let len =
                (rng.range(1, part as u64 / 2) as usize).next_multiple_of(grain).min(part - from);
            let start = i * part + from;
            let (offset, len32, fua) = (start as u64, len as u32, rng.chance(0.2));
            expected.push(None);
            let range = start..start + len;
            let op = match rng.below(6) {
                0 | 1 => {
                    let skip = if rng.chance(0.5) { 0 } else { 7 };
                    let mut buf = AlignedBuf::zeroed(len + skip);
                    buf.iter_mut().for_each(|b| *b = rng.below(256) as u8);
                    model[range].copy_from_slice(&buf[skip..]);
                    Op::Write { offset, data: Payload::new(buf).part(skip, len), fua }
                }
                2 => {
                    model[range].fill(0);
                    let may_punch = rng.chance(0.5);
                    Op::WriteZeroes { offset, len: len32, fua, may_punch, fast: false }
                }
                3 => Op::Flush,
                4 => Op::Status { offset, len: len32, one: false },
                _ => {
                    expected[i] = Some(model[range].to_vec());
                    Op::Read { offset, buf: AlignedBuf::zeroed(len) }
                }
            };
            session.submit(i as u64, op);
        }
        let done = run(session, 16);
        assert_eq!((done.len(), session.in_flight()), (16, 0));
        for Done { token, op, outcome } in done {
            let extents = outcome.unwrap();
            match op {
                Op::Read { buf, .. } => {
                    assert!(buf[..] == expected[token as usize].as_ref().unwrap()[..]);
                }
                Op::Status { offset, len, .. } => {
                    assert!(!extents.is_empty());
                    let mut at = offset as usize;
                    for e in extents {
                        if e.zero {
                            // What a write made of it in the meantime is another part's.
                            assert!(model[at..at + e.len as usize].iter().all(|&b| b == 0));
                        }
                        at += e.len as usize;
                    }
                    assert!(at <= (offset + u64::from(len)) as usize);
                }
                _ => {}
            }
        }
    }
    model
}

/// A client that relies on flushes, and has heard of so many losses: it hears of each once.
#[derive(Debug)]
pub struct Client(u64);

impl Client {
    /// One that comes now.
    pub fn new(backing: &dyn Backing) -> Client {
        Client(backing.losses())
    }

    /// Whether what it asked for, and what ended so when the store had lost so often, is good.
    pub fn believes(&mut self, well: bool, losses: u64) -> bool {
        let before = self.0;
        self.0 = before.max(losses);
        well && losses <= before
    }
}

static HANGING: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
static ANSWERS: Condvar = Condvar::new();

/// While this is there a directory is as on a file server that is away: whoever opens or reads a marker in it waits.
#[derive(Debug)]
pub struct Hangs(PathBuf);

impl Hangs {
    /// From now on.
    pub fn new(dir: &Path) -> Hangs {
        HANGING.lock().push(dir.to_owned());
        Hangs(dir.to_owned())
    }
}

impl Drop for Hangs {
    fn drop(&mut self) {
        HANGING.lock().retain(|dir| *dir != self.0);
        ANSWERS.notify_all();
    }
}

/// Waits while what is at this path hangs.
pub(crate) fn answers(path: &Path) {
    let mut hanging = HANGING.lock();
    while hanging.iter().any(|dir| path.starts_with(dir)) {
        ANSWERS.wait(&mut hanging);
    }
}
