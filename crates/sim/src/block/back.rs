//! Volumes that write back: the engine's write log over a drive that keeps nothing, and how old what is dirty becomes.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use larder_base::{ByteSize, Nanos};
use larder_engine::block::node::defaults;
use larder_engine::block::node::logged::tell_log;
use larder_engine::block::writeback::bounds::LogSize;
use larder_engine::block::writeback::economy::{Change, Thrift};
use larder_engine::block::writeback::holder::{Comer, Held, Holder};
use larder_engine::block::writeback::log::{Attach, Config, Status, WriteLog};
use larder_engine::block::writeback::marker::{Read, Step};
use larder_engine::block::writeback::throttle::Age;
use larder_engine::block::writeback::volume_log::Order;
use larder_engine::block::writeback::words::{BACK, Mode, NotBack};
use larder_engine::block::writeback::{Fault, destager};
use larder_format::Uuid;
use larder_format::block::superblock::{HoldsState, WrittenBack};
use larder_format::block::write_log::SegmentGeometry;
use larder_format::block::write_log::segment::SEGMENT_BYTES;

use super::BlockSim;
use super::node::{Blank, SimNode};
use super::spec::{Block, Wrong};
use super::world::{Event, World};

/// A segment of a small log is smaller than that of a daemon's, and not so small that a batch does not fit.
const LEAST_SEGMENT: u64 = 2 << 20;
/// Fewest segments of a log.
const SEGMENTS: u64 = 8;
/// What the drive writes as a whole or not at all.
const SECTOR: u32 = 512;

/// A write log, as it is stated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stated {
    mode: Mode,
    segment: u32,
    segments: u32,
    dirty_max: Option<u64>,
    memory: u64,
    age: Option<Age>,
}

impl Stated {
    /// What a block cache says of it; `None` if it writes through.
    pub(super) fn of(spec: &Block) -> Result<Option<Stated>, Wrong> {
        let through = "goes with write = \"back:…\" alone: leave it out".to_owned();
        if !spec.write.starts_with(BACK) {
            return match (spec.write_log, spec.dirty_max, &spec.dirty_age_max) {
                (Some(bytes), ..) => Err(("write_log", bytes.to_string(), through)),
                (_, Some(bytes), _) => Err(("dirty_max", bytes.to_string(), through)),
                (_, _, Some(age)) => Err(("dirty_age_max", format!("'{age}'"), through)),
                _ => Ok(None),
            };
        }
        let wrong = |must: String| ("write", format!("'{}'", spec.write), must);
        let mode: Mode = spec.write.parse().map_err(|e| wrong(format!("{e}")))?;
        if matches!(mode.order, Order::Journaled(cuts) if cuts.are_marks()) {
            return Err(wrong(
                "no trace names marks, so that no epoch would end where it is to: leave cut=marks out, and epochs end at clients' flushes (flush_every)"
                    .to_owned(),
            ));
        }
        let wrong_age = |e: NotBack| {
            (
                "dirty_age_max",
                format!("'{}'", spec.dirty_age_max.as_deref().unwrap_or("")),
                e.to_string(),
            )
        };
        let age = spec.dirty_age_max.as_deref().map(str::parse).transpose().map_err(wrong_age)?;
        let age = mode.age(age).map_err(wrong_age)?;
        if spec.volume.0 == 0 {
            let must = "write-back is of whole volumes: say how many bytes one has, the largest of the trace";
            return Err(("volume", "not stated".to_owned(), must.to_owned()));
        }
        let usual = ByteSize((spec.flash.0 / defaults::LOG_PART).min(defaults::LOG_MOST.0));
        let bytes = spec.write_log.unwrap_or(usual);
        let segment = (bytes.0 / SEGMENTS).clamp(LEAST_SEGMENT, SEGMENT_BYTES.into()) & !4095;
        let segments = bytes.0 / segment;
        if segments < SEGMENTS || segments > u64::from(u32::MAX) || bytes >= spec.flash {
            let must = format!(
                "a write log has at least {}, and less than the flash",
                ByteSize(SEGMENTS * LEAST_SEGMENT)
            );
            return Err(("write_log", bytes.to_string(), must));
        }
        let dirty_max = spec.dirty_max.map(|bytes| bytes.0);
        let (segment, segments) = (segment as u32, segments as u32);
        let size = LogSize { segments, segment };
        if let Some((most, why)) = dirty_max.zip(size.check(&[dirty_max]).err()) {
            return Err(("dirty_max", ByteSize(most).to_string(), why.to_string()));
        }
        let memory = spec.fill_memory.0;
        Ok(Some(Stated { mode, segment, segments, dirty_max, memory, age }))
    }

