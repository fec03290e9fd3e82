//! What requests tell whoever watches. All of it is out of the way while nobody does.

use larder_engine::kv::api::{Item, Op, Reply, Request, Store, StoreMode, Tier};

use super::engine::{Engine, Sink, Step};
use super::text::name_of;
use super::turn::{Act, Turn};
use crate::protocol::answer;
use crate::protocol::tokens::Tokens;
use crate::watch::{Stored, Topics};

/// What memcached's proxy, and its slab mover, LRU crawler and compaction, tell.
const ABSENT: [&[u8]; 4] = [b"proxyreqs", b"proxyevents", b"proxyuser", b"sysevents"];

/// What a change has met and done, as lines show it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outcome {
    /// An object was there.
    found: bool,
    /// Bytes of its value, where the answer tells.
    size: usize,
    /// How a store went.
    status: &'static str,
}

impl Outcome {
    pub(super) fn of(reply: &Reply<'_>, op: &Op<'_>) -> Outcome {
        let mode = match op {
            Op::Store(store) => Some(store.mode),
            _ => None,
        };
        let (found, size, status) = match reply {
            Reply::Stored { .. } => (mode != Some(StoreMode::Add), 0, "stored"),
            Reply::NotStored => (mode == Some(StoreMode::Add), 0, "not_stored"),
            Reply::Exists => (true, 0, "exists"),
            Reply::NotFound | Reply::Miss => (false, 0, "not_found"),
            Reply::TooLarge => (mode.is_none(), 0, "too_large"),
            Reply::OutOfMemory => (false, 0, "no_memory"),
            Reply::Deleted { size } => (true, *size as usize, ""),
            Reply::Touched | Reply::NotNumeric => (true, 0, ""),
            Reply::Number(_, item) | Reply::Item(item) => (true, item.value.len(), ""),
        };
        Outcome { found, size, status }
    }
}

/// A store's command as lines name it.
pub(super) fn command_of(store: &Store<'_>) -> &'static str {
    if store.compare_cas.is_some() { "cas" } else { name_of(store.mode) }
}

/// The class by which a tier is known in `stats items`.
pub(super) fn class_of(item: &Item<'_>) -> u8 {
    match item.tier {
        Tier::Dram => 1,
        Tier::Flash => 2,
    }
}

impl<E: Engine> Turn<'_, '_, E> {
    /// Whether anybody watches this.
    pub(super) fn watched(&self, topic: Topics) -> bool {
        self.ctx.watch.as_ref().is_some_and(|watch| watch.wants(topic))
    }

    /// `watch [fetchers|mutations|deletions|evictions|connevents|rawcmds]*`
    pub(super) fn watch(&mut self, line_len: usize, tokens: &Tokens<'_>) -> Act<E::Read> {
        let mut topics = Topics::default();
        for name in &tokens.as_slice()[1..] {
            match Topics::named(name) {
                Some(topic) => topics = topics.and(topic),
                None if ABSENT.contains(name) => {
                    let mut text =
                        b"CLIENT_ERROR there is nothing here that would tell of ".to_vec();
                    text.extend_from_slice(name);
                    self.say(false, &text);
                    // The connection was opened to listen to what will not come: its owner need not wait.
                    return Act::Close(line_len);
                }
                None => return self.bad(false, answer::ERROR, line_len),
            }
        }
        if topics.is_empty() {
            topics = Topics::FETCHERS;
        }
        if self.out.unsent() > 0 || self.behind_reads() {
            // As memcached: the answers before it would be in the way of the lines.
            self.say(false, b"ERROR cannot pipeline other commands before watch");
            return Act::Done(line_len);
        }
        match self.ctx.admin.watch(topics) {
            Ok(()) => {
                self.say(false, b"OK");
                Act::Watch(line_len)
            }
            Err(text) => {
                self.say(false, text);
                Act::Close(line_len)
            }
        }
    }

    /// Tells of a command line that is done with.
    pub(super) fn tell_command(&mut self, line: &[u8]) {
        let now = self.now;
        if let Some(watch) = &mut self.ctx.watch {
            watch.command(now, line);
        }
    }

    /// Tells of a read that is answered.
    pub(super) fn tell_get(&mut self, key: &[u8], class: u8, size: usize) {
        let now = self.now;
        if let Some(watch) = &mut self.ctx.watch {
            watch.item_get(now, key, class, size);
        }
    }

    /// Whether a plain set would find an object in DRAM, and of which size. What is on flash is not read for it.
    pub(super) fn look(&mut self, request: &Request<'_>) -> Option<Outcome> {
        let plain = matches!(&request.op, Op::Store(s) if s.mode == StoreMode::Set && s.compare_cas.is_none());
        if !plain || !self.watched(Topics::FETCHERS) {
            return None;
        }
        let peek = Request { op: Op::Peek, ..*request };
        let mut seen = Outcome::default();
        let on_reply = |reply: Reply<'_>| seen = Outcome::of(&reply, &Op::Peek);
        let mut sink = Sink { side: &mut *self.ctx.side, on_reply };
        match self.engine.execute(self.now, &peek, None, &mut sink) {
            Step::Done => Some(seen),
            Step::Read(_) => Some(Outcome::default()),
        }
    }

    /// Tells of a change that is answered: a look-up, and a store if it was one.
    pub(super) fn tell_change(&mut self, key: &[u8], op: &Op<'_>, seen: Outcome, done: Outcome) {
        let now = self.now;
        let Some(watch) = &mut self.ctx.watch else { return };
        watch.item_get(now, key, u8::from(seen.found), seen.size);
        if let Op::Store(store) = op {
            let stored = Stored {
                status: done.status,
                command: command_of(store),
                ttl: store.expiry.remaining(now.wall).unwrap_or(0),
                size: store.value.len(),
            };
            watch.item_store(now, key, &stored);
        }
    }

    /// Tells of a store that was refused by its announced length.
    pub(super) fn tell_too_large(&mut self, key: &[u8], command: &'static str) {
        let now = self.now;
        if let Some(watch) = &mut self.ctx.watch {
            watch.item_store(now, key, &Stored { status: "too_large", command, ttl: 0, size: 0 });
        }
    }

    /// Tells of a deletion, if there was one.
    pub(super) fn tell_deleted(&mut self, key: &[u8], command: &str, size: Option<u32>) {
        let now = self.now;
        if let (Some(watch), Some(size)) = (&mut self.ctx.watch, size) {
            watch.deleted(now, key, command, size);
        }
    }
}
