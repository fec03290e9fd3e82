//! A volume that is attached, and its store.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use larder_engine::block::node;
use larder_engine::block::node::counters::VolumeCounters;
use larder_engine::block::node::event::{State, Volume};
use larder_engine::block::node::share::{Account, Share, ShareLines};
use larder_engine::block::node::{owners, setup};
use larder_format::block::{BlockSuperblock, Volume as Record, layout};
use larder_policy::block::detect::Detector;
use larder_policy::block::{BlockAdmissionConfig, BlockKind, Reason, VerdictCounts, VolumeId};

use super::GivenError;

/// A store's bytes, which outlive runs.
pub(super) type Store = Rc<RefCell<Vec<u8>>>;

/// See the [module](self).
pub(super) struct Attached {
    pub name: String,
    /// Its number, for policies: another with each time that it comes.
    pub id: VolumeId,
    base: Cell<u64>,
    bytes: Cell<u64>,
    line: u64,
    /// Operations on it that count, and whether more may begin.
    inside: Cell<u64>,
    pub shut: Cell<bool>,
    /// Whoever comes is refused.
    pub closed: Cell<bool>,
    pub account: Account,
    /// Something is selected of it.
    pub selected: Cell<bool>,
    pub admission: RefCell<node::StoredAdmission>,
    /// Verdicts that no policy gave.
    governed: RefCell<VerdictCounts>,
    /// Only where admission makes a difference between metadata and data.
    pub detector: Option<RefCell<Detector>>,
    pub counters: VolumeCounters,
    pub store: Store,
    /// So many reads and changes of the store fail from now on.
    pub fails: Cell<u32>,
}

impl Attached {
    /// # Errors
    /// A share that makes no sense in a cache of this size, or admission whose tables would be too large.
    pub(super) fn new(
        record: &Record,
        id: VolumeId,
        superblock: &BlockSuperblock,
        (admission, share): (&BlockAdmissionConfig, Share),
        store: Store,
    ) -> Result<Rc<Attached>, GivenError> {
        let layout = superblock.layout;
        let line = u64::from(layout.line);
        let admission = setup::admission(admission, superblock, record.bytes)?;
        let detector = setup::detector(&admission, record.bytes).map(RefCell::new);
        let share = ShareLines::new(share, layout.capacity(), layout.line)
            .map_err(|why| GivenError::volume(&record.name, why))?;
        Ok(Rc::new(Attached {
            name: record.name.clone(),
            id,
            base: Cell::new(record.first_group * layout::GROUP_LINES * line),
            bytes: Cell::new(record.bytes),
            line,
            inside: Cell::new(0),
            shut: Cell::new(false),
            closed: Cell::new(false),
            account: Account::new(share),
            selected: Cell::new(false),
            admission: RefCell::new(admission),
            governed: RefCell::default(),
            detector,
            counters: VolumeCounters::default(),
            store,
            fails: Cell::new(0),
        }))
    }

    pub(super) fn base(&self) -> u64 {
        self.base.get()
    }

    pub(super) fn set_base(&self, base: u64) {
        self.base.set(base);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    pub(super) fn set_bytes(&self, bytes: u64) {
        self.bytes.set(bytes);
    }

    /// Where a byte of the line space lies in it.
    pub(super) fn offset_of(&self, at: u64) -> u64 {
        at.saturating_sub(self.base())
    }

    /// Whether what the store is asked for now fails.
    pub(super) fn store_fails(&self) -> bool {
        let left = self.fails.get();
        self.fails.set(left.saturating_sub(1));
        left > 0
    }

    /// Nothing is under way on it.
    pub(super) fn is_empty(&self) -> bool {
        self.inside.get() == 0
    }

    pub(super) fn verdicts(&self) -> VerdictCounts {
        let mut verdicts = *self.governed.borrow();
        verdicts.add(self.admission.borrow().verdicts());
        verdicts
    }

    pub(super) fn refused(&self, reason: Reason) {
        self.governed.borrow_mut().rejected[reason as usize] += 1;
    }

    pub(super) fn classify(&self, offset: u64, bytes: u64) -> BlockKind {
        let detector = self.detector.as_ref();
        detector.map_or(BlockKind::Unknown, |d| d.borrow().classify(offset, bytes))
    }

    pub(super) fn pass(&self, offset: u64, bytes: &[u8]) {
        if let Some(detector) = &self.detector {
            detector.borrow_mut().pass(offset, bytes);
        }
    }
}

impl owners::Governed for Attached {
    fn id(&self) -> VolumeId {
        self.id
    }

    fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    fn account(&self) -> &Account {
        &self.account
    }

    fn select(&self, selected: bool) {
        self.selected.set(selected);
    }
}

impl owners::Volume for Attached {
    fn base(&self) -> u64 {
        self.base.get()
    }
}

/// A volume as the queue knows it.
#[derive(Clone)]
pub(super) struct Known {
    pub attached: Rc<Attached>,
    /// What its store has done waits behind what those with lower numbers have.
    pub session: usize,
}

impl Volume for Known {
    fn state(&self) -> State {
        if self.attached.closed.get() { State::Detached } else { State::Served }
    }

    fn base(&self) -> u64 {
        self.attached.base()
    }

    fn whole(&self) -> u64 {
        let Attached { line, .. } = *self.attached;
        self.base() + self.attached.bytes() / line * line
    }

    fn enter(&self) -> bool {
        let open = !self.attached.shut.get();
        self.attached.inside.set(self.attached.inside.get() + u64::from(open));
        open
    }

    fn leave(&self) {
        self.attached.inside.set(self.attached.inside.get() - 1);
    }
}
