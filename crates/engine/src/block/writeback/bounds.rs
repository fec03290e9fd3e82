//! What volumes may hold of the write log: together four fifths of it without its reserve, each what is stated of it, else an equal part of the rest.
//!
//! What is stated must fit together when a server starts ([`LogSize::check`]). What no longer fits, since volumes have come or are put aside with what is
//! dirty, is less until it does ([`LogSize::divide`]); nobody is refused for that.

use larder_base::ByteSize;

/// Less of the log is not worth having: a batch of it may be as long.
pub const LEAST: u64 = 1 << 20;
/// What a volume may hold of the log where nothing is stated, at most.
const MOST_SHARE: u64 = 4 << 30;
/// A volume that holds so much of its bound, of 1, is as slow as its store.
const NEARLY: f64 = 0.9;

/// How large a log is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSize {
    /// Its segments,
    pub segments: u32,
    /// and the bytes of one.
    pub segment: u32,
}

/// Why volumes cannot hold of a log what is stated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotHeld {
    /// It is less than is worth having.
    #[error("{0} of the write log is too little: give it {least} at least", least = ByteSize(LEAST))]
    TooLittle(ByteSize),
    /// One volume is to hold more than the log has for it.
    #[error(
        "{stated} is more than it can hold of the write log, which has {log}: four fifths of that without its reserve, {most}; give it {most} at most, or \
         make the log larger (it is as large as its cache was formatted with)"
    )]
    TooMuch {
        /// What it is to hold,
        stated: ByteSize,
        /// what it can,
        most: ByteSize,
        /// and what the log has.
        log: ByteSize,
    },
    /// Several are to hold more than that together.
    #[error(
        "{stated} together are more than {volumes} volumes can hold of the write log, which has {log}: four fifths of that without its reserve, and {least} for each \
         of which nothing is stated; give them {most} together at most, or make the log larger (it is as large as \
         its cache was formatted with)",
        least = ByteSize(LEAST)
    )]
    TooMuchTogether {
        /// What is stated,
        stated: ByteSize,
        /// what can be,
        most: ByteSize,
        /// what the log has,
        log: ByteSize,
        /// and how many volumes write back.
        volumes: usize,
    },
}

impl LogSize {
    /// Bytes of all segments.
    pub fn bytes(self) -> u64 {
        u64::from(self.segments) * u64::from(self.segment)
    }

    /// Segments that client writes leave: two, and one for each of so many volumes, as far as there are that many.
    pub fn reserve(self, volumes: usize) -> u32 {
        (2 + volumes as u32).min(self.segments / 2)
    }

    /// What so many volumes may hold together.
    pub fn all(self, volumes: usize) -> u64 {
        u64::from(self.segments - self.reserve(volumes)) * u64::from(self.segment) / 5 * 4
    }

    /// Whether volumes can hold together what is stated of each.
    ///
    /// # Errors
    /// [`NotHeld`], with the most that can be stated.
    pub fn check(self, stated: &[Option<u64>]) -> Result<(), NotHeld> {
        if let Some(&little) = stated.iter().flatten().find(|&&most| most < LEAST) {
            return Err(NotHeld::TooLittle(ByteSize(little)));
        }
        // As it is written: in whole MiB.
        let whole = |bytes: u64| ByteSize(bytes / LEAST * LEAST);
        let log = ByteSize(self.bytes());
        let most = self.all(1);
        if let Some(&much) = stated.iter().flatten().find(|&&much| much > most) {
            let (stated, most) = (ByteSize(much), whole(most));
            return Err(NotHeld::TooMuch { stated, most, log });
        }
        let sum: u64 = stated.iter().flatten().sum();
        let volumes = stated.len();
        let others = stated.iter().filter(|stated| stated.is_none()).count() as u64;
        let most = self.all(volumes).saturating_sub(others * LEAST);
        match sum > 0 && sum > most {
            true => {
                let (stated, most) = (ByteSize(sum), whole(most));
                Err(NotHeld::TooMuchTogether { stated, most, log, volumes })
            }
            false => Ok(()),
        }
    }

