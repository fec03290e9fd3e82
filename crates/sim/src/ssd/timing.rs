//! When a device is done: channels that work one operation at a time.

use larder_base::Nanos;

use super::ftl::Work;

/// How long flash takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Reading a page.
    pub read: Nanos,
    /// Programming a page.
    pub program: Nanos,
    /// Erasing a block.
    pub erase: Nanos,
}

impl Default for Timing {
    /// Typical of 3D TLC: 60 µs, 600 µs, 3.5 ms.
    fn default() -> Timing {
        Timing {
            read: Nanos::from_micros(60),
            program: Nanos::from_micros(600),
            erase: Nanos::from_micros(3_500),
        }
    }
}

/// Channels × planes that each serve one operation after the other. Super-blocks are striped over all of them, so page
/// numbers choose the channel; the cleaner's work occupies channels like the host's, which is what delays reads.
#[derive(Clone, Debug)]
pub struct Channels {
    timing: Timing,
    /// When each is free.
    free_at: Vec<Nanos>,
    /// Where the next programmed page goes.
    next: usize,
    /// Time spent working, summed over channels.
    busy: Nanos,
}

impl Channels {
    /// `count` idle channels (at least 1).
    pub fn new(count: usize, timing: Timing) -> Channels {
        Channels { timing, free_at: vec![Nanos::ZERO; count.max(1)], next: 0, busy: Nanos::ZERO }
    }

    fn occupy(&mut self, channel: usize, now: Nanos, span: Nanos) -> Nanos {
        let free_at = &mut self.free_at[channel];
        *free_at = Nanos(free_at.0.max(now.0)) + span;
        self.busy = self.busy + span;
        *free_at
    }

    /// A host read of one page issued at `now`; returns when it is done.
    pub fn read(&mut self, now: Nanos, page: u32) -> Nanos {
        let channel = page as usize % self.free_at.len();
        self.occupy(channel, now, self.timing.read)
    }

    /// A host write of one page issued at `now`, with the cleaning that it set off; returns when the host's own page is
    /// programmed (no write buffer is modelled).
    pub fn write(&mut self, now: Nanos, work: Work) -> Nanos {
        let count = self.free_at.len();
        for _ in 0..work.erases {
            // A super-block has a block on every channel.
            for channel in 0..count {
                self.occupy(channel, now, self.timing.erase);
            }
        }
        for _ in 0..work.reads {
            self.occupy(self.next, now, self.timing.read);
            self.occupy(self.next, now, self.timing.program);
            self.next = (self.next + 1) % count;
        }
        let done = self.occupy(self.next, now, self.timing.program);
        self.next = (self.next + 1) % count;
        done
    }

    /// The share of all channels' time up to `now` spent working.
    pub fn utilisation(&self, now: Nanos) -> f64 {
        if now == Nanos::ZERO {
            return 0.0;
        }
        (self.busy.as_secs_f64() / self.free_at.len() as f64 / now.as_secs_f64()).min(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cleaning_delays_reads() {
        let mut idle = Channels::new(4, Timing::default());
        let quick = idle.read(Nanos::ZERO, 0);
        assert_eq!(quick, Nanos::from_micros(60));
        let mut busy = Channels::new(4, Timing::default());
        busy.write(Nanos::ZERO, Work { programs: 1, reads: 0, erases: 1 });
        assert_eq!(busy.read(Nanos::ZERO, 0), Nanos::from_micros(3_500 + 600 + 60));
        assert_eq!(busy.read(Nanos::ZERO, 1), Nanos::from_micros(3_500 + 60));
        // Later the channel is idle again.
        assert_eq!(busy.read(Nanos::from_secs(1), 0), Nanos::from_secs(1) + Nanos::from_micros(60));
        assert!(busy.utilisation(Nanos::from_secs(1)) > 0.0);
    }
}
