//! The text protocol's commands on objects.

use larder_engine::kv::api::{Arith, Delete, Get, Op, Reply, Store, StoreMode};

use super::buffers::PendingKind;
use super::context::PrefixUse;
use super::engine::Engine;
use super::turn::{Act, Keys, ReadStep, Shape, Turn};
use super::{Progress, SMALL};
use crate::protocol::number::{Digits, parse_i32, parse_u32, parse_u64, parse_wrapped_i32};
use crate::protocol::tokens::{Tokens, trim_end_of_line};
use crate::protocol::{KEY_MAX, answer, expiry, reply};

/// A deletion with more than a key.
const BAD_DELETE: &[u8] = b"CLIENT_ERROR bad command line format.  Usage: delete <key> [noreply]";

impl<E: Engine> Turn<'_, '_, E> {
    /// Executes the command whose line is the first `line_len` bytes of `bytes`; a body may follow.
    #[inline]
    pub(super) fn command(&mut self, bytes: &[u8], line_len: usize) -> Act<E::Read> {
        let line = trim_end_of_line(&bytes[..line_len]);
        if line.starts_with(b"get ") {
            return self.get(bytes, line_len, line, 4, false);
        }
        if line_len < 4 {
            return self.bad(false, answer::BAD_FORMAT, line_len);
        }
        let name_len = memchr::memchr(b' ', line).unwrap_or(line.len());
        match &line[..name_len] {
            b"set" => self.store(bytes, line_len, line, StoreMode::Set, false),
            b"mg" => self.meta_get(line_len, line),
            b"ms" => self.meta_set(bytes, line_len, line),
            b"md" => self.meta_delete(line_len, line),
            b"ma" => self.meta_arith(line_len, line),
            b"me" => self.meta_debug(line_len, line),
            b"mn" => {
                self.say(false, b"MN");
                Act::Done(line_len)
            }
            b"gets" => self.get(bytes, line_len, line, 5, true),
            b"get" => self.bad(false, answer::BAD_FORMAT, line_len),
            b"gat" => self.get_and_touch(bytes, line_len, line, false),
            b"gats" => self.get_and_touch(bytes, line_len, line, true),
            b"add" => self.store(bytes, line_len, line, StoreMode::Add, false),
            b"replace" => self.store(bytes, line_len, line, StoreMode::Replace, false),
            b"append" => self.store(bytes, line_len, line, StoreMode::Append, false),
            b"prepend" => self.store(bytes, line_len, line, StoreMode::Prepend, false),
            b"cas" => self.store(bytes, line_len, line, StoreMode::Set, true),
            b"delete" => self.delete(line_len, line),
            b"incr" => self.arith(line_len, line, false),
            b"decr" => self.arith(line_len, line, true),
            b"touch" => self.touch(line_len, line),
            b"quit" => Act::Quit(line_len),
            b"version" => {
                let tail = self.out.tail();
                tail.extend_from_slice(b"VERSION ");
                reply::line(tail, self.ctx.config.version.as_bytes());
                Act::Done(line_len)
            }
            b"stats" => {
                self.ctx.admin.stats(line[name_len..].trim_ascii(), self.out.tail());
                Act::Done(line_len)
            }
            _ => self.administer(line_len, line),
        }
    }

    /// `get` and `gets`, whose keys start at `from`.
    #[inline]
    fn get(
        &mut self,
        bytes: &[u8],
        line_len: usize,
        line: &[u8],
        from: usize,
        with_cas: bool,
    ) -> Act<E::Read> {
        if !self.out.pending.is_empty() && self.out.pending.iter().any(|p| p.changes) {
            return Act::Wait(Progress::WaitingForFlash);
        }
        if line.len() > KEY_MAX && has_long_key(line) {
            return self.bad(false, answer::BAD_FORMAT, line_len);
        }
        if line.len() <= from {
            return self.bad(false, answer::BAD_FORMAT, line_len);
        }
        self.keys(&bytes[..line_len], from, Keys { op: Get::default(), with_cas, any: false })
    }

