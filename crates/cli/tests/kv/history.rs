//! What clients did and saw, and whether a cache may have answered so.
//!
//! Every write stores a token that no other write stores. A cache may forget; it must not answer with a value that had
//! been overwritten, deleted, flushed or expired before the question was asked. With writes that overlap in time the order
//! is the server's to choose, so an answer W is **stale** only if some other write or removal began after W had surely
//! been carried out and was acknowledged before the question. W has surely been carried out once it was acknowledged, or
//! seen by anyone, whichever came first: that also covers writes whose acknowledgement a kill has swallowed.

use std::collections::BTreeMap;

/// Nanoseconds since the test began.
pub(crate) type Nanos = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A value of this token was stored, to live so many seconds (0: for ever).
    Write { token: u64, ttl: u32 },
    /// The key was deleted.
    Remove,
    /// All keys were.
    Flush,
    /// A value of this token was answered.
    Read { token: u64, cas: Option<u64> },
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) key: u32,
    pub(crate) what: What,
    pub(crate) began: Nanos,
    /// When the acknowledgement was read; `None` when it never came.
    pub(crate) ended: Option<Nanos>,
}

/// Seconds and a half: the server's clock counts whole seconds.
const EXPIRY_SLACK: Nanos = 1_500_000_000;

#[derive(Clone, Copy)]
struct Written {
    key: u32,
    sure: Nanos,
    ttl: u32,
}

/// The first contradictions found, in words. `late` has by how much the server's clock fell behind that of the events, and when
/// ([`Notebook::falls_behind`](crate::load::Notebook::falls_behind)).
pub(crate) fn contradictions(events: &[Event], late: &[(Nanos, Nanos)]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut writes: BTreeMap<u64, Written> = BTreeMap::new();
    for e in events {
        if let What::Write { token, ttl } = e.what {
            let sure = e.ended.unwrap_or(Nanos::MAX);
            if writes.insert(token, Written { key: e.key, sure, ttl }).is_some() {
                wrong.push(format!("token {token} was given out twice: {e:?}"));
            }
        }
    }
    let mut by_cas = BTreeMap::new();
    for e in events {
        let What::Read { token, cas } = e.what else { continue };
        match writes.get_mut(&token) {
            None => wrong.push(format!("nobody wrote what was read: {e:?}")),
            Some(w) if w.key != e.key => wrong.push(format!("another key's value: {e:?}")),
            Some(w) => w.sure = w.sure.min(e.ended.unwrap_or(Nanos::MAX)),
        }
        if let Some(cas) = cas
            && *by_cas.entry((e.key, cas)).or_insert(token) != token
        {
            wrong.push(format!("two values with the same CAS: {e:?}"));
        }
    }
    // By key: acknowledged writes and removals in the order of their ends, each with the latest beginning so far.
    let mut done: BTreeMap<u32, Vec<(Nanos, Nanos)>> = BTreeMap::new();
    let mut flushes = Vec::new();
    for e in events {
        let Some(ended) = e.ended else { continue };
        match e.what {
            What::Write { .. } | What::Remove => {
                done.entry(e.key).or_default().push((ended, e.began));
            }
            What::Flush => flushes.push((ended, e.began)),
            What::Read { .. } => {}
        }
    }
    let latest = |list: &mut Vec<(Nanos, Nanos)>| {
        list.sort_unstable();
        let mut most = 0;
        for entry in list {
            most = most.max(entry.1);
            entry.1 = most;
        }
    };
    done.values_mut().for_each(latest);
    latest(&mut flushes);
    let begun_before = |list: &[(Nanos, Nanos)], at: Nanos| {
        let n = list.partition_point(|&(ended, _)| ended < at);
        n.checked_sub(1).map_or(0, |i| list[i].1)
    };
    for e in events {
        let What::Read { token, .. } = e.what else { continue };
        let Some(w) = writes.get(&token) else { continue };
        let since = done.get(&e.key).map_or(0, |list| begun_before(list, e.began));
        if since > w.sure {
            wrong.push(format!(
                "stale: {e:?}, but that value was there at {} and something else was done from {since} on",
                w.sure
            ));
        }
        let flushed = begun_before(&flushes, e.began);
        if flushed > w.sure {
            wrong.push(format!("flushed at {flushed}, and back: {e:?}"));
        }
        let meanwhile = late.iter().filter(|l| l.0 > w.sure && l.0 <= e.began);
        let slack = EXPIRY_SLACK + meanwhile.map(|l| l.1).sum::<Nanos>();
        if w.ttl > 0 && e.began > w.sure.saturating_add(u64::from(w.ttl) * 1_000_000_000 + slack) {
            wrong.push(format!("expired {} s after {}, and served: {e:?}", w.ttl, w.sure));
        }
    }
    wrong.truncate(20);
    wrong
}

