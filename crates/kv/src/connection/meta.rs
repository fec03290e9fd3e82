//! The meta protocol's commands.

use larder_engine::kv::api::{Op, Reply};

use super::Progress;
use super::buffers::PendingKind;
use super::context::PrefixUse;
use super::engine::Engine;
use super::text::body_len;
use super::turn::{Act, ReadStep, Shape, Turn};
use super::watched::command_of;
use crate::protocol::meta::{MetaLine, Refused};
use crate::protocol::tokens::Tokens;
use crate::protocol::{answer, reply};

impl<E: Engine> Turn<'_, '_, E> {
    fn refuse(&mut self, refused: Refused, line_len: usize) -> Act<E::Read> {
        let text = match refused {
            Refused::Line => answer::BAD_FORMAT,
            Refused::Flags(text) => text,
        };
        self.bad(false, text, line_len)
    }

    /// `mg <key> <flags>*`
    pub(super) fn meta_get(&mut self, line_len: usize, line: &[u8]) -> Act<E::Read> {
        let meta = match MetaLine::parse(line, 2) {
            Ok(meta) => meta,
            Err(refused) => return self.refuse(refused, line_len),
        };
        let (op, changes) = meta.get(self.now);
        let wait =
            if changes { self.behind_reads() } else { self.out.pending.iter().any(|p| p.changes) };
        if wait {
            return Act::Wait(Progress::WaitingForFlash);
        }
        match self.read(op, Shape::Meta(&meta), PendingKind::MetaGet, changes, line) {
            ReadStep::Done => Act::Done(line_len),
            ReadStep::Wait(progress) => Act::Wait(progress),
        }
    }

    /// `me <key> [b]`
    pub(super) fn meta_debug(&mut self, line_len: usize, line: &[u8]) -> Act<E::Read> {
        let meta = match MetaLine::parse(line, 2) {
            Ok(meta) => meta,
            Err(_) => return self.bad(false, answer::BAD_FORMAT, line_len),
        };
        if self.out.pending.iter().any(|p| p.changes) {
            return Act::Wait(Progress::WaitingForFlash);
        }
        match self.read(Op::Peek, Shape::Debug(&meta), PendingKind::MetaDebug, false, line) {
            ReadStep::Done => Act::Done(line_len),
            ReadStep::Wait(progress) => Act::Wait(progress),
        }
    }

    /// `ms <key> <bytes> <flags>*` and its body. Errors are shown even when `q` asks for silence.
    pub(super) fn meta_set(&mut self, bytes: &[u8], line_len: usize, line: &[u8]) -> Act<E::Read> {
        let parsed = MetaLine::parse(line, 3);
        let length = Tokens::new(line).get(2).and_then(body_len);
        let (Some(length), false) = (length, matches!(parsed, Err(Refused::Line))) else {
            return self.bad(false, answer::BAD_FORMAT, line_len);
        };
        let body_len = length + 2;
        let now = self.now;
        let checked = match &parsed {
            Ok(meta) => meta.store(now, &[]).map(|store| (meta, store)),
            Err(refused) => Err(*refused),
        };
        let (meta, mut store) = match checked {
            Ok(both) => both,
            Err(refused) => {
                let _ = self.refuse(refused, line_len);
                return Act::Swallow(line_len, body_len as u64);
            }
        };
        let key = meta.key();
        if !self.engine.fits(key.len(), length) {
            let command = command_of(&store);
            return self.too_large(key, (command, true), false, line_len, body_len);
        }
        let need = line_len + body_len;
        if bytes.len() < need {
            return Act::Body(need);
        }
        let Some(value) = bytes[line_len..need].strip_suffix(b"\r\n") else {
            self.ctx.stats.malformed += 1;
            self.say(false, answer::BAD_CHUNK);
            return Act::Done(need);
        };
        if self.behind_reads() {
            return Act::Wait(Progress::WaitingForFlash);
        }
        if self.waits_for_room(key, length) {
            return Act::Wait(Progress::WaitingForRoom);
        }
        store.value = value;
        let cas = store.compare_cas.is_some();
        let blocked = self.change(key, Op::Store(store), |reply, out, stats| {
            stats.count_store(&reply, cas);
            match reply {
                Reply::Stored { .. } if meta.quiet => {}
                Reply::Stored { cas, size } => meta.write_stored(out, b"HD", cas, u64::from(size)),
                Reply::Exists => meta.write_stored(out, b"EX", 0, length as u64),
                Reply::NotFound => meta.write_stored(out, b"NF", 0, length as u64),
                Reply::TooLarge if !extends(&store) => reply::line(out, answer::TOO_LARGE),
                Reply::OutOfMemory if !extends(&store) => reply::line(out, answer::NO_MEMORY),
                _ => meta.write_stored(out, b"NS", 0, length as u64),
            }
        });
        if let Some(read) = blocked {
            return Act::Block(read);
        }
        if self.ctx.detail {
            self.ctx.admin.prefix_use(key, PrefixUse::Set);
        }
        Act::Done(need)
    }

