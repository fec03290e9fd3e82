//! Which setting is taken, of what miniatures have shown.

use super::OWN;

/// Each miniature asks so many times as much as the one before.
const STEP: f32 = 1.6;
/// What is asked is multiplied by this at least and at most.
const THRIFT: (f32, f32) = (0.04, 4.0);
/// Reads of the sample before the first move, and looks between two.
const LEAST_READS: f64 = 3000.0;
const BETWEEN: u32 = 2;
/// Writing more has to save this part of the misses; without a rate that pays for it also this part of them, times the difference of the
/// writes over their mean. Writing less may cost a part of that. (Chosen on scarab, OLTP, P3 and adaptsize: this follows our own output.)
const GAIN: f64 = 0.01;
const GAIN_UNPAID: f64 = 0.03;
const LOSS: f64 = 0.25;

/// What one miniature has shown.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rung {
    pub(super) reads: f64,
    hits: f64,
    written: f64,
}

impl Rung {
    pub(super) fn see(&mut self, keep: f64, reads: f64, hits: f64, written: f64) {
        self.reads = self.reads * keep + reads;
        self.hits = self.hits * keep + hits;
        self.written = self.written * keep + written;
    }

    /// Reads and hits were of twice as many keys.
    pub(super) fn halve(&mut self) {
        self.reads /= 2.0;
        self.hits /= 2.0;
    }

    fn misses(&self) -> f64 {
        (self.reads - self.hits) / self.reads.max(1.0)
    }
}

/// Why a setting is what it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tuned {
    /// There is too little memory for miniatures: nothing is changed.
    #[default]
    NoMemory,
    /// Too little has been seen.
    TooEarly,
    /// It has the fewest misses for what it writes.
    FewestMisses,
    /// The rate of writes allows no more than is written.
    Rate,
}

impl Tuned {
    /// The reason as statistics name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Tuned::NoMemory => "too_little_memory",
            Tuned::TooEarly => "too_early",
            Tuned::FewestMisses => "fewest_misses",
            Tuned::Rate => "write_rate",
        }
    }
}

/// What miniatures have found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuning {
    /// What is asked of a write is multiplied by this.
    pub thrift: f32,
    /// Why.
    pub reason: Tuned,
    /// The part of the reads, 0..=1, that a miniature misses with the present setting.
    pub misses: f64,
    /// The same of the miniature that misses fewest.
    pub best: f64,
    /// Looks since the last move.
    pub(super) since: u32,
}

impl Tuning {
    /// None is made, for want of memory.
    pub const NO_MEMORY: Tuning =
        Tuning { thrift: 1.0, reason: Tuned::NoMemory, misses: 0.0, best: 0.0, since: 0 };

    /// The part of all reads, 0..=1, that the setting of the best miniature would miss less.
    pub fn gain(&self) -> f64 {
        (self.misses - self.best).max(0.0)
    }
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning { reason: Tuned::TooEarly, ..Tuning::NO_MEMORY }
    }
}

impl Tuning {
    /// What the miniature at this place multiplies what is asked by.
    pub(super) fn of(&self, place: usize) -> f32 {
        let mut thrift = self.thrift;
        (place..OWN).for_each(|_| thrift /= STEP);
        (OWN..place).for_each(|_| thrift *= STEP);
        thrift
    }
}

/// Where the cache's setting moves to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    Stay,
    /// To that of the next miniature, which asks more.
    Thriftier,
    /// To that of the one before.
    Freer,
}

/// How the writes of the present setting stand to a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Paid {
    /// There is none.
    NoRate,
    /// It allows more.
    ForMore,
    /// It allows no more: of what is wanted the cut admits the best.
    ForThis,
}

/// Looks at what was seen.
pub(super) fn choose(chosen: &mut Tuning, rungs: &[Rung], paid: Paid) -> Move {
    chosen.misses = rungs[OWN].misses();
    chosen.best = rungs.iter().map(Rung::misses).fold(f64::INFINITY, f64::min);
    chosen.since += 1;
    let own = &rungs[OWN];
    if own.reads < LEAST_READS {
        return Move::Stay;
    }
    chosen.reason = match paid {
        Paid::ForThis => Tuned::Rate,
        Paid::NoRate | Paid::ForMore => Tuned::FewestMisses,
    };
    if chosen.since < BETWEEN {
        return Move::Stay;
    }
    // By which part of the misses of the present setting another has fewer, beyond what it has to have fewer for its writes.
    let gain = |of: &Rung, part: f64| {
        let more = 2.0 * (of.written - own.written) / (of.written + own.written).max(1.0);
        let unpaid = if paid == Paid::NoRate { GAIN_UNPAID * more } else { 0.0 };
        let least = GAIN.copysign(more) + unpaid;
        (own.misses() - of.misses()) / own.misses().max(1e-9) - part * least
    };
    let best = |of: &[Rung], part: f64| {
        of.iter().map(|rung| gain(rung, part)).fold(f64::NEG_INFINITY, f64::max)
    };
    let (freer, thriftier) = (best(&rungs[..OWN], 1.0), best(&rungs[OWN + 1..], LOSS));
    let next = match (freer > 0.0, thriftier > 0.0) {
        (false, false) => Move::Stay,
        (true, _) if paid == Paid::ForThis => Move::Stay,
        _ if freer > thriftier => Move::Freer,
        _ => Move::Thriftier,
    };
    let thrift = match next {
        Move::Stay => chosen.thrift,
        Move::Thriftier => chosen.thrift * STEP,
        Move::Freer => chosen.thrift / STEP,
    };
    if next == Move::Stay || !(THRIFT.0..=THRIFT.1).contains(&thrift) {
        return Move::Stay;
    }
    (chosen.thrift, chosen.since) = (thrift, 0);
    next
}
