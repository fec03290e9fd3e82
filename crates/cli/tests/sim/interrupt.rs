//! Processes that are interrupted.

/// Waits until the process `pid` handles SIGINT, instead of being ended by it.
pub(crate) fn until_it_heeds(pid: u32) {
    let began = std::time::Instant::now();
    loop {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let caught = status.lines().find_map(|l| l.strip_prefix("SigCgt:")).unwrap();
        // SIGINT is signal 2: the second bit.
        if u64::from_str_radix(caught.trim(), 16).unwrap() & 2 != 0 {
            return;
        }
        assert!(began.elapsed().as_secs() < 120, "it does not handle signals");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
