//! The plain-map engine: memcached's semantics in the shortest form, the oracle of model-based tests and the engine of
//! protocol tests. Everything is in DRAM, nothing is evicted.
//!
//! Where memcached's own behaviour depends on accidents of its memory layout, the model takes the simple side:
//! arithmetic keeps the marks of a stale object whether or not the number grew longer, and an append that does not fit
//! is answered `TooLarge` and leaves the object alone.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use larder_base::{Expiry, HashKey, KeyHasher, Nanos, Now, ObjectHash, UnixSecs};
use larder_engine::kv::api::{
    Arith, Delete, Effects, FlashRead, Get, Item, Op, Reply, Request, Store, StoreMode, Tier,
};

use crate::connection::{Engine, Fetched, Step};
use crate::protocol::number::{Digits, parse_value};

#[derive(Clone, Debug)]
struct Object {
    value: Vec<u8>,
    flags: u32,
    cas: u64,
    expiry: Expiry,
    /// When it was written: a flush takes what was written before it.
    written: UnixSecs,
    accessed: UnixSecs,
    /// Read since it was written.
    hit: bool,
    stale: bool,
    /// A client has won the right to refill it.
    won: bool,
}

#[derive(Debug)]
struct State {
    objects: BTreeMap<Vec<u8>, Object>,
    last_cas: u64,
    /// A flush that is still to come.
    flush_at: Option<UnixSecs>,
}

/// A memcached in a map.
#[derive(Debug)]
pub struct ModelEngine {
    state: Mutex<State>,
    hasher: KeyHasher,
    max_object: usize,
    put_off: AtomicU32,
}

/// Values of so many bytes may be put off.
const LARGE: usize = 64 << 10;

/// What memcached stores beside key and value, counted against the limit on objects.
const OVERHEAD: usize = 48;

impl ModelEngine {
    /// An empty engine that holds objects of up to `max_object` bytes, key and header included.
    pub fn new(max_object: usize) -> ModelEngine {
        ModelEngine {
            state: Mutex::new(State { objects: BTreeMap::new(), last_cas: 0, flush_at: None }),
            hasher: KeyHasher::new(HashKey([0x5a; 16])),
            max_object,
            put_off: 0.into(),
        }
    }

    /// Puts off the next stores of large values, 64 KiB and more, as if room were being made for them: so many times in all.
    pub fn put_off(&self, times: u32) {
        self.put_off.store(times, Ordering::SeqCst);
    }

    /// How many times more it will.
    pub fn puts_off(&self) -> u32 {
        self.put_off.load(Ordering::SeqCst)
    }

    /// Number of objects, expired ones that nobody asked for included.
    pub fn len(&self) -> usize {
        self.lock().objects.len()
    }

    /// Whether there is no object.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent between calls even if a reply's sink panicked in one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for ModelEngine {
    /// With memcached's default limit of 1 MiB per object.
    fn default() -> ModelEngine {
        ModelEngine::new(1 << 20)
    }
}

impl Object {
    fn item(&self, now: Now) -> Item<'_> {
        Item {
            value: &self.value,
            flags: self.flags,
            cas: self.cas,
            expiry: self.expiry,
            expiry_before: self.expiry,
            last_access: now.wall.0.saturating_sub(self.accessed.0),
            hit_before: self.hit,
            won: false,
            stale: self.stale,
            already_won: self.won,
            tier: Tier::Dram,
        }
    }

    fn bump(&mut self, now: Now) {
        self.hit = true;
        self.accessed = now.wall;
    }
}

impl State {
    fn cas(&mut self, given: Option<u64>) -> u64 {
        given.unwrap_or_else(|| {
            self.last_cas += 1;
            self.last_cas
        })
    }

    fn fresh(&mut self, now: Now, value: Vec<u8>, expiry: Expiry, new_cas: Option<u64>) -> Object {
        Object {
            value,
            flags: 0,
            cas: self.cas(new_cas),
            expiry,
            written: now.wall,
            accessed: now.wall,
            hit: false,
            stale: false,
            won: false,
        }
    }

    /// Carries out a flush whose time has come.
    fn flush_if_due(&mut self, now: Now) {
        if let Some(at) = self.flush_at.filter(|at| *at <= now.wall) {
            self.objects.retain(|_, o| o.written >= at);
            self.flush_at = None;
        }
    }

