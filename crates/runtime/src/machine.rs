//! What the machine has and what this process uses of it: for defaults and for watching.

use crate::buffer::PAGE;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Memory of the machine, bytes. `None` where `/proc/meminfo` does not say.
pub fn total_memory() -> Option<u64> {
    parse_meminfo(&fs::read_to_string("/proc/meminfo").ok()?)
}

/// Has the allocator give whole pages that it keeps free back to the system. It looks at all of them: milliseconds where there
/// are many.
pub fn release_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointer, and may be called at any time from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

fn parse_meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The least memory limit of the control groups this process is in (version 1 or 2), bytes; `None` without one.
pub fn memory_limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    memory_limit_under(Path::new("/sys/fs/cgroup"), &groups)
}

fn memory_limit_under(root: &Path, groups: &str) -> Option<u64> {
    let mut least: Option<u64> = None;
    for line in groups.lines() {
        // `0::/path` is version 2, `4:memory:/path` the memory controller of version 1.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (mounts, file): (&[&str], _) = if controllers.is_empty() {
            (&["", "unified"], "memory.max")
        } else if controllers.split(',').any(|c| c == "memory") {
            (&["memory"], "memory.limit_in_bytes")
        } else {
            continue;
        };
        for mount in mounts {
            let top = root.join(mount);
            // Every group up to the top limits. Within a container the path may be the host's: then only the top is there.
            let group = top.join(path.trim_start_matches('/'));
            for dir in group.ancestors().take_while(|d| d.starts_with(&top)) {
                let limit = fs::read_to_string(dir.join(file))
                    .ok()
                    .and_then(|t| t.trim().parse::<u64>().ok());
                // Version 1 writes "no limit" as the largest number of pages.
                if let Some(limit) = limit.filter(|&l| l < 1 << 62) {
                    least = Some(least.map_or(limit, |l| l.min(limit)));
                }
            }
        }
    }
    least
}

/// Memory that this process may use: the machine's or the control group's, whichever is less.
pub fn usable_memory() -> Option<u64> {
    match (total_memory(), memory_limit()) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Processors that this process may use (affinity and control group quota considered), at least 1.
pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Bytes that an unprivileged user may still write to the file system of `path`, or of its nearest parent that exists.
///
/// # Errors
/// When not even a parent can be looked at.
pub fn free_space(path: &Path) -> io::Result<u64> {
    let absolute = std::path::absolute(path)?;
    let existing = absolute.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
    let stat = rustix::fs::statvfs(existing)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Whether this process can make files in `dir`, or make the directory if it is not there.
///
/// # Errors
/// Why not: what the system says of it, or of its nearest parent that exists.
pub fn can_hold_files(dir: &Path) -> io::Result<()> {
    use rustix::fs::Access;
    let absolute = std::path::absolute(dir)?;
    let existing = absolute.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
    if !existing.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    Ok(rustix::fs::access(existing, Access::WRITE_OK | Access::EXEC_OK)?)
}

/// What is free on the file system of `path`, bytes, if a file of `size` bytes there cannot be filled: what it has already is
/// counted. `None` where there is room enough, for devices, and where the file system does not say.
pub fn shortfall(path: &Path, size: u64) -> Option<u64> {
    let allocated = match fs::metadata(path) {
        Ok(meta) if !meta.is_file() => return None,
        // A block of st_blocks is 512 bytes, whatever the file system's are.
        Ok(meta) => meta.blocks().saturating_mul(512),
        Err(_) => 0,
    };
    let free = free_space(path).ok()?;
    // Pseudo file systems and some over a network say that they have nothing at all.
    (free > 0 && size.saturating_sub(allocated) > free).then_some(free)
}

/// Resident memory of this process, bytes.
///
/// # Errors
/// When `/proc` does not say.
pub fn resident_memory() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/self/statm")?;
    let pages = text.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok());
    let pages = pages
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "statm has no second number"))?;
    Ok(pages * rustix::param::page_size() as u64)
}

/// Open descriptors of this process (without the one used for counting).
///
/// # Errors
/// When `/proc` does not say.
pub fn open_descriptors() -> io::Result<usize> {
    Ok(fs::read_dir("/proc/self/fd")?.count().saturating_sub(1))
}

/// Processor time of this process, in user and in kernel mode.
pub fn processor_time() -> (Duration, Duration) {
    // SAFETY: `rusage` is plain integers, for which all zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the call fills the structure that the pointer is to. It fails only for a bad argument; then all is zero.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let duration = |t: libc::timeval| {
        Duration::from_secs(t.tv_sec.max(0) as u64) + Duration::from_micros(t.tv_usec.max(0) as u64)
    };
    (duration(usage.ru_utime), duration(usage.ru_stime))
}

/// Where a process without other instructions keeps its data: `$XDG_STATE_HOME/larder`, `~/.local/state/larder`, or
/// `/var/lib/larder` for root.
pub fn default_data_dir() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if rustix::process::geteuid().is_root() {
        return PathBuf::from("/var/lib/larder");
    }
    set("XDG_STATE_HOME")
        .or_else(|| set("HOME").map(|h| h.join(".local/state")))
        .map_or_else(|| PathBuf::from("larder-data"), |p| p.join("larder"))
}

