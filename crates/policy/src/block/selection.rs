//! Selective control: which volumes and which ranges of them are cached always, never, or as admission decides.
//!
//! Ranges come from the operator: LBA ranges, partitions, or files by their extents. Later
//! ones overrule earlier ones where they overlap.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use super::access::VolumeId;

/// How a range is cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rule {
    /// Admitted whatever admission says, as long as there is room for pinned lines.
    Always,
    /// Not at all.
    Never,
    /// As admission decides.
    #[default]
    ByPolicy,
}

impl Rule {
    /// The rule as users write it.
    pub fn as_str(self) -> &'static str {
        match self {
            Rule::Always => "always",
            Rule::Never => "never",
            Rule::ByPolicy => "policy",
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Rule {
    type Err = SelectionError;

    fn from_str(text: &str) -> Result<Rule, SelectionError> {
        let all = [Rule::Always, Rule::Never, Rule::ByPolicy];
        let found = all.into_iter().find(|r| r.as_str() == text);
        found.ok_or_else(|| SelectionError::UnknownRule(text.to_owned()))
    }
}

/// Why a selection was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectionError {
    /// No such rule.
    #[error("'{0}' is no rule: write always, never or policy")]
    UnknownRule(String),
    /// Start at or after end.
    #[error("the range {start}..{end} is empty: its end must be after its start")]
    Empty {
        /// First byte.
        start: u64,
        /// Byte after the last.
        end: u64,
    },
    /// More ranges than are kept.
    #[error(
        "{would} ranges would be selected and at most {most} can be: select larger ranges, or clear some first"
    )]
    TooMany {
        /// How many there would be.
        would: usize,
        /// How many there may be.
        most: usize,
    },
    /// A label that is too long to keep.
    #[error("the label of a selection has {0} bytes: at most 255 are kept")]
    Label(usize),
}

/// A selected range, as it is listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selected {
    /// First byte.
    pub start: u64,
    /// Byte after the last.
    pub end: u64,
    /// How it is cached.
    pub rule: Rule,
    /// What it was selected as: a file's path, a partition; empty for a plain range.
    pub label: String,
}

/// Rules by volume and range. Ranges of a volume do not overlap, and neighbours of the same rule and label are one, so
/// that the number of ranges, which is bounded, follows from what was selected and not from how often.
#[derive(Debug)]
pub struct Selection {
    volumes: BTreeMap<VolumeId, VolumeRules>,
    most: usize,
    ranges: usize,
}

#[derive(Debug, Default)]
struct VolumeRules {
    /// Where no range says otherwise.
    whole: Rule,
    /// By first byte.
    ranges: BTreeMap<u64, Range>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Range {
    end: u64,
    rule: Rule,
    label: Box<str>,
}

impl VolumeRules {
    /// Takes `start..end` out of the ranges, cutting those at its edges.
    fn cut(&mut self, start: u64, end: u64) {
        if let Some((&first, range)) = self.ranges.range_mut(..start).next_back()
            && range.end > start
        {
            debug_assert!(first < start);
            let tail = Range { ..range.clone() };
            range.end = start;
            if tail.end > end {
                self.ranges.insert(end, tail);
                return;
            }
        }
        while let Some((&first, _)) = self.ranges.range(start..end).next() {
            if let Some(range) = self.ranges.remove(&first)
                && range.end > end
            {
                self.ranges.insert(end, range);
            }
        }
    }

    /// Adds a range where there is none, as one with its equals beside it.
    fn join(&mut self, mut start: u64, mut end: u64, rule: Rule, label: &str) {
        if let Some((&first, before)) = self.ranges.range(..start).next_back()
            && before.end == start
            && before.rule == rule
            && *before.label == *label
        {
            start = first;
        }
        if let Some(after) = self.ranges.get(&end)
            && after.rule == rule
            && *after.label == *label
        {
            let joined = after.end;
            self.ranges.remove(&end);
            end = joined;
        }
        self.ranges.insert(start, Range { end, rule, label: label.into() });
    }

