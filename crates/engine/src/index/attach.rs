//! Making an index in fresh memory, and finding it again in memory that outlived a process.
//!
//! The header, in words: 0 magic and version, 1 number of buckets, 2 journal, 3 number of buckets before any was split, 4 to 7 zero, 8 to 15
//! the owner's.

use larder_base::Words;

use super::bucket::{Line, PAIRS, Runs, WORDS, positions};
use super::grow::{MOST_TIMES, Spots};
use super::{BASE, ClockBits, FlashIndex, HEADER_WORDS, JOURNAL, Place, least_width};

/// "LARDIX" and the version of the layout, 1.
const MAGIC: u64 = 0x4c41_5244_4958_0001;

/// What [`FlashIndex::attach`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attached {
    /// Entries kept.
    pub kept: u64,
    /// Entries dropped, because the caller did not want their segment, or a kill had left them in two buckets.
    pub dropped: u64,
    /// Buckets wiped: one that a kill had caught in the middle of a change, and any that no index can have written.
    pub wiped_buckets: u32,
}

/// Why memory could not be taken for an index.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IndexError {
    /// Not even a header and one bucket, or more buckets than can be numbered, or a broken line.
    #[error(
        "{words} words cannot hold a flash index: it needs {HEADER_WORDS} and 8 for each of 1 to 4294967295 buckets"
    )]
    Size {
        /// Number of words offered.
        words: usize,
    },
    /// The header is of something else, of another version, or of an index whose making was cut.
    #[error(
        "this memory holds no flash index of layout version 1 (its first word is {found:#018x}): make a new one"
    )]
    Foreign {
        /// The first word.
        found: u64,
    },
    /// The header speaks of another size.
    #[error(
        "the flash index in this memory says that it has {recorded} buckets, and the memory has room for {room}: make a new one"
    )]
    Buckets {
        /// Buckets according to the header.
        recorded: u64,
        /// Buckets that the memory holds.
        room: u32,
    },
    /// The journal names a bucket that does not exist.
    #[error(
        "the journal of the flash index in this memory names bucket {bucket} of {buckets}: make a new one"
    )]
    Journal {
        /// The bucket named.
        bucket: u64,
        /// Buckets that there are.
        buckets: u32,
    },
}

/// Whether a bucket can be the work of an index at all: what is empty is zero, and no extent is empty. Memory that
/// something else wrote to fails this mostly; what passes names places where no object is found.
fn is_sound(line: &Line) -> bool {
    positions(line.free_small() | line.free_wide()).all(|pos| !line.raw(pos).is_dirty())
        && positions(line.live_wide()).all(|pos| {
            !matches!(line.raw(pos).entry(Runs::default()).place, Place::Extent { length: 0, .. })
        })
}

fn buckets_in(words: &Words) -> Result<u32, IndexError> {
    let bad = IndexError::Size { words: words.len() };
    let body = words.len().checked_sub(HEADER_WORDS).ok_or(bad.clone())?;
    if body == 0 || !body.is_multiple_of(WORDS) {
        return Err(bad);
    }
    u32::try_from(body / WORDS).map_err(|_| bad)
}

impl FlashIndex {
    /// Makes an empty index that fills `words` ([`Self::words_for`] says how many), whatever they held. Words that are
    /// zero already are not written, so that fresh memory stays untouched.
    ///
    /// # Errors
    /// [`IndexError::Size`].
    pub fn create(words: Words, clock: ClockBits) -> Result<FlashIndex, IndexError> {
        let base = buckets_in(&words)?;
        Self::create_in(words, base, clock)
    }

    /// The same of `base` buckets, in words that have room for more of them: it can grow into that.
    ///
    /// # Errors
    /// [`IndexError::Size`].
    pub fn create_in(
        mut words: Words,
        base: u32,
        clock: ClockBits,
    ) -> Result<FlashIndex, IndexError> {
        let room = buckets_in(&words)?;
        let bad = IndexError::Size { words: words.len() };
        if base == 0 || base > room || !words.supply(Self::words_for(base)) {
            return Err(bad);
        }
        for index in 0..Self::words_for(base) {
            if words.load(index) != 0 {
                words.store(index, 0);
            }
        }
        words.store(1, u64::from(base));
        words.store(BASE, u64::from(base));
        // Last, so that an index whose making was cut is not taken for one.
        words.store(0, MAGIC);
        Ok(FlashIndex::over(words, base, base, clock))
    }

    fn over(words: Words, base: u32, buckets: u32, clock: ClockBits) -> FlashIndex {
        let spots = Spots::new(base, buckets);
        let clock_max = clock.max();
        let runs = Runs::default();
        FlashIndex {
            words,
            buckets,
            base,
            spots,
            clock_max,
            runs,
            len: 0,
            wide: 0,
            hot: 0,
            hand: 0,
        }
    }

    /// The same empty index, of a flash of so many segments: at first of up to 4,095.
    ///
    /// # Panics
    /// If it is not empty.
    #[must_use]
    pub fn of_segments(mut self, segments: u16) -> FlashIndex {
        assert!(self.is_empty(), "an index that has entries");
        self.runs = Runs::of(segments);
        self
    }

    /// Whether `words` may hold an index that began with `base` buckets.
    pub fn began_with(words: &Words, base: u32) -> bool {
        let began = match words.load(BASE) {
            0 => words.load(1),
            began => began,
        };
        words.load(0) == MAGIC && began == u64::from(base)
    }