    /// The object under `key`, unless it is gone by now.
    fn live(&mut self, key: &[u8], now: Now) -> Option<&mut Object> {
        self.flush_if_due(now);
        if self.objects.get(key)?.expiry.is_past(now.wall) {
            self.objects.remove(key);
        }
        self.objects.get_mut(key)
    }

    fn get(&mut self, now: Now, key: &[u8], get: &Get, fx: &mut impl Effects) {
        if self.live(key, now).is_none() {
            let Some(expiry) = get.vivify else { return fx.reply(Reply::Miss) };
            let mut object = self.fresh(now, Vec::new(), expiry, get.new_cas);
            let expiry_before = Expiry::NEVER;
            fx.reply(Reply::Item(Item { won: true, expiry_before, ..object.item(now) }));
            object.won = true;
            object.bump(now);
            self.objects.insert(key.to_vec(), object);
            return;
        }
        let Some(object) = self.live(key, now) else { return };
        let expiry_before = object.expiry;
        let low = get.recache_due(expiry_before, now.wall);
        if let Some(expiry) = get.touch {
            object.expiry = expiry;
        }
        let won = get.meta && !object.won && (low || object.stale);
        fx.reply(Reply::Item(Item { won, expiry_before, ..object.item(now) }));
        object.won |= won;
        object.bump(now);
    }

    fn store(
        &mut self,
        now: Now,
        key: &[u8],
        store: &Store<'_>,
        fits: impl Fn(usize) -> bool,
    ) -> Reply<'static> {
        let extends = matches!(store.mode, StoreMode::Append | StoreMode::Prepend);
        if !fits(store.value.len()) {
            if store.mode == StoreMode::Set {
                self.objects.remove(key);
            }
            return Reply::TooLarge;
        }
        let mut object = self.fresh(now, Vec::new(), store.expiry, Some(1));
        object.flags = store.flags;
        match self.live(key, now) {
            None => match store.mode {
                StoreMode::Append | StoreMode::Prepend => match store.vivify {
                    Some(expiry) => object.expiry = expiry,
                    None => return Reply::NotStored,
                },
                StoreMode::Set | StoreMode::Replace if store.compare_cas.is_some() => {
                    return Reply::NotFound;
                }
                StoreMode::Replace => return Reply::NotStored,
                StoreMode::Set | StoreMode::Add => {}
            },
            Some(_) if store.mode == StoreMode::Add => return Reply::NotStored,
            Some(old) => {
                match store.compare_cas {
                    None => {}
                    Some(cas) if cas != 0 && cas == old.cas => {}
                    Some(cas) if cas != 0 && store.invalidate && cas < old.cas => {
                        object.expiry = old.expiry;
                        object.stale = true;
                        object.won = old.won;
                    }
                    Some(_) => return Reply::Exists,
                }
                if extends {
                    if !fits(old.value.len() + store.value.len()) {
                        return Reply::TooLarge;
                    }
                    object.flags = old.flags;
                    object.expiry = old.expiry;
                    if store.mode == StoreMode::Append {
                        object.value.extend_from_slice(&old.value);
                    }
                }
            }
        }
        object.value.extend_from_slice(store.value);
        if store.mode == StoreMode::Prepend
            && let Some(old) = self.objects.get(key)
        {
            object.value.extend_from_slice(&old.value);
        }
        object.cas = self.cas(store.new_cas);
        let reply = Reply::Stored { cas: object.cas, size: object.value.len() as u32 };
        self.objects.insert(key.to_vec(), object);
        reply
    }

    fn delete(&mut self, now: Now, key: &[u8], delete: &Delete) -> Reply<'static> {
        let Some(object) = self.live(key, now) else { return Reply::NotFound };
        if delete.compare_cas.is_some_and(|cas| cas != object.cas) {
            return Reply::Exists;
        }
        let (old_cas, size) = (object.cas, object.value.len() as u32);
        if !delete.drop_value && !delete.mark_stale {
            self.objects.remove(key);
            return Reply::Deleted { size };
        }
        if delete.drop_value {
            // memcached puts a new, empty object in place of the old: marks, flags and expiry start afresh.
            let cas = delete.new_cas.unwrap_or(old_cas);
            let tombstone =
                self.fresh(now, Vec::new(), delete.touch.unwrap_or(Expiry::NEVER), Some(cas));
            self.objects.insert(key.to_vec(), tombstone);
        }
        if delete.mark_stale {
            let cas = self.cas(delete.new_cas);
            if let Some(object) = self.objects.get_mut(key) {
                object.stale = true;
                object.won = false;
                object.cas = cas;
                object.expiry = delete.touch.unwrap_or(object.expiry);
            }
        }
        Reply::Deleted { size }
    }

    fn arith(&mut self, now: Now, key: &[u8], arith: &Arith, fx: &mut impl Effects) {
        let Some(object) = self.live(key, now) else {
            let Some((expiry, initial)) = arith.vivify else { return fx.reply(Reply::NotFound) };
            let object =
                self.fresh(now, Digits::new(initial).as_bytes().to_vec(), expiry, arith.new_cas);
            let item = Item { expiry_before: Expiry::NEVER, ..object.item(now) };
            fx.reply(Reply::Number(initial, item));
            self.objects.insert(key.to_vec(), object);
            return;
        };
        if object.value.is_empty() {
            return fx.reply(Reply::NotNumeric);
        }
        if arith.compare_cas.is_some_and(|cas| cas != object.cas) {
            return fx.reply(Reply::Exists);
        }
        let Some(before) = parse_value(&object.value) else { return fx.reply(Reply::NotNumeric) };
        let number = if arith.decrement {
            before.saturating_sub(arith.delta)
        } else {
            before.wrapping_add(arith.delta)
        };
        // A number that grew shorter keeps its width, filled up with spaces.
        let width = object.value.len();
        object.value.clear();
        object.value.extend_from_slice(Digits::new(number).as_bytes());
        if object.value.len() < width {
            object.value.resize(width, b' ');
        }
        object.written = now.wall;
        let expiry_before = object.expiry;
        if let Some(expiry) = arith.touch {
            object.expiry = expiry;
        }
        let cas = self.cas(arith.new_cas);
        if let Some(object) = self.objects.get_mut(key) {
            object.cas = cas;
            let item = Item { expiry_before, ..object.item(now) };
            fx.reply(Reply::Number(number, item));
        }
    }
}

