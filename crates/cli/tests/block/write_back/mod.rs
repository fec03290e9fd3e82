//! Volumes that write back: what may be set, what is refused, what is served, and how a store is recovered whose cache is lost.

mod away;
mod carried;
mod discard;
mod journal;
mod marks;
mod offline;
mod recover;
mod served;
mod settings;
mod unanswered;
mod waits;

use std::path::Path;

use tempfile::TempDir;

use crate::daemon::larder;

/// A cache with the smallest write log, and a file of 32 MiB for a volume, whose name is `disk`.
fn prepare() -> TempDir {
    let dir = TempDir::new().unwrap();
    format(&dir.path().join("cache"));
    std::fs::File::create(dir.path().join("disk")).unwrap().set_len(32 << 20).unwrap();
    dir
}

fn format(cache: &Path) {
    let format = ["format", cache.to_str().unwrap(), "--size", "128m", "--write-log", "64m"];
    let (code, message) = larder(&format);
    assert_eq!(code, Some(0), "{message}");
}

/// All of these words are in it.
#[track_caller]
fn has(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no '{word}' in: {text}");
    }
}
