//! How many requests a worker passes on together.

/// After how many requests a worker starts what it has taken, and after how many answers it sends what it has.
///
/// Once a turn would cost the fewest system calls. But then a client's requests go round together: it sends as many as it may have
/// under way, the worker takes all, starts all, is woken when they have ended, and answers all; meanwhile either the drive or the
/// processors have nothing to do. With some passed on before the others are looked at, the drive works while requests are still
/// being taken, and the client while answers are still being made. What is left over goes at the end of the turn, so a request
/// that is alone waits for no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Requests (of a key-value server: reads of flash) that are started together, at most.
    pub submit: u32,
    /// Answers that are sent together, at most, where they come while others are waited for.
    pub send: u32,
}

impl Batch {
    /// What a key-value server uses: nearly always all of a turn.
    pub const OBJECTS: Batch = Batch { submit: 64, send: 64 };
    /// What a block server uses. Over NBD on two processors, hits that were started four at a time were 1.12 times as many with 16 under way, and 1.28
    /// times with 64, as those started with the turn, at 0.96 and 1.15 times the processor time each. (Writes to the write log of a block cache
    /// are not counted: they are one write of the turn, and were a sixth fewer in fours.) Answers gave no difference.
    pub const BLOCKS: Batch = Batch { submit: 4, send: 64 };
}

/// What has piled up and was not passed on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pile(u32);

impl Pile {
    /// One more. Returns whether it is time to pass all of them on: then it is taken that they are.
    pub fn is_full(&mut self, most: u32) -> bool {
        self.0 += 1;
        let full = self.0 >= most;
        if full {
            self.0 = 0;
        }
        full
    }

    /// All were passed on.
    pub fn clear(&mut self) {
        self.0 = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pile_is_full_at_each_multiple_and_begins_anew() {
        let mut pile = Pile::default();
        let mut full = |times: usize| (0..times).map(|_| pile.is_full(4)).collect::<Vec<_>>();
        assert_eq!(full(5), [false, false, false, true, false]);
        assert_eq!(full(3), [false, false, true]);
        let mut pile = Pile::default();
        pile.is_full(4);
        pile.clear();
        assert_eq!([1; 4].map(|_| pile.is_full(4)), [false, false, false, true]);
        assert!(Pile::default().is_full(1));
    }
}
