//! Which batches count, and where the log ends.
//!
//! Freed segments and batches behind the log's end stay readable, so what can be read is more than what counts:
//!
//! * Only segments from the oldest live one on count; a FRONTIER names it.
//! * A batch is void if one with an equal or lower number has a later run: that run began again before it. Of two batches
//!   with one number and run, that of the later segment counts: the write to the earlier one failed.
//! * Batches above the number known durable are the tail. The log ends at the first of them that is missing, torn, or has
//!   another predecessor than the batch before.
//! * At or below that number a missing batch, or one that its successor does not name, is damage. The log goes on behind it.
//!
//! All functions here are about one chain: the main one, or that of one parked segment.

use std::ops::Range;

/// What the rules need to know of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Its number.
    pub number: u64,
    /// The run that wrote it.
    pub run: u64,
    /// Generation of its segment.
    pub generation: u64,
    /// Hash of its head; it stands for the run, too.
    pub hash: u64,
    /// Hash of the head before.
    pub before: u64,
    /// Number of the last batch known durable when it was written.
    pub known: u64,
}

/// What a number of the chain turns out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Its batch follows the one before, or damage.
    Follows,
    /// The log ends before it.
    EndOfTail,
    /// Its batch was durable, and is missing or not the one that the next batch names: it is lost, and the log goes on.
    Damage,
}

/// The number of the last batch that any of these knew durable: a void one knew it, too.
pub fn known_durable<'a>(links: impl IntoIterator<Item = &'a Link>) -> u64 {
    links.into_iter().map(|link| link.known).max().unwrap_or(0)
}

/// Which of these batches count, ascending by number and at most one of each, where `oldest` is the generation of the oldest
/// segment that is live: their places in `links`.
pub fn counting(links: &[Link], oldest: u64) -> Vec<usize> {
    counting_by(links.len(), |i| links[i], oldest)
}

fn counting_by(count: usize, link: impl Fn(usize) -> Link, oldest: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).filter(|&i| link(i).generation >= oldest).collect();
    order.sort_by_key(|&i| {
        let Link { number, run, generation, .. } = link(i);
        (number, run, generation)
    });
    let mut latest = 0;
    // Those that count, in the place of those that were looked at.
    let mut counting = 0;
    for at in 0..order.len() {
        let i = order[at];
        let Link { number, run, .. } = link(i);
        if run < latest {
            continue;
        }
        latest = run;
        // Sorted: the last of a number is the one that counts.
        let before = order[..counting].last();
        if before.is_some_and(|&before| link(before).number == number) {
            counting -= 1;
        }
        order[counting] = i;
        counting += 1;
    }
    order.truncate(counting);
    order
}

/// Walks along a chain, number by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Walk {
    next: u64,
    known: u64,
    before: Option<u64>,
}

impl Walk {
    /// Begins at batch `first`, whose predecessor is freed, in a log whose batches up to `known` are known durable.
    pub fn new(first: u64, known: u64) -> Walk {
        Walk { next: first, known, before: None }
    }

    /// The number whose turn it is.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Hash of the batch before, unless that one is lost or freed.
    pub fn before(&self) -> Option<u64> {
        self.before
    }

    /// What the number is whose turn it is. `found` is the batch that counts as this number ([`counting`]), `after` the one
    /// that counts as the next; nothing where there is none. At the end of the tail the walk stays where it is.
    pub fn step(&mut self, found: Option<&Link>, after: Option<&Link>) -> Verdict {
        let found = found.filter(|link| link.number == self.next);
        let after = after.filter(|link| link.number.checked_sub(1) == Some(self.next));
        let linked = |link: &Link| self.before.is_none_or(|hash| link.before == hash);
        if self.next > self.known && !found.is_some_and(linked) {
            return Verdict::EndOfTail;
        }
        // A successor in the tail contradicts nobody: it is the one that is doubted.
        let after = after.filter(|_| self.next < self.known);
        let found = found.filter(|link| after.is_none_or(|after| after.before == link.hash));
        self.before = found.map(|link| link.hash);
        self.next = self.next.saturating_add(1);
        if found.is_some() { Verdict::Follows } else { Verdict::Damage }
    }

    /// Passes numbers that have no batch, up to `to` or the end of the tail.
    fn pass(&mut self, to: u64) -> Range<u64> {
        let from = self.next;
        self.next = to.min(self.known.saturating_add(1)).max(from);
        if self.next > from {
            self.before = None;
        }
        from..self.next
    }
}

/// A chain, read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The batches of the log in their order: their places among those that were given.
    pub batches: Vec<usize>,
    /// Numbers of batches that are lost, ascending.
    pub damaged: Vec<Range<u64>>,
    /// Number of the next batch that will be written.
    pub next: u64,
    /// What that batch will name as the hash of the head before: 0 if there is none, or if it is lost.
    pub before: u64,
}

/// Reads a chain from all batches of it that verify, in any order. `oldest` is the generation of the oldest live segment,
/// `first` the number of its first batch.
pub fn read(links: &[Link], oldest: u64, first: u64) -> Reading {
    read_by(links.len(), |i| links[i], oldest, first)
}

/// The same of so many batches, each of which `link` says when it is asked for: a log of small writes has millions.
pub fn read_by(count: usize, link: impl Fn(usize) -> Link, oldest: u64, first: u64) -> Reading {
    let known = (0..count).map(|i| link(i).known).max().unwrap_or(0);
    let counting = counting_by(count, &link, oldest);
    let mut batches = Vec::with_capacity(counting.len());
    let mut rest = counting.into_iter().filter(|&i| link(i).number >= first).peekable();
    let mut walk = Walk::new(first, known);
    let mut damaged: Vec<Range<u64>> = Vec::new();
    loop {
        let here = rest.next_if(|&i| link(i).number == walk.next);
        let after = rest.peek().map(|&i| link(i));
        let after = after.as_ref();
        let lost = match here {
            Some(i) => match walk.step(Some(&link(i)), after) {
                Verdict::EndOfTail => break,
                Verdict::Damage => walk.next - 1..walk.next,
                Verdict::Follows => {
                    batches.push(i);
                    continue;
                }
            },
            None => walk.pass(after.map_or(u64::MAX, |after| after.number)),
        };
        match damaged.last_mut() {
            _ if lost.is_empty() => break,
            Some(before) if before.end == lost.start => before.end = lost.end,
            _ => damaged.push(lost),
        }
    }
    Reading { batches, damaged, next: walk.next, before: walk.before.unwrap_or(0) }
}
