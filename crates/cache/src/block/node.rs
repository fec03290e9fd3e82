//! What the workers' queues share, as the engine asks for it: shards behind mutexes, mailboxes with descriptors that wake, and
//! what is decided for all of them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use larder_base::Nanos;
use larder_engine::block::node;
use larder_engine::block::node::calls::{Calls, Mail, OP_BITS, Questions, thread_of};
use larder_engine::block::node::event::Ended;
use larder_engine::block::node::held::Held;
use larder_engine::block::node::limits::{self, Limits};
use larder_engine::block::node::maintenance::Stores;
use larder_engine::block::node::owners::{self, Owners};
use larder_engine::block::node::queue::Node;
use larder_engine::block::node::quiet::Changes;
use larder_engine::block::node::ranged::Turns;
use larder_engine::block::node::share::{Account, Pins};
use larder_engine::block::writeback::log::WriteLog;
use larder_engine::block::{GroupId, LineId, OpId, PartKind, Source};
use larder_policy::block::{BlockKind, LineId as PolicyLine, Reason, Rule, VolumeId};
use larder_runtime::Payload;

use super::shard::{Daemon, Known, Out};
use super::{Attached, Core, locked};

impl Owners for Core {
    type Volume = Arc<Attached>;

    fn pins(&self) -> &Pins {
        self.node_limits.pins()
    }

    fn shards(&self) -> u32 {
        self.layout.shards
    }

    fn owner(&self, line: LineId) -> Option<Arc<Attached>> {
        self.node_limits.volume_at(self.at(line))
    }

    fn id(&self, volume: &Arc<Attached>) -> VolumeId {
        volume.id
    }

    fn account<'a>(&'a self, volume: &'a Arc<Attached>) -> &'a Account {
        &volume.account
    }

    fn selects(&self, volume: &Arc<Attached>) -> bool {
        volume.selected.load(Ordering::Relaxed)
    }

    fn is_pinned(&self, volume: &Arc<Attached>, line: LineId) -> bool {
        let offset = volume.offset_of(self.at(line));
        self.node_limits.rule(volume, offset, u64::from(self.layout.line)) == Rule::Always
    }

    fn refused(&self, volume: &Arc<Attached>, reason: Reason) {
        volume.refused(reason, 1);
    }
}

impl Questions for Core {
    #[inline]
    fn line_bytes(&self) -> u32 {
        self.layout.line
    }

    fn prefer(&self, line: LineId, victim: LineId) -> bool {
        owners::prefer(self, line, victim, |of, its| {
            let bytes = u64::from(self.layout.line);
            let look = |v: &Attached, l: LineId| {
                let offset = v.offset_of(self.at(l));
                (PolicyLine { volume: v.id, offset }, v.classify(offset, bytes))
            };
            let (at, over) = (look(of, line), look(its, victim));
            limits::prefer(&mut locked(&of.admission), at, over)
        })
    }

    fn keep(&self, victim: LineId, line: Option<LineId>) -> bool {
        owners::keep(self, victim, line)
    }

    fn keep_groups(&self, first: GroupId, last: GroupId, lines: u32) -> bool {
        owners::keep_groups(self, first, last, lines)
    }

    fn may_grow(&self, line: LineId) -> bool {
        owners::may_grow(self, line)
    }

    fn filling(&self, line: LineId, lines: u32, source: Source) {
        self.node_limits.filling(line, self.at(line), lines, source, self.now());
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
    type Shard = node::StoredShard;

    #[inline]
    fn shard<R>(
        &self,
        shard: u32,
        f: impl FnOnce(&mut node::StoredShard, &mut Held<Daemon>) -> R,
    ) -> R {
        let mut cell = locked(&self.shards[shard as usize]);
        let (shard, held) = cell.parts();
        f(shard, held)
    }

    #[inline]
    fn mailbox<R>(&self, thread: usize, f: impl FnOnce(&mut Mail<Daemon>) -> R) -> R {
        f(&mut locked(&self.mailboxes[thread].inbox))
    }

    fn notify(&self, thread: usize) {
        self.mailboxes[thread].wake();
    }

    fn maintain(&self, out: &mut Out) {
        self.leave_for_log(|inbox| inbox.leave(self.now(), out));
    }
}

impl Stores for Core {
    fn store_of(&self, region: u32) -> Option<VolumeId> {
        let bytes = self.layout.region_groups * self.group_bytes();
        let at = u64::from(region) * bytes;
        self.node_limits.volume_within(at, at + bytes).map(|v| v.id)
    }

    fn stores(&self) -> Vec<VolumeId> {
        self.volumes().iter().map(|v| v.id).collect()
    }
}

impl Node<Daemon> for Core {
    type Admission = node::StoredAdmission;

    fn is_enabled(&self) -> bool {
        Core::is_enabled(self)
    }

    fn limits(&self) -> &Limits {
        &self.node_limits.limits
    }

    #[inline]
    fn attachment(&self, volume: &Known) -> Option<u32> {
        volume.0.attached.as_ref()?.attachment()
    }

    fn log<R>(&self, f: impl FnOnce(&mut WriteLog<Payload>) -> R) -> Option<R> {
        self.back.get().map(|back| back.with_log(f))
    }

    fn destages(&self, attachment: u32) -> usize {
        attachment as usize % self.config.workers
    }

    fn ask_budget(&self, op: OpId) {
        self.leave_for_log(|inbox| inbox.ask_budget(self.now(), op));
    }

    fn changes(&self) -> &Changes {
        &self.node_limits.changes
    }

    fn turns<R>(&self, f: impl FnOnce(&mut Turns) -> R) -> R {
        f(&mut locked(&self.node_limits.ranges))
    }

    fn ask_bits(&self, op: OpId, first: u32, last: u32) {
        self.leave_for_log(|inbox| inbox.ask_bits(self.now(), op, first, last));
    }

    fn give_up(&self, now: Nanos, why: String) {
        let last = locked(&self.last_flash_error).clone();
        let why = if last.is_empty() { why } else { format!("{why}, the last with: {last}") };
        self.leave_for_log(|inbox| inbox.give_up(now, why));
    }

    fn pauses(&self, pause: Nanos) {
        tracing::warn!(
            "the file system of the cache '{}' is full ({}): nothing new is cached for {} s; free some space there, or format a \
             smaller cache",
            self.node_limits.path.display(),
            locked(&self.last_flash_error),
            pause.0 / 1_000_000_000
        );
    }

    fn id(&self, volume: &Known) -> VolumeId {
        volume.attached().id
    }

    #[inline]
    fn selects(&self, volume: &Known) -> bool {
        volume.attached().selected.load(Ordering::Relaxed)
    }

    fn rule(&self, volume: &Known, at: u64, len: u64) -> Rule {
        self.node_limits.rule(volume.attached(), at, len)
    }

    fn kind(&self, volume: &Known, at: u64, len: u64) -> BlockKind {
        volume.attached().classify(at, len)
    }

    fn admission<R>(&self, volume: &Known, f: impl FnOnce(&mut node::StoredAdmission) -> R) -> R {
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
        attached.counters.ended(ended, || attached.classify(ended.at, ended.len));
        let nanos = now.0.saturating_sub(ended.began.0);
        let node_limits = &self.node_limits;
        match ended.kind {
            PartKind::Read => node_limits
                .record(me, |l| if ended.hit { l.hit.record(nanos) } else { l.miss.record(nanos) }),
            PartKind::Write | PartKind::Zero | PartKind::Trim => {
                node_limits.record(me, |l| l.write.record(nanos));
            }
            PartKind::Prefetch => {}
        }
    }
}
