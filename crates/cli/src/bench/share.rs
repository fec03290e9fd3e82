//! Work that is shared out over threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::CliError;

/// How many threads `--threads` comes to: one for each processor when it is not given.
///
/// # Errors
/// None at all.
pub(super) fn threads(given: Option<usize>) -> Result<usize, CliError> {
    match given {
        Some(0) => {
            Err(CliError::Usage("--threads '0': write a whole number, at least 1".to_owned()))
        }
        Some(n) => Ok(n),
        None => Ok(larder_runtime::machine::processors()),
    }
}

/// What becomes of each piece of `work`, in their order, done on as many threads at a time.
///
/// # Errors
/// The first that a piece ends with; no other begins then.
pub(super) fn share_out<W: Sync, T: Send>(
    threads: usize,
    work: &[W],
    one: impl Fn(&W) -> Result<T, String> + Sync,
) -> Result<Vec<T>, CliError> {
    let next = AtomicUsize::new(0);
    let found: Mutex<Vec<(usize, T)>> = Mutex::default();
    let failed = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(work.len()) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(piece) = work.get(at) else { return };
                    match (one(piece), found.lock(), failed.lock()) {
                        (Ok(outcome), Ok(mut found), _) => found.push((at, outcome)),
                        (Err(e), _, Ok(mut failed)) => {
                            failed.get_or_insert(e);
                            next.store(work.len(), Ordering::Relaxed);
                        }
                        _ => return,
                    }
                }
            });
        }
    });
    if let Ok(Some(e)) = failed.into_inner() {
        return Err(CliError::Runtime(e));
    }
    let mut found = found.into_inner().unwrap_or_default();
    found.sort_by_key(|&(at, _)| at);
    Ok(found.into_iter().map(|(_, outcome)| outcome).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_come_in_the_order_of_the_work() {
        let work: Vec<u64> = (0..100).collect();
        for threads in [1, 3, 200] {
            let all = share_out(threads, &work, |n| Ok(n * 2)).unwrap();
            assert!(all.iter().eq(work.iter().map(|n| n * 2).collect::<Vec<_>>().iter()));
        }
        assert!(share_out(2, &[0; 0], |n| Ok(*n)).unwrap().is_empty());
    }

    #[test]
    fn nothing_begins_behind_a_failure() {
        let begun = AtomicUsize::new(0);
        let work: Vec<usize> = (0..100).collect();
        let all = share_out(1, &work, |&n| {
            begun.fetch_add(1, Ordering::Relaxed);
            if n == 7 { Err("the seventh".to_owned()) } else { Ok(n) }
        });
        assert_eq!(all.unwrap_err().to_string(), "the seventh");
        assert_eq!(begun.into_inner(), 8);
    }

    #[test]
    fn no_threads_at_all_are_refused() {
        assert!(threads(Some(0)).unwrap_err().to_string().contains("--threads '0'"));
        assert_eq!(threads(Some(3)).unwrap(), 3);
    }
}
