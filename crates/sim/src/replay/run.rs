//! Shards and log, driven by a record.

use std::cell::RefCell;
use std::io::{Read, Seek};

use larder_base::lock::Single;
use larder_base::{ByteSize, KeyHasher, Now};
use larder_engine::kv::node::{Follow, Maintenance, Node};
use larder_engine::kv::record::{Decision, Got, Input, Io, RecordedOp};
use larder_engine::kv::{IoFailed, SegmentIo};
use larder_format::recording::Ended;
use serde::Serialize;

use super::flash::ReplayFlash;
use super::{RecordFile, ReplayError, Stream};

/// Records between two calls of the watcher.
const WATCH_EVERY: u64 = 8192;

/// The first decision that differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Which shard, or the log.
    pub stream: String,
    /// Number of the record in its stream, from 0.
    pub record: u64,
    /// Monotonic nanoseconds of the input, as recorded (of the call of the log, those of its step).
    pub nanos: u64,
    /// What was told.
    pub input: String,
    /// What the server decided.
    pub recorded: String,
    /// What the replay decided.
    pub replayed: String,
}

/// What a replay came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Version of the larder that recorded.
    pub larder: String,
    /// UUID of its flash, or of the run.
    pub uuid: String,
    /// Shards.
    pub shards: usize,
    /// Records in the file.
    pub records: u64,
    /// Of these, compared.
    pub compared: u64,
    /// Of these, requests.
    pub requests: u64,
    /// Segments that the log wrote.
    pub segments_written: u64,
    /// By stream: what it is called, and its records.
    pub streams: Vec<(String, u64)>,
    /// Why recording ended; `None` when the file was cut short.
    pub ended: Option<&'static str>,
    /// Recording went on to the end of the run.
    pub complete: bool,
    /// The first decision that differs.
    pub difference: Option<Difference>,
}

fn describe(input: &Input<'_>) -> String {
    match input {
        Input::Execute { request, fetched } => {
            use larder_engine::kv::api::Op;
            let (op, more) = match &request.op {
                Op::Get(_) => (RecordedOp::Get, String::new()),
                Op::Store(s) => {
                    (RecordedOp::Store, format!(" {:?} of {} bytes", s.mode, s.value.len()))
                }
                Op::Delete(_) => (RecordedOp::Delete, String::new()),
                Op::Arith(a) => (RecordedOp::Arith, format!(" by {}", a.delta)),
                Op::Touch(_) => (RecordedOp::Touch, String::new()),
                Op::Peek => (RecordedOp::Peek, String::new()),
            };
            let read = match fetched {
                Some((read, got)) => format!(
                    ", with segment {} offset {} read ({got:?})",
                    read.at.segment, read.at.offset
                ),
                None => String::new(),
            };
            let key = request.key.escape_ascii();
            format!("{op:?}{more} of key '{key}'{read}").to_lowercase()
        }
        Input::Verify { read, got } => format!(
            "verification of segment {} offset {} ({got:?})",
            read.at.segment, read.at.offset
        ),
        Input::Flush { at } => match at {
            Some(at) => format!("flush at {}", at.0),
            None => "flush".to_owned(),
        },
        Input::FreeRoom => "room to be made".to_owned(),
        Input::Await { value_len, .. } => format!("room for {value_len} bytes to be made"),
        Input::Expire { .. } => "expired objects to go".to_owned(),
        Input::LogCall => "a call of the log".to_owned(),
        Input::TrainingDue => "whether a model should be trained".to_owned(),
        Input::TrainingSet { app } => format!("samples of application {}", app.0),
        Input::Install { app, .. } => format!("a model of application {}", app.0),
        Input::Step { io } => format!("a step (input and output: {io:?})").to_lowercase(),
    }
}

struct Player {
    stream: Stream,
    /// Its stream has no more records, or the log has asked for more than was recorded.
    over: bool,
}

/// What is common to all streams.
struct Stage<'r, R> {
    node: Node<Single>,
    file: RefCell<&'r mut RecordFile<R>>,
    flash: RefCell<ReplayFlash>,
    hasher: KeyHasher,
    filler: Vec<u8>,
    counts: RefCell<Counts<'r>>,
}

struct Counts<'r> {
    compared: u64,
    requests: u64,
    watch: &'r mut dyn FnMut(u64),
}

impl Counts<'_> {
    fn count(&mut self, request: bool) {
        self.compared += 1;
        self.requests += u64::from(request);
        if self.compared.is_multiple_of(WATCH_EVERY) {
            (self.watch)(self.compared);
        }
    }
}

/// How far a stream was brought.
enum Came {
    /// To a call of the log, on which this was decided.
    Called(u64, Decision),
    /// To its end.
    Over,
    /// To a decision that differs.
    Differs(Box<Difference>),
}