    /// What is in force of each of these volumes, by what is stated of it. `volumes`: how many there are, also those that are put aside; `aside`: what those hold.
    pub fn divide(self, stated: &[Option<u64>], volumes: usize, aside: u64) -> Vec<u64> {
        let all = self.all(volumes).saturating_sub(aside);
        let each = all / stated.len().max(1) as u64;
        // Who states nothing keeps something beside those who do.
        let least = LEAST.min(each / 4);
        let others = stated.iter().filter(|stated| stated.is_none()).count() as u64;
        let sum = stated.iter().flatten().fold(0, |sum: u64, &bytes| sum.saturating_add(bytes));
        let theirs = all - others * least;
        let rest = all.saturating_sub(sum) / others.max(1);
        let of = |bytes: u64| match sum > theirs {
            true => (u128::from(bytes) * u128::from(theirs) / u128::from(sum)) as u64,
            false => bytes,
        };
        stated.iter().map(|stated| stated.map_or(rest.max(least).min(MOST_SHARE), of)).collect()
    }
}

/// Whether a volume that holds so much of its bound is as slow as its store.
pub fn is_nearly_full(held: u64, bound: u64) -> bool {
    bound > 0 && held as f64 >= NEARLY * bound as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    /// A log of 64 MiB.
    const LOG: LogSize = LogSize { segments: 8, segment: 8 << 20 };

    #[test]
    fn what_one_states_beyond_what_the_log_can_hold_is_refused_with_what_it_can() {
        assert!(LOG.check(&[Some(32 * MIB)]).is_ok() && LOG.check(&[None, None]).is_ok());
        for much in [32 * MIB + 1, 64 * MIB, 1 << 40] {
            let why = LOG.check(&[Some(much)]).unwrap_err().to_string();
            assert!(why.contains("which has 64 MiB") && why.contains("32 MiB at most"), "{why}");
        }
        let why = LOG.check(&[Some(MIB - 1)]).unwrap_err().to_string();
        assert!(why.contains("1 MiB at least"), "{why}");
    }

    #[test]
    fn what_several_state_beyond_what_the_log_can_hold_is_refused_with_what_it_can() {
        // Two volumes: 8 segments without 4, and of those four fifths, are 25.6 MiB.
        assert!(LOG.check(&[Some(15 * MIB), Some(10 * MIB)]).is_ok());
        let why = LOG.check(&[Some(16 * MIB), Some(10 * MIB)]).unwrap_err().to_string();
        for words in ["26 MiB together", "2 volumes", "25 MiB together at most", "has 64 MiB"] {
            assert!(why.contains(words), "{why}");
        }
        assert!(LOG.check(&[Some(24 * MIB), None]).is_ok());
        assert!(LOG.check(&[Some(25 * MIB), None]).is_err(), "1 MiB is left for the other");
    }

    #[test]
    fn what_no_longer_fits_is_less_and_nobody_has_nothing() {
        let all = LOG.all(3);
        let of = LOG.divide(&[Some(30 * MIB), Some(MIB), None], 3, 0);
        assert!(of.iter().sum::<u64>() <= all && of.iter().sum::<u64>() > all - 3, "{of:?}");
        // Those that state something are less in proportion.
        assert_eq!((of[0] / (30 * 1024), of[2]), (of[1] / 1024, MIB));
        assert_eq!(LOG.divide(&[Some(8 * MIB), None, None], 3, 0)[1..], [(all - 8 * MIB) / 2; 2]);
        assert_eq!(LOG.divide(&[None], 2, 20 * MIB), [LOG.all(2) - 20 * MIB]);
        // Those that are put aside hold nearly all.
        let of = LOG.divide(&[Some(8 * MIB), None], 3, all - 4096);
        assert!(of.iter().all(|&of| of > 0) && of.iter().sum::<u64>() <= 4096, "{of:?}");
        assert_eq!(LOG.divide(&[Some(8 * MIB), None], 3, all), [0, 0]);
    }

    #[test]
    fn nine_tenths_of_the_bound_are_nearly_full() {
        assert!(is_nearly_full(9, 10) && !is_nearly_full(8, 10) && !is_nearly_full(0, 0));
    }
}
