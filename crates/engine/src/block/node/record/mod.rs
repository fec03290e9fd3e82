//! Queues and maintenance with the tapes that record them, and as they are called again in a replay. Records of the machines
//! that these call, and what a recording is, are in [`block::record`](crate::block::record).

mod maintenance;
mod queue;

use larder_format::recording::{BadRecord, Cursor};

use super::failing::FlashError;

pub use maintenance::{RecordedMaintenance, ReplayedMaintenance};
pub use queue::{RecordedQueue, ReplayedQueue};

/// How an I/O of the cache device ended, as a number.
fn end_code<T>(ended: &Result<T, FlashError>) -> u64 {
    match ended {
        Ok(_) => 1,
        Err(FlashError::Device) => 0,
        Err(FlashError::NoSpace) => 2,
        Err(FlashError::Damaged) => 3,
    }
}

/// Reads what [`end_code`] says.
fn take_end(c: &mut Cursor<'_>) -> Result<Result<(), FlashError>, BadRecord> {
    Ok(match c.at_most(3, "how an I/O of the cache device ended")? {
        0 => Err(FlashError::Device),
        1 => Ok(()),
        2 => Err(FlashError::NoSpace),
        _ => Err(FlashError::Damaged),
    })
}

/// For people.
fn end_words(ended: &Result<(), FlashError>) -> &'static str {
    match ended {
        Ok(()) => "has ended",
        Err(FlashError::Device) => "has failed",
        Err(FlashError::NoSpace) => "has found no space",
        Err(FlashError::Damaged) => "has read what makes no sense",
    }
}

#[cfg(test)]
mod tests {
    use larder_format::recording::bytes::put;

    use super::*;

    #[test]
    fn ends_of_io_are_read_as_they_were_written() {
        let errors = [FlashError::Device, FlashError::NoSpace, FlashError::Damaged];
        for ended in errors.map(Err).into_iter().chain([Ok(())]) {
            let mut bytes = Vec::new();
            put(&mut bytes, end_code(&ended));
            assert_eq!(take_end(&mut Cursor::new(&bytes)).unwrap(), ended);
        }
        assert!(take_end(&mut Cursor::new(&[4])).is_err());
    }
}