impl<R: Read + Seek> Stage<'_, R> {
    /// Replays a shard's stream up to the next call of the log.
    fn advance(&self, index: usize, player: &mut Player) -> Result<Came, ReplayError> {
        let mut bytes = Vec::new();
        loop {
            let more = {
                let mut file = self.file.borrow_mut();
                player.stream.fill(&mut file)?
            };
            if !more {
                return Ok(Came::Over);
            }
            let read = player.stream.take(&self.hasher, &self.filler)?;
            if matches!(read.input, Input::LogCall) {
                return Ok(Came::Called(read.number, read.decision));
            }
            let fetched = match &read.input {
                Input::Execute { fetched, .. } => fetched.as_ref().map(|(r, got)| (r.at, *got)),
                Input::Verify { read, got } => Some((read.at, *got)),
                _ => None,
            };
            let fetched = match fetched {
                None | Some((_, Got::Nothing)) => None,
                Some((at, got)) => {
                    let flash = self.flash.borrow();
                    flash.read(at.segment, at.offset, at.len, &mut bytes);
                    if got == Got::Corrupt {
                        // Whatever the damage was: no record begins like this.
                        bytes.fill(0xff);
                    }
                    Some(&bytes[..])
                }
            };
            let decision = self.node.replay(index, read.now, &read.input, fetched);
            let request = matches!(read.input, Input::Execute { .. });
            self.counts.borrow_mut().count(request);
            if decision != read.decision {
                return Ok(Came::Differs(Box::new(Difference {
                    stream: format!("shard {index}"),
                    record: read.number,
                    nanos: read.now.mono.0,
                    input: describe(&read.input),
                    recorded: read.decision.to_string(),
                    replayed: decision.to_string(),
                })));
            }
        }
    }
}

/// Brings each shard up to the calls of the log before they are made.
struct Players<'s, 'r, R> {
    stage: &'s Stage<'r, R>,
    players: Vec<Player>,
    now: Now,
    /// What was recorded of the call that is being made, if that is known.
    recorded: Option<(u64, Decision)>,
    difference: Option<Box<Difference>>,
    error: Option<ReplayError>,
    /// The log has asked a shard for more than was recorded: from here on nothing can be said of the log.
    exhausted: bool,
}

impl<R> Players<'_, '_, R> {
    fn stopped(&self) -> bool {
        self.difference.is_some() || self.error.is_some() || self.exhausted
    }
}

impl<R: Read + Seek> Follow for Players<'_, '_, R> {
    fn before(&mut self, index: usize) {
        self.recorded = None;
        // The log has its answer even where there is nothing to compare it with any more.
        if self.stopped() {
            return;
        }
        match self.stage.advance(index, &mut self.players[index]) {
            Ok(Came::Called(record, recorded)) => self.recorded = Some((record, recorded)),
            Ok(Came::Over) => {
                self.players[index].over = true;
                self.exhausted = true;
            }
            Ok(Came::Differs(difference)) => self.difference = Some(difference),
            Err(error) => self.error = Some(error),
        }
    }

    fn after(&mut self, index: usize, decision: Decision) {
        let Some((record, recorded)) = self.recorded.take() else { return };
        self.stage.counts.borrow_mut().count(false);
        if decision != recorded {
            self.difference = Some(Box::new(Difference {
                stream: format!("shard {index}"),
                record,
                nanos: self.now.mono.0,
                input: describe(&Input::LogCall),
                recorded: recorded.to_string(),
                replayed: decision.to_string(),
            }));
        }
    }
}

/// The device of a replay: what it came to was recorded.
struct ReplayIo<'f> {
    flash: &'f RefCell<ReplayFlash>,
    outcome: Io,
}

impl SegmentIo for ReplayIo<'_> {
    type Buffer = Vec<u8>;

    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        if self.outcome == Io::Failed {
            return Err(IoFailed);
        }
        if self.flash.borrow_mut().write(segment, bytes) { Ok(()) } else { Err(IoFailed) }
    }

    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        if self.outcome == Io::Failed {
            return Err(IoFailed);
        }
        if self.flash.borrow().read_segment(segment, bytes) { Ok(()) } else { Err(IoFailed) }
    }
}

