//! The cache as a library, by the example that shows it: a program's tags decide what two-level block selection keeps.

#[path = "../examples/embed.rs"]
mod embed;

use std::fs::File;
use std::time::Duration;

use embed::Embedded;
use larder_base::ByteSize;
use larder_block::nbd::server::Command;
use larder_policy::block::BlockKind;
use larder_runtime::AlignedBuf;

const LINE: u64 = 4096;

fn read(disk: &mut Embedded, line: u64, tag: BlockKind) {
    let buf = AlignedBuf::zeroed(LINE as usize);
    disk.ask(Command::Read { offset: line * LINE, buf }, tag).unwrap().outcome.unwrap();
}

fn settled(disk: &Embedded) -> larder_engine::block::BlockStats {
    let cache = disk.handle().cache();
    assert_eq!(cache.settle(Duration::from_secs(120)).unwrap(), 0);
    cache.stats().engine
}

/// Lines of a volume that is far larger than the cache, each read once: those that the program calls metadata are kept, in
/// place of data that was read three times; the others are not.
#[test]
fn a_programs_tag_decides() {
    let dir = tempfile::tempdir().unwrap();
    File::create(dir.path().join("disk")).unwrap().set_len(64 << 20).unwrap();
    let uri = format!("file:{}", dir.path().join("disk").display());
    let mut disk =
        Embedded::open(&dir.path().join("cache"), ByteSize(8 << 20), &uri, "two_lbs").unwrap();
    let slots = disk.handle().cache().layout().slots();
    for _ in 0..3 {
        (0..5 * slots).for_each(|line| read(&mut disk, line, BlockKind::Data));
        settled(&disk);
    }
    let mut kept = Vec::new();
    for (first, tag) in [(6 * slots, BlockKind::Data), (8 * slots, BlockKind::Metadata)] {
        (first..first + 64).for_each(|line| read(&mut disk, line, tag));
        let before = settled(&disk).read_hits;
        (first..first + 64).for_each(|line| read(&mut disk, line, tag));
        kept.push(settled(&disk).read_hits - before);
    }
    assert!(kept[0] < 32 && kept[1] == 64, "of 64 lines each, data and metadata: {kept:?}");
}
