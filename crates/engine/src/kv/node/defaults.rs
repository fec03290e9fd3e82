//! Sizes where none are given, and the least and the most that can be given.

use larder_base::ByteSize;

use super::plan::AdmissionNeed;
use crate::kv::config::ClockMode;

/// The least memory that can be given, bytes.
pub const LEAST_MEMORY: u64 = 1 << 20;
/// The least flash that can be asked for, bytes. One that is there already may be as small as
/// [`Plan::LEAST_FLASH`](super::Plan::LEAST_FLASH).
pub const LEAST_FLASH: u64 = 16 << 20;
/// Bytes of DRAM that the flash index takes for an object. Which objects it has room for is admission's need ([`AdmissionNeed`]).
pub const INDEX_BYTES_PER_OBJECT: u64 = 4;
/// Mean bytes of an object on flash.
pub const OBJECT_SIZE: u32 = 280;
/// The least and the most that may be said of it, bytes: the index is sized by it.
pub const OBJECT_SIZE_BOUNDS: (u64, u64) = (64, 16 << 20);
/// Largest object, bytes.
pub const MAX_ITEM: u32 = 1 << 20;
/// The least that the largest object may be, bytes.
pub const LEAST_MAX_ITEM: u64 = 1 << 10;
/// The most that it may be, bytes: an object is in memory as a whole wherever it passes.
pub const MOST_MAX_ITEM: u64 = 128 << 20;
/// Largest value of CLOCK: two bits.
pub const CLOCK_MAX: u8 = 3;
/// How much of the flash may be hot, percent.
pub const HOT_PERCENT: u8 = 70;
/// How much of a reclaimed segment may go back to DRAM, percent: all that was read. With fewer, objects that are read leave, and are
/// written again when they were missed.
pub const REINSERT_PERCENT: u8 = 100;
/// What a read does to an object's CLOCK: one read alone does not keep an object for three turns.
pub const CLOCK_MODE: ClockMode = ClockMode::Increment;

/// An eighth of the machine's `total` memory, between 64 MiB and 8 GiB: a cache should not crowd out what it serves.
pub fn memory(total: u64) -> u64 {
    (total / 8).clamp(64 << 20, 8 << 30) >> 20 << 20
}

/// A quarter of the `free` bytes of a file system, at most 64 GiB, whole mebibytes. The index may take a quarter of `memory`.
pub fn flash(free: u64, memory: u64, object_size: u64, need: AdmissionNeed<'_>) -> u64 {
    let indexable = memory / 4 / need.index_bytes(object_size) * object_size;
    (free / 4).min(64 << 30).min(indexable) >> 20 << 20
}

/// The mean size of objects on flash where nobody states it and the flash is given: [`OBJECT_SIZE`], or if that index does not fit the
/// memory, the least size with which it takes a quarter of it. An index of too few objects grows as they come.
pub fn object_size(flash: u64, memory: u64, need: AdmissionNeed<'_>) -> u64 {
    let usual = u64::from(OBJECT_SIZE);
    if !matches!(check_flash(flash, memory, usual), Err(SizeError::LargeIndex { .. })) {
        return usual;
    }
    let (least, most) = (usual, OBJECT_SIZE_BOUNDS.1);
    let room = (memory / 4).max(1);
    let wanted = |object| flash.saturating_mul(need.index_bytes(object)).div_ceil(room);
    // Larger objects take more of the index each.
    let first = wanted(least).clamp(least, most);
    wanted(first).clamp(first, most)
}

