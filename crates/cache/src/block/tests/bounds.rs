//! What volumes may hold of the write log: what cannot be is refused at the start, and what no longer fits is lowered and shown.

use super::back::{builder, ordered, wishes};
use super::*;
use crate::block::back::{BackConfig, Pace};

fn stated(most: u64) -> BackConfig {
    BackConfig { dirty_max: Some(ByteSize::mib(most)), ..ordered(Pace::AtBound) }
}

/// Another volume's store.
fn more(dir: &TempDir) -> String {
    let path = dir.path().join("more");
    File::create(&path).unwrap().set_len(8 << 20).unwrap();
    format!("file:{}", path.display())
}

/// A log of 96 MiB has 12 segments: of 9 without the reserve of one volume four fifths are 57.6 MiB, of 8 for two 51.2 MiB.
#[test]
fn a_start_with_more_than_the_log_can_hold_is_refused_and_names_the_most_that_fits() {
    let dir = TempDir::new().unwrap();
    let uri = more(&dir);
    let why = builder(dir.path(), Some(stated(64))).open().err().unwrap().to_string();
    assert!(why.contains("'disk'") && why.contains("57 MiB at most"), "{why}");
    let two = builder(dir.path(), Some(stated(40))).volume("more", &uri).unwrap();
    let why = two.write_back("more", stated(20)).open().err().unwrap().to_string();
    assert!(why.contains("60 MiB together") && why.contains("51 MiB together at most"), "{why}");
    let two = builder(dir.path(), Some(stated(40))).volume("more", &uri).unwrap();
    let cache = two.write_back("more", stated(11)).open().unwrap();
    for (name, most) in [("disk", 40 << 20), ("more", 11 << 20)] {
        let status = cache.core().back_status(name).unwrap().status;
        assert_eq!((status.stated, status.held.1), (Some(most), most), "{name}");
    }
}

#[test]
fn what_no_longer_fits_beside_a_volume_that_changed_over_later_is_lowered_and_shown() {
    let dir = TempDir::new().unwrap();
    let two = builder(dir.path(), Some(stated(40))).volume("more", &more(&dir)).unwrap();
    let cache = two.open().unwrap();
    let core = cache.core();
    let of = |name: &str| {
        let status = core.back_status(name).unwrap().status;
        (status.stated.unwrap(), status.held.1)
    };
    assert_eq!(of("disk"), (40 << 20, 40 << 20));
    let why = core.change_over("more", &wishes(stated(64)), &mut |_| true).unwrap_err().to_string();
    assert!(why.contains("57 MiB at most"), "{why}");
    assert!(core.change_over("more", &wishes(stated(40)), &mut |_| true).unwrap());
    let (disk, other) = (of("disk"), of("more"));
    assert_eq!((disk.0, other.0), (40 << 20, 40 << 20));
    assert!(disk.1 < 26 << 20 && disk.1 + other.1 > 50 << 20, "{disk:?} {other:?}");
    assert!(core.change_over("more", &Default::default(), &mut |_| true).unwrap());
    assert_eq!(of("disk"), (40 << 20, 40 << 20));
}
