//! The drive under one cache: the translation layer that makes writes of writes, and channels that take time.

use larder_base::Nanos;

use super::DeviceOp;
use super::spec::{Drive as Spec, Timing};
use crate::ssd::{Geometry, GeometryError, NoEviction, Ssd, Wear, Work};

/// Channels are occupied by units of so many bytes; the times of [`Timing`] are for one of them.
const UNIT: u64 = 4096;

/// One channel: reads pass the writes that wait, or not.
#[derive(Clone, Copy, Debug, Default)]
struct Channel {
    /// It is simulated up to here; in the future while reads wait.
    at: Nanos,
    /// Work of writes, copies and erases that waits.
    backlog: Nanos,
}

/// The drive's channels.
#[derive(Debug)]
struct Channels {
    channels: Vec<Channel>,
    read: Nanos,
    program: Nanos,
    erase: Nanos,
    read_priority: bool,
    /// Time spent working, over all channels.
    busy: u128,
    /// Where the next programmed unit goes.
    next: usize,
}

fn micros(us: f64) -> Nanos {
    Nanos((us * 1000.0).round() as u64)
}

impl Channels {
    fn new(timing: &Timing) -> Channels {
        Channels {
            channels: vec![Channel::default(); timing.channels as usize],
            read: micros(timing.flash_read_us),
            program: micros(timing.flash_program_us),
            erase: micros(timing.flash_erase_us),
            read_priority: timing.read_priority,
            busy: 0,
            next: 0,
        }
    }

    /// Works off what waits until `now`.
    fn advance(channel: &mut Channel, now: Nanos) {
        if now > channel.at {
            let idle = now.saturating_sub(channel.at);
            channel.backlog = channel.backlog.saturating_sub(idle);
            channel.at = now;
        }
    }

    /// A read of one unit that is asked for at `now`; returns when it is done. With priority it waits for earlier reads
    /// and for the program under way (erases are suspended), otherwise for all that came before.
    fn read(&mut self, now: Nanos, unit: u64) -> Nanos {
        let count = self.channels.len() as u64;
        let channel = &mut self.channels[(unit % count) as usize];
        let waits = channel.at > now;
        Self::advance(channel, now);
        let before = if !self.read_priority {
            channel.backlog
        } else if waits || self.program == Nanos::ZERO {
            Nanos::ZERO
        } else {
            Nanos(channel.backlog.0 % self.program.0)
        };
        channel.backlog = channel.backlog.saturating_sub(before);
        channel.at = channel.at + before + self.read;
        self.busy += u128::from(self.read.0);
        channel.at
    }

    /// Adds work to a channel; returns when it is done if no read comes first.
    fn occupy(&mut self, now: Nanos, channel: usize, span: Nanos) -> Nanos {
        let channel = &mut self.channels[channel];
        Self::advance(channel, now);
        channel.backlog = channel.backlog + span;
        self.busy += u128::from(span.0);
        channel.at + channel.backlog
    }

    /// Programs `units`, with the copies and erases that a translation layer adds. `page` units make a page of the
    /// translation layer. Returns when the last unit is programmed, if no read comes first.
    fn write(&mut self, now: Nanos, units: u64, work: Work, page: u64) -> Nanos {
        let count = self.channels.len();
        for _ in 0..work.erases {
            // A super-block has a block on every channel.
            for channel in 0..count {
                self.occupy(now, channel, self.erase);
            }
        }
        for _ in 0..u64::from(work.reads) * page {
            self.occupy(now, self.next, self.read + self.program);
            self.next = (self.next + 1) % count;
        }
        let mut done = now;
        for _ in 0..units {
            done = Nanos(done.0.max(self.occupy(now, self.next, self.program).0));
            self.next = (self.next + 1) % count;
        }
        done
    }

    /// Time spent working, in seconds, over the number of channels.
    fn busy_seconds(&self) -> f64 {
        self.busy as f64 / 1e9 / self.channels.len() as f64
    }
}

/// Why there is no such drive.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DriveError {
    /// Its capacity cannot be meant.
    #[error("the drive's capacity is {capacity}: {must}")]
    Capacity {
        /// Bytes.
        capacity: u64,
        /// What it must be.
        must: String,
    },
    /// The translation layer cannot be built.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
}

