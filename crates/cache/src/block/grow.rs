//! A volume grows while it is served, and moves in the line space if it must.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use larder_engine::block::node::attachment::{Attachment, DRAIN, Step};
use larder_engine::block::node::operator::Operation;
use larder_engine::block::volumes::{CannotGrow, Growth, room_to_grow};

use super::attached::Attached;
use super::log::LogThread;
use super::open::CacheError;
use super::operators::OVERTAKEN;
use super::{Core, Mailbox};

/// Between two looks whether they have ended.
const GLANCE: Duration = Duration::from_millis(1);

/// A volume's gate is closed as long as it lives.
struct Closed<'a> {
    cache: &'a Core,
    volume: &'a Attached,
}

impl<'a> Closed<'a> {
    fn new(cache: &'a Core, volume: &'a Attached) -> Closed<'a> {
        volume.gate.close();
        Closed { cache, volume }
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.volume.gate.open();
        self.cache.mailboxes.iter().for_each(Mailbox::wake);
    }
}

impl Core {
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
        self.check_state_dir(name)?;
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
    /// As [`Core::may_grow_to`]; when the store's identity cannot be found out; or when it must move and requests for it do not
    /// end. Nothing has changed then.
    pub fn grow(&self, name: &str, bytes: u64) -> Result<bool, CacheError> {
        self.may_grow_to(name, bytes)?;
        let volume = self.attached(name)?;
        let of = name.to_owned();
        let planned = self.on_log(move |log| {
            let sb = log.line_space()?;
            let volume = sb.volumes.iter().find(|v| v.name == of)?.clone();
            Some((volume, room_to_grow(sb, &of, bytes).ok()?))
        })?;
        let (record, growth) = planned.ok_or_else(|| self.no_volume(name))?;
        let attachment = Attachment::grow(&record, growth, bytes, &self.layout);
        if growth.moves_from.is_none() {
            self.carry_growth(&volume, bytes, growth, attachment)?;
            return Ok(false);
        }
        if self.node_limits.prefetching.swap(true, Ordering::SeqCst) {
            let reason = "another volume lies right behind it, so that it must move, and something is prefetched or another volume moves: wait for that to end";
            return Err(CacheError::Volume { name: name.to_owned(), reason: reason.to_owned() });
        }
        let outcome = self.carry_growth(&volume, bytes, growth, attachment);
        self.node_limits.prefetching.store(false, Ordering::SeqCst);
        outcome.map(|()| true)
    }

    fn carry_growth(
        &self,
        volume: &Arc<Attached>,
        bytes: u64,
        growth: Growth,
        attachment: Attachment,
    ) -> Result<(), CacheError> {
        let fail = |reason: String| CacheError::Volume { name: volume.name.clone(), reason };
        let late = || {
            fail(format!(
                "another volume lies right behind it, so that it must move, and requests for it did not end within {} s: see to \
                 its store and try again",
                DRAIN.0 / 1_000_000_000
            ))
        };
        let moves = growth.moves_from.is_some();
        let until = Instant::now() + Duration::from_nanos(DRAIN.0);
        // As long as it must, nobody works on the volume: what was asked has ended, what is asked waits.
        let mut closed = None;
        let (id, shards) = self.next_operation();
        let mut operation = Operation::attachment(id, shards, attachment);
        let grown = self.carry(&mut operation, &mut || true, &mut |operation, step| {
            match step {
                Step::Hold => {
                    closed = Some(Closed::new(self, volume));
                    while !volume.gate.is_empty() {
                        if Instant::now() >= until {
                            return Ok(false);
                        }
                        self.pause(GLANCE);
                    }
                }
                Step::Store => operation.known_by(self.identity_of_grown(volume)?),
                Step::Bits { first, last } => {
                    let left = self.on_log(move |log| log.hurry(first, last))?;
                    operation.bits(self.now(), left, self.is_enabled());
                    return Ok(true);
                }
                Step::Record => {
                    let name = volume.name.clone();
                    let with = move |log: &mut LogThread, applied: bool, durable: bool| {
                        let outcome = applied.then_some(growth).ok_or(CannotGrow::Unknown);
                        if durable {
                            log.cache().record_growth(&name, bytes, &outcome);
                        }
                    };
                    let (applied, _) = self.record_change_with(operation, with)?;
                    let overtaken = || fail(OVERTAKEN.to_owned());
                    return applied.then_some(true).ok_or_else(overtaken);
                }
                Step::InForce => {
                    if moves {
                        self.node_limits.moved(volume, growth.first_group * self.group_bytes());
                        volume.account.set(0);
                    }
                    volume.set_bytes(bytes);
                    self.node_limits.select(|_| ());
                }
                _ => {}
            }
            operation.done();
            Ok(true)
        })?;
        if !grown {
            return Err(late());
        }
        drop(closed);
        if moves {
            tracing::warn!(
                "volume '{}': another lies right behind it, so it has moved to grow: {} lines are dropped, and nothing of it is cached",
                volume.name,
                operation.dropped(),
            );
        }
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
}
