use larder_base::{ByteSize, UnixSecs};
use larder_format::Uuid;
use larder_format::block::Layout;
use larder_format::block::log::Held;

use super::memory::HEADER_WORDS;
use super::*;
use crate::block::left::tests::Fx;
use crate::block::map::Replacement;
use crate::block::node::limits::Limits;
use crate::block::node::maintenance::{Maintenance, Pace, takeback};
use crate::block::node::setup;
use crate::block::{
    GroupId, LineId, LogShards, LogStep, MapRecord, OpId, Part, PartKind, Sum, Verdict, WriteMode,
};

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
        true
    }
    fn intent_ready(&mut self, _: u32, _: u32) {}
    fn flush_backing(&mut self, _: u32) -> Result<(), IoFailed> {
        Ok(())
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

/// Memory as a run has left it: its header, and the words of each shard.
type Survived = (Words, Vec<(Words, Words)>);

/// How a run on a device with this layout is.
fn setup_of(layout: &Layout) -> Setup {
    Setup {
        shape: Shape::of(layout),
        making: Making {
            replacement: Replacement::ALL[0],
            reclaim: larder_policy::block::VictimPolicy::ALL[0],
            evict: larder_policy::block::EvictionBy::default(),
        },
        config: setup::shard_config(WriteMode::WriteThrough, ByteSize(1 << 20), layout),
        idle: Nanos::from_secs(30),
        empty: false,
        random: 4,
        fault: Fault::default(),
    }
}

/// One volume whose store is known by `version`.
fn volume(version: u8) -> Comer {
    let proves = move |then: &[u8; 64], _| if *then == [version; 64] { Ok(()) } else { Err("not") };
    Comer {
        name: "a".to_owned(),
        bytes: 1 << 20,
        identity: [version; 64],
        proves: Box::new(proves),
    }
}

/// A start with that volume, as far as its verdict.
fn judge(
    disk: &mut Disk,
    version: u8,
    left: Option<Survived>,
    empty: bool,
) -> (Result<Judged, Refused>, Memory) {
    let sb = superblock(disk);
    let setup = Setup { empty, ..setup_of(&sb.layout) };
    let (is_old, (e, s)) = (left.is_some(), Map::words(setup.shape));
    let (header, words) = left.unwrap_or_else(|| {
        let words = (0..sb.layout.shards).map(|_| (Words::heap(e), Words::heap(s)));
        (Words::heap(HEADER_WORDS), words.collect())
    });
    let mut memory = Memory::new(header, is_old);
    let left = Left { superblock: sb, voided: None, memory: &mut memory, words };
    let mut io = Charged::new(disk, Limits::default(), Nanos::ZERO);
    (left.judge(&[volume(version)], &setup, &mut io), memory)
}

fn begin(disk: &mut Disk, version: u8, left: Option<Survived>) -> (Box<Begun>, Memory) {
    let (judged, mut memory) = judge(disk, version, left, false);
    let ready = judged.unwrap().stores_durable(|_| Ok::<(), ()>(())).unwrap();
    let mut io = Charged::new(disk, Limits::default(), Nanos::ZERO);
    match ready.take_over(&mut memory, &mut io, &mut Note(false)) {
        Ok(Started::With(begun)) => (begun, memory),
        Ok(Started::Without(without)) => panic!("{}", without.why),
        Err(why) => panic!("{why:?}"),
    }
}

fn lines(begun: &Begun) -> u32 {
    begun.shards.iter().map(BlockShard::lines).sum()
}

fn words(begun: &Begun) -> Vec<(Words, Words)> {
    begun.shards.iter().map(|shard| shard.map().snapshot()).collect()
}

/// A line that was evicted so lately that only the log names it, of a volume whose store has changed: it is not in the map that
/// survived, and must not come back with a power cut behind the start.
#[test]
fn lines_evicted_lately_of_a_changed_volume_do_not_come_back() {
    for changed in [false, true] {
        let mut disk = format();
        let (mut begun, memory) = begin(&mut disk, 1, None);
        let shard = begun.shards[0].map().placing().shard(GroupId(0));
        let mut shards = OneLine(Some(shard));
        begun.log.step(Nanos::ZERO, &mut shards, &mut disk).unwrap();
        assert_eq!(shards.0, None, "it is durable");
        let version = if changed { 2 } else { 1 };
        let left = (memory.snapshot(), words(&begun));
        let (begun, _) = begin(&mut disk, version, Some(left));
        assert_eq!((&begun.warmth, lines(&begun)), (&Warmth::Memory, 0));
        let (begun, _) = begin(&mut disk, version, None);
        assert_eq!(lines(&begun), u32::from(!changed));
    }
}

/// A run whose memory has no line 3, on a log that names it. The batch with which the line left was the log's last, and has rotted: nobody misses it.
fn behind_a_lost_batch(disk: &mut Disk) -> (Box<Begun>, u32) {
    let (mut begun, memory) = begin(disk, 1, None);
    let shard = begun.shards[0].map().placing().shard(GroupId(0));
    begun.log.step(Nanos::ZERO, &mut OneLine(Some(shard)), disk).unwrap();
    let left = (memory.snapshot(), words(&begun));
    let (begun, _) = begin(disk, 1, Some(left));
    assert_eq!((&begun.warmth, lines(&begun)), (&Warmth::Memory, 0));
    (begun, shard)
}

/// A power cut would bring the line back as it was. So a change of it waits for its region's bit, until the log has a snapshot.
#[test]
fn what_a_log_may_name_beside_memory_is_not_changed_ahead_of_its_bit() {
    let mut disk = format();
    let (mut begun, shard) = behind_a_lost_batch(&mut disk);
    let at = LINE.0 * 4096;
    let write = Part { op: OpId(1), kind: PartKind::Write, at, len: 4096, verdict: Verdict::Admit };
    let (machine, mut fx) = (&mut begun.shards[shard as usize], Fx::default());
    machine.submit(Nanos(1), write, &mut fx);
    assert_eq!((fx.bits, fx.store.len()), (1, 0), "it waits for the bit");
    machine.intent_ready(Nanos(1), 0, &mut fx);
    machine.backing_changed(Nanos(1), fx.store.remove(0), Ok(()), &mut fx);
    machine.flash_written(Nanos(1), fx.flash.remove(0), Ok(&[10]), &mut fx);
    // The log asks this behind its snapshot.
    assert!(machine.quiet(0));
    let elsewhere = Part { at: at + 4096, op: OpId(2), ..write };
    machine.submit(Nanos(1), elsewhere, &mut fx);
    assert_eq!((fx.bits, fx.store.len()), (2, 1));
}

/// Before a bit goes, the log has a snapshot of the memory that it was found beside, and nothing behind it that an earlier run wrote.
#[test]
fn a_log_that_may_name_lines_beside_memory_is_replaced_before_a_bit_goes() {
    for is_older in [false, true] {
        let mut disk = format();
        let (mut begun, memory) = begin(&mut disk, 1, None);
        let shard = begun.shards[0].map().placing().shard(GroupId(0));
        let left = (memory.snapshot(), words(&begun));
        begun.log.ask(shard, 0);
        begun.log.step(Nanos::ZERO, &mut OneLine(None), &mut disk).unwrap();
        // A step that writes twice has begun a snapshot: the run is killed, and its record is behind that snapshot.
        let fails = if is_older { 2 } else { usize::MAX };
        loop {
            let mut io = Failing(&mut disk, fails, Vec::new());
            let outcome = begun.log.step(Nanos::ZERO, &mut OneLine(Some(shard)), &mut io);
            if outcome.is_err() || !is_older {
                break;
            }
        }
        let (begun, _) = begin(&mut disk, 1, Some(left));
        assert_eq!((&begun.warmth, lines(&begun)), (&Warmth::Memory, 0));
        let mut log = begun.log;
        while log.step(Nanos::from_secs(60), &mut OneLine(None), &mut disk) == Ok(LogStep::Worked) {
            let stats = log.stats();
            assert!(stats.intents_cleared == 0 || stats.snapshots == 1 + u64::from(is_older));
        }
        assert_eq!(log.stats().intents_cleared, 1);
        let (begun, _) = begin(&mut disk, 1, None);
        assert_eq!(lines(&begun), 0, "{is_older}");
    }
}

/// A store that cannot be made durable ends the start, before a byte of the device has changed, or a line has left memory that is believed: the next
/// start finds what this one has found, though a volume has changed.
#[test]
fn a_start_that_a_store_refuses_changes_nothing() {
    let mut disk = format();
    let (mut begun, _) = begin(&mut disk, 1, None);
    let shard = begun.shards[0].map().placing().shard(GroupId(0));
    begun.log.step(Nanos::ZERO, &mut OneLine(Some(shard)), &mut disk).unwrap();
    drop(begun);
    // With what the device says, and then with memory.
    let (begun, _) = begin(&mut disk, 1, None);
    assert_eq!(lines(&begun), 1);
    for in_memory in [false, true] {
        let survived = in_memory.then(|| (memory_of(&disk), words(&begun)));
        let before = disk.0.clone();
        let (judged, memory) = judge(&mut disk, 2, survived, false);
        let mut asked = Vec::new();
        let refused = judged.unwrap().stores_durable(|volume| {
            asked.push(volume.name.clone());
            Err("it hangs")
        });
        assert_eq!((refused.unwrap_err(), asked), ("it hangs", vec!["a".to_owned()]));
        assert!(disk.0 == before, "the device has changed");
        let is_believed = memory.is_of(&superblock(&disk), Fault::default()).is_ok();
        assert_eq!(is_believed, in_memory);
    }
    let left = (memory_of(&disk), words(&begun));
    let (begun, _) = begin(&mut disk, 1, Some(left));
    assert_eq!((&begun.warmth, lines(&begun)), (&Warmth::Memory, 1));
}

/// The header of memory that is owned by the last run.
fn memory_of(disk: &Disk) -> Words {
    let mut memory = Memory::new(Words::heap(HEADER_WORDS), false);
    memory.own(&superblock(disk));
    memory.snapshot()
}

/// A run that is to be recorded does not begin with a cache that has lines, and leaves them where they are: those of a volume that has changed too.
#[test]
fn a_record_is_refused_before_a_line_goes() {
    let mut disk = format();
    let (mut begun, _) = begin(&mut disk, 1, None);
    let shard = begun.shards[0].map().placing().shard(GroupId(0));
    begun.log.step(Nanos::ZERO, &mut OneLine(Some(shard)), &mut disk).unwrap();
    let (begun, _) = begin(&mut disk, 1, None);
    let before = disk.0.clone();
    for in_memory in [false, true] {
        let survived = in_memory.then(|| (memory_of(&disk), words(&begun)));
        let (judged, _) = judge(&mut disk, 2, survived, true);
        assert_eq!(judged.err(), Some(Refused::NotEmpty));
        assert!(disk.0 == before, "the device has changed");
    }
}

/// Memory of a run that another has followed is not believed.
#[test]
fn memory_of_another_run_is_not_believed() {
    let mut disk = format();
    let (begun, memory) = begin(&mut disk, 1, None);
    let (again, _) = begin(&mut disk, 1, Some((memory.snapshot(), words(&begun))));
    assert_eq!(again.warmth, Warmth::Memory);
    // (The copy is of the run before.)
    let (again, _) = begin(&mut disk, 1, Some((memory.snapshot(), words(&begun))));
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

/// A host that writes down what a cache that is taken back asks for; one of its shards may not be at rest.
struct Asked {
    disk: BlockSuperblock,
    busy: bool,
    order: Vec<&'static str>,
}

impl takeback::Anew for Asked {
    fn found(&mut self) -> Result<BlockSuperblock, String> {
        self.order.push("found");
        Ok(self.disk.clone())
    }
    fn is_idle(&mut self, shard: u32) -> bool {
        shard == 0 || !self.busy
    }
    fn empty_map(&mut self, shard: u32) -> Map {
        self.order.push("empty map");
        let (shape, placing) =
            (Shape::of(&self.disk.layout), Placing::of(&self.disk.layout, self.disk.key));
        let (entries, rest) = Map::words(shape);
        Map::new(Words::heap(entries), Words::heap(rest), placing, shard, shape, Making::default())
    }
    fn begin_anew(&mut self, _: u32, _: Map) -> bool {
        self.order.push("shard");
        true
    }
    fn disable(&mut self, _: u32) {
        self.order.push("disabled");
    }
    fn own(&mut self, _: &BlockSuperblock) {
        self.order.push("owned");
    }
    fn in_force(&mut self) {
        self.order.push("in force");
    }
    fn forget(&mut self) {
        self.order.push("forgotten");
    }
}

/// The order in which a cache is taken back (the note goes in the same step: were it later, it could go when the cache had been given up anew), and
/// that nothing is written where it cannot be.
#[test]
fn a_cache_is_taken_back_when_everything_in_it_is_empty() {
    let take = |disk: &mut Disk, change: fn(&mut Asked)| {
        let former = superblock(disk);
        let mut machine = Maintenance::new(Pace::default(), None, former.clone());
        let mut asked = Asked { disk: former, busy: false, order: Vec::new() };
        change(&mut asked);
        let again =
            takeback::Again { idle: Nanos::from_secs(30), random: 4, fault: Fault::default() };
        let mut io = Charged::new(disk, Limits::default(), Nanos::ZERO);
        let outcome = takeback::take_back(&mut machine, again, &mut io, &mut asked);
        (outcome, machine.superblock().map(|sb| sb.epoch), asked.order)
    };
    let mut disk = format();
    let (begun, _) = begin(&mut disk, 1, None);
    let before = disk.0.clone();
    for (change, why) in [
        ((|asked: &mut Asked| asked.busy = true) as fn(&mut Asked), takeback::NotTakenBack::Busy),
        (|asked: &mut Asked| asked.disk.uuid = Uuid([4; 16]), takeback::NotTakenBack::Other),
    ] {
        let (outcome, epoch, _) = take(&mut disk, change);
        assert_eq!((outcome, epoch), (Err(why), None));
        assert!(disk.0 == before, "the device has changed");
    }
    let (outcome, epoch, order) = take(&mut disk, |_| ());
    assert_eq!(outcome, Ok(()));
    let in_force = superblock(&disk);
    assert_eq!(epoch, Some(in_force.epoch));
    assert!(in_force.epoch > begun.log.superblock().epoch);
    assert!(in_force.generation > begun.log.superblock().generation, "an empty map");
    let shards = in_force.layout.shards as usize;
    let mut expected = vec!["found"];
    (0..shards).for_each(|_| expected.extend(["empty map", "shard"]));
    expected.extend(["owned", "in force", "forgotten"]);
    assert_eq!(order, expected);
}
