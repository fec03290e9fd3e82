//! An operator lets a volume go while the clients of another go on.

use std::convert::Infallible;

use larder_base::Nanos;
use larder_engine::block::OpId;
use larder_engine::block::node::attachment::Attachment;
use larder_engine::block::node::calls::{Message, OP_BITS, Out};
use larder_engine::block::node::event::State;
use larder_engine::block::node::operator::detach::DetachIo;
use larder_engine::block::node::operator::steps::{Change, OperatorIo, Recorded, Waits};
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
        let ask = match operation.next(shared, shared.now(), &mut out) {
            Ask::Do(step) => {
                let Ok(ask) = operation.detach_step(step, &mut Goes { shared });
                ask
            }
            ask => ask,
        };
        match ask {
            Ask::Over => break,
            Ask::Again | Ask::Do(_) => {}
            Ask::Pause(_) => shuttle::thread::yield_now(),
            Ask::GiveUp(why) => unreachable!("it waits without an end: {why:?}"),
            Ask::Lines => {
                await_lines(shared, id);
                operation.given();
            }
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

/// The second volume goes.
struct Goes<'a> {
    shared: &'a Shared,
}

impl OperatorIo for Goes<'_> {
    type Error = Infallible;

    fn now(&self) -> Nanos {
        self.shared.now()
    }

    fn goes_on(&mut self, waits: Waits) -> bool {
        if let Waits::Clients(_) = waits {
            self.shared.bells[OPERATOR].sleep();
        }
        true
    }

    fn is_enabled(&self) -> bool {
        true
    }

    fn record(&mut self, change: Change) -> Result<Recorded, Infallible> {
        let (recorded, state) = in_log(self.shared, move |keeper| {
            let now = keeper.shared.now();
            let (machine, mut shards, mut io, fx) = keeper.parts();
            let recorded = change.make(machine, now, &mut shards, &mut io, fx);
            assert!(machine.unflushed(1, 1).is_empty(), "its bits have gone");
            let superblock = machine.superblock().expect("the device does not fail");
            (recorded, superblock.volumes.iter().find(|v| v.name == NAMES[1]).map(|v| v.state))
        });
        assert_eq!(recorded, Recorded { applied: true, durable: true });
        assert_eq!(state, Some(VolumeState::Detached));
        Ok(recorded)
    }

    fn hurry(&mut self, regions: (u32, u32)) -> Result<u64, Infallible> {
        Ok(in_log(self.shared, move |keeper| {
            let now = keeper.shared.now();
            let (machine, mut shards, mut io, fx) = keeper.parts();
            machine.hurry(now, regions, &mut shards, &mut io, fx)
        }))
    }
}

impl DetachIo for Goes<'_> {
    fn clients(&mut self) -> u64 {
        u64::from(!*self.shared.left.lock().unwrap())
    }

    fn close(&mut self) {
        self.shared.volumes[1].flags(|f| f.state = State::Detached);
    }

    fn reopen(&mut self) {
        unreachable!("it goes");
    }

    fn settle_losses(&mut self) {}

    fn identity(&mut self) -> [u8; 64] {
        [3; 64]
    }

    fn remove(&mut self) {
        *self.shared.gone.lock().unwrap() = true;
    }

    fn deselect(&mut self) {}

    fn forget_store(&mut self) {
        in_log(self.shared, |keeper| keeper.machine.forget_store(VolumeId(1)));
    }

    fn end(&mut self) {}
}