    /// `gat` and `gats <exptime> <key>*`.
    fn get_and_touch(
        &mut self,
        bytes: &[u8],
        line_len: usize,
        line: &[u8],
        with_cas: bool,
    ) -> Act<E::Read> {
        let tokens = Tokens::new(line);
        if tokens.len() < 3 {
            return self.bad(false, answer::BAD_FORMAT, line_len);
        }
        let Some(argument) = tokens.get(1).and_then(parse_i32) else {
            return self.bad(false, answer::BAD_EXPTIME, line_len);
        };
        if self.behind_reads() {
            return Act::Wait(Progress::WaitingForFlash);
        }
        if line.len() > KEY_MAX && has_long_key(line) {
            return self.bad(false, answer::BAD_FORMAT, line_len);
        }
        let first_key = tokens.as_slice()[2];
        let from = first_key.as_ptr() as usize - line.as_ptr() as usize;
        let op = Get { touch: Some(expiry(self.now, argument)), ..Get::default() };
        self.keys(&bytes[..line_len], from, Keys { op, with_cas, any: false })
    }

    /// Works off keys of a get from `bytes[from..]` up to the end of the line, of the input, or until the connection
    /// must wait.
    #[inline]
    pub(super) fn keys(&mut self, bytes: &[u8], from: usize, mut keys: Keys) -> Act<E::Read> {
        let line_end = memchr::memchr(b'\n', &bytes[from..]).map(|at| from + at);
        let end = match line_end {
            Some(at) if at > from && bytes[at - 1] == b'\r' => at - 1,
            Some(at) => at,
            None => bytes.len(),
        };
        let touch = keys.op.touch.is_some();
        let kind = PendingKind::Text { op: keys.op, with_cas: keys.with_cas };
        let mut at = from;
        loop {
            while at < end && bytes[at] == b' ' {
                at += 1;
            }
            if at == end {
                break;
            }
            let key_len = memchr::memchr(b' ', &bytes[at..end]).unwrap_or(end - at);
            if key_len > KEY_MAX + usize::from(line_end.is_none()) {
                // Only in a line too long to be looked over before it was begun (one more byte may be its CR).
                self.ctx.stats.malformed += 1;
                self.say(false, answer::BAD_FORMAT);
                return match line_end {
                    Some(line_end) => Act::Done(line_end + 1),
                    None => Act::SwallowLine(bytes.len()),
                };
            }
            if line_end.is_none() && at + key_len == end {
                // The key may go on in the next piece.
                return Act::Keys(at, keys, Some(Progress::NeedInput));
            }
            if key_len > KEY_MAX {
                self.ctx.stats.malformed += 1;
                self.say(false, answer::BAD_FORMAT);
                return Act::SwallowLine(at + key_len);
            }
            let key = &bytes[at..at + key_len];
            let shape = Shape::Text { key, with_cas: keys.with_cas, touch };
            match self.read(Op::Get(keys.op), shape, kind, touch, key) {
                ReadStep::Done => {}
                ReadStep::Wait(progress) => return Act::Keys(at, keys, Some(progress)),
            }
            keys.any = true;
            at += key_len;
            if at < end && self.out.unsent() >= SMALL {
                return Act::Keys(at, keys, None);
            }
        }
        let Some(line_end) = line_end else {
            return Act::Keys(at, keys, Some(Progress::NeedInput));
        };
        if keys.any {
            self.out.tail().extend_from_slice(b"END\r\n");
            Act::Done(line_end + 1)
        } else {
            self.bad(false, answer::BAD_FORMAT, line_end + 1)
        }
    }

