//! What each operation does to an object.
//!
//! Every operation first looks in DRAM, then on flash. An object on flash that must change is brought into DRAM and
//! changed there: a record on flash never changes, so this is where "touch" and "incr" of an object on flash are an
//! ordinary change of an object in DRAM, with its flash copy invalidated.

use larder_base::{Expiry, Now};
use larder_format::Record;
use larder_policy::admission::{AdmissionPolicy, Departure};

use super::api::{
    Arith, Delete, Effects, Fetched, Get, Item, Op, Outcome, Reply, Request, Store, StoreMode, Tier,
};
use super::config::object_fits;
use super::flash::{Found, Located};
use super::planted::Planted;
use super::shard::{KvShard, NewObject};
use crate::dram::{Block, ObjectHeader, ObjectMemory, State};

/// Longest decimal number plus sign and padding that incr and decr accept, as memcached does.
const MAX_NUMBER: usize = 24;

/// The object of a request.
enum Present<'f> {
    Dram(Block, ObjectHeader),
    Flash(Found<'f>),
    Absent,
}

impl<M: ObjectMemory> KvShard<M> {
    /// Executes one request. [`Outcome::Read`] asks for bytes on flash: call again with the same request and
    /// [`Fetched`]; nothing has changed yet (but an expired object may be gone).
    pub fn execute(
        &mut self,
        now: Now,
        req: &Request<'_>,
        fetched: Option<Fetched<'_>>,
        fx: &mut impl Effects,
    ) -> Outcome {
        self.flush_if_due(now);
        if let Op::Store(store) = &req.op
            && store.mode == StoreMode::Set
            && store.compare_cas.is_none()
        {
            self.set(now, req, store, fx);
            return Outcome::Done;
        }
        let present = match self.find_dram(now, req.hash, req.key) {
            Ok(Some((block, h))) => Present::Dram(block, h),
            // A key has one copy: where one lies in DRAM, none is on flash.
            Err(()) => Present::Absent,
            Ok(None) => match self.locate(now, req, fetched) {
                Located::Read(read) => {
                    self.stats.flash_reads += 1;
                    self.stats.flash_read_bytes += u64::from(read.at.len);
                    return Outcome::Read(read);
                }
                Located::Found(found) => Present::Flash(found),
                Located::Absent => Present::Absent,
            },
        };
        match &req.op {
            Op::Get(get) => self.get(now, req, get, present, fx),
            Op::Store(store) => self.store(now, req, store, present, fx),
            Op::Delete(delete) => self.delete(now, req, delete, present, fx),
            Op::Arith(arith) => self.arith(now, req, arith, present, fx),
            Op::Touch(expiry) => match self.bring_in(now, req, present) {
                Some((block, mut h)) => {
                    h.expiry = *expiry;
                    self.sweep.note(*expiry);
                    h.state = h.state.with(State::FETCHED).with_clock(self.raised(h.state.clock()));
                    h.touch(now.millis32());
                    self.changed_in_place(req, block, &mut h);
                    h.save(&mut self.arena, block);
                    fx.reply(Reply::Touched);
                }
                None => fx.reply(Reply::NotFound),
            },
            Op::Peek => match present {
                Present::Dram(block, h) => {
                    fx.reply(Reply::Item(Self::item(&self.arena, now, block, &h)))
                }
                Present::Flash(found) => {
                    fx.reply(Reply::Item(self.flash_item(now, req, &found.record)))
                }
                Present::Absent => fx.reply(Reply::Miss),
            },
        }
        Outcome::Done
    }

    // ---- reads ----

