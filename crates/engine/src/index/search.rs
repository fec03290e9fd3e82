//! Making room: the shortest chain of moves, each of an entry to its other bucket, that ends in a free place.

use super::FlashIndex;
use super::bucket::{Line, Raw, positions};

/// Buckets whose entries' other buckets are searched: the two of the entry to be inserted and those that their 34 entries
/// lead to, which makes chains of two moves. Measured with `larder bench index` at 98 % load: chains of one move force out
/// 1 entry in 10,000 insertions, chains of two none in 60 million; an index that fills up forces its first at 98.7 % and
/// at 99.9 % load. The longer search is needed so seldom that it does not show in the time of an insertion.
const SEARCHED: usize = 36;

/// Moves in the longest chain. Chains of three arise only where buckets hold fewer entries than slots (wide ones).
const LONGEST: usize = 4;

/// Which entries are to move: small ones to small slots or wide ones to wide words.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Small,
    Wide,
}

impl Kind {
    pub(super) fn live(self, line: &Line) -> u32 {
        match self {
            Kind::Small => line.live_small(),
            Kind::Wide => line.live_wide(),
        }
    }

    pub(super) fn free(self, line: &Line) -> u32 {
        match self {
            Kind::Small => line.free_small(),
            Kind::Wide => line.free_wide(),
        }
    }
}

/// A chain: the entry in the last place moves to the free one, that in the place before it to the last, and so on, which
/// leaves the first place to the entry to be inserted.
pub(super) struct Chain {
    places: [(u32, usize); LONGEST],
    len: usize,
    free: (u32, usize),
}

/// A bucket that the search has reached.
#[derive(Clone, Copy, Default)]
struct Step {
    bucket: u32,
    /// The step before it; a root is its own parent.
    parent: u8,
    /// Position, in the parent's bucket, of the entry that would move here.
    pos: u8,
    /// Moves from a root to here.
    depth: u8,
}

impl FlashIndex {
    /// The shortest chain that frees a place for `kind` in one of `roots`, none of which has a free one.
    pub(super) fn find_chain(&self, roots: &[u32], kind: Kind) -> Option<Chain> {
        let mut steps = [Step::default(); SEARCHED];
        for (i, &bucket) in roots.iter().enumerate() {
            steps[i] = Step { bucket, parent: i as u8, pos: 0, depth: 0 };
        }
        let mut reached = roots.len();
        let mut at = 0;
        while at < reached {
            let Step { bucket: from, depth, .. } = steps[at];
            let line = self.line(from);
            for pos in positions(kind.live(&line)) {
                let to = self.other(from, line.tag(pos));
                if to == from {
                    continue;
                }
                let free = kind.free(&self.line(to));
                if free != 0 {
                    return Some(chain(&steps, at, pos, (to, free.trailing_zeros() as usize)));
                }
                // No bucket twice: it leads nowhere new.
                if reached < SEARCHED
                    && usize::from(depth) + 1 < LONGEST
                    && steps[..reached].iter().all(|s| s.bucket != to)
                {
                    steps[reached] =
                        Step { bucket: to, parent: at as u8, pos: pos as u8, depth: depth + 1 };
                    reached += 1;
                }
            }
            at += 1;
        }
        None
    }

    /// Puts `raw` in the chain's first place and moves the others along. In this order, from the front, a cut loses the
    /// entry that is in hand and doubles none. Returns the number of moves.
    pub(super) fn move_along(&mut self, chain: &Chain, raw: Raw) -> u8 {
        let mut hand = raw;
        for &(bucket, pos) in &chain.places[..chain.len] {
            let next = self.line(bucket).raw(pos);
            self.write(bucket, pos, hand);
            hand = next;
        }
        self.write(chain.free.0, chain.free.1, hand);
        chain.len as u8
    }
}

fn chain(steps: &[Step; SEARCHED], last: usize, pos: usize, free: (u32, usize)) -> Chain {
    let mut places = [(0, 0); LONGEST];
    let len = usize::from(steps[last].depth) + 1;
    let (mut at, mut pos) = (last, pos);
    for place in places[..len].iter_mut().rev() {
        *place = (steps[at].bucket, pos);
        (at, pos) = (usize::from(steps[at].parent), usize::from(steps[at].pos));
    }
    Chain { places, len, free }
}
