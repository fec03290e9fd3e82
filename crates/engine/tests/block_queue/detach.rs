//! An operator lets a volume go while the clients of another go on.

use larder_engine::block::OpId;
use larder_engine::block::node::attachment::{Attachment, Step};
use larder_engine::block::node::calls::{Message, OP_BITS, Out};
use larder_engine::block::node::event::State;
use larder_engine::block::node::operator::{Ask, Operation};
use larder_format::block::VolumeState;
use larder_policy::block::VolumeId;

use super::maintenance::in_log;
use super::{NAMES, OPERATOR, SHARDS, Shared, layout};

pub(super) fn detach(shared: &Shared) {
    let record = in_log(shared, |keeper| {
        let superblock = keeper.machine.superblock().expect("the device does not fail");
        superblock.volumes.iter().find(|v| v.name == NAMES[1]).cloned().unwrap()
    });
    let id = OpId((OPERATOR as u64) << OP_BITS | 1);
    let mut operation = Operation::attachment(id, SHARDS, Attachment::detach(&record, &layout()));
    let mut out = Out::default();
    loop {
        match operation.next(shared, shared.now(), &mut out) {
            Ask::Over => break,
            Ask::Again => {}
            Ask::Pause => shuttle::thread::yield_now(),
            Ask::Late => unreachable!("it waits without an end"),
            Ask::Lines => {
                await_lines(shared, id);
                operation.given();
            }
            Ask::Do(step) => act(shared, &mut operation, step),
        }
    }
    assert!(operation.way().is_some_and(Attachment::is_durable));
}

fn await_lines(shared: &Shared, id: OpId) {
    loop {
        let mail = std::mem::take(&mut *shared.mail[OPERATOR].lock().unwrap());
        if mail.iter().any(|(op, m)| *op == id && matches!(m, Message::Done { .. })) {
            return;
        }
        shared.bells[OPERATOR].sleep();
    }
}

fn act(shared: &Shared, operation: &mut Operation, step: Step) {
    match step {
        Step::Clients => {
            while !*shared.left.lock().unwrap() {
                shared.bells[OPERATOR].sleep();
            }
        }
        Step::Close => shared.volumes[1].flags(|f| f.state = State::Detached),
        Step::Bits { first, last } => {
            let left = in_log(shared, move |keeper| {
                let now = keeper.shared.now();
                let (machine, mut shards, mut io, fx) = keeper.parts();
                machine.hurry(now, (first, last), &mut shards, &mut io, fx)
            });
            return operation.bits(shared.now(), left, true);
        }
        Step::Record => {
            operation.known_by([3; 64]);
            let change = operation.change();
            let state = in_log(shared, move |keeper| {
                let now = keeper.shared.now();
                let (machine, mut shards, mut io, fx) = keeper.parts();
                let anew = change.is_anew();
                machine.change_superblock(now, anew, &mut shards, &mut io, fx, |sb| {
                    assert!(change.apply(sb), "nobody else changes it");
                });
                assert!(machine.unflushed(1, 1).is_empty(), "its bits have gone");
                machine.forget_store(VolumeId(1));
                let superblock = machine.superblock().expect("the device does not fail");
                superblock.volumes.iter().find(|v| v.name == NAMES[1]).map(|v| v.state)
            });
            assert_eq!(state, Some(VolumeState::Detached));
        }
        Step::InForce => *shared.gone.lock().unwrap() = true,
        step => unreachable!("{step:?} is no step of a volume that goes"),
    }
    operation.done();
}
