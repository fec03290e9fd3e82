//! What follows when I/O of the cache device fails.
//!
//! Queues and maintenance are told every end of an I/O of lines or of pages of the table, and both say it
//! [here](Limits::flash_ended):
//!
//! - One that succeeds shows that the device works, also when what was read makes no sense: that is damage to be read around.
//! - One that finds no space begins a [pause](super::backoff) in which nothing new is cached. The device is good for what it has.
//! - Any other failure counts. After 64 of them one after the other the cache is given up: every hit would ask the
//!   device first.
//!
//! The map's log says by itself when it cannot go on; one failure is enough there.

use std::sync::atomic::{AtomicU32, Ordering};

use larder_base::Nanos;
use larder_format::block::{Layout, table};

use super::limits::Limits;
use crate::block::api::{IoFailed, Sum};

/// What failed of an I/O of the cache device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlashError {
    /// The device did not do it.
    Device,
    /// The file system under it has no room.
    NoSpace,
    /// It was read, and is not what was written there.
    Damaged,
}

impl From<&std::io::Error> for FlashError {
    fn from(error: &std::io::Error) -> FlashError {
        use std::io::ErrorKind;
        match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => FlashError::NoSpace,
            _ => FlashError::Device,
        }
    }
}

/// A shard need not know why.
impl From<FlashError> for IoFailed {
    fn from(_: FlashError) -> IoFailed {
        IoFailed
    }
}

/// What a page of a shard's table says of its slots, as it was read from the device.
///
/// # Errors
/// When it is not that page, or not whole.
pub fn page_slots(
    layout: &Layout,
    generation: u64,
    (shard, page): (u32, u32),
    bytes: &[u8],
) -> Result<Vec<Option<Sum>>, FlashError> {
    let number = layout.table_number(shard, page);
    let slots = table::decode(bytes, generation, number).ok_or(FlashError::Damaged)?;
    let per = (layout.shard_slots() / layout.table_pages().max(1)) as usize;
    Ok(slots.take(per).map(|sum| sum.map(Sum)).collect())
}

/// What follows from the end of an I/O.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failing {
    /// Nothing new is cached for so long.
    Pauses(Nanos),
    /// The cache is given up, for this reason.
    GivesUp(String),
}

/// I/Os that fail one after the other before the device is given up.
const FAILURES: u32 = 64;

/// Counts I/Os of the cache device that fail one after the other.
#[derive(Debug)]
pub struct Failures {
    most: u32,
    count: AtomicU32,
}

impl Default for Failures {
    fn default() -> Failures {
        Failures::of(FAILURES)
    }
}

impl Failures {
    /// A device is given up after so many.
    pub fn of(most: u32) -> Failures {
        Failures { most, count: AtomicU32::new(0) }
    }

    fn failed(&self) -> Option<String> {
        let gives_up = self.count.fetch_add(1, Ordering::Relaxed) + 1 == self.most;
        let why =
            || format!("{} operations of the cache device failed one after the other", self.most);
        gives_up.then(why)
    }

    /// The device works, or another has taken its place.
    pub fn works(&self) {
        if self.count.load(Ordering::Relaxed) > 0 {
            self.count.store(0, Ordering::Relaxed);
        }
    }
}

impl Limits {
    /// An I/O of lines or of a page of the table has ended so. See the [module](self).
    #[must_use = "the cache may have to be given up"]
    pub fn flash_ended(&self, now: Nanos, ended: Result<(), FlashError>) -> Option<Failing> {
        match ended {
            Ok(()) | Err(FlashError::Damaged) => {
                self.failures.works();
                None
            }
            Err(FlashError::NoSpace) => self.backoff.full(now).map(Failing::Pauses),
            Err(FlashError::Device) => self.failures.failed().map(Failing::GivesUp),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Error;

    use super::super::limits::Allows;
    use super::*;

    #[test]
    fn it_is_given_up_once_and_only_when_nothing_works() {
        let limits = Limits::default();
        let now = Nanos::from_secs(1);
        let ended = |ended| limits.flash_ended(now, ended);
        let times =
            |n| (0..n).filter_map(|_| ended(Err(FlashError::Device))).collect::<Vec<_>>().len();
        assert_eq!(times(FAILURES - 1), 0);
        assert_eq!(ended(Ok(())), None);
        assert_eq!(times(FAILURES - 1), 0);
        // What makes no sense was read.
        assert_eq!(ended(Err(FlashError::Damaged)), None);
        assert_eq!(times(FAILURES - 1), 0);
        // One that finds no room says nothing of the device.
        assert!(matches!(ended(Err(FlashError::NoSpace)), Some(Failing::Pauses(_))));
        assert!(limits.is_paused(now));
        assert_eq!(ended(Err(FlashError::NoSpace)), None, "it pauses already");
        assert_eq!(times(1), 1);
        assert_eq!(times(10), 0);
    }

    #[test]
    fn a_full_file_system_and_a_quota_are_no_failure_of_the_device() {
        let of = |errno| FlashError::from(&Error::from_raw_os_error(errno));
        // ENOSPC, EDQUOT and EIO.
        assert_eq!(
            [28, 122, 5].map(of),
            [FlashError::NoSpace, FlashError::NoSpace, FlashError::Device]
        );
    }
}