/// Asks the kernel to back this memory with huge pages where it can: random access to gigabytes of objects otherwise
/// spends much of its time on address translation. Only whole pages inside the range are meant. A kernel that cannot or
/// may not ignores it.
pub fn prefer_huge_pages(memory: &mut [u8]) {
    let start = memory.as_mut_ptr().addr().next_multiple_of(PAGE);
    let end = (memory.as_ptr().addr() + memory.len()) / PAGE * PAGE;
    if end <= start {
        return;
    }
    let first = memory.as_mut_ptr().with_addr(start).cast();
    // SAFETY: the range lies within `memory`, which is borrowed exclusively; this advice changes no contents.
    let advised =
        unsafe { rustix::mm::madvise(first, end - start, rustix::mm::Advice::LinuxHugepage) };
    if let Err(error) = advised {
        tracing::debug!(%error, "no huge pages");
    }
}

/// This process serves a disk of the kernel it runs on: when memory is short, the calling thread, and threads that
/// it starts from then on, must not be made to wait for writes to that disk. `false`: not permitted (`CAP_SYS_RESOURCE`), or not known (before
/// Linux 5.6).
pub fn serve_the_kernel() -> bool {
    /// `PR_SET_IO_FLUSHER` of `linux/prctl.h`.
    const SET_IO_FLUSHER: libc::c_int = 57;
    let (on, none): (libc::c_ulong, libc::c_ulong) = (1, 0);
    // SAFETY: this sets a flag of the calling thread; no memory is passed.
    unsafe { libc::prctl(SET_IO_FLUSHER, on, none, none, none) == 0 }
}

/// From here on a write to a pipe that nobody reads ends the process, as programs whose output is piped to `head` end;
/// without it such a write fails, and printing panics. Not for servers: their sockets must only fail.
pub fn end_on_broken_pipe() {
    // SAFETY: this restores the system's own way with the signal; no handler of ours is installed that it could run.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// A number that nobody can foresee.
///
/// # Errors
/// When the system gives none.
pub fn random() -> io::Result<u64> {
    random_bytes().map(u64::from_le_bytes)
}

/// Bytes that nobody can foresee.
///
/// # Errors
/// When the system gives none.
pub fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_makes_sense() {
        let total = total_memory().unwrap();
        assert!(total > 64 << 20 && usable_memory().unwrap() <= total);
        let resident = resident_memory().unwrap();
        assert!(resident > 100_000 && resident < total);
        assert!(processors() >= 1);
        assert!(free_space(Path::new("/tmp/not/there/yet")).unwrap() > 0);
        let before = open_descriptors().unwrap();
        assert!(before >= 3);
    }

    #[test]
    fn where_files_can_be_made_is_known_before_any_is() {
        let dir = tempfile::tempdir().unwrap();
        assert!(can_hold_files(dir.path()).is_ok());
        assert!(can_hold_files(&dir.path().join("a/b")).is_ok());
        assert!(!dir.path().join("a").exists());
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        for not in [file.as_path(), &file.join("below")] {
            assert!(can_hold_files(not).is_err(), "{}", not.display());
        }
    }

    #[test]
    fn a_file_that_does_not_fit_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sparse");
        // Far from the edge: others write to this file system too.
        let free = free_space(&path).unwrap();
        let too_much = free.saturating_mul(2) + (1 << 40);
        assert_eq!(shortfall(&path, free / 2), None);
        assert!(shortfall(&path, too_much).is_some_and(|f| f > 0));
        // What the file has is not needed again; holes are.
        let file = fs::File::create(&path).unwrap();
        file.set_len(1 << 30).unwrap();
        assert!(shortfall(&path, too_much).is_some());
        assert_eq!(shortfall(Path::new("/dev/null"), too_much), None);
    }

    #[test]
    fn processor_time_grows_with_work() {
        let before = processor_time();
        let mut x = 1u64;
        while processor_time().0 < before.0 + Duration::from_millis(5) {
            for _ in 0..100_000 {
                x = std::hint::black_box(x.wrapping_mul(3));
            }
        }
        assert!(processor_time().1 >= before.1);
    }

    #[test]
    fn meminfo_is_read_and_nonsense_is_not() {
        assert_eq!(parse_meminfo("MemFree: 1 kB\nMemTotal:   49368 kB\n"), Some(49_368 << 10));
        for bad in ["", "MemTotal: x kB", "MemTotal: 5", "MemTotal: 99999999999999999999 kB"] {
            assert_eq!(parse_meminfo(bad), None);
        }
    }

    #[test]
    fn limits_of_both_versions_and_of_every_ancestor_count() {
        let root = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let limit = |groups: &str| memory_limit_under(root.path(), groups);
        put("a/b/memory.max", "max\n");
        put("a/memory.max", "5000000\n");
        assert_eq!(limit("0::/a/b\n"), Some(5_000_000));
        assert_eq!(limit("0::/\n"), None);
        put("memory/x/memory.limit_in_bytes", "4000000\n");
        put("memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(limit("11:cpu,cpuacct:/a\n4:memory:/x\n0::/a\n"), Some(4_000_000));
        assert_eq!(limit("4:memory:/host/path/not/here\n"), None);
        put("unified/memory.max", "77");
        assert_eq!(limit("0::/gone\n"), Some(77));
        assert_eq!(limit("nonsense\n1:\n"), None);
    }
}
