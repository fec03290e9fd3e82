//! How volumes that write back are left: at a clean stop those with nothing dirty are whole, and what counts no more is said to be dropped.

use std::sync::Arc;
use std::time::Instant;

use larder_base::ByteSize;
use larder_engine::block::node::logged::tell_log;
use larder_format::block::superblock::WrittenBack;

use super::super::Core;
use super::super::attached::Attached;
use super::patient::PATIENCE;

impl Core {
    /// A clean stop: nobody writes any more. A volume of which nothing is dirty is left as a detach leaves it, so that any cache may serve its store.
    /// What is dirty stays.
    pub(in crate::block) fn end_back(&self) {
        let Some(back) = self.back.get() else { return };
        let is_clean = |volume: &Arc<Attached>| {
            let log = back.log();
            let of = volume.attachment();
            of.is_some_and(|of| log.is_clean(of) && log.closed().is_none() && !log.is_halted(of))
        };
        let clean: Vec<Arc<Attached>> = self.volumes().into_iter().filter(is_clean).collect();
        if clean.is_empty() || !self.is_enabled() {
            return;
        }
        let end = |volume: &Arc<Attached>| {
            let begun = Instant::now();
            // (Nothing has come in between: then it would be waited for.) After that it goes without what store and marker would say.
            let mut go_on = |left| left == 0 && begun.elapsed() < PATIENCE;
            let ended = self
                .alone(volume)
                .and_then(|alone| self.write_back_no_more((volume, &alone), &mut go_on));
            let says = "its marker says still that this cache may hold writes of it";
            match ended {
                Ok(Some(true)) => {}
                Ok(_) => tracing::warn!(
                    "volume '{}': its store, or the place of its marker, has not answered within {} s: {says}",
                    volume.name,
                    PATIENCE.as_secs()
                ),
                Err(error) => tracing::warn!("{error}: {says}"),
            }
        };
        if self.hand.get().is_some() {
            return clean.iter().for_each(end);
        }
        // A store that hangs keeps no other.
        std::thread::scope(|scope| {
            for volume in &clean {
                let run = move || end(volume);
                let spawned =
                    std::thread::Builder::new().name("block-end".into()).spawn_scoped(scope, run);
                if let Err(error) = spawned {
                    tracing::warn!(%error, "no thread to leave volume '{}' in good order", volume.name);
                }
            }
        });
    }

    /// What this cache has of a volume counts no more, as its marker says: the log lets go of what it kept of it, if it did.
    pub(super) fn let_go_void(&self, name: &str, record: &WrittenBack) {
        let Some(back) = self.back.get() else { return };
        let status = back.log().status(self.now(), record.attachment);
        if let Some(status) = status {
            say_void(name, status.dirty);
            tell_log(self, self.now(), |log, _| log.detach(record.attachment));
        }
    }
}

/// What is dropped is said.
pub(super) fn say_void(name: &str, bytes: u64) {
    if bytes > 0 {
        tracing::warn!(
            "volume '{name}': {} that this cache had of it are dropped: its marker says that they count no more, since the store was recovered or was served \
             without this cache, or has them, and this is an older copy of the cache",
            ByteSize(bytes)
        );
    }
}
