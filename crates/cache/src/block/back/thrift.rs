//! What the write budget makes of a volume, carried out: the engine's [`Thrift`](larder_engine::block::writeback::economy::Thrift) says what.

use std::sync::Arc;

use larder_engine::block::node::logged::tell_log;
use larder_engine::block::writeback::economy::{Change, Economy, Thrift};

use super::super::attached::Attached;
use super::super::{Core, locked};
use super::{BackConfig, BackWish};

/// A volume under the write budget.
#[derive(Debug, Default)]
pub(in crate::block) struct Saves {
    thrift: Thrift,
    /// How it wrote back, and does again.
    wish: BackWish,
}

impl Core {
    /// What the write budget makes of write-back now.
    fn economy(&self) -> Option<Economy> {
        let (now, means) = (self.now(), self.node_limits.limits.means(self.now()));
        tell_log(self, now, |log, asks| {
            log.afford(now, means, asks);
            *log.economy()
        })
    }

    /// How a volume will write back again that is written through for want of write budget.
    pub fn saves(&self, name: &str) -> Option<BackConfig> {
        let volume = self.volume(name)?;
        let saves = locked(&volume.saves);
        saves.thrift.is_through().then(|| saves.wish.back.clone()).flatten()
    }

    /// A volume that writes back changes over if the write budget wants it to, on a thread of its own: a store that hangs holds up nobody else.
    pub(in crate::block) fn economise(&self, volume: &Attached) {
        if self.back.get().is_none() || volume.volume().is_closed() || volume.had().is_some() {
            return;
        }
        let written = self.back_of(&volume.name);
        let writes_back = written.is_some();
        if !writes_back && !locked(&volume.saves).thrift.is_through() {
            return;
        }
        if let Some((back, written)) = &written
            && back.log().is_halted(written.state.attachment)
        {
            // Its marker is another's.
            return;
        }
        let Some(economy) = self.economy() else { return };
        let mut saves = locked(&volume.saves);
        let Some(change) = saves.thrift.wants(self.now(), writes_back, &economy) else { return };
        if let (Change::Through, Some((_, written))) = (change, written) {
            saves.wish = BackWish {
                back: Some(written.config.clone()),
                marker: written.marker.clone(),
                journal: written.journal_at.clone(),
                moved: false,
            };
        }
        drop(saves);
        let (name, by_hand) = (volume.name.clone(), self.hand.get().is_some());
        let spawned = self.me.get().and_then(|me| me.upgrade()).filter(|_| !by_hand).map(|core| {
            let run = move || core.change_for_budget(&name, change);
            std::thread::Builder::new().name("block-budget".into()).spawn(run)
        });
        match spawned {
            Some(Ok(_)) => {}
            Some(Err(error)) => {
                tracing::warn!(%error, "volume '{}': no thread to change it over", volume.name);
                locked(&volume.saves).thrift.ended(self.now(), change, false);
            }
            None => self.change_for_budget(&volume.name, change),
        }
    }

    fn change_for_budget(&self, name: &str, change: Change) {
        let Some(volume) = self.volume(name) else { return };
        let wish = match change {
            Change::Through => BackWish::default(),
            Change::Back => locked(&volume.saves).wish.clone(),
        };
        let wanted = |economy: &Economy| Thrift::goes_on(change, economy);
        let mut go_on = |_| self.goes_on(&volume) && self.economy().is_some_and(|e| wanted(&e));
        let done = self.changes_over(&volume, &wish, &mut go_on);
        let has_changed = matches!(done, Ok(true));
        locked(&volume.saves).thrift.ended(self.now(), change, has_changed);
        match (done, change) {
            (Ok(true), Change::Through) => tracing::warn!(
                "volume '{name}': the write budget is used up, and slowing its clients to the rate of its store was not enough: it is written through \
                 until there is budget again"
            ),
            (Ok(true), Change::Back) => {
                tracing::info!("volume '{name}': there is write budget again: it writes back");
            }
            (Ok(false), _) => {}
            (Err(error), _) => tracing::warn!(
                "the write budget wants a volume to change over, and it cannot yet: {error}"
            ),
        }
    }

    /// The operator says how a volume is to be written. Returns whether that is all there is to do: it goes on writing through.
    pub(super) fn stays_through(&self, volume: &Arc<Attached>) -> bool {
        let mut saves = locked(&volume.saves);
        let through = saves.thrift.is_through();
        saves.thrift.forget();
        through
    }
}
