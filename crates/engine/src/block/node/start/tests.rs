use larder_base::UnixSecs;
use larder_format::Uuid;
use larder_format::block::Layout;
use larder_format::block::log::Held;

use super::memory::HEADER_WORDS;
use super::*;
use crate::block::map::Replacement;
use crate::block::node::limits::Limits;
use crate::block::{GroupId, LogShards, MapRecord};
use crate::block::{LineId, Sum};

const LINE: LineId = LineId(3);

/// A cache device in memory.
struct Disk(Vec<u8>);

impl LogIo for Disk {
    fn read(&mut self, at: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        out.copy_from_slice(&self.0[at as usize..][..out.len()]);
        Ok(())
    }
    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), IoFailed> {
        self.0[at as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
    fn flush(&mut self) -> Result<(), IoFailed> {
        Ok(())
    }
}

/// Shards of which one has a line to record.
struct OneLine(Option<u32>);

impl LogShards for OneLine {
    fn records_waiting(&mut self, shard: u32) -> usize {
        usize::from(self.0 == Some(shard))
    }
    fn take_records(&mut self, shard: u32, _: usize, out: &mut Vec<MapRecord>) {
        if self.0 == Some(shard) {
            out.push(MapRecord { slot: SlotId(0), holds: Some((LINE, Sum(7))) });
            self.0 = None;
        }
    }
    fn records_durable(&mut self, _: u32) {}
    fn records_lost(&mut self, _: u32) {}
    fn state(&mut self, _: u32, _: SlotId, most: u32, out: &mut Vec<Held>) {
        out.extend((0..most).map(|_| None));
    }
    fn quiet(&mut self, _: u32, _: u32) -> bool {
        false
    }
    fn intent_ready(&mut self, _: u32, _: u32) {}
    fn flush_backing(&mut self, _: u32) -> Result<(), IoFailed> {
        Err(IoFailed)
    }
}

/// The host's note.
struct Note(bool);

impl Notes for Note {
    fn given_up(&mut self) -> Result<(), String> {
        self.0 = true;
        Ok(())
    }
    fn forget(&mut self) {
        self.0 = false;
    }
}

fn superblock(disk: &Disk) -> BlockSuperblock {
    let (a, b) = disk.0.split_at(COPY_BYTES);
    larder_format::block::superblock::choose(a, b).unwrap()
}

fn format() -> Disk {
    let layout = Layout::full_of((2 << 20) + 64 * 4096, 4096, 2, 4).unwrap();
    let sb = BlockSuperblock::format(Uuid([3; 16]), 5, 9, layout, UnixSecs(0));
    let mut disk = Disk(vec![0; layout.device as usize]);
    disk.write((sb.copy() * COPY_BYTES) as u64, &sb.encode()).unwrap();
    disk
}

/// A start with one volume whose store is known by `version`.
fn begin(
    disk: &mut Disk,
    version: u8,
    left: Option<(Words, Vec<(Words, Words)>)>,
) -> (Box<Begun>, Memory) {
    let sb = superblock(disk);
    let setup = Setup {
        shape: Shape::of(&sb.layout),
        making: Making {
            replacement: Replacement::ALL[0],
            reclaim: larder_policy::block::VictimPolicy::ALL[0],
            evict: larder_policy::block::EvictionBy::default(),
        },
        idle: Nanos::from_secs(30),
        empty: false,
        random: 4,
        fault: Fault::default(),
    };
    let (is_old, (e, s)) = (left.is_some(), Map::words(setup.shape));
    let (header, words) = left.unwrap_or_else(|| {
        let words = (0..sb.layout.shards).map(|_| (Words::heap(e), Words::heap(s)));
        (Words::heap(HEADER_WORDS), words.collect())
    });
    let mut memory = Memory::new(header, is_old);
    let proves = move |then: &[u8; 64], _| if *then == [version; 64] { Ok(()) } else { Err("not") };
    let comer = Comer {
        name: "a".to_owned(),
        bytes: 1 << 20,
        identity: [version; 64],
        proves: Box::new(proves),
    };
    let left = Left { superblock: sb, voided: None, memory: &mut memory, words };
    let mut io = Charged::new(disk, Limits::default(), Nanos::ZERO);
    match start(left, &[comer], &setup, &mut io, &mut Note(false)) {
        Ok(Started::With(begun)) => (begun, memory),
        other => panic!("{other:?}"),
    }
}

fn lines(begun: &Begun) -> u32 {
    begun.maps.iter().map(Map::count).sum()
}

/// A line that was evicted so lately that only the log names it, of a volume whose store has changed: it is not in the map that
/// survived, and must not come back with a power cut behind the start.
#[test]
fn lines_evicted_lately_of_a_changed_volume_do_not_come_back() {
    for changed in [false, true] {
        let mut disk = format();
        let (mut begun, memory) = begin(&mut disk, 1, None);
        let shard = begun.maps[0].placing().shard(GroupId(0));
        let mut shards = OneLine(Some(shard));
        begun.log.step(Nanos::ZERO, &mut shards, &mut disk).unwrap();
        assert_eq!(shards.0, None, "it is durable");
        let version = if changed { 2 } else { 1 };
        let words = begun.maps.iter().map(Map::snapshot).collect();
        let (begun, _) = begin(&mut disk, version, Some((memory.snapshot(), words)));
        assert_eq!((&begun.warmth, lines(&begun)), (&Warmth::Memory, 0));
        let (begun, _) = begin(&mut disk, version, None);
        assert_eq!(lines(&begun), u32::from(!changed));
    }
}

/// Memory of a run that another has followed is not believed.
#[test]
fn memory_of_another_run_is_not_believed() {
    let mut disk = format();
    let (begun, memory) = begin(&mut disk, 1, None);
    let words = || begun.maps.iter().map(Map::snapshot).collect();
    let (again, _) = begin(&mut disk, 1, Some((memory.snapshot(), words())));
    assert_eq!(again.warmth, Warmth::Memory);
    // (The copy is of the run before.)
    let (again, _) = begin(&mut disk, 1, Some((memory.snapshot(), words())));
    assert!(matches!(again.warmth, Warmth::Cold(_)), "{:?}", again.warmth);
}

/// What is asked of a device, of which a flush may fail.
struct Order(Vec<&'static str>, bool);

impl LogIo for Order {
    fn read(&mut self, _: u64, _: &mut [u8]) -> Result<(), IoFailed> {
        Err(IoFailed)
    }
    fn write(&mut self, _: u64, _: &[u8]) -> Result<(), IoFailed> {
        self.0.push("write");
        Ok(())
    }
    fn flush(&mut self) -> Result<(), IoFailed> {
        self.0.push("flush");
        if self.1 { Err(IoFailed) } else { Ok(()) }
    }
}

/// A start whose device fails, behind a run that was killed between writing a copy of the superblock and its flush: that copy rules, and may not
/// be durable. It is made so before the other is written, or the other is left as it is.
#[test]
fn a_start_that_fails_does_not_risk_both_copies_of_the_superblock() {
    let sb = superblock(&format());
    let orders = [false, true].map(|fails| {
        let mut io = Order(Vec::new(), fails);
        let mut memory = Memory::new(Words::heap(HEADER_WORDS), false);
        begin_without(&sb, ("", Fault::default()), &mut memory, &mut io, &mut Note(false)).unwrap();
        io.0
    });
    assert_eq!(orders, [vec!["flush", "write", "flush"], vec!["flush"]]);
}

/// A disk whose `fails`th write from now fails, and where writes went.
struct Failing<'a>(&'a mut Disk, usize, Vec<u64>);

impl LogIo for Failing<'_> {
    fn read(&mut self, at: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        self.0.read(at, out)
    }
    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), IoFailed> {
        self.2.push(at);
        if self.2.len() == self.1 { Err(IoFailed) } else { self.0.write(at, bytes) }
    }
    fn flush(&mut self) -> Result<(), IoFailed> {
        Ok(())
    }
}

/// The second copy of a change is not taken, and may be torn: it is the next to be written, since the first alone is whole.
#[test]
fn a_copy_of_the_superblock_that_may_be_torn_is_the_next_to_be_written() {
    for fails in [1, 2] {
        let mut disk = format();
        let (mut begun, _) = begin(&mut disk, 1, None);
        let mut io = Failing(&mut disk, fails, Vec::new());
        begun.log.update(&mut io, |sb| sb.volumes.clear()).unwrap_err();
        begun.log.update(&mut io, |sb| sb.volumes.clear()).unwrap();
        assert_eq!(io.2[fails - 1], io.2[fails], "the write that failed, and the next");
    }
}