    /// The ranges that overlap `start..end`.
    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Range)> {
        let before = self.ranges.range(..start).next_back().filter(|(_, r)| r.end > start);
        before
            .into_iter()
            .chain(self.ranges.range(start..end.max(start)))
            .map(|(&first, range)| (first, range))
    }
}

impl Selection {
    /// How many ranges are kept by default: about 6 MB.
    pub const MOST_RANGES: usize = 65_536;

    /// No rule for anything, and room for `most` ranges.
    pub fn new(most: usize) -> Selection {
        Selection { volumes: BTreeMap::new(), most, ranges: 0 }
    }

    /// How a whole volume is cached where no range says otherwise.
    pub fn set_volume(&mut self, volume: VolumeId, rule: Rule) {
        self.volumes.entry(volume).or_default().whole = rule;
    }

    /// How bytes `start..end` of a volume are cached from now on, over whatever was selected there before. `ByPolicy` is a rule
    /// like the others: within a volume that is cached never it makes an exception. See [`clear`](Self::clear).
    ///
    /// # Errors
    /// When the range is empty, the label too long, or there would be too many ranges; nothing has changed then.
    pub fn set(
        &mut self,
        volume: VolumeId,
        start: u64,
        end: u64,
        rule: Rule,
        label: &str,
    ) -> Result<(), SelectionError> {
        if label.len() > 255 {
            return Err(SelectionError::Label(label.len()));
        }
        self.change(volume, start, end, Some((rule, label)))
    }

    /// Forgets what was selected of bytes `start..end`.
    ///
    /// # Errors
    /// When the range is empty, or cutting a range in two makes too many.
    pub fn clear(&mut self, volume: VolumeId, start: u64, end: u64) -> Result<(), SelectionError> {
        self.change(volume, start, end, None)
    }

    fn change(
        &mut self,
        volume: VolumeId,
        start: u64,
        end: u64,
        to: Option<(Rule, &str)>,
    ) -> Result<(), SelectionError> {
        if start >= end {
            return Err(SelectionError::Empty { start, end });
        }
        // Checked ahead, so that a refusal changes nothing: at most the new range and the tail of one that is cut in two.
        let rules = self.volumes.get(&volume);
        let gone =
            rules.map_or(0, |r| r.ranges.range(start..end).filter(|(_, r)| r.end <= end).count());
        let split = rules.is_some_and(|r| {
            r.ranges.range(..start).next_back().is_some_and(|(_, range)| range.end > end)
        });
        let would = self.ranges - gone + usize::from(split) + usize::from(to.is_some());
        if would > self.most && would > self.ranges {
            return Err(SelectionError::TooMany { would, most: self.most });
        }
        let rules = self.volumes.entry(volume).or_default();
        let before = rules.ranges.len();
        rules.cut(start, end);
        if let Some((rule, label)) = to {
            rules.join(start, end, rule, label);
        }
        self.ranges = self.ranges - before + rules.ranges.len();
        Ok(())
    }

    /// Forgets every range with this label (a file's), and says how many there were.
    pub fn clear_label(&mut self, volume: VolumeId, label: &str) -> usize {
        let Some(rules) = self.volumes.get_mut(&volume) else { return 0 };
        let before = rules.ranges.len();
        rules.ranges.retain(|_, range| *range.label != *label);
        let gone = before - rules.ranges.len();
        self.ranges -= gone;
        gone
    }

    /// Forgets a volume.
    pub fn remove_volume(&mut self, volume: VolumeId) {
        if let Some(rules) = self.volumes.remove(&volume) {
            self.ranges -= rules.ranges.len();
        }
    }

