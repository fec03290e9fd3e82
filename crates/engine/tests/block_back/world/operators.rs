//! Operators, and threads that look after volumes: they call the log and carry nothing out. What it asks of its device then a queue does.

use std::collections::BTreeSet;

use larder_base::Nanos;
use larder_engine::block::node::calls::Message;
use larder_engine::block::node::logged::tell_log;
use larder_engine::block::writeback::log::{Asks, Attach, WriteLog};
use larder_policy::budget::Means;

use super::{Checked, World};
use crate::parts::{Bytes, Io};

type Call = fn(&mut WriteLog<Bytes>, Nanos, Attach, &mut Asks<Bytes>);

/// What they call, each so that clients go on, if what they wait for may fail.
pub(crate) const CALLS: [(&str, Call); 14] = [
    ("drain", |log, _, of, asks| {
        log.drain(of.attachment, true, asks);
        log.drain(of.attachment, false, asks);
    }),
    ("halt", |log, _, of, asks| {
        log.halt(of.attachment, true, asks);
        log.halt(of.attachment, false, asks);
    }),
    ("clients_left", |log, _, of, asks| {
        log.put_aside(of.attachment);
        log.clients_left(of.attachment, asks);
        log.resume(of.attachment, asks);
    }),
    ("resume", |log, _, of, asks| {
        log.put_aside(of.attachment);
        log.resume(of.attachment, asks);
    }),
    ("take_up", |log, now, of, asks| {
        log.put_aside(of.attachment);
        let rests = log.is_settled(of.attachment) && log.is_durable(of.attachment);
        match rests && log.closed().is_none() {
            true => log.take_up(now, of, asks),
            false => log.resume(of.attachment, asks),
        }
    }),
    ("mark", |log, _, of, asks| {
        log.mark(of.attachment, "a mark", Bytes::new(b"a mark".to_vec()), asks);
    }),
    ("give_up_unreadable", |log, _, of, asks| {
        if let Ok(giving) = log.giving_up(of.attachment) {
            log.give_up_unreadable(of.attachment, &giving, asks);
        }
    }),
    ("afford", |log, now, _, asks| {
        log.afford(now, Means::Short, asks);
        log.afford(now, Means::Plenty, asks);
    }),
    ("set_marker", |log, _, of, _| log.set_marker(of.attachment, of.marker)),
    ("refuse", |log, _, of, _| {
        log.refuse(of.attachment, true);
        log.refuse(of.attachment, false);
    }),
    ("looked", |log, now, of, asks| log.looked(of.attachment, now, asks)),
    ("look_ended", |log, now, of, asks| log.look_ended(now, of.attachment, asks)),
    ("follow", |_, _, _, _| {}),
    // (It comes to no stop of a run that goes on: see `World::operate`.)
    ("close", |log, now, _, asks| log.close(now, "somebody says so", asks)),
];

/// What a start calls before anything is served. What `start` asks for it carries out itself; `start_closed` leaves a log that asks for nothing.
pub(crate) const OF_A_START: [&str; 2] = ["start", "start_closed"];

impl World {
    /// One of them calls the log.
    pub(super) fn operate(&mut self) {
        let v = self.rng.below(self.stores.len() as u64) as usize;
        // (One at a time works at a volume.)
        let Some(attach) = self.attach_of(v, 0).filter(|_| !self.is_changing(v)) else { return };
        let (name, call) = CALLS[self.rng.below(CALLS.len() as u64) as usize];
        if name == "close" {
            // The log's device fails then, in runs in which it may.
            if !self.may_fail || self.failing || !self.rng.chance(0.2) {
                return;
            }
            self.failing = true;
        }
        let now = self.now;
        if ["halt", "clients_left"].contains(&name) {
            self.let_go[v] = self.tick;
        }
        self.says(|| format!("v{v}: somebody calls {name}"));
        let shared = &self.life().shared;
        let before = shared.log.borrow().under_way();
        tell_log(shared, now, |log, asks| call(log, now, attach, asks));
        let after = shared.log.borrow().under_way();
        self.seen.operators += 1;
        self.seen.operators_io += u64::from(before != after);
    }

    /// What the log waits for at its device somebody does.
    pub(super) fn check_carried(&self) -> Checked {
        let Some(life) = &self.life else { return Ok(()) };
        if life.queues.iter().any(|queue| !queue.is_settled()) {
            // It has taken its mail, and not looked at it.
            return Ok(());
        }
        let (mut writes, mut flushes) = (BTreeSet::new(), BTreeSet::new());
        let mut gives_up =
            !life.shared.enabled.get() || life.shared.work.borrow().give_up.is_some();
        for doing in &self.doing {
            match &doing.io {
                Io::LogWrite(_, write) => drop(writes.insert(write.number)),
                Io::LogFlush(_, covers, _) => drop(flushes.insert(*covers)),
                _ => {}
            }
        }
        for mail in &life.shared.mail {
            for (_, message) in mail.borrow().iter() {
                if let Message::ForDevice(asked) = message {
                    writes.extend(asked.writes.iter().map(|write| write.number));
                    flushes.extend(asked.flush);
                    gives_up |= asked.gives_up.is_some();
                }
            }
        }
        if life.shared.log.borrow().closed().is_some() && !gives_up {
            return Err("the log has failed, and nobody gives the slots up".to_owned());
        }
        let (batches, flush) = life.shared.log.borrow().under_way();
        let nobody = batches.iter().find(|batch| !writes.contains(batch));
        if let Some(batch) = nobody {
            return Err(format!("the log waits for batch {batch}, which nobody writes"));
        }
        match flush.filter(|covers| !flushes.contains(covers)) {
            Some(covers) => Err(format!("the log waits for a flush up to {covers} of nobody")),
            None => Ok(()),
        }
    }
}