/// What was written since counting began, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// By the cache.
    pub(crate) written: u64,
    /// By the drive: whole pages, and what cleaning copied.
    pub(crate) programmed: u64,
}

impl Traffic {
    /// Bytes programmed over bytes written: device-level write amplification. 1 before any write.
    pub(crate) fn amplification(&self) -> f64 {
        if self.written == 0 { 1.0 } else { self.programmed as f64 / self.written as f64 }
    }
}

/// The drive of one cache.
#[derive(Debug)]
pub(crate) struct Drive {
    ssd: Ssd,
    page: u64,
    trim: bool,
    channels: Channels,
    /// Bytes that the cache wrote since counting began.
    written: u64,
    /// Bytes of the host's view.
    pub(crate) capacity: u64,
    /// Busy seconds when counting began.
    busy_before: f64,
}

impl Drive {
    /// The drive that `spec` states under a cache with `flash` bytes.
    ///
    /// # Errors
    /// A capacity below the cache's flash or of too many pages, a geometry that no translation layer has.
    pub(crate) fn new(
        spec: &Spec,
        timing: &Timing,
        flash: u64,
        seed: u64,
    ) -> Result<Drive, DriveError> {
        let page = spec.page.0;
        let capacity = if spec.capacity.0 == 0 { flash } else { spec.capacity.0 };
        if capacity < flash {
            let must = format!("at least the cache's flash, {flash} bytes");
            return Err(DriveError::Capacity { capacity, must });
        }
        let pages = capacity.div_ceil(page);
        if pages > 1 << 31 {
            let must = "fewer than 2^31 pages: give a larger ssd.page".to_owned();
            return Err(DriveError::Capacity { capacity, must });
        }
        let block = if spec.block.0 == 0 {
            let wanted = (capacity / 64).clamp(64 << 10, 64 << 20).max(page);
            1 << wanted.ilog2()
        } else {
            spec.block.0
        };
        let geometry = Geometry {
            logical_pages: pages as u32,
            pages_per_block: u32::try_from(block / page).unwrap_or(u32::MAX),
            over_provisioning: spec.over_provisioning,
            streams: 1,
            separate_cleaning: false,
            victim: spec.victim,
        };
        let ssd = Ssd::new(geometry, seed)?;
        Ok(Drive {
            ssd,
            page,
            trim: spec.trim,
            channels: Channels::new(timing),
            written: 0,
            capacity,
            busy_before: 0.0,
        })
    }

    fn units(offset: u64, len: u32) -> std::ops::Range<u64> {
        let end = offset + u64::from(len);
        offset / UNIT..end.div_ceil(UNIT)
    }

    /// A read that somebody waits for, asked for at `now`: when it is done. Its units are read in parallel.
    pub(crate) fn read(&mut self, now: Nanos, offset: u64, len: u32) -> Nanos {
        let done = Self::units(offset, len).map(|unit| self.channels.read(now, unit));
        done.max().unwrap_or(now)
    }

    /// A write that somebody waits for: when its last unit is programmed, if no read comes first.
    pub(crate) fn write(&mut self, now: Nanos, offset: u64, len: u32) -> Nanos {
        self.written += u64::from(len);
        let units = self.page.div_ceil(UNIT);
        let mut done = now;
        for page in self.pages(offset, len) {
            let work = self.ssd.write(page, 0, &mut NoEviction);
            done = Nanos(done.0.max(self.channels.write(now, units, work, units).0));
        }
        done
    }

    /// Whatever the cache did at `now`. Returns when what a request waits for is done, if anything is.
    pub(crate) fn apply(&mut self, now: Nanos, op: DeviceOp) -> Option<Nanos> {
        match op {
            DeviceOp::Read { offset, len } => return Some(self.read(now, offset, len)),
            DeviceOp::BackgroundRead { offset, len } => {
                let count = self.channels.channels.len();
                for unit in Self::units(offset, len) {
                    let span = self.channels.read;
                    self.channels.occupy(now, (unit % count as u64) as usize, span);
                }
            }
            DeviceOp::Write { offset, len } => {
                self.write(now, offset, len);
            }
            DeviceOp::Trim { offset, len } => {
                if self.trim {
                    for page in self.pages(offset, len) {
                        self.ssd.trim(page);
                    }
                }
            }
        }
        None
    }