    /// The rule for a line of `bytes` bytes at `offset`. A line that holds a byte never to be cached is never cached; else
    /// one that holds a byte always to be cached always is.
    pub fn rule(&self, volume: VolumeId, offset: u64, bytes: u64) -> Rule {
        let Some(rules) = self.volumes.get(&volume) else { return Rule::ByPolicy };
        if rules.ranges.is_empty() {
            return rules.whole;
        }
        let end = offset.saturating_add(bytes.max(1));
        let (mut at, mut always, mut policy) = (offset, false, false);
        let mut see = |rule: Rule| {
            always |= rule == Rule::Always;
            policy |= rule == Rule::ByPolicy;
            rule == Rule::Never
        };
        for (start, range) in rules.overlapping(offset, end) {
            if (start > at && see(rules.whole)) || see(range.rule) {
                return Rule::Never;
            }
            at = range.end;
        }
        if at < end && see(rules.whole) {
            return Rule::Never;
        }
        if always { Rule::Always } else { Rule::ByPolicy }
    }

    /// Whether anything is selected of a volume.
    pub fn selects(&self, volume: VolumeId) -> bool {
        self.volumes.get(&volume).is_some_and(|r| r.whole != Rule::ByPolicy || !r.ranges.is_empty())
    }

    /// Volumes of which anything is selected.
    pub fn volumes(&self) -> impl Iterator<Item = VolumeId> {
        self.volumes.keys().copied().filter(|&volume| self.selects(volume))
    }

    /// How a whole volume is cached where no range says otherwise.
    pub fn whole(&self, volume: VolumeId) -> Rule {
        self.volumes.get(&volume).map_or(Rule::ByPolicy, |r| r.whole)
    }

    /// How many of the `bytes` bytes of a volume are selected to be cached always.
    pub fn pinned_bytes(&self, volume: VolumeId, bytes: u64) -> u64 {
        let whole = self.whole(volume) == Rule::Always;
        let mut pinned = if whole { bytes } else { 0 };
        for range in self.selected(volume) {
            let len = range.end.min(bytes).saturating_sub(range.start);
            match (whole, range.rule == Rule::Always) {
                (false, true) => pinned += len,
                (true, false) => pinned = pinned.saturating_sub(len),
                _ => {}
            }
        }
        pinned
    }

    /// Ranges that are selected, over all volumes.
    pub fn ranges(&self) -> usize {
        self.ranges
    }

    /// What is selected of a volume, in order of address.
    pub fn selected(&self, volume: VolumeId) -> impl Iterator<Item = Selected> {
        self.volumes.get(&volume).into_iter().flat_map(|rules| {
            rules.ranges.iter().map(|(&start, range)| Selected {
                start,
                end: range.end,
                rule: range.rule,
                label: range.label.clone().into_string(),
            })
        })
    }

    /// Which rule a byte falls under and where that comes from, for people.
    pub fn explain(&self, volume: VolumeId, offset: u64) -> String {
        let Some(rules) = self.volumes.get(&volume) else {
            return "nothing is selected of its volume".to_owned();
        };
        match rules.overlapping(offset, offset.saturating_add(1)).next() {
            Some((start, range)) => {
                let label = if range.label.is_empty() {
                    String::new()
                } else {
                    format!(" ({})", range.label)
                };
                format!("bytes {start}..{} are selected: {}{label}", range.end, range.rule)
            }
            None => format!("no range is selected there; its volume is cached: {}", rules.whole),
        }
    }
}

