//! Descriptors and memory stay flat. One test in a program of its own, so that nothing else opens or allocates.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use std::sync::Arc;
use std::time::Duration;

use larder_base::ByteSize;
use larder_runtime::{
    DataDir, Device, DeviceOptions, FlashDevice, ReadRing, RingChoice, RingOptions, SharedRegion,
    machine,
};

#[test]
fn opening_and_closing_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let round = |choice| {
        let data = DataDir::open(&dir.path().join("data"), 1).unwrap();
        let region = SharedRegion::open(data.path(), "words", 1 << 16).unwrap();
        let options = DeviceOptions::new(data.join("flash")).size(ByteSize::mib(4));
        let device: Arc<dyn Device> = Arc::new(FlashDevice::open(&options).unwrap());
        assert!(FlashDevice::open(&options).is_err());
        assert!(DataDir::open(data.path(), 1).is_err());
        let mut ring =
            ReadRing::open(device, &RingOptions { choice, ..RingOptions::default() }).unwrap();
        for token in 0..200 {
            ring.submit(token, token * 4096, 4096).unwrap();
        }
        ring.wait(Duration::from_secs(1));
        ring.completions(|_, bytes| assert!(bytes.is_ok()));
        drop(region);
        // The ring goes with whatever is still in flight.
    };
    let rounds = |n: u32| {
        for _ in 0..n {
            round(RingChoice::Auto);
            round(RingChoice::Threads);
        }
    };
    rounds(3);
    let before = (machine::open_descriptors().unwrap(), machine::resident_memory().unwrap());
    rounds(12);
    let after = (machine::open_descriptors().unwrap(), machine::resident_memory().unwrap());
    // A ring's descriptor is closed in full a moment after the call.
    assert_eq!(after.0, before.0, "descriptors");
    assert!(
        after.1 < before.1 + (2 << 20),
        "resident memory grew from {} to {}",
        before.1,
        after.1
    );
}
