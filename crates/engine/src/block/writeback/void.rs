//! What of a volume's records does not count any more, by an operator's word.

use std::ops::Range;

use larder_format::block::superblock::Cut;

/// What an operator has given up of a volume: as its cache's superblock says, and what was given up since.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Void {
    /// What records have beyond an end.
    cut: Option<Cut>,
    /// Records as a whole, since they could not be read: the first and the last of each stretch, ascending. None meets another.
    records: Vec<(u64, u64)>,
    /// What FRONTIERs of positions up to this one list as unreadable.
    listed: Option<u64>,
}

impl Void {
    /// What a superblock says: `given_up` are first and last of what could not be read, where a first of 0 stands for what FRONTIERs list.
    pub fn new(cut: Option<Cut>, given_up: &[(u64, u64)]) -> Void {
        let (lists, records): (Vec<_>, Vec<_>) =
            given_up.iter().partition(|(first, _)| *first == 0);
        let listed = lists.iter().map(|(_, last)| *last).max();
        let mut void = Void { cut, records: Vec::new(), listed };
        void.merge(records);
        void
    }

    /// As a superblock says it.
    pub fn given_up(&self) -> Vec<(u64, u64)> {
        let listed = self.listed.map(|last| (0, last));
        listed.into_iter().chain(self.records.iter().copied()).collect()
    }

    fn merge(&mut self, more: Vec<(u64, u64)>) {
        self.records.extend(more);
        self.records.sort_unstable();
        self.records.dedup_by(|next, before| {
            let meets = next.0 <= before.1.saturating_add(1);
            if meets {
                before.1 = before.1.max(next.1);
            }
            meets
        });
    }

    /// Whether this record was given up as a whole.
    pub fn has(&self, sequence: u64) -> bool {
        let at = self.records.partition_point(|(_, last)| *last < sequence);
        self.records.get(at).is_some_and(|(first, _)| *first <= sequence)
    }

    /// Whether what a FRONTIER of this position lists was given up.
    pub fn lists(&self, position: u64) -> bool {
        self.listed.is_some_and(|listed| position <= listed)
    }

    /// Up to which position what FRONTIERs list was given up.
    pub fn listed(&self) -> Option<u64> {
        self.listed
    }

    /// What counts of a record of these bytes.
    pub fn counts(&self, sequence: u64, range: Range<u64>) -> Range<u64> {
        match self.has(sequence) {
            true => range.start..range.start,
            false => self.within_end(sequence, range),
        }
    }

    /// What of these bytes, which are of records up to this one, does not lie beyond an end.
    pub fn within_end(&self, sequence: u64, range: Range<u64>) -> Range<u64> {
        match self.cut.filter(|cut| sequence <= cut.last) {
            Some(cut) => range.start.min(cut.end)..range.end.min(cut.end),
            None => range,
        }
    }

    /// The same, and these records too; and, where a position is said, what FRONTIERs up to it list.
    #[must_use]
    pub fn with(&self, records: impl IntoIterator<Item = u64>, listed: Option<u64>) -> Void {
        let mut with = Void { listed: self.listed.max(listed), ..self.clone() };
        with.merge(records.into_iter().map(|sequence| (sequence, sequence)).collect());
        with
    }

    /// Records up to this one are there no more.
    pub fn let_go(&mut self, position: u64) {
        if self.records.first().is_some_and(|(first, _)| *first <= position) {
            self.records.retain(|(_, last)| *last > position);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_up_is_what_was_said_and_no_record_beside_it() {
        let cut = Some(Cut { end: 100, last: 4 });
        let void = Void::new(cut, &[(9, 9), (0, 5), (3, 4), (0, 2)]);
        let given = |void: &Void| (1..15).filter(|&n| void.has(n)).collect::<Vec<u64>>();
        assert_eq!(given(&void), [3, 4, 9]);
        assert!(void.lists(0) && void.lists(5) && !void.lists(6));
        assert_eq!(void.given_up(), [(0, 5), (3, 4), (9, 9)]);
        assert_eq!(void.counts(3, 50..120), 50..50);
        assert_eq!(void.counts(2, 50..120), 50..100);
        assert_eq!(void.within_end(3, 50..120), 50..100);
        assert_eq!(void.counts(5, 50..120), 50..120);
        let mut more = void.with([8, 2, 12], Some(7));
        assert_eq!(more.given_up(), [(0, 7), (2, 4), (8, 9), (12, 12)]);
        more.let_go(8);
        assert_eq!(given(&more), [8, 9, 12]);
        assert_eq!(Void::new(cut, &more.given_up()), more);
        assert_eq!(Void::default().given_up(), []);
    }
}