impl Default for Selection {
    fn default() -> Selection {
        Selection::new(Selection::MOST_RANGES)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const V: VolumeId = VolumeId(1);

    #[test]
    fn later_rules_overrule_and_neighbours_join() {
        let mut s = Selection::default();
        s.set(V, 0, 100, Rule::Always, "").unwrap();
        s.set(V, 40, 60, Rule::Never, "swap").unwrap();
        let listed: Vec<_> = s.selected(V).map(|r| (r.start, r.end, r.rule)).collect();
        assert_eq!(listed, [(0, 40, Rule::Always), (40, 60, Rule::Never), (60, 100, Rule::Always)]);
        assert!(s.explain(V, 50).contains("never (swap)"));
        s.set(V, 40, 60, Rule::Always, "").unwrap();
        assert_eq!((s.selected(V).count(), s.ranges()), (1, 1));
        assert_eq!(s.clear_label(V, ""), 1);
        assert_eq!(s.ranges(), 0);
    }

    #[test]
    fn a_line_with_a_byte_of_never_is_never_cached() {
        let mut s = Selection::default();
        s.set(V, 4096, 8192, Rule::Always, "").unwrap();
        s.set(V, 8000, 8001, Rule::Never, "").unwrap();
        assert_eq!(s.rule(V, 4096, 4096), Rule::Never);
        assert_eq!(s.rule(V, 4096, 2048), Rule::Always);
        assert_eq!(s.rule(V, 0, 4097), Rule::Always);
        assert_eq!(s.rule(V, 0, 4096), Rule::ByPolicy);
        assert_eq!(s.rule(VolumeId(2), 4096, 4096), Rule::ByPolicy);
        s.set_volume(V, Rule::Never);
        assert_eq!(s.rule(V, 0, 8192), Rule::Never);
        assert_eq!(s.rule(V, 4096, 2048), Rule::Always, "a range is an exception to its volume");
    }

    #[test]
    fn the_number_of_ranges_is_bounded_and_a_refusal_changes_nothing() {
        let mut s = Selection::new(3);
        for i in 0..3u64 {
            s.set(V, i * 10, i * 10 + 5, Rule::Never, "").unwrap();
        }
        let error = s.set(V, 100, 105, Rule::Never, "").unwrap_err();
        assert_eq!(error, SelectionError::TooMany { would: 4, most: 3 });
        assert!(s.clear(V, 11, 12).is_err(), "would cut one in two");
        assert_eq!(s.selected(V).count(), 3);
        s.set(V, 0, 1000, Rule::Always, "").unwrap();
        assert_eq!(s.ranges(), 1);
        assert!(s.set(V, 5, 5, Rule::Never, "").is_err());
        assert!(s.set(V, 5, 6, Rule::Never, &"x".repeat(256)).is_err());
        s.remove_volume(V);
        assert_eq!((s.ranges(), s.rule(V, 0, 10)), (0, Rule::ByPolicy));
    }

    #[test]
    fn rules_read_back() {
        for rule in [Rule::Always, Rule::Never, Rule::ByPolicy] {
            assert_eq!(rule.to_string().parse(), Ok(rule));
        }
        assert!("often".parse::<Rule>().unwrap_err().to_string().contains("'often'"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn a_map_of_bytes_agrees(steps in proptest::collection::vec((0u64..120, 1u64..40, 0u8..5), 1..60)) {
            let mut s = Selection::new(12);
            let mut model = [None; 200];
            for (start, len, what) in steps {
                let end = start + len;
                let (rule, label) = match what {
                    0 => (Some(Rule::Always), "a"),
                    1 => (Some(Rule::Never), ""),
                    2 => (Some(Rule::ByPolicy), ""),
                    3 => (Some(Rule::Always), "b"),
                    _ => (None, ""),
                };
                let done = match rule {
                    Some(rule) => s.set(V, start, end, rule, label),
                    None => s.clear(V, start, end),
                };
                if done.is_ok() {
                    model[start as usize..end as usize].fill(rule.map(|r| (r, label)));
                }
                prop_assert!(s.ranges() <= 12);
                prop_assert_eq!(s.ranges(), s.selected(V).count());
                let mut listed = [None; 200];
                let all: Vec<Selected> = s.selected(V).collect();
                for r in &all {
                    let label = match r.label.as_str() { "a" => "a", "b" => "b", _ => "" };
                    listed[r.start as usize..r.end as usize].fill(Some((r.rule, label)));
                }
                prop_assert_eq!(listed, model);
                let runs = (0..200).filter(|&i| model[i].is_some() && (i == 0 || model[i - 1] != model[i])).count();
                prop_assert_eq!(runs, all.len(), "neighbours are joined");
                for at in (0..190).step_by(7) {
                    let bytes = &model[at..at + 9];
                    let has = |rule| bytes.iter().any(|b| b.map_or(Rule::ByPolicy, |(r, _)| r) == rule);
                    let wanted = if has(Rule::Never) { Rule::Never } else if has(Rule::Always) { Rule::Always } else { Rule::ByPolicy };
                    prop_assert_eq!(s.rule(V, at as u64, 9), wanted);
                }
            }
        }
    }
}