    /// Bytes of the device that the log takes.
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.segment) * u64::from(self.segments)
    }

    /// The log behind byte `at` of the device.
    pub(super) fn log(&self, at: u64, depth: u32) -> Result<Back, Wrong> {
        let geometry = SegmentGeometry::new(self.segment, SECTOR)
            .map_err(|e| ("write_log", ByteSize(self.bytes()).to_string(), e.to_string()))?;
        let config = Config {
            cache: Uuid([0; 16]),
            run: 1,
            at,
            geometry,
            segments: self.segments,
            depth: defaults::LOG_DEPTH,
            memory: self.memory,
            wall: 0,
        };
        Ok(Back {
            stated: *self,
            #[cfg(test)]
            config,
            depth,
            log: RefCell::new(WriteLog::new(config)),
            volumes: RefCell::default(),
            gone: Cell::default(),
            saves: RefCell::default(),
            looked: Cell::default(),
        })
    }
}

/// How old what is dirty is, and how often the bound is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Ages {
    /// Age of the oldest dirty write, its integral over time, seconds².
    pub age: f64,
    /// The oldest that a dirty write has become.
    pub oldest: Nanos,
    /// How long it was counted.
    pub time: Nanos,
    /// Bytes that are dirty now, and at most.
    pub dirty: u64,
    pub most_dirty: u64,
    /// How often all that may be held was held, so that no write was answered.
    pub stalls: u64,
    /// How long that was,
    pub stalled: Nanos,
    /// and how long a volume held more than half of what it may, so that writes are slowed down.
    pub slowed: Nanos,
}

/// What the log was like when it was last looked at.
#[derive(Clone, Copy, Debug, Default)]
struct Looked {
    at: Nanos,
    oldest: Option<Nanos>,
    slow: bool,
    full: bool,
    ages: Ages,
}

/// The write log of a cache, and the volumes in it.
pub(super) struct Back {
    stated: Stated,
    /// What the log is built from.
    #[cfg(test)]
    pub config: Config,
    /// Requests to a store under way at a time.
    depth: u32,
    pub log: RefCell<WriteLog<Blank>>,
    /// Attachment numbers of volumes.
    volumes: RefCell<BTreeMap<u32, u32>>,
    /// Bytes that were destaged of volumes that are written through by now.
    gone: Cell<u64>,
    /// What the write budget makes of volumes that wrote back when they came.
    saves: RefCell<BTreeMap<u32, Saves>>,
    looked: Cell<Looked>,
}

impl Back {
    pub(super) fn attachment(&self, volume: u32) -> Option<u32> {
        self.volumes.borrow().get(&volume).copied()
    }

    /// A volume comes, with this attachment number.
    pub(super) fn attach(&self, node: &SimNode, now: Nanos, (volume, attachment): (u32, u32)) {
        self.volumes.borrow_mut().insert(volume, attachment);
        self.saves.borrow_mut().entry(volume).or_default();
        let Mode { order, pace } = self.stated.mode;
        let (most, depth) = (defaults::window(order), self.depth);
        let attach = Attach {
            attachment,
            volume: larder_format::Uuid([0; 16]),
            generation: 1,
            destage: destager::Config { order, pace, most, depth },
            bound: self.stated.dirty_max,
            marked: false,
            age: self.stated.age,
            frontier: 0,
            epoch: 0,
            marker: 0,
        };
        // As in a server: the periods of a destage that has any begin when its volume comes.
        tell_log(node, now, |log, asks| {
            log.attach(now, attach);
            asks.steps.push(attachment);
        });
    }

    fn statuses(&self, now: Nanos) -> Vec<Status> {
        let log = self.log.borrow();
        log.attached().filter_map(|attachment| log.status(now, attachment)).collect()
    }

    /// Bytes of the log that were destaged since the start.
    pub(super) fn destaged(&self, now: Nanos) -> u64 {
        self.statuses(now).iter().map(|status| status.destaged).sum::<u64>() + self.gone.get()
    }

    /// Whether clients of a volume wait while it changes over.
    pub(super) fn is_held(&self, volume: u32) -> bool {
        self.saves.borrow().get(&volume).is_some_and(|saves| saves.held)
    }

    /// Volumes that are written through for want of write budget.
    #[cfg(test)]
    pub(super) fn through(&self) -> usize {
        self.saves.borrow().values().filter(|saves| saves.thrift.is_through()).count()
    }

