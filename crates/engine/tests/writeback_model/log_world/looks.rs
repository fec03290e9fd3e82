//! A second holder takes the marker of a volume, while the first is stopped for a while and knows nothing of it.

use super::*;
use larder_engine::block::writeback::log::FRESH;

impl World {
    /// The host looks at the markers in time, where nobody else comes.
    pub(super) fn look_in_time(&mut self, asks: &mut Asks<Bytes>) {
        if self.second {
            return;
        }
        for volume in &self.volumes {
            self.log.looked(volume.attachment, self.now, asks);
        }
    }

    /// The process is stopped for a while, or goes on; somebody else takes a volume, or nobody does.
    pub(super) fn pauses(&mut self) -> Checked {
        if self.rng.chance(0.6) {
            let v = self.rng.below(self.volumes.len() as u64) as usize;
            self.says(|| format!("v{v}: another takes it"));
            self.volumes[v].taken.get_or_insert(self.now);
        }
        if self.rng.chance(0.7) {
            self.now.0 += FRESH.0 + 1 + self.rng.below(FRESH.0);
            self.says(|| "it goes on".to_owned());
        }
        self.due()
    }

    /// More of a volume comes to its store: that was nobody else's a moment ago.
    pub(super) fn check_taken(&self, v: usize) -> Checked {
        match self.volumes[v].taken.filter(|taken| self.now > *taken + FRESH) {
            Some(taken) => {
                Err(format!("v{v}: another has it since {taken:?}, and more comes there"))
            }
            None => Ok(()),
        }
    }

    /// A look at a marker ends that began then. Who is not its holder any more is stopped, and gets it back: the other has written nothing.
    pub(super) fn look_ends(
        &mut self,
        v: usize,
        began: Nanos,
        asks: &mut Asks<Bytes>,
    ) -> Result<bool, String> {
        if self.volumes[v].taken.take().is_some() {
            self.found_taken += 1;
            self.restart(false)?;
            return Ok(false);
        }
        let found = !self.fails();
        self.says(|| format!("v{v}: looked at: {found}"));
        let attachment = self.volumes[v].attachment;
        // (Where the place does not answer for a minute, that is as with a store that fails.)
        self.stores_failed |= !found;
        if found {
            self.log.looked(attachment, began, asks);
        }
        self.log.look_ended(self.now, attachment, asks);
        Ok(true)
    }
}
