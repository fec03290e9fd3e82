//! What the steps of an operator's work ask of a server ([`steps`](larder_engine::block::node::operator::steps)): its volumes and their stores, the
//! thread of the map's log, and who asked.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use larder_base::Nanos;
use larder_engine::block::node::operator::attach::AttachIo;
use larder_engine::block::node::operator::detach::DetachIo;
use larder_engine::block::node::operator::forget::ForgetIo;
use larder_engine::block::node::operator::grow::GrowIo;
use larder_engine::block::node::operator::steps::{Change, OperatorIo, Recorded, StoreIo, Waits};

use super::attached::Attached;
use super::open::CacheError;
use super::{Core, Mailbox, locked};

/// An operation on `of`, a volume or the name of one.
pub(super) struct At<'a, V> {
    pub core: &'a Core,
    pub of: V,
    /// Who asked hears what is waited for, and may say no.
    pub go_on: &'a mut dyn FnMut(Waits) -> bool,
}

/// What an operation is about.
pub(super) trait About {
    /// The volume, if it is one that is attached or comes.
    fn attached(&self) -> Option<Arc<Attached>>;
}

impl About for Arc<Attached> {
    fn attached(&self) -> Option<Arc<Attached>> {
        Some(self.clone())
    }
}

impl About for &str {
    fn attached(&self) -> Option<Arc<Attached>> {
        None
    }
}

impl<V: About> OperatorIo for At<'_, V> {
    type Error = CacheError;

    fn now(&self) -> Nanos {
        self.core.now()
    }

    fn goes_on(&mut self, waits: Waits) -> bool {
        (self.go_on)(waits)
    }

    fn is_enabled(&self) -> bool {
        self.core.is_enabled()
    }

    fn record(&mut self, change: Change) -> Result<Recorded, CacheError> {
        let attached = self.of.attached();
        self.core.on_log(move |log| {
            let recorded = log.make(&change);
            if let Some(superblock) = log.line_space() {
                log.cache().follow_superblock(superblock);
            }
            log.cache().put_on_tape(&change, recorded, attached.as_deref());
            recorded
        })
    }

    fn hurry(&mut self, (first, last): (u32, u32)) -> Result<u64, CacheError> {
        self.core.on_log(move |log| log.hurry(first, last))
    }
}

impl At<'_, Arc<Attached>> {
    /// The list of volumes is changed, and with it where each lies in the line space.
    fn change_volumes(&self, change: impl FnOnce(&mut BTreeMap<String, Arc<Attached>>)) {
        let mut volumes = self.core.volumes.write().unwrap_or_else(PoisonError::into_inner);
        change(&mut volumes);
        // Others come and go meanwhile: the later list must be the later one here too.
        self.core.node_limits.set_volumes(volumes.values().cloned().collect());
    }
}

impl StoreIo for At<'_, Arc<Attached>> {
    fn make_durable(&mut self) -> Result<(), CacheError> {
        self.of.make_durable()
    }
}

impl AttachIo for At<'_, Arc<Attached>> {
    fn holds(&mut self, change: Change) -> Result<bool, CacheError> {
        self.core.on_log(move |log| change.holds(log.line_space()))
    }

    fn add(&mut self) {
        self.change_volumes(|volumes| drop(volumes.insert(self.of.name.clone(), self.of.clone())));
    }

    fn restore_selection(&mut self) {
        self.core.restore_selection(std::slice::from_ref(&self.of));
    }
}

impl GrowIo for At<'_, Arc<Attached>> {
    fn hold(&mut self) {
        self.of.gate.close();
    }

    fn is_used(&mut self) -> bool {
        !self.of.gate.is_empty()
    }

    fn release(&mut self) {
        self.of.gate.open();
        self.core.mailboxes.iter().for_each(Mailbox::wake);
    }

    fn identity(&mut self) -> Result<[u8; 64], CacheError> {
        let identity = self.of.volume().backing().identity();
        identity.map(|identity| identity.encode()).map_err(|error| CacheError::NotYet {
            name: self.of.name.clone(),
            reason: error.to_string(),
        })
    }

    fn moved(&mut self, first_group: u64) {
        self.core.node_limits.moved(&self.of, first_group * self.core.group_bytes());
        self.of.account.set(0);
    }

    fn grown(&mut self, bytes: u64) {
        self.of.set_bytes(bytes);
        self.core.node_limits.select(|_| ());
    }
}

impl ForgetIo for At<'_, &str> {
    fn forget_selection(&mut self) -> Result<(), CacheError> {
        self.core.forget_selection(self.of)
    }
}

impl DetachIo for At<'_, Arc<Attached>> {
    fn clients(&mut self) -> u64 {
        self.of.volume().clients()
    }

    fn close(&mut self) {
        self.of.volume().close();
    }

    fn reopen(&mut self) {
        self.of.volume().reopen();
    }

    fn settle_losses(&mut self) {
        let At { core, of, go_on } = self;
        core.settle_losses(of, &mut || go_on(Waits::Lines));
    }

    fn identity(&mut self) -> [u8; 64] {
        self.of.identity()
    }

    fn remove(&mut self) {
        self.change_volumes(|volumes| {
            volumes.remove(&self.of.name);
            locked(&self.core.retired).add(&self.of);
        });
    }

    fn deselect(&mut self) {
        // Selections are removed by the volume's number and kept by its name: they apply again when it comes back.
        self.core.node_limits.select(|selection| selection.remove_volume(self.of.id));
    }

    fn forget_store(&mut self) {
        let id = self.of.id;
        // Where the thread has ended there is nothing to forget.
        let _ = self.core.on_log(move |log| log.forget_store(id));
    }

    fn end(&mut self) {
        locked(&self.of.admission).end_recording();
        // Its sessions go, with the workers' and this one.
        self.of.flusher.end();
        self.core.let_go_of_closed();
    }
}