    fn get(
        &mut self,
        now: Now,
        req: &Request<'_>,
        get: &Get,
        present: Present<'_>,
        fx: &mut impl Effects,
    ) {
        self.apps.of_mut(req.app).gets += 1;
        match present {
            Present::Dram(block, h) => {
                self.stats.hits_dram += 1;
                self.apps.of_mut(req.app).hits_dram += 1;
                self.get_dram(now, req, get, block, h, fx);
            }
            Present::Flash(found) => {
                self.stats.hits_flash += 1;
                self.apps.of_mut(req.app).hits_flash += 1;
                let meta = found.record.meta();
                let recache = get.recache_due(meta.expiry, now.wall);
                let changes = get.touch.is_some_and(|t| t != meta.expiry)
                    || get.meta && !meta.won && (meta.stale || recache);
                if changes {
                    if let Some((block, h)) = self.bring_in(now, req, Present::Flash(found)) {
                        self.get_dram(now, req, get, block, h, fx);
                        return;
                    }
                    // No room to change it: it has left flash, so it is gone; the truth is a miss.
                    self.stats.misses += 1;
                    fx.reply(Reply::Miss);
                    return;
                }
                let item = self.flash_item(now, req, &found.record);
                self.access_times.put(req.hash.fingerprint(), now.wall.0);
                let mode = self.index_clock_mode();
                if self.index.hit(req.hash, found.entry.segment, found.entry.place, mode)
                    == Some(true)
                {
                    self.stats.revived += 1;
                }
                let access = self.access(req.hash, req.app, now.mono, found.record.len() as u32);
                self.admission.on_flash_read(&access);
                fx.reply(Reply::Item(item));
            }
            Present::Absent => {
                self.stats.misses += 1;
                if !self.flushed.is_empty() && self.flushed.remove(&req.hash.fingerprint()) {
                    self.stats.get_flushed += 1;
                }
                self.admission.on_miss(req.hash, req.app, now.mono);
                let Some(expiry) = get.vivify else {
                    fx.reply(Reply::Miss);
                    return;
                };
                let cas = self.take_cas(get.new_cas);
                let fresh = NewObject::fresh(req, b"", expiry, cas);
                let new = NewObject { state: fresh.state.with(State::WON), ..fresh };
                match self.insert_dram(now, &new) {
                    Some((block, h)) => {
                        let item = Item {
                            won: true,
                            already_won: false,
                            expiry_before: Expiry::NEVER,
                            ..Self::item(&self.arena, now, block, &h)
                        };
                        fx.reply(Reply::Item(item));
                        self.call_cleaner(fx);
                    }
                    None => {
                        self.stats.out_of_memory += 1;
                        fx.reply(Reply::OutOfMemory);
                    }
                }
            }
        }
    }

    fn get_dram(
        &mut self,
        now: Now,
        req: &Request<'_>,
        get: &Get,
        block: Block,
        mut h: ObjectHeader,
        fx: &mut impl Effects,
    ) {
        // Whether it is due is what it was when the client came, not what this request's own touch makes of it.
        let expiry_before = h.expiry;
        let recache = get.recache_due(expiry_before, now.wall);
        if let Some(expiry) = get.touch
            && expiry != h.expiry
        {
            h.expiry = expiry;
            self.sweep.note(expiry);
            self.changed_in_place(req, block, &mut h);
        }
        let wins = get.meta && !h.state.has(State::WON) && (h.state.has(State::STALE) || recache);
        if wins {
            h.state = h.state.with(State::WON);
            self.changed_in_place(req, block, &mut h);
        }
        let already_won = h.state.has(State::WON) && !wins;
        let item = Self::item(&self.arena, now, block, &h);
        let item = Item { expiry_before, won: wins, already_won, ..item };
        fx.reply(Reply::Item(item));
        h.note_read(now.millis32());
        h.state = h.state.with(State::FETCHED).with_clock(self.raised(h.state.clock()));
        h.save(&mut self.arena, block);
        if self.admission.wants_read(req.hash) {
            let size = Self::record_bytes(&h);
            let features = h.features(now.millis32(), size);
            let access = self.access(req.hash, h.app, now.mono, size);
            self.admission.on_read(&access, &features);
        }
    }

    /// An object on flash as an answer shows it.
    fn flash_item<'r>(&self, now: Now, req: &Request<'_>, record: &Record<'r>) -> Item<'r> {
        let meta = record.meta();
        let read = self.access_times.get(req.hash.fingerprint());
        let last = read.unwrap_or(meta.last_access.0).max(meta.last_access.0);
        Item {
            value: record.value(),
            flags: meta.flags,
            cas: meta.cas,
            expiry: meta.expiry,
            expiry_before: meta.expiry,
            last_access: now.wall.0.saturating_sub(last),
            hit_before: meta.fetched || read.is_some(),
            won: false,
            stale: meta.stale,
            already_won: meta.won,
            tier: Tier::Flash,
        }
    }

    // ---- writes ----

