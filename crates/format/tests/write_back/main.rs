//! The formats of write-back: the log, the marker and the journal. Images are kept as files: what is written today must be the
//! same bytes. A change of a format that was released adds a version and new files.

mod batch;
mod beside;
mod chain;
mod pieces;
mod samples;
mod segment;

use std::fs;
use std::path::PathBuf;

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn images() -> [(&'static str, Vec<u8>); 7] {
    [
        ("write-log-batch-v1.bin", samples::batch_bytes()),
        ("write-log-frontier-v1.bin", samples::frontier().encode()),
        ("write-log-segment-v1.bin", samples::segment_bytes()),
        ("write-log-footer-v1.bin", samples::footer().encode(samples::geometry())),
        ("marker-v1.bin", samples::markers().concat()),
        ("journal-descriptors-v1.bin", samples::descriptors().encode()),
        ("journal-commit-v1.bin", samples::commit().encode().to_vec()),
    ]
}

/// `cargo test -p larder-format --test write_back -- --ignored` writes the files: only for a new version of a format.
#[test]
#[ignore = "writes the fixtures"]
fn write_fixtures() {
    for (name, bytes) in images() {
        // Those of a released version never change.
        if !path(name).exists() {
            fs::write(path(name), bytes).unwrap();
        }
    }
}

#[test]
fn today_writes_the_same_bytes() {
    for (name, bytes) in images() {
        let kept = fs::read(path(name)).unwrap_or_else(|e| panic!("fixture {name}: {e}"));
        let differs = kept.iter().zip(&bytes).position(|(a, b)| a != b);
        assert!(kept == bytes, "{name} differs from byte {differs:?} on");
    }
}

/// Every flip of a single bit and every cut of `bytes` is refused.
fn nothing_but_itself_is_read<T, E>(bytes: &[u8], read: impl Fn(&[u8]) -> Result<T, E>) {
    assert!(read(bytes).is_ok());
    let mut bad = bytes.to_vec();
    for bit in 0..bytes.len() * 8 {
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(read(&bad).is_err(), "bit {bit} flipped");
        bad[bit / 8] ^= 1 << (bit % 8);
    }
    for cut in 0..bytes.len() {
        assert!(read(&bytes[..cut]).is_err(), "cut to {cut} bytes");
    }
}
