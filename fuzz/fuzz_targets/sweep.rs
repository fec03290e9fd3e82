//! Any text as a sweep: read or refused; what is read has as many cells as its axes make, or says at which it is none.
#![no_main]

use larder_sim::sweep::Sweep;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(sweep) = Sweep::parse(text, "fuzzed.toml", |name| Err(format!("no file {name}"))) else {
        return;
    };
    let wanted = sweep.axes.iter().try_fold(1usize, |n, a| n.checked_mul(a.values.len()));
    // Many cells take long and show nothing new.
    if wanted.is_some_and(|n| n <= 64)
        && let Ok(cells) = sweep.cells("0", |_| String::new())
    {
        assert_eq!(Some(cells.len()), wanted);
        assert!(cells.iter().all(|c| c.values.len() == sweep.axes.len()));
    }
});