    /// A plain set: never waits for flash. Index entries that may be the key's are removed before the answer, so that
    /// an older version can never be found; the reads that tell whose they were run behind.
    fn set(&mut self, now: Now, req: &Request<'_>, store: &Store<'_>, fx: &mut impl Effects) {
        let update = match self.table.find(&self.arena, req.hash.dram(), req.key) {
            Some((block, h)) => {
                self.remove_dram(req.hash, block, &h, Some((now, Departure::Updated)));
                true
            }
            None if self.planted(Planted::SetKeepsEntry) => false,
            None => self.disown(req.hash, req.key, fx),
        };
        let cas = self.take_cas(store.new_cas);
        let fresh = NewObject::fresh(req, store.value, store.expiry, cas);
        self.put(now, req, &NewObject { flags: store.flags, ..fresh }, update, fx);
    }

    /// Writes a new object and answers. Whatever was there of this key is gone already.
    fn put(
        &mut self,
        now: Now,
        req: &Request<'_>,
        new: &NewObject<'_>,
        update: bool,
        fx: &mut impl Effects,
    ) {
        let value_len = new.value[0].len() + new.value[1].len();
        if !object_fits(req.key.len(), value_len, self.config.max_object) {
            fx.reply(Reply::TooLarge);
            return;
        }
        if !self.flushed.is_empty() && self.flushed.remove(&req.hash.fingerprint()) {
            self.sweep.replaced += 1;
        }
        match self.insert_dram(now, new) {
            Some((_, h)) => {
                let bytes = (req.key.len() + value_len) as u64;
                self.stats.sets += 1;
                self.stats.set_bytes += bytes;
                let app = self.apps.of_mut(req.app);
                app.sets += 1;
                app.set_bytes += bytes;
                let access = self.access(req.hash, req.app, now.mono, Self::record_bytes(&h));
                self.admission.on_write(&access, update);
                fx.reply(Reply::Stored { cas: new.cas, size: value_len as u32 });
                self.call_cleaner(fx);
            }
            None => {
                self.stats.out_of_memory += 1;
                fx.reply(Reply::OutOfMemory);
            }
        }
    }

    fn store(
        &mut self,
        now: Now,
        req: &Request<'_>,
        store: &Store<'_>,
        present: Present<'_>,
        fx: &mut impl Effects,
    ) {
        use StoreMode::{Add, Append, Prepend, Replace, Set};
        let (cas, expiry, flags, state) = match &present {
            Present::Dram(_, h) => (h.cas, h.expiry, h.flags, h.state),
            Present::Flash(found) => {
                let m = found.record.meta();
                let mut state = State::default();
                for (set, bit) in [(m.stale, State::STALE), (m.won, State::WON)] {
                    state = if set { state.with(bit) } else { state };
                }
                (m.cas, m.expiry, m.flags, state)
            }
            Present::Absent => {
                let expiry = match (store.mode, store.vivify) {
                    (Set | Replace, _) if store.compare_cas.is_some() => {
                        fx.reply(Reply::NotFound);
                        return;
                    }
                    (Set | Add, _) => store.expiry,
                    (Append | Prepend, Some(expiry)) => expiry,
                    (Replace | Append | Prepend, _) => {
                        fx.reply(Reply::NotStored);
                        return;
                    }
                };
                let cas = self.take_cas(store.new_cas);
                let fresh = NewObject::fresh(req, store.value, expiry, cas);
                self.put(now, req, &NewObject { flags: store.flags, ..fresh }, false, fx);
                return;
            }
        };
        if store.mode == Add {
            // As memcached: a failed add counts as an access for eviction.
            if let Present::Dram(block, h) = &present {
                let raised = h.state.with_clock(self.raised(h.state.clock()));
                ObjectHeader::set_state(&mut self.arena, *block, raised);
            }
            fx.reply(Reply::NotStored);
            return;
        }
        let mut new_expiry = store.expiry;
        let mut new_state = State::default().with_clock(1);
        if let Some(wanted) = store.compare_cas
            && wanted != cas
        {
            let on_flash = matches!(present, Present::Flash(_));
            let unchecked = on_flash && self.planted(Planted::CasNotCompared);
            let late = store.invalidate && wanted < cas && matches!(store.mode, Set | Replace);
            if !(late || unchecked) {
                fx.reply(Reply::Exists);
                return;
            }
            // A late writer: its value is kept, but marked stale, with the expiry and the win of what it replaces.
            new_expiry = expiry;
            new_state = new_state.with(State::STALE);
            if state.has(State::WON) {
                new_state = new_state.with(State::WON);
            }
        }
        if matches!(store.mode, Set | Replace)
            && !object_fits(req.key.len(), store.value.len(), self.config.max_object)
        {
            // The object stays as it was.
            fx.reply(Reply::TooLarge);
            return;
        }
        let mut new_cas = self.take_cas(store.new_cas);
        if self.planted(Planted::CasReused) {
            new_cas = cas;
        }
        if matches!(store.mode, Append | Prepend) {
            let mut old = std::mem::take(&mut self.scratch);
            old.clear();
            match &present {
                Present::Dram(block, h) => old.extend_from_slice(h.value(&self.arena, *block)),
                Present::Flash(found) => old.extend_from_slice(found.record.value()),
                Present::Absent => {}
            }
            let value_len = old.len() + store.value.len();
            if !object_fits(req.key.len(), value_len, self.config.max_object) {
                // The object stays as it was.
                fx.reply(Reply::TooLarge);
            } else {
                self.discard(now, req, present, Departure::Updated);
                let value =
                    if store.mode == Append { [&old, store.value] } else { [store.value, &old] };
                let kept = new_state.with_clock(state.clock().max(1));
                let fresh = NewObject::fresh(req, b"", expiry, new_cas);
                let new = NewObject { value, flags, state: kept, ..fresh };
                self.put(now, req, &new, true, fx);
            }
            old.shrink_to(64 << 10);
            self.scratch = old;
            return;
        }
        self.discard(now, req, present, Departure::Updated);
        let fresh = NewObject::fresh(req, store.value, new_expiry, new_cas);
        let new = NewObject { flags: store.flags, state: new_state, ..fresh };
        self.put(now, req, &new, true, fx);
    }

