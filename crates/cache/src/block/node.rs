//! What the workers' queues share, as the engine asks for it: shards behind mutexes, mailboxes with descriptors that wake, and
//! what is decided for all of them.

use std::sync::atomic::Ordering;

use larder_base::Nanos;
use larder_engine::block::node::calls::{Calls, Mail, OP_BITS, Questions, thread_of};
use larder_engine::block::node::event::Ended;
use larder_engine::block::node::held::Held;
use larder_engine::block::node::limits::{self, Limits};
use larder_engine::block::node::maintenance::Stores;
use larder_engine::block::node::queue::Node;
use larder_engine::block::node::quiet::Changes;
use larder_engine::block::node::ranged::Turns;
use larder_engine::block::record::{TapedAdmission, TapedShard};
use larder_engine::block::{GROUP_LINES, GroupId, LineId, OpId, PartKind, Source};
use larder_policy::block::{BlockKind, LineId as PolicyLine, Reason, Rule, VolumeId};
use larder_policy::budget::BudgetState;
use larder_runtime::Payload;

use super::attached::count;
use super::cell::{Cell, Daemon, Known, Out};
use super::{Attached, Core, locked};

impl Questions for Core {
    #[inline]
    fn line_bytes(&self) -> u32 {
        self.layout.line
    }

    fn prefer(&self, line: LineId, victim: LineId) -> bool {
        let volume_at = |line| self.governor.volume_at(self.at(line));
        let (Some(of), Some(victims)) = (volume_at(line), volume_at(victim)) else {
            return true;
        };
        let bytes = u64::from(self.layout.line);
        let look = |v: &Attached, l: LineId| {
            let offset = v.offset_of(self.at(l));
            (PolicyLine { volume: v.id, offset }, v.classify(offset, bytes))
        };
        let (at, over) = (look(&of, line), look(&victims, victim));
        let preferred = limits::prefer(&mut locked(&of.admission), at, over);
        if !preferred {
            self.governor.not_taken(self.at(victim), self.at(line));
        }
        preferred
    }

    fn keep(&self, victim: LineId, line: Option<LineId>) -> bool {
        let bytes = u64::from(self.layout.line);
        self.governor.keep(self.at(victim), line.map(|l| self.at(l)), bytes)
    }

    fn keep_groups(&self, first: GroupId, last: GroupId, lines: u32) -> bool {
        let shares = self.shares_of_page(first, last, lines);
        let stride = self.layout.shards as usize;
        let groups = (first.0..=last.0).step_by(stride).map(GroupId);
        let at = groups.flat_map(|g| (0..GROUP_LINES).map(move |i| self.at(g.line(i))));
        self.governor.keep_page(&shares, at, u64::from(self.layout.line))
    }

    fn may_grow(&self, line: LineId) -> bool {
        self.governor.may_grow(self.at(line))
    }

    fn filling(&self, line: LineId, lines: u32, source: Source) {
        self.governor.filling(line, self.at(line), lines, source, self.now());
    }

    fn stays(&self, op: OpId) -> bool {
        thread_of(op) < self.config.workers
    }

    /// A queue of the program's goes when it likes: a thread of the cache does them.
    fn writes_of(&self, op: OpId) -> OpId {
        let (thread, workers) = (thread_of(op), self.config.workers);
        if thread < workers {
            return op;
        }
        let of_thread = op.0 & ((1 << OP_BITS) - 1);
        OpId(((thread % workers) as u64) << OP_BITS | of_thread)
    }
}

impl Calls<Daemon> for Core {
    type Shard = TapedShard;

    #[inline]
    fn shard<R>(&self, shard: u32, f: impl FnOnce(&mut TapedShard, &mut Held<Daemon>) -> R) -> R {
        let mut cell = locked(&self.shards[shard as usize]);
        let Cell { shard, held } = &mut *cell;
        f(shard, held)
    }

