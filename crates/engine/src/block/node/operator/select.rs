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

#[cfg(test)]
mod tests {
    use super::*;

    const VOLUME: VolumeId = VolumeId(3);

    fn choose<'a>(rule: Option<Rule>, ranges: &'a [(u64, u64)], label: &'a str) -> Choice<'a> {
        Choice { rule, ranges: Some(ranges), label }
    }

    #[test]
    fn a_change_that_does_not_fit_changes_nothing() {
        let mut selection = Selection::new(2);
        let whole = Choice { rule: Some(Rule::Always), ranges: None, label: "" };
        whole.put(&mut selection, VOLUME).unwrap();
        choose(Some(Rule::Never), &[(0, 10)], "file").put(&mut selection, VOLUME).unwrap();
        let before = Kept::of(&selection, VOLUME);
        let many = [(20, 1), (30, 1), (40, 1)];
        choose(Some(Rule::Never), &many, "file").put(&mut selection, VOLUME).unwrap_err();
        assert_eq!(Kept::of(&selection, VOLUME), before);
        assert_eq!((before.whole, before.ranges.len()), (Rule::Always, 1));
    }

    #[test]
    fn what_had_the_label_before_has_it_no_more() {
        let mut selection = Selection::new(10);
        choose(Some(Rule::Always), &[(0, 10)], "file").put(&mut selection, VOLUME).unwrap();
        choose(Some(Rule::Always), &[(50, 10)], "file").put(&mut selection, VOLUME).unwrap();
        let kept = Kept::of(&selection, VOLUME);
        assert_eq!(kept.ranges.iter().map(|r| (r.start, r.end)).collect::<Vec<_>>(), [(50, 60)]);
        choose(None, &[(0, 100)], "").put(&mut selection, VOLUME).unwrap();
        assert!(Kept::of(&selection, VOLUME).is_empty() && !kept.is_empty());
    }

    #[test]
    fn what_is_never_to_be_cached_is_dropped() {
        let ranges = [(0, 10), (50, 10)];
        assert_eq!(choose(Some(Rule::Never), &ranges, "").drops(100), ranges);
        let whole = Choice { rule: Some(Rule::Never), ranges: None, label: "" };
        assert_eq!(whole.drops(100), [(0, 100)]);
        assert!(choose(Some(Rule::Always), &ranges, "").drops(100).is_empty());
        assert!(choose(None, &ranges, "").drops(100).is_empty());
    }

    #[test]
    fn what_was_kept_is_in_force_again_where_nothing_is_selected() {
        let mut selection = Selection::new(10);
        choose(Some(Rule::Never), &[(0, 10)], "file").put(&mut selection, VOLUME).unwrap();
        let kept = Kept::of(&selection, VOLUME);
        let again = VolumeId(4);
        kept.restore(&mut selection, again).unwrap();
        assert_eq!(Kept::of(&selection, again), kept);
        choose(None, &[(0, 10)], "").put(&mut selection, VOLUME).unwrap();
        choose(Some(Rule::Always), &[(70, 10)], "").put(&mut selection, VOLUME).unwrap();
        kept.restore(&mut selection, VOLUME).unwrap();
        assert_eq!(Kept::of(&selection, VOLUME).ranges[0].start, 70, "it is another's choice");
    }
}