    /// Removes what a request found.
    fn discard(&mut self, now: Now, req: &Request<'_>, present: Present<'_>, why: Departure) {
        match present {
            Present::Dram(block, h) => self.remove_dram(req.hash, block, &h, Some((now, why))),
            Present::Flash(found) => {
                let access = self.access(req.hash, req.app, now.mono, found.record.len() as u32);
                self.admission.on_departure(&access, why);
                self.remove_flash(req.hash, &found.entry);
            }
            Present::Absent => {}
        }
    }

    fn delete(
        &mut self,
        now: Now,
        req: &Request<'_>,
        delete: &Delete,
        present: Present<'_>,
        fx: &mut impl Effects,
    ) {
        let (cas, size) = match &present {
            Present::Dram(_, h) => (h.cas, h.value_len),
            Present::Flash(found) => (found.record.meta().cas, found.record.value().len() as u32),
            Present::Absent => {
                fx.reply(Reply::NotFound);
                return;
            }
        };
        if delete.compare_cas.is_some_and(|wanted| wanted != cas) {
            fx.reply(Reply::Exists);
            return;
        }
        if !delete.mark_stale && !delete.drop_value {
            if matches!(present, Present::Flash(_)) && self.planted(Planted::DeleteKeepsEntry) {
                fx.reply(Reply::Deleted { size });
                return;
            }
            self.discard(now, req, present, Departure::Removed);
            fx.reply(Reply::Deleted { size });
            return;
        }
        let Some((mut block, mut h)) = self.bring_in(now, req, present) else {
            fx.reply(Reply::OutOfMemory);
            return;
        };
        let cas = self.take_cas(delete.new_cas);
        let fresh = if delete.drop_value {
            // As memcached: a dropped value takes its flags and its expiry along.
            let expiry = delete.touch.unwrap_or(Expiry::NEVER);
            self.rewrite(now, block, &h, NewObject::fresh(req, b"", expiry, cas))
        } else {
            self.with_room_for_cas(now, req, block, h, cas)
        };
        let Some(fresh) = fresh else {
            fx.reply(Reply::OutOfMemory);
            return;
        };
        (block, h) = fresh;
        if delete.mark_stale {
            h.state = h.state.with(State::STALE).without(State::WON);
            if let Some(expiry) = delete.touch {
                h.expiry = expiry;
                self.sweep.note(expiry);
            }
        }
        h.cas = cas;
        self.changed_in_place(req, block, &mut h);
        h.save(&mut self.arena, block);
        fx.reply(Reply::Deleted { size });
    }

