//! What outlives a stop beside the objects, and what a refused start leaves behind.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_base::AppId;
use larder_runtime::testing::MemoryDevice;
use larder_runtime::{Clock, Device};

use super::harness::{Client, Site, config, open};
use crate::connection::Engine;
use crate::server::Store;
use crate::store::{StoreConfig, StoreError, Warmth};

fn flash_bytes(site: &Site) -> BTreeMap<String, u64> {
    site.stats().applications.into_iter().map(|a| (a.name, a.flash_bytes)).collect()
}

#[test]
fn applications_keep_their_ids_and_their_bytes_on_flash() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path().to_owned());
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(4 << 20));
    let mut client = Client::new(5, 1_500);
    let mut ids: Option<Vec<AppId>> = None;
    for round in 0..3 {
        let (site, opened) = open(&config, device.clone()).unwrap();
        let now = ["app0:x", "app1:x", "app2:x"].map(|key| site.store.app(key.as_bytes()));
        // The ids of the first run hold in every later one, though keys come in another order.
        let first = ids.get_or_insert_with(|| now.to_vec());
        assert_eq!(now[..], first[..], "round {round}");
        if round > 0 {
            assert_eq!(opened.warmth, Some(Warmth::Checkpoint));
            assert!(client.check_all(&site) > 300);
        }
        for _ in 0..6_000 {
            client.step(&site);
        }
        site.store.shutdown(site.clock.now());
        let before = flash_bytes(&site);
        let used = site.stats().flash.unwrap().used_bytes;
        let sum: u64 = before.values().sum();
        assert!(
            before.values().filter(|b| **b > 200_000).count() == 3 && sum <= used + (64 << 10),
            "{before:?}"
        );
        drop(site);
        let (site, _) = open(&config, device.clone()).unwrap();
        assert_eq!(flash_bytes(&site), before);
        site.stop(round == 2);
    }
}

#[test]
fn a_refused_start_leaves_nothing_behind() {
    let top = tempfile::tempdir().unwrap();
    let data = top.path().join("a/b");
    let clock = Arc::new(Clock::start());
    let refused = |config: StoreConfig| crate::store::open(&config, &clock).err().unwrap();
    // Sizes that cannot work, with a flash file that would have been made.
    let impossible = StoreConfig {
        memory: 2 << 20,
        flash: Some(data.join("flash")),
        flash_size: Some(1 << 30),
        flash_object_size: 64,
        ..config(data.clone())
    };
    let e = refused(impossible);
    assert!(matches!(e, StoreError::Plan(_)), "{e}");
    assert!(!top.path().join("a").exists());
    // Somebody's file.
    let file = top.path().join("archive.gz");
    let bytes = [&[0x1f, 0x8b, 8, 0][..], &vec![7; 32 << 20]].concat();
    std::fs::write(&file, &bytes).unwrap();
    let e = refused(StoreConfig { flash: Some(file.clone()), ..config(data.clone()) });
    assert!(matches!(e, StoreError::Foreign { .. }), "{e}");
    assert!(!top.path().join("a").exists() && std::fs::read(&file).unwrap() == bytes);
    // A file that is too small says how large it is and how large it must be.
    std::fs::write(&file, vec![0; 5000]).unwrap();
    let e = refused(StoreConfig { flash: Some(file.clone()), ..config(data.clone()) }).to_string();
    assert!(e.contains("archive.gz") && e.contains("5000 bytes") && e.contains("at least"), "{e}");
    // What was there before stays.
    std::fs::create_dir(top.path().join("a")).unwrap();
    std::fs::write(top.path().join("a/mine"), b"x").unwrap();
    drop(refused(StoreConfig { flash: Some(file), ..config(data) }));
    assert_eq!(std::fs::read_dir(top.path().join("a")).unwrap().count(), 1);
}
