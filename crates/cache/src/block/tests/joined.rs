//! Stores that were no image when a run ended: what could not be read had been written again, and had come there in part.

use larder_format::block::marker::{COPY_BYTES, Marker, choose};

use super::back::{builder, ordered, wishes};
use super::*;
use crate::block::back::Pace;

fn marker(dir: &std::path::Path) -> Marker {
    let bytes = std::fs::read(dir.join("disk.larder")).unwrap();
    choose(&bytes[..COPY_BYTES], &bytes[COPY_BYTES..2 * COPY_BYTES]).unwrap().marker
}

#[test]
fn a_start_says_that_its_store_alone_is_no_image_until_all_is_there_that_its_marker_speaks_of() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    let cache = builder(dir, Some(ordered(Pace::AtBound))).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    for n in 0..3u8 {
        disk.write(0, [n; 4096]).wait().unwrap();
        disk.flush().wait().unwrap();
    }
    drop((disk, cache));
    let bytes = Marker { joins: 2, ..marker(dir) }.encode();
    std::fs::write(dir.join("disk.larder"), [bytes.clone(), bytes].concat()).unwrap();
    let joins =
        |cache: &crate::block::Cache| cache.core().back_status("disk").unwrap().status.joins;
    for _ in 0..2 {
        let cache = builder(dir, Some(ordered(Pace::AtBound))).open().unwrap();
        assert!(joins(&cache));
        assert_eq!(marker(dir).joins, 2, "the next start is told too");
    }
    // So it is of one that is put aside and taken up again.
    let cache = builder(dir, Some(ordered(Pace::AtBound))).open().unwrap();
    assert!(cache.detach_dirty("disk", &mut |_| true).unwrap());
    assert_eq!(marker(dir).joins, 2);
    let uri = format!("file:{}", dir.join("disk").display()).parse().unwrap();
    // Who had it lets go of it a little later.
    let end = std::time::Instant::now() + Duration::from_secs(20);
    let store = loop {
        match larder_volume::open_with(&uri, &OpenOptions::default()) {
            Ok(store) => break store,
            Err(why) => assert!(std::time::Instant::now() < end, "{why}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    drop(cache.attach_as("disk", store, &wishes(ordered(Pace::AtBound))).unwrap());
    assert!(joins(&cache));
    assert!(cache.core().destage("disk", &mut |_| true).unwrap());
    assert!(!joins(&cache));
    assert_eq!(marker(dir).joins, 0);
}