    #[inline]
    fn mailbox<R>(&self, thread: usize, f: impl FnOnce(&mut Mail<Daemon>) -> R) -> R {
        f(&mut locked(&self.doors[thread].inbox))
    }

    fn notify(&self, thread: usize) {
        self.doors[thread].wake();
    }

    fn maintain(&self, out: &mut Out) {
        let wake = locked(&self.log_inbox).mail.leave(self.now(), out);
        if wake {
            self.log_wake.notify_one();
        }
    }
}

impl Stores for Core {
    fn store_of(&self, region: u32) -> Option<VolumeId> {
        let bytes = self.layout.region_groups * self.group_bytes();
        let at = u64::from(region) * bytes;
        let volumes = self.volumes();
        let owner = volumes.iter().find(|v| v.base() < at + bytes && at < v.base() + v.bytes());
        owner.map(|v| v.id)
    }

    fn stores(&self) -> Vec<VolumeId> {
        self.volumes().iter().map(|v| v.id).collect()
    }
}

impl Node<Daemon> for Core {
    type Admission = TapedAdmission;

    fn is_enabled(&self) -> bool {
        Core::is_enabled(self)
    }

    fn limits(&self) -> &Limits {
        &self.governor.limits
    }

    fn keep_budget(&self, now: Nanos, state: BudgetState) {
        self.governor.claim(now, Some(state));
    }

    fn changes(&self) -> &Changes {
        &self.governor.changes
    }

    fn turns<R>(&self, f: impl FnOnce(&mut Turns) -> R) -> R {
        f(&mut locked(&self.governor.ranges))
    }

    fn ask_bits(&self, op: OpId, first: u32, last: u32) {
        if locked(&self.log_inbox).mail.ask_bits(self.now(), op, first, last) {
            self.log_wake.notify_one();
        }
    }

    fn id(&self, volume: &Known) -> VolumeId {
        volume.attached().id
    }

    #[inline]
    fn selects(&self, volume: &Known) -> bool {
        volume.attached().selected.load(Ordering::Relaxed)
    }

    fn rule(&self, volume: &Known, at: u64, len: u64) -> Rule {
        self.governor.rule(volume.attached(), at, len)
    }

    fn kind(&self, volume: &Known, at: u64, len: u64) -> BlockKind {
        volume.attached().classify(at, len)
    }

    fn admission<R>(&self, volume: &Known, f: impl FnOnce(&mut TapedAdmission) -> R) -> R {
        f(&mut locked(&volume.attached().admission))
    }

    fn refused(&self, volume: &Known, reason: Reason) {
        volume.attached().refused(reason, 1);
    }

    #[inline]
    fn pass(&self, volume: &Known, at: u64, bytes: &Payload) {
        volume.attached().pass(at, bytes);
    }

    fn ended(&self, volume: &Known, me: usize, now: Nanos, ended: &Ended) {
        let attached = volume.attached();
        let (counters, governor) = (&attached.counters, &self.governor);
        let nanos = now.0.saturating_sub(ended.began.0);
        count(&counters.failed, u64::from(ended.failed));
        match ended.kind {
            PartKind::Read => {
                let hit = ended.hit;
                count(&counters.reads, 1);
                count(&counters.read_bytes, ended.len);
                count(&counters.read_hits, u64::from(hit));
                let holds = match ended.holds {
                    BlockKind::Unknown => attached.classify(ended.at, ended.len),
                    stated => stated,
                };
                if holds == BlockKind::Metadata {
                    count(&counters.metadata_reads, 1);
                    count(&counters.metadata_hits, u64::from(hit));
                }
                governor.record(
                    me,
                    |l| {
                        if hit { l.hit.record(nanos) } else { l.miss.record(nanos) }
                    },
                );
            }
            PartKind::Write | PartKind::Zero | PartKind::Trim => {
                count(&counters.writes, 1);
                if ended.kind == PartKind::Write {
                    count(&counters.write_bytes, ended.len);
                }
                governor.record(me, |l| l.write.record(nanos));
            }
            PartKind::Prefetch => {}
        }
    }
}