    /// What has been since it was last looked at, and how it is now.
    fn look(&self, now: Nanos) {
        let Looked { at, oldest, slow, full, mut ages } = self.looked.get();
        let since = now.saturating_sub(at);
        if let Some(oldest) = oldest {
            let age = |at: Nanos| at.saturating_sub(oldest).as_secs_f64();
            ages.age += (age(now).powi(2) - age(at).powi(2)) / 2.0;
            ages.oldest = ages.oldest.max(now.saturating_sub(oldest));
        }
        ages.time = ages.time + since;
        let over = |held: bool, sum: Nanos| if held { sum + since } else { sum };
        (ages.slowed, ages.stalled) = (over(slow, ages.slowed), over(full, ages.stalled));
        let statuses = self.statuses(now);
        ages.dirty = statuses.iter().map(|s| s.dirty).sum();
        ages.most_dirty = ages.most_dirty.max(ages.dirty);
        let is_full = statuses.iter().any(|s| s.held.0 >= s.held.1);
        ages.stalls += u64::from(is_full && !full);
        self.looked.set(Looked {
            at: now,
            oldest: statuses.iter().filter_map(|s| s.oldest).min(),
            slow: statuses.iter().any(|s| s.delayed),
            full: is_full,
            ages,
        });
    }

    /// Counting begins.
    pub(super) fn reset(&self, now: Nanos) {
        self.look(now);
        let looked = self.looked.get();
        let Ages { dirty, .. } = looked.ages;
        let ages = Ages { dirty, most_dirty: dirty, ..Ages::default() };
        self.looked.set(Looked { ages, ..looked });
    }

    /// What was counted until now.
    pub(super) fn ages(&self, now: Nanos) -> Ages {
        self.look(now);
        self.looked.get().ages
    }

    /// Whether nothing is dirty or on its way.
    #[cfg(test)]
    pub(super) fn is_clean(&self) -> bool {
        let log = self.log.borrow();
        log.attached().all(|attachment| log.is_clean(attachment))
    }
}

/// A volume under the write budget.
#[derive(Default)]
struct Saves {
    thrift: Thrift,
    /// It changes over.
    way: Option<Way>,
    /// Its clients wait.
    held: bool,
}

/// A volume that changes over.
struct Way {
    change: Change,
    holder: Holder,
    /// When the present step was begun, whether something was asked for, and until when, or up to which record, it lasts.
    since: Nanos,
    begun: bool,
    until: u64,
}

impl Way {
    /// It has no marker: a simulation does not crash.
    fn new(change: Change, (attachment, order): (u32, Order), now: Nanos) -> Way {
        let cache = Uuid([0; 16]);
        let order = order.marked();
        let holds = match change {
            Change::Through => HoldsState::Open,
            Change::Back => HoldsState::Clean,
        };
        let entry = WrittenBack {
            volume: cache,
            attachment,
            began: 0,
            holds,
            generation: 1,
            marker: 0,
            run: 1,
            order,
            cut: None,
        };
        let holder = match change {
            Change::Through => {
                let held = Held { cache, entry, number: 0, durable: 0, marked: false, frontier: 0 };
                Holder::goes_through(held, Fault::default())
            }
            Change::Back => {
                let comer = Comer {
                    cache,
                    former: 1,
                    run: 1,
                    record: Some(entry),
                    logged: None,
                    order: Some(order),
                    marked: false,
                    served: true,
                    drains: false,
                    later: false,
                    shrunk: false,
                    fresh: cache,
                };
                Holder::comes(comer, Fault::default())
            }
        };
        Way { change, holder, since: now, begun: false, until: 0 }
    }