mod tests {
    //! The checker, checked.
    use super::*;

    fn write(key: u32, token: u64, began: Nanos, ended: Option<Nanos>) -> Event {
        Event { key, what: What::Write { token, ttl: 0 }, began, ended }
    }
    fn read(key: u32, token: u64, began: Nanos, ended: Nanos) -> Event {
        Event { key, what: What::Read { token, cas: None }, began, ended: Some(ended) }
    }
    fn other(key: u32, what: What, began: Nanos, ended: Nanos) -> Event {
        Event { key, what, began, ended: Some(ended) }
    }

    #[test]
    fn what_a_cache_may_do_is_accepted() {
        // Overlapping writes in either order; a read beside a write; a write without acknowledgement, seen or not.
        assert!(contradictions(&[], &[]).is_empty());
        let ok = [
            write(1, 10, 0, Some(50)),
            write(1, 11, 10, Some(40)),
            read(1, 10, 60, 70),
            read(1, 11, 61, 71),
            write(1, 12, 80, None),
            read(1, 10, 90, 95),
            read(1, 12, 96, 99),
            other(1, What::Remove, 100, 120),
            read(1, 12, 110, 130),
            write(2, 20, 0, Some(1)),
        ];
        assert_eq!(contradictions(&ok, &[]), Vec::<String>::new());
    }

    #[test]
    fn what_it_must_not_do_is_found() {
        let w = write(1, 10, 0, Some(10));
        for (events, word) in [
            (vec![w, write(1, 11, 20, Some(30)), read(1, 10, 40, 50)], "stale"),
            (vec![w, other(1, What::Remove, 20, 30), read(1, 10, 40, 50)], "stale"),
            (vec![w, other(0, What::Flush, 20, 30), read(1, 10, 40, 50)], "flushed"),
            (vec![w, read(2, 10, 40, 50)], "another key"),
            (vec![w, read(1, 99, 40, 50)], "nobody"),
            (vec![w, w], "twice"),
            // An unacknowledged write, seen, then overwritten.
            (
                vec![
                    write(1, 10, 0, None),
                    read(1, 10, 5, 10),
                    write(1, 11, 20, Some(30)),
                    read(1, 10, 40, 50),
                ],
                "stale",
            ),
            (
                vec![
                    other(1, What::Write { token: 10, ttl: 1 }, 0, 10),
                    read(1, 10, 2_600_000_000, 2_600_000_001),
                ],
                "expired",
            ),
            (
                vec![
                    w,
                    other(1, What::Read { token: 10, cas: Some(7) }, 11, 12),
                    write(1, 11, 13, Some(14)),
                    other(1, What::Read { token: 11, cas: Some(7) }, 15, 16),
                ],
                "same CAS",
            ),
        ] {
            let found = contradictions(&events, &[]);
            assert!(found.len() == 1 && found[0].contains(word), "{word}: {found:?}");
        }
        // A clock that stood still in between knows of no expiry; one that did so before or behind does.
        let events = [
            other(1, What::Write { token: 10, ttl: 1 }, 0, 10),
            read(1, 10, 2_600_000_000, 2_600_000_001),
        ];
        let found = |at| contradictions(&events, &[(at, 200_000_000)]).len();
        assert_eq!([5, 1_000_000_000, 2_700_000_000].map(found), [1, 0, 1]);
    }
}
