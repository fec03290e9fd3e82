//! What becomes of a request when it comes.

use std::sync::Arc;

use larder_engine::block::PartKind;
use larder_engine::block::node::readahead;
use larder_policy::block::BlockKind;
use larder_runtime::Payload;

use super::super::attached::Inside;
use super::Cached;
use super::client_op::ClientOp;
use crate::nbd::server::Command;
use crate::op::{Extent, Failure, FailureKind, Op};
use crate::server::Volume;
use crate::server::service::Answer;

/// A request that waits for its volume to have its place.
pub(super) struct Postponed {
    volume: Arc<Volume>,
    ticket: u64,
    command: Command,
    tag: BlockKind,
}

impl Cached {
    /// [`Service::submit`] of a program that knows what the range holds: admission need not find out. (Of what is cached it
    /// is not kept: there metadata is what the [detector](larder_policy::block) takes for it.)
    pub fn submit_tagged(
        &mut self,
        volume: &Arc<Volume>,
        ticket: u64,
        command: Command,
        tag: BlockKind,
    ) {
        let refuse = |command: Command, failure: Failure| {
            let buf = match command {
                Command::Read { buf, .. } | Command::Write { buf, .. } => Some(buf),
                _ => None,
            };
            Answer::new(ticket, Err(failure), buf)
        };
        if volume.is_closed() {
            let failure = Failure::new(FailureKind::Gone, "the volume was detached");
            self.ended.push_back(refuse(command, failure));
            return;
        }
        let lost = || {
            Failure::new(
                FailureKind::Failed,
                "another writer has the volume: this daemon must be started again",
            )
        };
        let known = if volume.backing().is_lost() { Err(lost()) } else { self.known(volume) };
        let known = match known {
            Ok(known) => known,
            Err(failure) => return self.ended.push_back(refuse(command, failure)),
        };
        // Where it lies in the line space is what it is done by.
        let by_place = !matches!(command, Command::Flush | Command::BlockStatus { .. });
        let inside = self.attached(known).filter(|_| by_place).map(Inside::enter);
        if let Some(None) = inside {
            self.postponed.push_back(Postponed { volume: volume.clone(), ticket, command, tag });
            return;
        }
        let inside = inside.flatten();
        let base = self.attached(known).map(|a| a.base());
        let op = |kind, offset: u64, len: u64| ClientOp {
            tag,
            _inside: inside,
            ..ClientOp::new(ticket, known, kind, base.unwrap_or(0) + offset, len)
        };
        match command {
            Command::Read { offset, buf } if base.is_some() => {
                let len = buf.len() as u64;
                self.begin(ClientOp { buf: Some(buf), ..op(PartKind::Read, offset, len) });
            }
            Command::Write { offset, buf, fua } if base.is_some() => {
                let len = buf.len() as u64;
                let payload = Some(Payload::new(buf));
                self.begin(ClientOp { payload, fua, ..op(PartKind::Write, offset, len) });
            }
            Command::Trim { offset, len, fua } if base.is_some() => {
                self.begin(ClientOp { fua, ..op(PartKind::Trim, offset, u64::from(len)) });
            }
            Command::WriteZeroes { offset, len, fua, may_punch, fast } if base.is_some() => {
                let whole = op(PartKind::Zero, offset, u64::from(len));
                self.begin(ClientOp { fua, may_punch, fast, ..whole });
            }
            Command::Cache { offset, len } if base.is_some() => {
                let len = u64::from(len).min(readahead::MOST_ADVICE);
                self.begin(op(PartKind::Prefetch, offset, len));
            }
            Command::Read { offset, buf } => self.through(known, ticket, Op::Read { offset, buf }),
            Command::Write { offset, buf, fua } => {
                self.through(known, ticket, Op::Write { offset, data: Payload::new(buf), fua });
            }
            Command::Trim { offset, len, fua } => {
                self.through(known, ticket, Op::Trim { offset, len, fua });
            }
            Command::WriteZeroes { offset, len, fua, may_punch, fast } => {
                self.through(known, ticket, Op::WriteZeroes { offset, len, fua, may_punch, fast });
            }
            Command::Flush => self.through(known, ticket, Op::Flush),
            Command::BlockStatus { offset, len, one } if volume.about().status => {
                self.through(known, ticket, Op::Status { offset, len, one });
            }
            Command::BlockStatus { len, .. } => {
                let outcome = Ok(vec![Extent { len, hole: false, zero: false }]);
                self.ended.push_back(Answer::new(ticket, outcome, None));
            }
            Command::Cache { .. } => {
                let outcome = Ok(Vec::new());
                self.ended.push_back(Answer::new(ticket, outcome, None));
            }
        }
    }

    /// Those whose volume still moves are postponed again.
    pub(super) fn submit_postponed(&mut self) {
        for Postponed { volume, ticket, command, tag } in std::mem::take(&mut self.postponed) {
            self.submit_tagged(&volume, ticket, command, tag);
        }
    }
}