/// A size that cannot be asked for. It reads as what follows the size's name and value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Too little memory.
    #[error("must be at least {}", ByteSize(LEAST_MEMORY))]
    LittleMemory,
    /// Too small a largest object.
    #[error("must be at least {LEAST_MAX_ITEM} bytes")]
    SmallItem,
    /// A largest object that no cache takes.
    #[error("must be at most {}", ByteSize(MOST_MAX_ITEM))]
    HugeItem,
    /// Too large an object for the memory.
    #[error("is more than half of the memory, which is {memory}")]
    LargeItem {
        /// The memory.
        memory: ByteSize,
    },
    /// A mean size of objects on flash that is none.
    #[error(
        "must be between {} bytes and {}",
        OBJECT_SIZE_BOUNDS.0,
        ByteSize(OBJECT_SIZE_BOUNDS.1)
    )]
    ObjectOnFlash,
    /// Too little flash.
    #[error("must be at least {}", ByteSize(LEAST_FLASH))]
    LittleFlash,
    /// An index that leaves too little for objects.
    #[error(
        "{flash} B / {object} B per object x {INDEX_BYTES_PER_OBJECT} B of index = {index} of DRAM, more than half of \
         the memory, which is {memory}"
    )]
    LargeIndex {
        /// Bytes of flash.
        flash: u64,
        /// Mean bytes of an object on it.
        object: u64,
        /// What its index takes.
        index: ByteSize,
        /// The memory.
        memory: ByteSize,
    },
}

/// Whether so much memory can be given to objects of at most `max_item` bytes.
///
/// # Errors
/// [`SizeError::LittleMemory`] is of the memory, the others are of the object.
pub fn check_memory(memory: u64, max_item: u64) -> Result<(), SizeError> {
    if memory < LEAST_MEMORY {
        return Err(SizeError::LittleMemory);
    }
    if max_item < LEAST_MAX_ITEM {
        return Err(SizeError::SmallItem);
    }
    if max_item > MOST_MAX_ITEM {
        return Err(SizeError::HugeItem);
    }
    if max_item > memory / 2 {
        return Err(SizeError::LargeItem { memory: ByteSize(memory) });
    }
    Ok(())
}

/// Whether objects on flash may be said to have so many bytes, on average.
///
/// # Errors
/// [`SizeError::ObjectOnFlash`].
pub fn check_object_size(bytes: u64) -> Result<(), SizeError> {
    let (least, most) = OBJECT_SIZE_BOUNDS;
    if (least..=most).contains(&bytes) { Ok(()) } else { Err(SizeError::ObjectOnFlash) }
}

/// Whether so much flash can be asked for beside the memory, which its index takes at most half of.
///
/// # Errors
/// Of the flash.
pub fn check_flash(flash: u64, memory: u64, object: u64) -> Result<(), SizeError> {
    if flash < LEAST_FLASH {
        return Err(SizeError::LittleFlash);
    }
    let index = (flash as f64 / object as f64 * INDEX_BYTES_PER_OBJECT as f64) as u64;
    if index > memory / 2 {
        let (index, memory) = (ByteSize(index), ByteSize(memory));
        return Err(SizeError::LargeIndex { flash, object, index, memory });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use larder_policy::admission::AdmissionConfig;

    use super::*;

    #[test]
    fn the_size_of_objects_follows_from_flash_that_is_large_for_the_memory() {
        let config = AdmissionConfig::default();
        let need = AdmissionNeed::of(&config);
        // Where an index for the usual size fits, it is that.
        for (flash, memory) in [(20 << 30, 8 << 30), (1 << 30, 64 << 20), (16 << 20, 1 << 20)] {
            assert_eq!(object_size(flash, memory, need), u64::from(OBJECT_SIZE));
        }
        for (flash, memory) in [(64 << 30, 64 << 20), (20 << 30, 512 << 20), (350 << 30, 6 << 30)] {
            assert!(check_flash(flash, memory, OBJECT_SIZE.into()).is_err());
            let object = object_size(flash, memory, need);
            assert!(check_object_size(object).is_ok());
            let index = flash / object * need.index_bytes(object);
            assert!(index <= memory / 4 && index > memory / 8, "{flash} {memory}: {index}");
            assert_eq!(check_flash(flash, memory, object), Ok(()));
        }
        // What no size of objects fits is refused by the one that would come nearest.
        assert_eq!(object_size(1 << 60, 1 << 20, need), OBJECT_SIZE_BOUNDS.1);
        assert!(check_flash(1 << 60, 1 << 20, OBJECT_SIZE_BOUNDS.1).is_err());
    }
}
