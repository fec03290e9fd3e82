//! What is asked of a host, and in which order.

use larder_base::{Nanos, UnixSecs};
use larder_format::Uuid;
use larder_format::block::{BlockSuperblock, Layout, Volume, VolumeState};

use super::super::attachment::{Attachment, Step};
use super::super::start::places::Comer;
use super::attach::AttachIo;
use super::detach::DetachIo;
use super::forget::ForgetIo;
use super::grow::GrowIo;
use super::steps::{Change, OperatorIo, Recorded, StoreIo, Waits};
use super::{Ask, NotDone, Operation};
use crate::block::Fault;
use crate::block::api::OpId;
use crate::block::volumes::Growth;

/// A host that notes what it is asked for.
struct Host {
    asked: Vec<&'static str>,
    now: Nanos,
    users: u64,
    bits: u64,
    waits: bool,
    recorded: Recorded,
}

impl Default for Host {
    fn default() -> Host {
        Host {
            asked: Vec::new(),
            now: Nanos::ZERO,
            users: 0,
            bits: 0,
            waits: true,
            recorded: Recorded { applied: true, durable: true },
        }
    }
}

impl OperatorIo for Host {
    type Error = ();

    fn now(&self) -> Nanos {
        self.now
    }
    fn goes_on(&mut self, _: Waits) -> bool {
        self.waits
    }
    fn is_enabled(&self) -> bool {
        true
    }
    fn record(&mut self, _: Change) -> Result<Recorded, ()> {
        self.asked.push("record");
        Ok(self.recorded)
    }
    fn hurry(&mut self, _: (u32, u32)) -> Result<u64, ()> {
        self.asked.push("hurry");
        Ok(self.bits)
    }
}

impl StoreIo for Host {
    fn make_durable(&mut self) -> Result<(), ()> {
        self.asked.push("make durable");
        Ok(())
    }
}

impl AttachIo for Host {
    fn holds(&mut self, _: Change) -> Result<bool, ()> {
        self.asked.push("holds");
        Ok(self.recorded.applied)
    }
    fn add(&mut self) {
        self.asked.push("add");
    }
    fn restore_selection(&mut self) {
        self.asked.push("restore selection");
    }
}

impl DetachIo for Host {
    fn clients(&mut self) -> u64 {
        self.users
    }
    fn close(&mut self) {
        self.asked.push("close");
    }
    fn reopen(&mut self) {
        self.asked.push("reopen");
    }
    fn settle_losses(&mut self) {
        self.asked.push("settle losses");
    }
    fn identity(&mut self) -> [u8; 64] {
        self.asked.push("identity");
        [0; 64]
    }
    fn remove(&mut self) {
        self.asked.push("remove");
    }
    fn deselect(&mut self) {
        self.asked.push("deselect");
    }
    fn forget_store(&mut self) {
        self.asked.push("forget store");
    }
    fn end(&mut self) {
        self.asked.push("end");
    }
}

impl GrowIo for Host {
    fn hold(&mut self) {
        self.asked.push("hold");
    }
    fn is_used(&mut self) -> bool {
        self.users > 0
    }
    fn release(&mut self) {
        self.asked.push("release");
    }
    fn identity(&mut self) -> Result<[u8; 64], ()> {
        self.asked.push("identity");
        Ok([0; 64])
    }
    fn moved(&mut self, _: u64) {
        self.asked.push("moved");
    }
    fn grown(&mut self, _: u64) {
        self.asked.push("grown");
    }
}

impl ForgetIo for Host {
    fn forget_selection(&mut self) -> Result<(), ()> {
        self.asked.push("forget selection");
        Ok(())
    }
}

fn layout() -> Layout {
    Layout::new(64 << 20, 4096, 8, 2).unwrap()
}

fn volume() -> Volume {
    let (name, state) = ("a".to_owned(), VolumeState::Attached);
    let groups = layout().region_groups;
    let (identity, write_back) = ([0; 64], None);
    Volume { name, first_group: 0, groups, bytes: 1 << 20, state, identity, write_back }
}

fn operation(attachment: Attachment) -> Operation {
    Operation::attachment(OpId(1), 2, attachment)
}

/// Goes on as long as nothing is waited for; lines are had at once. Returns what is next then.
fn run(
    operation: &mut Operation,
    host: &mut Host,
    act: impl Fn(&mut Operation, Step, &mut Host) -> Result<Ask, ()>,
) -> Ask {
    while let Some(step) = operation.step() {
        match step {
            Step::Lines { .. } => operation.step_done(0),
            step => match act(operation, step, host).unwrap() {
                Ask::Again => {}
                ask => return ask,
            },
        }
    }
    Ask::Over
}

#[test]
fn a_volume_that_goes_is_asked_for_what_it_is_known_by_behind_its_bits_and_its_store_is_forgotten_when_it_owns_no_line()
 {
    let (mut host, mut goes) =
        (Host::default(), operation(Attachment::detach(&volume(), &layout())));
    assert_eq!(run(&mut goes, &mut host, Operation::detach_step), Ask::Over);
    let asked = [
        "close",
        "settle losses",
        "hurry",
        "identity",
        "record",
        "remove",
        "deselect",
        "forget store",
        "end",
    ];
    assert_eq!(host.asked, asked);
    assert!(goes.is_recorded() && goes.way().is_some_and(Attachment::is_durable));
}

#[test]
fn who_does_not_wait_for_clients_leaves_the_volume_open() {
    let mut host = Host { users: 1, ..Host::default() };
    let mut goes = operation(Attachment::detach(&volume(), &layout()));
    assert!(matches!(run(&mut goes, &mut host, Operation::detach_step), Ask::Pause(_)));
    host.waits = false;
    let ask = run(&mut goes, &mut host, Operation::detach_step);
    assert_eq!(ask, Ask::GiveUp(NotDone::Unwanted));
    goes.detach_given_up(&mut host);
    assert_eq!(host.asked, ["reopen"]);
}