impl Engine for ModelEngine {
    type Read = FlashRead;

    fn hash(&self, key: &[u8]) -> ObjectHash {
        self.hasher.hash(key)
    }

    fn fits(&self, key_len: usize, value_len: usize) -> bool {
        key_len + value_len + OVERHEAD <= self.max_object
    }

    fn read_len(&self, read: &FlashRead) -> usize {
        read.at.len as usize
    }

    fn waits_for_room(
        &self,
        now: Now,
        _: &[u8],
        value_len: usize,
        since: &mut Option<Nanos>,
    ) -> bool {
        let less = |left: u32| left.checked_sub(1);
        let waits = value_len >= LARGE
            && self.put_off.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok();
        *since = waits.then(|| since.unwrap_or(now.mono));
        waits
    }

    fn execute<X: Effects>(
        &self,
        now: Now,
        request: &Request<'_>,
        _fetched: Option<Fetched<'_, FlashRead>>,
        fx: &mut X,
    ) -> Step<FlashRead> {
        let key = request.key;
        let mut state = self.lock();
        match &request.op {
            Op::Get(get) => state.get(now, key, get, fx),
            Op::Store(store) => {
                fx.reply(state.store(now, key, store, |len| self.fits(key.len(), len)))
            }
            Op::Delete(delete) => fx.reply(state.delete(now, key, delete)),
            Op::Arith(arith) => state.arith(now, key, arith, fx),
            Op::Touch(expiry) => match state.live(key, now) {
                Some(object) => {
                    object.expiry = *expiry;
                    object.bump(now);
                    fx.reply(Reply::Touched);
                }
                None => fx.reply(Reply::NotFound),
            },
            Op::Peek => match state.live(key, now) {
                Some(object) => fx.reply(Reply::Item(object.item(now))),
                None => fx.reply(Reply::Miss),
            },
        }
        Step::Done
    }

    fn flush_all(&self, now: Now, at: UnixSecs) {
        let mut state = self.lock();
        state.flush_if_due(now);
        if at <= now.wall {
            state.objects.clear();
            state.flush_at = None;
        } else {
            state.flush_at = Some(at);
        }
    }
}
