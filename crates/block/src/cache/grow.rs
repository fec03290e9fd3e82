//! A volume grows while it is served, and moves in the line space if it must.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use larder_engine::block::volumes::{self, CannotGrow, Growth, room_to_grow};

use super::attached::Attached;
use super::open::CacheError;
use super::{Cache, Door};

/// Requests for a volume that is to move are waited for so long; meanwhile new ones wait for the move.
const DRAIN: Duration = Duration::from_secs(10);
/// For the bits of where it lay to go: its store is durable by then.
const SOON: Duration = Duration::from_secs(1);
/// Between two looks whether they have ended.
const GLANCE: Duration = Duration::from_millis(1);

/// A volume's gate is closed as long as it lives.
struct Closed<'a> {
    cache: &'a Cache,
    volume: &'a Attached,
}

impl<'a> Closed<'a> {
    fn new(cache: &'a Cache, volume: &'a Attached) -> Closed<'a> {
        volume.gate.close();
        Closed { cache, volume }
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.volume.gate.open();
        self.cache.doors.iter().for_each(Door::wake);
    }
}

impl Cache {
    fn cannot_grow(&self, name: &str, bytes: u64, why: CannotGrow) -> CacheError {
        let fail = |reason: String| CacheError::Volume { name: name.to_owned(), reason };
        match why {
            CannotGrow::Unknown => self.no_volume(name),
            CannotGrow::Uneven => fail(
                "its size is no multiple of the cache's line: detach it and attach it again"
                    .to_owned(),
            ),
            CannotGrow::NoRoom => fail(format!(
                "{bytes} bytes do not fit in the line space of this cache, neither where it lies nor elsewhere: `larder block \
                 drop` forgets volumes that are not attached"
            )),
        }
    }

    /// Whether a volume may grow to so many bytes while it is attached.
    ///
    /// # Errors
    /// What is in the way.
    pub fn may_grow_to(&self, name: &str, bytes: u64) -> Result<(), CacheError> {
        self.attached(name)?;
        let of = name.to_owned();
        // Without a cache too: by its lines changes exclude each other, and it may be taken back.
        let decided = self.on_log(move |log| Some(room_to_grow(log.line_space()?, &of, bytes)))?;
        let Some(Err(why)) = decided else { return Ok(()) };
        self.record_growth(name, bytes, &Err(why));
        Err(self.cannot_grow(name, bytes, why))
    }

    /// A volume has so many bytes from now on: its store has grown. What is cached of it stays, unless another volume lies right
    /// behind it: then it moves to where there is room, and begins there with nothing cached. Returns whether it moved.
    ///
    /// # Errors
    /// As [`Cache::may_grow_to`]; when the store's identity cannot be found out; or when it must move and requests for it do not
    /// end. Nothing has changed then.
    pub fn grow(&self, name: &str, bytes: u64) -> Result<bool, CacheError> {
        self.may_grow_to(name, bytes)?;
        let volume = self.attached(name)?;
        let of = name.to_owned();
        let growth = self.on_log(move |log| room_to_grow(log.line_space()?, &of, bytes).ok())?;
        match growth {
            Some(growth) if growth.moves_from.is_some() => {
                self.grow_elsewhere(&volume, bytes, growth)?;
                Ok(true)
            }
            _ => {
                self.grow_there(&volume, bytes, growth)?;
                Ok(false)
            }
        }
    }

    fn grow_there(
        &self,
        volume: &Arc<Attached>,
        bytes: u64,
        growth: Option<Growth>,
    ) -> Result<(), CacheError> {
        let identity = self.identity_of_grown(volume)?;
        let mut dropped = 0;
        if let Some(Growth { first_group, groups, needed, .. }) = growth
            && needed > groups
        {
            // Lines of whoever had the stretch before are not its own.
            dropped = self.drop_groups(first_group + groups, needed - groups, &mut || true);
        }
        self.note_growth(volume, bytes, identity, growth, dropped > 0)?;
        volume.set_bytes(bytes);
        self.governor.select(|_| ());
        Ok(())
    }

