//! A thread for each volume looks after its store: whether it has lost writes or somebody else changes it, and what tells where a file
//! system's metadata is. A store that hangs holds up its own thread alone.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use larder_base::Nanos;
use larder_engine::block::node::maintenance::{MOST_LOOKS, ROUND};
use larder_engine::block::writeback::marker;
use larder_policy::block::VolumeId;
use larder_runtime::AlignedBuf;
use larder_volume::op::Op;
use larder_volume::{Alone, watch};

use super::attached::Attached;
use super::{Core, locked};

/// For one read of a store.
const PATIENCE: Duration = Duration::from_secs(5);
/// A store that was not read for so long is left alone until it is.
const REST: Nanos = Nanos::from_secs(5);

/// What is kept of one volume between two rounds.
#[derive(Default)]
pub(super) struct Watch {
    next_look: Nanos,
    next_marker: Nanos,
    next_refresh: Nanos,
    session: Option<Alone>,
    last_read: Nanos,
}

impl Watch {
    /// One round.
    pub(super) fn turn(&mut self, cache: &Core, volume: &Attached) {
        // Without threads it may be an operator's call that goes on here, which has the lines that would be waited for.
        if !cache.is_operated() {
            cache.look_for_losses(volume);
            if cache.now() >= self.next_look {
                cache.look_for_changes(volume);
                volume.volume().backing().look_at_place();
                self.next_look = cache.now() + Nanos(watch::LOOK.as_nanos() as u64);
            }
        }
        if !cache.is_operated() {
            cache.economise(volume);
        }
        let refresh = cache.now() >= self.next_refresh;
        if refresh || cache.now() >= self.next_marker {
            // (From when it begins: what is destaged counts on that.)
            self.next_marker = cache.now() + marker::LOOK;
            cache.look_at_marker(volume, refresh);
            cache.look_at_losses(volume);
            cache.look_at_bound(volume);
            cache.look_at_journal(volume);
            if refresh {
                self.next_refresh = cache.now() + marker::REFRESH;
            }
        }
        self.meet_wishes(cache, volume);
        if self.session.is_some() && cache.now() >= self.last_read + REST {
            self.session = None;
        }
    }

    /// Reads what the volume's detector wishes to see.
    fn meet_wishes(&mut self, cache: &Core, volume: &Attached) {
        let Some(detector) = &volume.detector else { return };
        for _ in 0..MOST_LOOKS {
            let Some((offset, bytes)) = locked(detector).next_wanted() else { return };
            if self.session.is_none() {
                self.session = open_session(volume);
            }
            let Some(open) = &mut self.session else { return };
            self.last_read = cache.now();
            match read(open, offset, bytes as usize, || !cache.goes_on(volume)) {
                Some(buf) => {
                    locked(detector).observe(offset, &buf);
                }
                // What is late would be taken for the answer to the next: another session, another time.
                None => {
                    self.session = None;
                    return;
                }
            }
        }
    }
}

/// The threads, by volume.
#[derive(Default)]
pub(super) struct Watchers(BTreeMap<VolumeId, JoinHandle<()>>);

impl Watchers {
    /// Volumes that have come have one from now on. Those of volumes that have gone end by themselves.
    pub(super) fn follow(&mut self, cache: &Arc<Core>) {
        self.0.retain(|_, thread| !thread.is_finished());
        for volume in cache.volumes() {
            if self.0.contains_key(&volume.id) {
                continue;
            }
            let (id, core) = (volume.id, cache.clone());
            let spawned = std::thread::Builder::new()
                .name("block-watch".into())
                .spawn(move || run(&core, volume));
            match spawned {
                Ok(thread) => drop(self.0.insert(id, thread)),
                // It is tried again in the next round.
                Err(error) => tracing::warn!(%error, "no thread to look after a volume's store"),
            }
        }
    }

    /// All end: the cache is stopped.
    pub(super) fn end(self) {
        for thread in self.0.into_values() {
            // A thread that panicked has said so on stderr already.
            let _ = thread.join();
        }
    }
}

fn run(cache: &Core, volume: Arc<Attached>) {
    let mut watch = Watch::default();
    // (A volume that is closed may be opened again: it stays attached then.)
    while cache.is_attached(&volume) && !locked(&cache.log_inbox).stopped {
        watch.turn(cache, &volume);
        std::thread::sleep(Duration::from_nanos(ROUND.0));
    }
}

/// A way to the volume's store for this thread.
pub(super) fn open_session(volume: &Attached) -> Option<Alone> {
    Alone::new(volume.volume.backing().session().ok()?).ok()
}

/// One read of a store, which is waited for as long as is decent, and not if `is_over`. After `None` the session is not to be used again.
pub(super) fn read(
    session: &mut Alone,
    offset: u64,
    len: usize,
    is_over: impl FnMut() -> bool,
) -> Option<AlignedBuf> {
    session.submit(0, Op::Read { offset, buf: AlignedBuf::zeroed(len) });
    let done = session.next(PATIENCE, is_over)?;
    match (done.op, done.outcome) {
        (Op::Read { buf, .. }, Ok(_)) => Some(buf),
        _ => None,
    }
}