#[test]
fn who_waits_no_longer_for_bits_leaves_them() {
    let mut host = Host { bits: 3, waits: false, ..Host::default() };
    let mut goes = operation(Attachment::detach(&volume(), &layout()));
    assert_eq!(run(&mut goes, &mut host, Operation::detach_step), Ask::Over);
    assert!(!goes.way().is_some_and(Attachment::is_durable));
    assert_eq!(host.asked.iter().filter(|a| **a == "hurry").count(), 1);
}

#[test]
fn where_time_stands_nothing_is_waited_for_without_an_end() {
    let mut host = Host { bits: 3, users: 1, ..Host::default() };
    let mut goes = operation(Attachment::detach(&volume(), &layout()));
    // (Clients are waited for as long as who asked waits.)
    host.users = 0;
    assert_eq!(run(&mut goes, &mut host, Operation::detach_step), Ask::Over);
    assert!(!goes.way().is_some_and(Attachment::is_durable));
    host.users = 1;
    let mut looks = 0;
    let mut moves = operation(growth(true));
    let last = loop {
        looks += 1;
        let ask = run(&mut moves, &mut host, Operation::grow_step);
        if !matches!(ask, Ask::Pause(_)) {
            break ask;
        }
        assert!(looks < 100_000, "it waits for ever");
    };
    assert_eq!(last, Ask::GiveUp(NotDone::Late));
}

/// The volume grows, and moves if it must.
fn growth(moves: bool) -> Attachment {
    let groups = layout().region_groups;
    let growth = Growth {
        first_group: if moves { 2 * groups } else { 0 },
        groups,
        needed: 2 * groups,
        moves_from: moves.then_some(0),
    };
    Attachment::grow(&volume(), growth, 2 << 20, &layout())
}

#[test]
fn a_volume_that_moves_is_held_until_it_lies_elsewhere() {
    let (mut host, mut moves) = (Host::default(), operation(growth(true)));
    assert_eq!(run(&mut moves, &mut host, Operation::grow_step), Ask::Over);
    let asked =
        ["hold", "make durable", "identity", "hurry", "record", "moved", "grown", "release"];
    assert_eq!(host.asked, asked);
    let (mut host, mut grows) = (Host::default(), operation(growth(false)));
    assert_eq!(run(&mut grows, &mut host, Operation::grow_step), Ask::Over);
    assert_eq!(host.asked, ["make durable", "identity", "record", "grown"]);
}

#[test]
fn one_that_was_overtaken_is_let_go_on_where_it_lies() {
    let recorded = Recorded { applied: false, durable: true };
    let mut host = Host { recorded, ..Host::default() };
    let mut moves = operation(growth(true));
    let ask = run(&mut moves, &mut host, Operation::grow_step);
    assert_eq!(ask, Ask::GiveUp(NotDone::Overtaken));
    moves.grow_given_up(&mut host);
    assert_eq!(host.asked, ["hold", "make durable", "identity", "hurry", "record", "release"]);
}

/// A cache that knows the volume so, or not at all.
fn superblock(state: Option<VolumeState>) -> BlockSuperblock {
    let mut sb = BlockSuperblock::format(Uuid([7; 16]), 1, 2, layout(), UnixSecs(0));
    sb.volumes.extend(state.map(|state| Volume { state, ..volume() }));
    sb
}

#[test]
fn a_volume_is_added_when_that_is_recorded_and_its_plan_is_looked_at_behind_its_store() {
    let proves = Box::new(|_: &[u8; 64], _| Ok(()));
    let comer = Comer { name: "a".to_owned(), bytes: 1 << 20, identity: [0; 64], proves };
    let attach = |given_up| {
        let planned = Attachment::attach(&superblock(None), &comer, given_up, Fault::default());
        operation(planned.unwrap())
    };
    let (mut host, mut comes) = (Host::default(), attach(false));
    assert_eq!(run(&mut comes, &mut host, Operation::attach_step), Ask::Over);
    assert_eq!(host.asked, ["make durable", "holds", "record", "restore selection", "add"]);

    let recorded = Recorded { applied: false, durable: true };
    let mut host = Host { recorded, ..Host::default() };
    let ask = run(&mut attach(false), &mut host, Operation::attach_step);
    assert_eq!(ask, Ask::GiveUp(NotDone::Overtaken));
    assert_eq!(host.asked, ["make durable", "holds"]);

    // Without a cache it comes all the same.
    let recorded = Recorded { applied: true, durable: false };
    let (mut host, mut comes) = (Host { recorded, ..Host::default() }, attach(true));
    assert_eq!(run(&mut comes, &mut host, Operation::attach_step), Ask::Over);
    assert_eq!(host.asked, ["record", "restore selection", "add"]);
    assert!(!comes.is_recorded());
}

#[test]
fn what_was_selected_of_a_volume_is_forgotten_when_the_volume_is_durably() {
    let sb = superblock(Some(VolumeState::Detached));
    let forget = || operation(Attachment::forget(&sb, "a", Fault::default()).unwrap());
    let mut host = Host::default();
    assert_eq!(run(&mut forget(), &mut host, Operation::forget_step), Ask::Over);
    assert_eq!(host.asked, ["record", "forget selection"]);
    let recorded = Recorded { applied: true, durable: false };
    let mut host = Host { recorded, ..Host::default() };
    let ask = run(&mut forget(), &mut host, Operation::forget_step);
    assert_eq!(ask, Ask::GiveUp(NotDone::GivenUp));
    assert_eq!(host.asked, ["record"]);
}