    /// `md <key> <flags>*`
    pub(super) fn meta_delete(&mut self, line_len: usize, line: &[u8]) -> Act<E::Read> {
        let meta = match MetaLine::parse(line, 2) {
            Ok(meta) => meta,
            Err(refused) => return self.refuse(refused, line_len),
        };
        if self.behind_reads() {
            return Act::Wait(Progress::WaitingForFlash);
        }
        let delete = meta.delete(self.now);
        let mut gone = None;
        let blocked =
            self.change(meta.key(), Op::Delete(delete), |reply, out, stats| match reply {
                Reply::Deleted { size } => {
                    gone = Some(size).filter(|_| !delete.mark_stale && !delete.drop_value);
                    // Marking stale is no deletion.
                    stats.delete_hits += u64::from(!delete.mark_stale);
                    if !meta.quiet {
                        meta.write_status(out, b"HD");
                    }
                }
                Reply::Exists => {
                    stats.delete_misses += 1;
                    meta.write_status(out, b"EX");
                }
                Reply::OutOfMemory | Reply::TooLarge => {
                    reply::line(out, b"SERVER_ERROR out of memory")
                }
                _ => {
                    stats.delete_misses += 1;
                    meta.write_status(out, b"NF");
                }
            });
        if let Some(read) = blocked {
            return Act::Block(read);
        }
        if self.ctx.detail {
            self.ctx.admin.prefix_use(meta.key(), PrefixUse::Delete);
        }
        self.tell_deleted(meta.key(), "md", gone);
        Act::Done(line_len)
    }

    /// `ma <key> <flags>*`
    pub(super) fn meta_arith(&mut self, line_len: usize, line: &[u8]) -> Act<E::Read> {
        let meta = match MetaLine::parse(line, 2) {
            Ok(meta) => meta,
            Err(Refused::Line) => return self.bad(false, answer::BAD_FORMAT, line_len),
            // ma has one answer for all of them.
            Err(Refused::Flags(_)) => {
                return self.bad(false, b"CLIENT_ERROR invalid or duplicate flag", line_len);
            }
        };
        let arith = match meta.arith(self.now) {
            Ok(arith) => arith,
            Err(refused) => return self.refuse(refused, line_len),
        };
        if self.behind_reads() {
            return Act::Wait(Progress::WaitingForFlash);
        }
        let now = self.now.wall;
        let blocked = self.change(meta.key(), Op::Arith(arith), |reply, out, stats| {
            stats.count_arith(&reply, arith.decrement);
            match reply {
                Reply::Number(..) if meta.quiet => {}
                Reply::Number(number, item) => meta.write_number(out, number, &item, now),
                Reply::NotNumeric => reply::line(out, answer::NOT_NUMERIC),
                Reply::Exists => meta.write_status(out, b"EX"),
                Reply::NotStored => meta.write_status(out, b"NS"),
                Reply::OutOfMemory | Reply::TooLarge => {
                    reply::line(out, b"SERVER_ERROR out of memory")
                }
                _ => meta.write_status(out, b"NF"),
            }
        });
        blocked.map_or(Act::Done(line_len), Act::Block)
    }
}

fn extends(store: &larder_engine::kv::api::Store<'_>) -> bool {
    use larder_engine::kv::api::StoreMode::{Append, Prepend};
    matches!(store.mode, Append | Prepend)
}
