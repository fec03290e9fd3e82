//! Histories of a model, shared out over threads: each needs only its seed.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;

/// What `f` gives for each, in its order; two threads share the work.
pub(crate) fn on_two_threads<T: Send, R: Send>(
    all: impl Iterator<Item = T> + Send,
    f: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let all = Mutex::new(all.enumerate());
    let work = || {
        let mut done = Vec::new();
        loop {
            let next = all.lock().unwrap().next();
            let Some((at, one)) = next else { return done };
            let result = catch_unwind(AssertUnwindSafe(|| f(one)));
            done.push((
                at,
                result.unwrap_or_else(|payload| {
                    // The other thread ends too.
                    all.lock().unwrap().by_ref().for_each(drop);
                    resume_unwind(payload)
                }),
            ));
        }
    };
    let mut done = std::thread::scope(|scope| {
        let other = scope.spawn(work);
        let mut done = work();
        done.extend(other.join().unwrap_or_else(|payload| resume_unwind(payload)));
        done
    });
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}
