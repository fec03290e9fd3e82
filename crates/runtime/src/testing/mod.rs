//! Devices for tests: in memory, losing power, failing, rotting and stalling on command. All from seeds, so that what a
//! test has found once it finds again.
//!
//! ```
//! # use larder_runtime::{Device, testing::MemoryDevice};
//! # use larder_base::Rng;
//! let device = MemoryDevice::new(1 << 20);
//! device.write_at(0, &[1; 4096]).unwrap();
//! device.sync().unwrap();
//! device.write_at(4096, &[2; 4096]).unwrap();
//! // What a machine finds after the power went: the synced page for certain, of the other any blocks or none.
//! let after = device.power_cut(&mut Rng::new(1));
//! let mut page = [0; 4096];
//! after.read_at(0, &mut page).unwrap();
//! assert_eq!(page, [1; 4096]);
//! ```

mod faulty;
mod memory;

pub use faulty::{Fault, FaultyDevice, Gate};
pub use memory::MemoryDevice;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A test that failed while it held a lock should show its own failure, not a poisoned mutex.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
