//! How an operation is cut into parts: at groups of lines, and where the operator's rule changes, so that of one part one thing
//! is said. What lies behind the last whole line of a volume is a part of its own.

use crate::block::api::GROUP_LINES;

/// Adds the parts of bytes `at..end` to `parts`, as first byte and bytes. Whole lines of the volume end at `whole`. `rule` says
/// what holds for the line of `line` bytes at a place, where there is anything to be said. Returns what lies behind `whole`: it is part of
/// a line too, so that who shares bytes there waits as anywhere else, but that line is never cached: the store ends in it, and
/// a fetch of all of it would fail.
pub fn cut<R: PartialEq>(
    (at, end): (u64, u64),
    whole: u64,
    line: u64,
    rule: Option<impl Fn(u64) -> R>,
    parts: &mut Vec<(u64, u32)>,
) -> Option<(u64, u32)> {
    let group = line * u64::from(GROUP_LINES);
    let cached = end.min(whole);
    let mut from = at;
    while from < cached {
        let to = ((from / group + 1) * group).min(cached);
        match &rule {
            None => parts.push((from, (to - from) as u32)),
            Some(rule) => at_rules((from, to), line, rule, parts),
        }
        from = to;
    }
    let tail = whole.max(at);
    (tail < end).then(|| (tail, (end - tail) as u32))
}

/// The same of bytes `from..to` of one group.
fn at_rules<R: PartialEq>(
    (from, to): (u64, u64),
    line: u64,
    rule: &impl Fn(u64) -> R,
    parts: &mut Vec<(u64, u32)>,
) {
    let of = |at: u64| rule(at / line * line);
    let (mut start, mut at) = (from, from);
    while at < to {
        let next = ((at / line + 1) * line).min(to);
        if next == to || of(next) != of(at) {
            parts.push((start, (next - start) as u32));
            start = next;
        }
        at = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Begin and length, bytes.
    type Part = (u64, u32);

    fn parts(at: u64, end: u64, whole: u64, never: Option<u64>) -> (Vec<Part>, Option<Part>) {
        let mut parts = Vec::new();
        let rule = never.map(|line| move |at: u64| at == line * 4096);
        let tail = cut((at, end), whole, 4096, rule, &mut parts);
        (parts, tail)
    }

    #[test]
    fn at_groups_and_rules_and_the_last_whole_line() {
        let far = u64::MAX;
        assert_eq!(parts(512, 1024, far, None), (vec![(512, 512)], None));
        let two = vec![(60_000, 5536), (65_536, 4464)];
        assert_eq!(parts(60_000, 70_000, far, None), (two.clone(), None));
        assert_eq!(parts(60_000, 70_000, far, Some(99)), (two, None));
        // One line is another's affair, and the line of which only a part is asked for is looked at as a whole.
        let three = vec![(100, 8092), (8192, 4096), (12_288, 712)];
        assert_eq!(parts(100, 13_000, far, Some(2)), (three, None));
        assert_eq!(parts(9000, 9500, far, Some(2)), (vec![(9000, 500)], None));
        assert_eq!(parts(0, 5000, 4096, None), (vec![(0, 4096)], Some((4096, 904))));
        assert_eq!(parts(4200, 5000, 4096, None), (vec![], Some((4200, 800))));
    }
}
