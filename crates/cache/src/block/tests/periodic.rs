//! What is destaged each so many seconds is all that was answered by then, in however many windows.

use super::*;
use crate::block::Cache;
use crate::block::back::{BackConfig, Grain, Order, Pace};

#[test]
fn each_period_takes_all_that_was_answered_by_then() {
    const WRITES: u64 = 30;
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("disk");
    File::create(&path).unwrap().set_len(8 << 20).unwrap();
    let pace = Pace::Periodic(larder_base::Nanos::from_secs(1));
    let order = Order::Ordered(Grain::Completion);
    let cache = Cache::builder(dir.path().join("cache"))
        .create(ByteSize::mib(192))
        .write_log(ByteSize::mib(96))
        .state_dir(dir.path().join("state"))
        .threads(1)
        .volume("disk", &format!("file:{}", path.display()))
        .unwrap()
        .write_back("disk", BackConfig { order, pace, ..BackConfig::default() })
        .open()
        .unwrap();
    let disk = cache.volume("disk").unwrap();
    // Each is a window of its own, since it is answered before the next is issued.
    for n in 0..WRITES {
        disk.write(n * 4096, [1; 4096]).wait().unwrap();
    }
    let end = Instant::now() + Duration::from_secs(WRITES / 2);
    while cache.core().back_status("disk").unwrap().status.dirty > 0 {
        assert!(Instant::now() < end, "{:?}", cache.core().back_status("disk"));
        std::thread::sleep(Duration::from_millis(20));
    }
}