    /// `<command> <key> <flags> <exptime> <bytes> [<cas>] [noreply]` and its body.
    #[inline]
    fn store(
        &mut self,
        bytes: &[u8],
        line_len: usize,
        line: &[u8],
        mode: StoreMode,
        cas: bool,
    ) -> Act<E::Read> {
        let tokens = Tokens::new(line);
        let (Some(key), Some(flags), Some(exptime), Some(length)) =
            (tokens.get(1), tokens.get(2), tokens.get(3), tokens.get(4).and_then(body_len))
        else {
            return self.bad(false, answer::BAD_FORMAT, line_len);
        };
        // From here on the length is known: an error swallows the body.
        let noreply = tokens.noreply();
        let body_len = length + 2;
        let refuse = |turn: &mut Self| {
            turn.ctx.stats.malformed += 1;
            turn.say(noreply, answer::BAD_FORMAT);
            Act::Swallow(line_len, body_len as u64)
        };
        if key.len() > KEY_MAX {
            return refuse(self);
        }
        let (Some(flags), Some(exptime)) = (parse_u32(flags), parse_wrapped_i32(exptime)) else {
            return refuse(self);
        };
        let compare_cas = if cas {
            match tokens.get(5).and_then(parse_u64) {
                Some(cas) => Some(cas),
                None => return refuse(self),
            }
        } else {
            None
        };
        if !self.engine.fits(key.len(), length) {
            return self.too_large(
                key,
                (if cas { "cas" } else { name_of(mode) }, mode == StoreMode::Set && !cas),
                noreply,
                line_len,
                body_len,
            );
        }
        let need = line_len + body_len;
        if bytes.len() < need {
            return Act::Body(need);
        }
        let Some(value) = bytes[line_len..need].strip_suffix(b"\r\n") else {
            self.ctx.stats.malformed += 1;
            self.say(noreply, answer::BAD_CHUNK);
            return Act::Done(need);
        };
        if self.behind_reads() {
            return Act::Wait(Progress::WaitingForFlash);
        }
        if self.waits_for_room(key, length) {
            return Act::Wait(Progress::WaitingForRoom);
        }
        let store = Store {
            mode,
            value,
            flags,
            expiry: expiry(self.now, exptime),
            compare_cas,
            new_cas: None,
            invalidate: false,
            vivify: None,
        };
        let blocked = self.change(key, Op::Store(store), |reply, out, stats| {
            stats.count_store(&reply, cas);
            let text: &[u8] = match reply {
                Reply::Stored { .. } => b"STORED",
                Reply::Exists => b"EXISTS",
                Reply::NotFound => b"NOT_FOUND",
                // As in memcached an append that cannot be held leaves the object as it is.
                Reply::TooLarge | Reply::OutOfMemory
                    if matches!(mode, StoreMode::Append | StoreMode::Prepend) =>
                {
                    b"NOT_STORED"
                }
                Reply::TooLarge => answer::TOO_LARGE,
                Reply::OutOfMemory => answer::NO_MEMORY,
                _ => b"NOT_STORED",
            };
            if !noreply {
                reply::line(out, text);
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

    /// Refuses a body by its announced length. A set must not leave the old value behind: `remove`, beside the command's name.
    pub(super) fn too_large(
        &mut self,
        key: &[u8],
        (command, remove): (&'static str, bool),
        noreply: bool,
        line_len: usize,
        body_len: usize,
    ) -> Act<E::Read> {
        if remove {
            if self.behind_reads() {
                return Act::Wait(Progress::WaitingForFlash);
            }
            if let Some(read) = self.change(key, Op::Delete(Delete::default()), |_, _, _| {}) {
                return Act::Block(read);
            }
        }
        self.ctx.stats.store_too_large += 1;
        self.tell_too_large(key, command);
        self.say(noreply, answer::TOO_LARGE);
        Act::Swallow(line_len, body_len as u64)
    }

    /// `delete <key> [noreply]`; further arguments are ignored, as old clients send a zero.
    fn delete(&mut self, line_len: usize, line: &[u8]) -> Act<E::Read> {
        let tokens = Tokens::new(line);
        let Some(key) = tokens.get(1) else {
            return self.bad(false, answer::BAD_FORMAT, line_len);
        };
        let noreply = tokens.noreply();
        if key.len() > KEY_MAX {
            return self.bad(noreply, answer::BAD_FORMAT, line_len);
        }
        // Once there was a time to hold the key for. memcached 1.6.45 has stopped looking, and deletes whatever follows the
        // key: so here, but for a line that no client ever sent, which clients' tests want refused.
        if tokens.len() > 4 {
            return self.bad(noreply, BAD_DELETE, line_len);
        }
        if self.behind_reads() {
            return Act::Wait(Progress::WaitingForFlash);
        }
        let mut gone = None;
        let blocked = self.change(key, Op::Delete(Delete::default()), |reply, out, stats| {
            let text: &[u8] = if let Reply::Deleted { size } = reply {
                gone = Some(size);
                stats.delete_hits += 1;
                b"DELETED"
            } else {
                stats.delete_misses += 1;
                b"NOT_FOUND"
            };
            if !noreply {
                reply::line(out, text);
            }
        });
        if let Some(read) = blocked {
            return Act::Block(read);
        }
        if self.ctx.detail {
            self.ctx.admin.prefix_use(key, PrefixUse::Delete);
        }
        self.tell_deleted(key, "delete", gone);
        Act::Done(line_len)
    }

    /// `incr|decr <key> <delta> [noreply]`
    fn arith(&mut self, line_len: usize, line: &[u8], decrement: bool) -> Act<E::Read> {
        let tokens = Tokens::new(line);
        let (Some(key), Some(delta)) = (tokens.get(1), tokens.get(2)) else {
            return self.bad(false, answer::BAD_FORMAT, line_len);
        };
        let noreply = tokens.noreply();
        if key.len() > KEY_MAX {
            return self.bad(noreply, answer::BAD_FORMAT, line_len);
        }
        let Some(delta) = parse_u64(delta) else {
            return self.bad(noreply, b"CLIENT_ERROR invalid numeric delta argument", line_len);
        };
        if self.behind_reads() {
            return Act::Wait(Progress::WaitingForFlash);
        }
        let op = Op::Arith(Arith { decrement, delta, ..Arith::default() });
        let blocked = self.change(key, op, |reply, out, stats| {
            stats.count_arith(&reply, decrement);
            let digits;
            let text: &[u8] = match reply {
                Reply::Number(n, _) => {
                    digits = Digits::new(n);
                    digits.as_bytes()
                }
                Reply::NotNumeric => answer::NOT_NUMERIC,
                Reply::OutOfMemory | Reply::TooLarge => b"SERVER_ERROR out of memory",
                _ => b"NOT_FOUND",
            };
            if !noreply {
                reply::line(out, text);
            }
        });
        blocked.map_or(Act::Done(line_len), Act::Block)
    }

    /// `touch <key> <exptime> [noreply]`
    fn touch(&mut self, line_len: usize, line: &[u8]) -> Act<E::Read> {
        let tokens = Tokens::new(line);
        let (Some(key), Some(exptime)) = (tokens.get(1), tokens.get(2)) else {
            return self.bad(false, answer::BAD_FORMAT, line_len);
        };
        let noreply = tokens.noreply();
        if key.len() > KEY_MAX {
            return self.bad(noreply, answer::BAD_FORMAT, line_len);
        }
        let Some(exptime) = parse_i32(exptime) else {
            return self.bad(noreply, answer::BAD_EXPTIME, line_len);
        };
        if self.behind_reads() {
            return Act::Wait(Progress::WaitingForFlash);
        }
        let op = Op::Touch(expiry(self.now, exptime));
        let blocked = self.change(key, op, |reply, out, stats| {
            stats.cmd_touch += 1;
            let text: &[u8] = if matches!(reply, Reply::Touched) {
                stats.touch_hits += 1;
                b"TOUCHED"
            } else {
                stats.touch_misses += 1;
                b"NOT_FOUND"
            };
            if !noreply {
                reply::line(out, text);
            }
        });
        blocked.map_or(Act::Done(line_len), Act::Block)
    }
}

/// A body length as the storage commands announce it: not negative, and with its end of line within an `i32`.
pub(super) fn body_len(token: &[u8]) -> Option<usize> {
    parse_i32(token).filter(|len| (0..=i32::MAX - 2).contains(len)).map(|len| len as usize)
}

/// A store's command.
pub(super) fn name_of(mode: StoreMode) -> &'static str {
    match mode {
        StoreMode::Set => "set",
        StoreMode::Add => "add",
        StoreMode::Replace => "replace",
        StoreMode::Append => "append",
        StoreMode::Prepend => "prepend",
    }
}

/// Whether a token of the line is over the limit on keys.
fn has_long_key(line: &[u8]) -> bool {
    line.split(|b| *b == b' ').any(|token| token.len() > KEY_MAX)
}