    fn arith(
        &mut self,
        now: Now,
        req: &Request<'_>,
        arith: &Arith,
        present: Present<'_>,
        fx: &mut impl Effects,
    ) {
        let (text, cas) = match &present {
            Present::Dram(block, h) => (h.value(&self.arena, *block), h.cas),
            Present::Flash(found) => (found.record.value(), found.record.meta().cas),
            Present::Absent => {
                self.vivify_number(now, req, arith, fx);
                return;
            }
        };
        let old_len = text.len();
        let number = parse_number(text);
        if arith.compare_cas.is_some_and(|wanted| wanted != cas) {
            fx.reply(Reply::Exists);
            return;
        }
        let Some(number) = number else {
            fx.reply(Reply::NotNumeric);
            return;
        };
        let result = if arith.decrement {
            number.saturating_sub(arith.delta)
        } else {
            number.wrapping_add(arith.delta)
        };
        let mut digits = [b' '; MAX_NUMBER];
        let len = write_number(result, &mut digits).max(old_len);
        let Some((mut block, mut h)) = self.bring_in(now, req, present) else {
            fx.reply(Reply::OutOfMemory);
            return;
        };
        let new_cas = self.take_cas(arith.new_cas);
        if len == old_len && self.arena.holds_cas(block, new_cas) {
            // Shorter numbers are padded with spaces to the old width, as memcached does.
            self.changed_in_place(req, block, &mut h);
            self.arena.write_value(block, &h, &digits[..len]);
        } else {
            let (accesses, written) = (h.accesses, h.written);
            let longer = NewObject::fresh(req, &digits[..len], h.expiry, new_cas);
            let longer = NewObject { flags: h.flags, ..longer };
            let Some(fresh) = self.rewrite(now, block, &h, longer) else {
                fx.reply(Reply::OutOfMemory);
                return;
            };
            (block, h) = fresh;
            (h.accesses, h.written) = (accesses, written);
        }
        h.cas = new_cas;
        let expiry_before = h.expiry;
        if let Some(expiry) = arith.touch {
            h.expiry = expiry;
            self.sweep.note(expiry);
        }
        h.state = h.state.with_clock(self.raised(h.state.clock()));
        let item = Item { expiry_before, ..Self::item(&self.arena, now, block, &h) };
        fx.reply(Reply::Number(result, item));
        h.save(&mut self.arena, block);
    }

    fn vivify_number(&mut self, now: Now, req: &Request<'_>, arith: &Arith, fx: &mut impl Effects) {
        let Some((expiry, initial)) = arith.vivify else {
            fx.reply(Reply::NotFound);
            return;
        };
        let mut digits = [b' '; MAX_NUMBER];
        let len = write_number(initial, &mut digits);
        let cas = self.take_cas(arith.new_cas);
        let new = NewObject::fresh(req, &digits[..len], expiry, cas);
        match self.insert_dram(now, &new) {
            Some((block, h)) => {
                let item = Item {
                    expiry_before: Expiry::NEVER,
                    ..Self::item(&self.arena, now, block, &h)
                };
                fx.reply(Reply::Number(initial, item));
                self.call_cleaner(fx);
            }
            None => fx.reply(Reply::OutOfMemory),
        }
    }

    /// The object in DRAM, brought there from flash if need be. `None` if it is absent or no room could be made (then
    /// it is gone from flash too: what is forgotten is never wrong).
    fn bring_in(
        &mut self,
        now: Now,
        req: &Request<'_>,
        present: Present<'_>,
    ) -> Option<(Block, ObjectHeader)> {
        let found = match present {
            Present::Dram(block, h) => return Some((block, h)),
            Present::Absent => return None,
            Present::Flash(found) => found,
        };
        let item = self.flash_item(now, req, &found.record);
        self.remove_flash(req.hash, &found.entry);
        self.stats.brought_in += 1;
        self.insert_record(
            now,
            req.hash,
            &found.record,
            found.entry.clock,
            item.last_access,
            item.hit_before,
        )
    }

    /// Puts `new` in the place of the object in `block`, of the same application and with the same marks. `None` when no
    /// room can be made: then neither is there.
    fn rewrite(
        &mut self,
        now: Now,
        block: Block,
        h: &ObjectHeader,
        new: NewObject<'_>,
    ) -> Option<(Block, ObjectHeader)> {
        self.remove_dram(new.hash, block, h, Some((now, Departure::Updated)));
        self.insert_dram(
            now,
            &NewObject { app: h.app, state: h.state.without(State::STAGED), ..new },
        )
    }