    /// Takes over an index that another process left in `words`, in one pass: wipes what a kill caught half-changed,
    /// drops the entries of segments that `keep` does not want, counts the rest. May itself be cut and repeated. It must have been an index
    /// of a flash of as many `segments`.
    ///
    /// # Errors
    /// If `words` hold no index of this layout and size. The caller makes a new one: a cache may forget.
    pub fn attach(
        mut words: Words,
        clock: ClockBits,
        segments: u16,
        mut keep: impl FnMut(u16) -> bool,
    ) -> Result<(FlashIndex, Attached), IndexError> {
        let room = buckets_in(&words)?;
        let (recorded, base) = match (words.load(0), words.load(1), words.load(BASE)) {
            // One that was made before indexes could grow.
            (MAGIC, recorded, 0) => (recorded, recorded),
            (MAGIC, recorded, base) => (recorded, base),
            (found, ..) => return Err(IndexError::Foreign { found }),
        };
        let could_be =
            (1..=recorded).contains(&base) && recorded <= base.saturating_mul(MOST_TIMES);
        let fits = recorded <= u64::from(room) && words.supply(Self::words_for(recorded as u32));
        if !could_be || !fits {
            return Err(IndexError::Buckets { recorded, room });
        }
        let buckets = recorded as u32;
        if words.load(BASE) != base {
            words.store(BASE, base);
        }
        let mut index = FlashIndex::over(words, base as u32, buckets, clock).of_segments(segments);
        let mut report = Attached::default();
        match index.words.load(JOURNAL) {
            0 => {}
            marked if marked <= u64::from(buckets) => {
                index.wipe((marked - 1) as u32);
                report.wiped_buckets = 1;
            }
            marked => return Err(IndexError::Journal { bucket: marked - 1, buckets }),
        }
        for bucket in 0..buckets {
            let line = index.line(bucket);
            if line.0 == [0; WORDS] {
                continue;
            }
            if !is_sound(&line) {
                index.wipe(bucket);
                report.wiped_buckets += 1;
                continue;
            }
            let mut settle = line.width() > 0;
            for pos in positions(line.live()) {
                let raw = line.raw(pos);
                let entry = raw.entry(index.runs);
                index.count_in(raw);
                // What a split had not yet cleared where it was is found where it went.
                if !index.belongs(bucket, line.tag(pos)) || !keep(entry.segment) {
                    index.clear(bucket, pos);
                    report.dropped += 1;
                    settle = true;
                } else if entry.clock > index.clock_max {
                    let line = index.line(bucket);
                    index.update(bucket, &line, &line.with_clock(pos, index.clock_max));
                }
            }
            if settle {
                index.settle(bucket);
            }
        }
        report.kept = index.len;
        Ok((index, report))
    }

    fn wipe(&mut self, bucket: u32) {
        let base = HEADER_WORDS + bucket as usize * WORDS;
        self.words.store(JOURNAL, u64::from(bucket) + 1);
        (base..base + WORDS).for_each(|word| self.words.store(word, 0));
        self.words.store(JOURNAL, 0);
    }

    /// Walks the whole index and checks everything that must hold between two calls.
    ///
    /// # Errors
    /// What does not hold, and where.
    pub fn validate(&self) -> Result<(), String> {
        if self.words.load(0) != MAGIC
            || self.words.load(1) != u64::from(self.buckets)
            || self.words.load(BASE) != u64::from(self.base)
        {
            return Err("the header is damaged".into());
        }
        if self.words.load(JOURNAL) != 0 {
            return Err(format!("the journal names bucket {}", self.words.load(JOURNAL) - 1));
        }
        let (mut len, mut wide, mut hot) = (0, 0, 0);
        for bucket in 0..self.buckets {
            let line = self.line(bucket);
            let pairs = line.live_wide().count_ones();
            if line.width() != least_width(pairs) {
                return Err(format!(
                    "bucket {bucket}: {pairs} wide entries in {} words",
                    PAIRS[line.width()]
                ));
            }
            if let Some(pos) = positions(line.free_small() | line.free_wide())
                .find(|&pos| line.raw(pos).is_dirty())
            {
                return Err(format!("bucket {bucket}: slot {pos} is empty but not zero"));
            }
            for pos in positions(line.live()) {
                let entry = line.raw(pos).entry(self.runs);
                if entry.clock > self.clock_max {
                    return Err(format!(
                        "bucket {bucket}: slot {pos}: CLOCK {} above {}",
                        entry.clock, self.clock_max
                    ));
                }
                if !self.belongs(bucket, line.tag(pos)) {
                    return Err(format!("bucket {bucket}: slot {pos} is of another bucket"));
                }
                if matches!(entry.place, Place::Extent { length: 0, .. }) {
                    return Err(format!("bucket {bucket}: slot {pos}: an extent of no pages"));
                }
                len += 1;
                hot += u64::from(entry.clock > 0);
            }
            wide += u64::from(pairs);
        }
        if (len, wide, hot) != (self.len, self.wide, self.hot) {
            return Err(format!(
                "counted {len} entries, {wide} wide, {hot} hot; kept {}, {}, {}",
                self.len, self.wide, self.hot
            ));
        }
        Ok(())
    }
}