    fn pages(&self, offset: u64, len: u32) -> std::ops::Range<u32> {
        let last = u64::from(self.ssd.geometry().logical_pages);
        let end = (offset + u64::from(len)).div_ceil(self.page).min(last);
        (offset / self.page).min(last) as u32..end as u32
    }

    /// Counting begins.
    pub(crate) fn reset(&mut self) {
        self.ssd.reset_traffic();
        self.written = 0;
        self.busy_before = self.channels.busy_seconds();
    }

    /// What was written since counting began.
    pub(crate) fn traffic(&self) -> Traffic {
        let pages = self.ssd.traffic();
        let programmed = (pages.host_pages + pages.copied_pages) * self.page;
        Traffic { written: self.written, programmed }
    }

    /// Erase counts since the start.
    pub(crate) fn wear(&self) -> Wear {
        self.ssd.wear()
    }

    /// The share of the channels' time spent working, of `seconds` since counting began.
    pub(crate) fn utilisation(&self, seconds: f64) -> f64 {
        if seconds <= 0.0 {
            return 0.0;
        }
        (self.channels.busy_seconds() - self.busy_before) / seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channels(read_priority: bool) -> Channels {
        Channels::new(&Timing { channels: 2, read_priority, ..Timing::default() })
    }

    const READ: Nanos = Nanos::from_micros(88);

    #[test]
    fn reads_wait_for_reads_of_their_channel() {
        let mut c = channels(true);
        assert_eq!(c.read(Nanos::ZERO, 0), READ);
        assert_eq!(c.read(Nanos::ZERO, 1), READ);
        assert_eq!(c.read(Nanos::ZERO, 2), READ + READ);
        // Once idle, it starts at once.
        let later = Nanos::from_secs(1);
        assert_eq!(c.read(later, 0), later + READ);
        assert!((c.busy_seconds() - 4.0 * 88e-6 / 2.0).abs() < 1e-12);
    }

    #[test]
    fn reads_pass_writes_but_for_the_one_under_way() {
        let ten = |c: &mut Channels| c.write(Nanos::ZERO, 20, Work::default(), 1);
        let now = Nanos::from_micros(30);
        let mut with = channels(true);
        ten(&mut with);
        // Ten programs of 21 µs a channel; at 30 µs the second is 9 µs under way.
        assert_eq!(with.read(now, 0), now + Nanos::from_micros(12) + READ);
        let mut without = channels(false);
        ten(&mut without);
        assert_eq!(without.read(now, 0), Nanos::from_micros(210) + READ);
    }

    #[test]
    fn cleaning_takes_time() {
        let mut c = channels(false);
        c.write(Nanos::ZERO, 1, Work { programs: 2, reads: 1, erases: 1 }, 1);
        // Both channels erase; the copy goes to the first, the write to the second.
        assert_eq!(c.read(Nanos::ZERO, 0), Nanos::from_micros(3_500 + 88 + 21) + READ);
        assert_eq!(c.read(Nanos::ZERO, 1), Nanos::from_micros(3_500 + 21) + READ);
    }

    #[test]
    fn writes_in_turn_are_not_amplified_and_random_ones_are() {
        let spec = Spec { block: larder_base::ByteSize::kib(256), ..Spec::default() };
        let mut rng = larder_base::Rng::new(5);
        let mut amplification = |random: bool| {
            let mut drive = Drive::new(&spec, &Timing::default(), 16 << 20, 1).unwrap();
            for i in 0..20_000u64 {
                let page = if random { rng.below(4096) } else { i % 4096 };
                drive.apply(Nanos(i), DeviceOp::Write { offset: page << 12, len: 4096 });
            }
            drive.traffic().amplification()
        };
        assert!(amplification(false) < 1.02);
        assert!(amplification(true) > 3.0);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let refuse = |spec: &Spec, flash: u64, words: &str| {
            let e = Drive::new(spec, &Timing::default(), flash, 1).unwrap_err().to_string();
            assert!(e.contains(words), "{e}");
        };
        let mut spec = Spec { capacity: larder_base::ByteSize::mib(1), ..Spec::default() };
        refuse(&spec, 2 << 20, "the drive's capacity is 1048576: at least");
        spec.capacity = larder_base::ByteSize(0);
        refuse(&spec, 1 << 50, "larger ssd.page");
    }
}
