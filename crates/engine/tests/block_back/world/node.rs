//! What the queues share: shards, mailboxes, the write log.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use larder_base::{Nanos, Rng};
use larder_engine::block::node::calls::{Calls, Mail, Out, Questions};
use larder_engine::block::node::event::Ended;
use larder_engine::block::node::held::Held;
use larder_engine::block::node::limits::{Admits, Limits};
use larder_engine::block::node::maintenance::{Stores, Work};
use larder_engine::block::node::queue::Node;
use larder_engine::block::node::quiet::Changes;
use larder_engine::block::node::ranged::Turns;
use larder_engine::block::writeback::log::WriteLog;
use larder_engine::block::{BlockShard, GroupId, LineId, OpId, Verdict};
use larder_policy::block::{
    BlockAccess, BlockCandidate, BlockKind, Observed, Reason, Rule, Verdict as PolicyVerdict,
    VolumeId,
};

use crate::parts::{Bytes, LINE, Model, Vol};

/// Admission that has been dealt what it says.
pub(crate) struct Dealt(Verdict);

impl Admits for Dealt {
    fn observe(&mut self, _: &BlockAccess) -> Observed {
        Observed::default()
    }

    fn wants_victim(&self) -> bool {
        false
    }

    fn ask(&mut self, _: &BlockCandidate, _: bool) -> Verdict {
        self.0
    }

    fn ahead(&self, said: Verdict) -> Verdict {
        said
    }

    fn count(&mut self, _: PolicyVerdict) {}
}

/// See the [module](self).
pub(crate) struct Shared {
    pub(crate) cells: Vec<RefCell<(BlockShard, Held<Model>)>>,
    pub(crate) mail: Vec<RefCell<Mail<Model>>>,
    /// What is left for maintenance.
    pub(crate) work: RefCell<Work<Bytes>>,
    pub(crate) turns: RefCell<Turns>,
    pub(crate) changes: Changes,
    pub(crate) limits: Rc<Limits>,
    pub(crate) log: RefCell<WriteLog<Bytes>>,
    pub(crate) volumes: Vec<Vol>,
    /// Attachment numbers of volumes that write through since the log has failed.
    pub(crate) over: RefCell<BTreeSet<u32>>,
    /// The cache is in use.
    pub(crate) enabled: Cell<bool>,
    pub(crate) coin: RefCell<Rng>,
    /// Bytes of a region.
    pub(crate) region: u64,
}

impl Shared {
    fn chance(&self, share: f64) -> bool {
        self.coin.borrow_mut().chance(share)
    }
}

impl Questions for Shared {
    fn line_bytes(&self) -> u32 {
        LINE as u32
    }

    fn prefer(&self, _: LineId, _: LineId) -> bool {
        self.chance(0.5)
    }

    fn keep(&self, _: LineId, _: Option<LineId>) -> bool {
        false
    }

    fn keep_groups(&self, _: GroupId, _: GroupId, _: u32) -> bool {
        false
    }

    fn may_grow(&self, _: LineId) -> bool {
        true
    }
}

impl Calls<Model> for Shared {
    type Shard = BlockShard;

    fn shard<R>(&self, shard: u32, f: impl FnOnce(&mut BlockShard, &mut Held<Model>) -> R) -> R {
        let (shard, held) = &mut *self.cells[shard as usize].borrow_mut();
        f(shard, held)
    }

    fn mailbox<R>(&self, thread: usize, f: impl FnOnce(&mut Mail<Model>) -> R) -> R {
        f(&mut self.mail[thread].borrow_mut())
    }

    fn notify(&self, _: usize) {}

    fn maintain(&self, out: &mut Out<Bytes>) {
        let all = &mut self.work.borrow_mut();
        all.fills.append(&mut out.fills);
        all.copies.append(&mut out.copies);
        all.asks.append(&mut out.asks);
        all.loads.append(&mut out.loads);
        all.commit |= std::mem::take(&mut out.commit);
    }
}

impl Node<Model> for Shared {
    type Admission = Dealt;

    fn is_enabled(&self) -> bool {
        self.enabled.get()
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn ask_budget(&self, op: OpId) {
        self.work.borrow_mut().budget.push(op);
    }

    fn changes(&self) -> &Changes {
        &self.changes
    }

    fn turns<R>(&self, f: impl FnOnce(&mut Turns) -> R) -> R {
        f(&mut self.turns.borrow_mut())
    }

    fn ask_bits(&self, op: OpId, first: u32, last: u32) {
        self.work.borrow_mut().ranges.push((op, first, last));
    }

    fn give_up(&self, _: Nanos, why: String) {
        self.work.borrow_mut().give_up.get_or_insert(why);
    }

    fn attachment(&self, volume: &Vol) -> Option<u32> {
        let attachment = self.volumes[volume.number].attachment;
        attachment.filter(|attachment| !self.over.borrow().contains(attachment))
    }

    fn log<R>(&self, f: impl FnOnce(&mut WriteLog<Bytes>) -> R) -> Option<R> {
        Some(f(&mut self.log.borrow_mut()))
    }

    fn destages(&self, attachment: u32) -> usize {
        attachment as usize % self.mail.len()
    }

    fn id(&self, volume: &Vol) -> VolumeId {
        VolumeId(volume.number as u32)
    }

    fn selects(&self, _: &Vol) -> bool {
        true
    }

    fn rule(&self, _: &Vol, at: u64, _: u64) -> Rule {
        // Of four lines one is always to be cached, and of sixteen one never.
        match at / LINE % 16 {
            0 => Rule::Never,
            line if line % 4 == 1 => Rule::Always,
            _ => Rule::ByPolicy,
        }
    }

    fn kind(&self, _: &Vol, _: u64, _: u64) -> BlockKind {
        BlockKind::Unknown
    }

    fn admission<R>(&self, _: &Vol, f: impl FnOnce(&mut Dealt) -> R) -> R {
        let all = [Verdict::Admit, Verdict::Admit, Verdict::Compete, Verdict::Reject];
        let verdict = all[self.coin.borrow_mut().below(4) as usize];
        f(&mut Dealt(verdict))
    }

    fn refused(&self, _: &Vol, _: Reason) {}

    fn pass(&self, _: &Vol, _: u64, _: &Bytes) {}

    fn ended(&self, _: &Vol, _: usize, _: Nanos, _: &Ended) {}
}

impl Stores for Shared {
    fn store_of(&self, region: u32) -> Option<VolumeId> {
        let at = u64::from(region) * self.region;
        let has = |v: &&Vol| (v.base..v.whole.max(v.base + 1)).contains(&at);
        self.volumes.iter().find(has).map(|v| VolumeId(v.number as u32))
    }

    fn stores(&self) -> Vec<VolumeId> {
        self.volumes.iter().map(|v| VolumeId(v.number as u32)).collect()
    }
}
