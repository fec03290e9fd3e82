//! How long a thread runs before the kernel gives its processor to another.

use std::io;
use std::time::Duration;

/// `struct sched_attr` of `sched_setattr(2)`, in its first form: later ones only grow.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    /// Nanoseconds. For the ordinary policies: the wanted slice.
    runtime: u64,
    deadline: u64,
    period: u64,
}

const SIZE: u32 = size_of::<Attributes>() as u32;
const _: () = assert!(SIZE == 48);

fn attributes() -> io::Result<Attributes> {
    let mut now = Attributes::default();
    // SAFETY: the kernel writes at most `SIZE` bytes, which is the length of the structure that the pointer is to; any
    // bytes are a value of it. 0 names the calling thread.
    let result =
        unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut now, SIZE, 0 as libc::c_uint) };
    if result == 0 { Ok(now) } else { Err(io::Error::last_os_error()) }
}

/// Asks the kernel to give the calling thread the processor in slices of this length, 100 µs to 100 ms: where several
/// threads share one, each waits less long for its turn, and has it more often. Its share stays the same. Heeded by Linux
/// 6.12 and later, in vain before. Returns whether it was asked: a thread under a real-time policy is left alone.
///
/// # Errors
/// When the system call is refused (a sandbox may).
pub fn prefer_slices(of: Duration) -> io::Result<bool> {
    let before = attributes()?;
    if !matches!(before.policy as libc::c_int, libc::SCHED_OTHER | libc::SCHED_BATCH) {
        return Ok(false);
    }
    let wanted = Attributes { size: SIZE, runtime: of.as_nanos() as u64, ..before };
    // SAFETY: the kernel reads `SIZE` bytes from the structure that the pointer is to. 0 names the calling thread, whose
    // policy, nice value and flags stay as they were read.
    let result =
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const wanted, 0 as libc::c_uint) };
    if result == 0 { Ok(true) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_changes_nothing_else() {
        let before = attributes().unwrap();
        match prefer_slices(Duration::from_micros(400)) {
            Ok(_) => {
                let after = attributes().unwrap();
                assert_eq!(
                    (before.policy, before.nice, before.priority, before.flags),
                    (after.policy, after.nice, after.priority, after.flags)
                );
            }
            // Only a sandbox forbids it.
            Err(e) => assert!(matches!(e.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)), "{e}"),
        }
    }
}