    /// Nobody works on the volume meanwhile: what was asked has ended, what is asked waits.
    fn grow_elsewhere(
        &self,
        volume: &Arc<Attached>,
        bytes: u64,
        growth: Growth,
    ) -> Result<(), CacheError> {
        let fail = |reason: String| CacheError::Volume { name: volume.name.clone(), reason };
        if self.governor.prefetching.swap(true, Ordering::SeqCst) {
            return Err(fail(
                "another volume lies right behind it, so that it must move, and something is prefetched: wait for that to end"
                    .to_owned(),
            ));
        }
        let outcome = self.move_and_grow(volume, bytes, growth);
        self.governor.prefetching.store(false, Ordering::SeqCst);
        outcome
    }

    fn move_and_grow(
        &self,
        volume: &Arc<Attached>,
        bytes: u64,
        growth: Growth,
    ) -> Result<(), CacheError> {
        let late = || CacheError::Volume {
            name: volume.name.clone(),
            reason: format!(
                "another volume lies right behind it, so that it must move, and requests for it did not end within {} s: see to \
                 its store and try again",
                DRAIN.as_secs()
            ),
        };
        let closed = Closed::new(self, volume);
        let until = Instant::now() + DRAIN;
        while !volume.gate.is_empty() {
            if Instant::now() >= until {
                return Err(late());
            }
            std::thread::sleep(GLANCE);
        }
        let identity = self.identity_of_grown(volume)?;
        // Fills may be under way behind the answers. No line is left where it lies: somebody else may come there.
        let (first, last) = self.lines_of(volume.base(), volume.bytes());
        let mut go_on = || Instant::now() < until + DRAIN;
        let dropped =
            self.with_range(first, last, &mut go_on, |out| self.drop_locked(first, last, out));
        let dropped = dropped.ok_or_else(late)?;
        volume.account.dropped(dropped);
        // All of it is durable: its bits can go. What is left of them is nobody's.
        let regions = (self.region(first), self.region(last));
        self.hurry(regions, SOON)?;
        // Lines of whoever had the stretch before are not its own.
        self.drop_groups(growth.first_group, growth.needed, &mut || true);
        self.note_growth(volume, bytes, identity, Some(growth), true)?;
        self.governor.moved(volume, growth.first_group * self.group_bytes());
        volume.account.set(0);
        volume.set_bytes(bytes);
        self.governor.select(|_| ());
        drop(closed);
        tracing::warn!(
            "volume '{}': another lies right behind it, so it has moved to grow: {dropped} lines are dropped, and nothing of it \
             is cached",
            volume.name
        );
        Ok(())
    }

    /// What the store is known by, durable with what others have put there: it must not be forgotten by the store when it is
    /// remembered here.
    fn identity_of_grown(&self, volume: &Attached) -> Result<[u8; 64], CacheError> {
        volume.make_durable()?;
        let identity = volume.volume().backing().identity();
        let identity = identity
            .map_err(|e| CacheError::Volume { name: volume.name.clone(), reason: e.to_string() })?;
        Ok(identity.encode())
    }

    /// Takes lines of so many groups from `first` on out of the map. Returns how many there were.
    fn drop_groups(&self, first: u64, groups: u64, go_on: &mut dyn FnMut() -> bool) -> u64 {
        let (first, last) = self.lines_of(first * self.group_bytes(), groups * self.group_bytes());
        self.with_range(first, last, go_on, |out| self.drop_locked(first, last, out)).unwrap_or(0)
    }

    /// Notes durably where the volume lies and how long it is, if that is still what was `planned`. With `anew`, lines were
    /// dropped: they must not come back, not even after a power cut in the next moment.
    fn note_growth(
        &self,
        volume: &Attached,
        bytes: u64,
        identity: [u8; 64],
        planned: Option<Growth>,
        anew: bool,
    ) -> Result<(), CacheError> {
        let of = volume.name.clone();
        let (changed, outcome) = self.on_log(move |log| {
            let now = log.line_space().map(|sb| room_to_grow(sb, &of, bytes));
            let mut outcome = Err(CannotGrow::Unknown);
            if now != planned.map(Ok) {
                return (false, outcome);
            }
            let changed = log.change_superblock(anew, |sb| {
                outcome = volumes::grow(sb, &of, bytes, identity);
            });
            (changed, outcome)
        })?;
        if changed {
            self.record_growth(&volume.name, bytes, &outcome);
        }
        match (planned, outcome) {
            (Some(_), Err(_)) => Err(CacheError::Volume {
                name: volume.name.clone(),
                reason: "it was put aside or moved in the meantime: try again".to_owned(),
            }),
            _ => Ok(()),
        }
    }
}