    /// The object where it can be given this CAS: where it lies or, as one that a client chose may take more bytes, in another block.
    /// `None` when no room can be made: then it is gone.
    fn with_room_for_cas(
        &mut self,
        now: Now,
        req: &Request<'_>,
        block: Block,
        h: ObjectHeader,
        cas: u64,
    ) -> Option<(Block, ObjectHeader)> {
        if self.arena.holds_cas(block, cas) {
            return Some((block, h));
        }
        let mut value = std::mem::take(&mut self.scratch);
        value.clear();
        value.extend_from_slice(h.value(&self.arena, block));
        let same = NewObject::fresh(req, &value, h.expiry, cas);
        let moved = self.rewrite(now, block, &h, NewObject { flags: h.flags, ..same });
        value.shrink_to(64 << 10);
        self.scratch = value;
        let (block, fresh) = moved?;
        Some((block, ObjectHeader { written: h.written, accesses: h.accesses, ..fresh }))
    }

    /// An object changes without moving: if it was staged, its copy in the segment is dead.
    fn changed_in_place(&mut self, req: &Request<'_>, block: Block, h: &mut ObjectHeader) {
        if h.state.has(State::STAGED) && !self.planted(Planted::StagedChangeMissed) {
            self.staged_bytes -= self.arena.block_bytes(block);
            self.note_staged_dead(req.hash);
            h.state = h.state.without(State::STAGED);
        }
    }
}

/// A stored value as the number that incr and decr work on, as C's `strtoull` reads it, which memcached asks: white space
/// and a sign may come before the digits, and white space or a zero byte ends them, whatever follows. A minus makes the
/// number's complement, which is refused where that looks negative.
fn parse_number(text: &[u8]) -> Option<u64> {
    let white = |b: u8| b.is_ascii_whitespace() || b == 0x0b;
    if text.len() > MAX_NUMBER {
        return None;
    }
    let start = text.iter().position(|&b| !white(b))?;
    let (minus, rest) = match text[start] {
        b'-' => (true, &text[start + 1..]),
        b'+' => (false, &text[start + 1..]),
        _ => (false, &text[start..]),
    };
    let digits = rest.iter().take_while(|b| b.is_ascii_digit()).count();
    if digits == 0 || rest.get(digits).is_some_and(|&b| !white(b) && b != 0) {
        return None;
    }
    let number = rest[..digits]
        .iter()
        .try_fold(0u64, |n, &b| n.checked_mul(10)?.checked_add(u64::from(b - b'0')))?;
    let number = if minus { number.wrapping_neg() } else { number };
    (!minus || number <= i64::MAX as u64).then_some(number)
}

/// Writes the digits of `n` to the start of `out` and returns their number.
fn write_number(n: u64, out: &mut [u8; MAX_NUMBER]) -> usize {
    let mut reversed = [0u8; 20];
    let (mut n, mut len) = (n, 0);
    loop {
        reversed[len] = b'0' + (n % 10) as u8;
        n /= 10;
        len += 1;
        if n == 0 {
            break;
        }
    }
    for i in 0..len {
        out[i] = reversed[len - 1 - i];
    }
    len
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(parse_number(b"18446744073709551615"), Some(u64::MAX));
        assert_eq!(parse_number(b"18446744073709551616"), None);
        // What memcached 1.6.45 answers to incr.
        for (text, number) in [
            (&b"12  "[..], 12),
            (b"12 ab", 12),
            (b" 12", 12),
            (b"\t\n12", 12),
            (b"+12", 12),
            (b"1\tab", 1),
            (b"1\0ab", 1),
            (b"-0", 0),
            (b"-18446744073709551615", 1),
        ] {
            assert_eq!(parse_number(text), Some(number), "{text:?}");
        }
        for bad in [&b""[..], b"  ", b"-1", b"1x", b"+", b"- 1", b"+-1", b"x"] {
            assert_eq!(parse_number(bad), None, "{bad:?}");
        }
        let mut out = [b' '; MAX_NUMBER];
        assert_eq!(write_number(0, &mut out), 1);
        assert_eq!(write_number(u64::MAX, &mut out), 20);
        assert_eq!(&out[..20], b"18446744073709551615");
    }
}
