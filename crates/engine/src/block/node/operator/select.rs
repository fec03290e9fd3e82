//! What an operator selects of a volume: what changes at once, what leaves the cache with it, and what is kept over restarts.
//!
//! The order is: the change is in force, so that nothing that is never to be cached comes any more; then what is there of it is dropped
//! ([`Choice::drops`]); then it is kept ([`Kept`]), and who asked is answered. Kept is what is selected by the volume's name, since its number is
//! another one each time that it comes.

use larder_policy::block::{Rule, Selected, Selection, SelectionError, VolumeId};

/// What is to be selected of a volume.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// By which rule; nothing forgets what was selected there.
    pub rule: Option<Rule>,
    /// Of which bytes: first byte and bytes of each range, all of which lie in the volume. Nothing is all of the volume, whatever was selected of
    /// parts of it.
    pub ranges: Option<&'a [(u64, u64)]>,
    /// Under which label. Ranges that had the label before have it no more: a file may lie elsewhere by now.
    pub label: &'a str,
}

impl Choice<'_> {
    /// Puts it in force.
    ///
    /// # Errors
    /// When there are too many ranges: nothing has changed then.
    pub fn put(&self, selection: &mut Selection, volume: VolumeId) -> Result<(), SelectionError> {
        let Some(ranges) = self.ranges else {
            selection.remove_volume(volume);
            selection.set_volume(volume, self.rule.unwrap_or_default());
            return Ok(());
        };
        let before = Kept::of(selection, volume);
        if self.rule.is_some() && !self.label.is_empty() {
            selection.clear_label(volume, self.label);
        }
        let done = ranges.iter().try_for_each(|&(start, bytes)| match self.rule {
            Some(rule) => selection.set(volume, start, start + bytes, rule, self.label),
            None => selection.clear(volume, start, start + bytes),
        });
        if done.is_err() {
            selection.remove_volume(volume);
            // It was there before, so it fits.
            let _ = before.put(selection, volume);
        }
        done
    }

    /// Ranges of a volume of so many bytes whose lines leave the cache: first byte and bytes.
    pub fn drops(&self, volume_bytes: u64) -> Vec<(u64, u64)> {
        match (self.rule, self.ranges) {
            (Some(Rule::Never), None) => vec![(0, volume_bytes)],
            (Some(Rule::Never), Some(ranges)) => ranges.to_vec(),
            _ => Vec::new(),
        }
    }
}

/// What is selected of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Where no range says otherwise.
    pub whole: Rule,
    /// Ranges, in their order.
    pub ranges: Vec<Selected>,
}

impl Kept {
    /// What is selected of it now.
    pub fn of(selection: &Selection, volume: VolumeId) -> Kept {
        Kept { whole: selection.whole(volume), ranges: selection.selected(volume).collect() }
    }

    /// Whether nothing is selected.
    pub fn is_empty(&self) -> bool {
        self.whole == Rule::ByPolicy && self.ranges.is_empty()
    }

    /// Selects it of a volume. Where there are too many ranges, the first that fit are selected.
    ///
    /// # Errors
    /// The first that does not fit.
    pub fn put(&self, selection: &mut Selection, volume: VolumeId) -> Result<(), SelectionError> {
        selection.set_volume(volume, self.whole);
        let set = |r: &Selected| selection.set(volume, r.start, r.end, r.rule, &r.label);
        // All are tried, as each of them is one's own.
        let outcomes: Vec<Result<(), SelectionError>> = self.ranges.iter().map(set).collect();
        outcomes.into_iter().collect()
    }

    /// The same of a volume that has come, if nothing is selected of it.
    ///
    /// # Errors
    /// The first range that does not fit.
    pub fn restore(
        &self,
        selection: &mut Selection,
        volume: VolumeId,
    ) -> Result<(), SelectionError> {
        if Kept::of(selection, volume).is_empty() { self.put(selection, volume) } else { Ok(()) }
    }
}