/// Replays a record. `memory` is what shards, index and what is on flash may take; `watch` is told, now and then, how many records are done.
///
/// Where a file was cut short, or recording ended early, the streams end at different moments: what can be told apart from the
/// others' missing parts is compared, the rest is not, and [`Report::compared`] says how much that was.
///
/// # Errors
/// A file that cannot be read or makes no sense, with the place; too little memory. A decision that differs is no error but
/// [`Report::difference`].
pub fn replay<R: Read + Seek>(
    file: &mut RecordFile<R>,
    memory: u64,
    watch: &mut dyn FnMut(u64),
) -> Result<Report, ReplayError> {
    let setup = file.setup().clone();
    let need = setup.memory_bytes();
    if need > memory {
        return Err(ReplayError::Memory { need: ByteSize(need), limit: ByteSize(memory) });
    }
    let count = setup.shards.len();
    let mut shards = Vec::with_capacity(count);
    for i in 0..count {
        shards.push(setup.build_shard(i)?);
    }
    let node = Node::new(&setup, None, shards)?;
    let maintenance = Maintenance::new(&node, setup.build_log()?, 0, 0);
    let player = |i| Player { stream: Stream::new(i), over: false };
    let players = (0..count).map(player).collect();
    let mut report = Report {
        larder: setup.larder.clone(),
        uuid: setup.uuid.clone(),
        shards: count,
        records: file.records(),
        compared: 0,
        requests: 0,
        segments_written: 0,
        streams: (0..file.streams()).map(|i| (file.name(i), file.records_of(i))).collect(),
        ended: file.ended().map(Ended::as_str),
        complete: file.ended() == Some(Ended::Stopped),
        difference: None,
    };
    let stage = Stage {
        node,
        file: RefCell::new(file),
        flash: RefCell::new(ReplayFlash::new(setup.segments, setup.segment_bytes)),
        hasher: setup.hasher(),
        filler: vec![0; setup.shard.max_object as usize],
        counts: RefCell::new(Counts { compared: 0, requests: 0, watch }),
    };
    let mut all = Players {
        stage: &stage,
        players,
        now: Now::default(),
        recorded: None,
        difference: None,
        error: None,
        exhausted: false,
    };
    if maintenance.log().is_some() {
        report.segments_written = run_log(&stage, &mut all, maintenance, count, memory - need)?;
    }
    // Behind the log's last call, every shard is on its own.
    for (i, player) in all.players.iter_mut().enumerate() {
        if all.difference.is_some() || player.over {
            continue;
        }
        match stage.advance(i, player)? {
            Came::Differs(difference) => all.difference = Some(difference),
            // A call that is not in the log's stream: the log's part of it was not written any more.
            Came::Called(..) | Came::Over => {}
        }
    }
    report.difference = all.difference.map(|d| *d);
    for stream in setup.maintenance_stream()..setup.streams() {
        if report.difference.is_some() {
            break;
        }
        let mut file = stage.file.borrow_mut();
        super::beside::replay(&mut file, stream, |_, _, differs| {
            stage.counts.borrow_mut().count(false);
            report.difference = differs;
            report.difference.is_none()
        })?;
    }
    let counts = stage.counts.into_inner();
    (report.compared, report.requests) = (counts.compared, counts.requests);
    if report.difference.is_none() {
        stage.file.into_inner().check_rest()?;
    }
    Ok(report)
}

/// Runs the log through its stream, and the shards with it; says how many segments it wrote. `memory` is what they may take.
fn run_log<R: Read + Seek>(
    stage: &Stage<'_, R>,
    all: &mut Players<'_, '_, R>,
    mut maintenance: Maintenance<Vec<u8>>,
    stream: usize,
    memory: u64,
) -> Result<u64, ReplayError> {
    let mut steps = Stream::new(stream);
    while !all.stopped() {
        let more = {
            let mut file = stage.file.borrow_mut();
            steps.fill(&mut file)?
        };
        if !more {
            break;
        }
        let read = steps.take(&stage.hasher, &stage.filler)?;
        let Input::Step { io: outcome } = read.input else {
            let what = format!("record {} of the log is {}", read.number, describe(&read.input));
            return Err(ReplayError::Order { offset: 0, what });
        };
        all.now = read.now;
        let mut io = ReplayIo { flash: &stage.flash, outcome };
        let Some(decision) = maintenance.replay(read.now, &stage.node, &mut io, all) else { break };
        let held = stage.flash.borrow().memory_bytes();
        if held > memory {
            let (held, left) = (ByteSize(held), ByteSize(memory));
            return Err(ReplayError::FlashMemory { record: read.number, held, left });
        }
        if all.stopped() {
            break;
        }
        stage.counts.borrow_mut().count(false);
        if decision != read.decision {
            all.difference = Some(Box::new(Difference {
                stream: "log".to_owned(),
                record: read.number,
                nanos: read.now.mono.0,
                input: describe(&read.input),
                recorded: read.decision.to_string(),
                replayed: decision.to_string(),
            }));
        }
    }
    match all.error.take() {
        Some(error) => Err(error),
        None => Ok(maintenance.log().map_or(0, |log| log.stats().segments_written)),
    }
}