    /// Begins a step, or looks whether it is done.
    fn step(
        &mut self,
        step: Step,
        (volume, attachment): (u32, Option<u32>),
        now: Nanos,
        node: &SimNode,
        world: &mut World,
    ) -> bool {
        let Some(back) = &node.back else { return true };
        let begins = !std::mem::replace(&mut self.begun, true);
        match step {
            Step::DestageMost | Step::Destage => {
                let Some(attachment) = attachment else { return true };
                if begins {
                    tell_log(node, now, |log, asks| log.drain(attachment, true, asks));
                    let status = back.log.borrow().status(now, attachment);
                    self.until = match step {
                        Step::DestageMost => status.map_or(0, |status| status.positions[3]),
                        _ => u64::MAX,
                    };
                }
                let status = back.log.borrow().status(now, attachment);
                let there = status.is_none_or(|status| status.positions[0] >= self.until);
                if !there && !back.log.borrow().is_clean(attachment) {
                    return false;
                }
                tell_log(node, now, |log, asks| log.drain(attachment, false, asks));
            }
            Step::Hold if world.asked.values().any(|asked| asked.volume == volume) => return false,
            Step::FlushStore => {
                if begins {
                    let done = world.store.flush(now);
                    self.until = done.0;
                    world.at(done, Event::WritesDue);
                }
                if now.0 < self.until {
                    return false;
                }
            }
            Step::Read => {
                // (There is none that could forbid it.)
                let _ = self.holder.read(Read::Absent { was: false }, None);
                return true;
            }
            Step::Holds(holds) => {
                let entry = self.holder.entry(holds);
                self.holder.recorded(entry);
                return true;
            }
            Step::Through => {
                let Some(attachment) = attachment else { return true };
                let destaged = tell_log(node, now, |log, _| {
                    let status = log.status(now, attachment);
                    log.detach(attachment);
                    status.map_or(0, |status| status.destaged)
                });
                back.gone.set(back.gone.get() + destaged.unwrap_or(0));
                back.volumes.borrow_mut().remove(&volume);
            }
            Step::Answer => {
                let run = world.written_back.iter().find(|run| run.volume == volume).copied();
                world.written_back.extend(run);
                back.attach(node, now, (volume, world.written_back.len() as u32));
            }
            _ => {}
        }
        self.holder.done();
        true
    }
}

impl BlockSim {
    /// What is due in the log is done; when that is to be done again it will be.
    pub(super) fn wake_writes(&mut self, now: Nanos) {
        let BlockSim { node, queue, world, .. } = self;
        let Some(back) = &node.back else { return };
        loop {
            let due = queue.log_due(node, now, world);
            if queue.turn(node, now, world) {
                queue.take_mail(node);
                continue;
            }
            if let Some(due) = due.map(|due| due.max(now))
                && self.writes_due.is_none_or(|at| due < at)
            {
                self.writes_due = Some(due);
                world.at(due, Event::WritesDue);
            }
            break;
        }
        back.look(now);
        self.economise(now);
    }

    /// Volumes change over if the write budget wants them to: the steps are the engine's, as a daemon carries them out.
    fn economise(&mut self, now: Nanos) {
        let Some(back) = &self.node.back else { return };
        let means = self.node.limits.means(now);
        let economy = tell_log(&self.node, now, |log, asks| {
            log.afford(now, means, asks);
            *log.economy()
        });
        let Some(economy) = economy else { return };
        let mut all = std::mem::take(&mut *back.saves.borrow_mut());
        for (&volume, saves) in &mut all {
            let writes_back = back.attachment(volume).is_some();
            if let Some(change) = saves.thrift.wants(now, writes_back, &economy) {
                let attachment = back.attachment(volume).unwrap_or(0);
                saves.way = Some(Way::new(change, (attachment, back.stated.mode.order), now));
            }
            while let Some(way) = &mut saves.way {
                let Some(step) = way.holder.next() else {
                    let done = !way.holder.has_failed();
                    saves.thrift.ended(now, way.change, done);
                    (saves.way, saves.held) = (None, false);
                    break;
                };
                let late = way.holder.within().is_some_and(|most| now > way.since + most);
                if (late || !Thrift::goes_on(way.change, &economy)) && !way.holder.has_failed() {
                    if way.begun {
                        let attachment = back.attachment(volume).unwrap_or(0);
                        tell_log(&self.node, now, |log, asks| log.drain(attachment, false, asks));
                    }
                    way.holder.failed();
                    (way.begun, way.since) = (false, now);
                    continue;
                }
                if matches!(step, Step::Hold | Step::Release) {
                    saves.held = step == Step::Hold;
                }
                let attachment = back.attachment(volume);
                if !way.step(step, (volume, attachment), now, &self.node, &mut self.world) {
                    break;
                }
                (way.begun, way.since) = (false, now);
            }
        }
        *back.saves.borrow_mut() = all;
    }

    /// Counts of write-back until now, if it writes back.
    pub(crate) fn ages(&self) -> Ages {
        self.node.back.as_ref().map_or_else(Ages::default, |back| back.ages(self.world.now))
    }

    /// Brings all that is dirty to the stores, as the end of a server does. Returns whether that is done.
    #[cfg(test)]
    pub(super) fn drain(&mut self) -> bool {
        let Some(back) = &self.node.back else { return true };
        let attached: Vec<u32> = back.log.borrow().attached().collect();
        for attachment in attached {
            let now = self.world.now;
            tell_log(&self.node, now, |log, asks| log.drain(attachment, true, asks));
        }
        self.serve();
        while self.node.back.as_ref().is_some_and(|back| !back.is_clean()) && self.turn() {}
        self.node.back.as_ref().is_none_or(Back::is_clean)
    }
}
