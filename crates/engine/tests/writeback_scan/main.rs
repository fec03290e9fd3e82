//! The scan of the write log at a start, and what is recovered from it: logs that are written with the encoders of the format, whole
//! and damaged.

#![allow(clippy::single_range_in_vec_init, reason = "lists of stretches that happen to be one")]

mod damage;
mod device;

use larder_engine::block::writeback::recovery::{Dirty, Recovered};
use larder_format::Uuid;
use larder_format::block::write_log::{Flags, Record, pieces};

use device::{Device, Truth};

/// Three segments, of which the first two are sealed; batches of both volumes.
fn three(sector: u32) -> Device {
    let mut device = Device::new(sector);
    for segment in [4, 2] {
        device.begin(segment);
        for _ in 0..3 {
            device.batch(&[(1, 5000), (2, 700)], false);
        }
        device.seal();
    }
    device.begin(7);
    device.batch(&[(1, 4096)], false);
    device.batch(&[(2, 9000), (2, 512)], true);
    device
}

/// Numbers of batches that are lost.
fn lost(recovered: &Recovered) -> Vec<u64> {
    recovered.chain.damaged.iter().cloned().flatten().collect()
}

#[test]
fn all_that_was_written_comes_back_from_footers_and_headers() {
    for sector in [512, 4096] {
        let device = three(sector);
        let (scan, recovered) = device.has_all([7, 8]);
        assert_eq!(scan.batches.len(), 8);
        assert_eq!((scan.generation, scan.unreadable.len(), scan.damaged.len()), (13, 0, 0));
        assert_eq!(recovered.chain.next, 9);
        let live: Vec<(u32, u64, u32)> =
            recovered.live.iter().map(|live| (live.segment, live.first, live.records)).collect();
        assert_eq!(live, [(4, 1, 6), (2, 4, 6), (7, 7, 3)]);
        // Behind a footer nothing is appended; behind the last batch it is.
        let end = (64 << 10) - sector;
        assert_eq!((recovered.live[0].used.bytes, recovered.live[1].used.bytes), (end, end));
        assert!(recovered.live[2].used.bytes < 40_000);
    }
}

#[test]
fn an_empty_area_and_that_of_another_cache_are_an_empty_log() {
    let mut device = Device::new(512);
    let (scan, recovered) = device.has_all([0, 0]);
    assert_eq!((scan, recovered.chain.next), (Default::default(), 1));
    // The same device, whose log another cache's is.
    device = three(512);
    let other = larder_engine::block::writeback::scan::scan(
        &device.area,
        Uuid([1; 16]),
        &mut |at, out: &mut [u8]| {
            out.copy_from_slice(&device.bytes[at as usize..at as usize + out.len()]);
            Ok(())
        },
    );
    assert_eq!(other, Default::default());
}

#[test]
fn the_log_ends_at_a_torn_batch() {
    for what in ["payload", "header", "nothing there"] {
        let mut device = three(512);
        let torn = device.batch(&[(1, 6000)], false);
        let whole = device.batch(&[(1, 512)], false);
        match what {
            "payload" => device.rot(torn.payload.start + 5999),
            "header" => device.rot(torn.header.start + 200),
            _ => device.bytes[torn.header.start..torn.payload.end].fill(0),
        }
        let (scan, recovered) = device.has_all([7, 8]);
        assert_eq!((recovered.chain.next, recovered.chain.damaged.len()), (9, 0), "{what}");
        // The one behind was read: it only does not count.
        assert!(scan.batches.iter().any(|batch| batch.link.number == whole.number), "{what}");
    }
}

#[test]
fn what_a_torn_batch_knew_durable_is_no_end_of_the_log() {
    let mut device = three(512);
    let rotten = device.batch(&[(1, 512)], false);
    device.batch(&[(2, 512)], false);
    device.known = device.last();
    let torn = device.batch(&[(2, 6000)], false);
    device.rot(rotten.header.start + 130);
    device.rot(torn.payload.start);
    let (_, recovered) = device.recover();
    assert_eq!(lost(&recovered), [rotten.number]);
    assert_eq!(recovered.chain.next, torn.number);
    assert_eq!(recovered.volumes[&2].last, 9);
    assert!(recovered.volumes[&1].gap);
}

#[test]
fn what_a_footer_knew_durable_is_no_end_of_the_log() {
    let mut device = Device::new(512);
    device.begin(4);
    let rotten = [512, 700, 900].map(|bytes| device.batch(&[(1, bytes)], false));
    device.begin(2);
    device.batch(&[(2, 512)], false);
    device.seal();
    device.rot(rotten[1].header.start + 60);
    let (_, recovered) = device.recover();
    assert_eq!((lost(&recovered), recovered.chain.next), (vec![2], 5));
}

#[test]
fn behind_a_rotten_batch_that_was_durable_the_log_goes_on() {
    let mut device = three(512);
    let rotten = device.batch(&[(1, 6000)], false);
    device.batch(&[(1, 700)], false);
    device.known = device.last();
    device.batch(&[(2, 700)], true);
    device.rot(rotten.header.start + 17);
    let (_, recovered) = device.recover();
    assert_eq!(lost(&recovered), [rotten.number]);
    assert_eq!(recovered.chain.next, device.last() + 1);
    let [one, two] = [1, 2].map(|volume| &recovered.volumes[&volume]);
    assert!(one.gap && one.last == 7);
    assert!(!two.gap && two.last == 9);
}

#[test]
fn rot_in_durable_payload_is_found_when_it_is_read() {
    let mut device = three(512);
    let rotten = device.batch(&[(1, 6000)], false);
    device.known = device.last();
    device.batch(&[(1, 700)], false);
    device.rot(rotten.payload.start + 4096);
    let (scan, recovered) = device.recover();
    let found = &recovered.volumes[&1];
    assert_eq!((found.last, found.gap), (9, false));
    assert_eq!(device.payload(&scan, &found.records[7]), None);
    assert!(device.payload(&scan, &found.records[8]).is_some());
}

#[test]
fn a_footer_stands_for_headers_that_rot() {
    let mut device = three(512);
    let headers = device.at(4) + 512..device.at(4) + 20_000;
    device.bytes[headers.step_by(512).next().unwrap()] ^= 1;
    device.has_all([7, 8]);
    // And headers for a footer that does.
    let mut device = three(512);
    let end = device.at(5);
    device.rot(end - 1000);
    let (scan, recovered) = device.has_all([7, 8]);
    // The next start may be able to read it: nothing is appended that it does not have.
    assert!(recovered.live[0].used.bytes == (64 << 10) - 512 && scan.damaged.is_empty());
    device.rot(end - 90);
    device.has_all([7, 8]);
}

#[test]
fn a_segment_whose_header_rots_is_known_by_what_is_in_it() {
    // Sealed, open, and sealed with a rotten first batch.
    for (segment, first) in [(4, false), (7, false), (4, true)] {
        let mut device = three(512);
        let at = device.at(segment);
        device.rot(at + 33);
        if first {
            device.rot(at + 512 + 40);
        }
        let (scan, _) = device.has_all([7, 8]);
        assert_eq!(scan.damaged, [segment]);
        // All of it gone.
        device.bytes[at..at + 512].fill(0);
        let (scan, _) = device.has_all([7, 8]);
        assert_eq!(scan.damaged, [segment]);
    }
}

#[test]
fn what_lies_behind_from_an_earlier_use_of_a_segment_is_void() {
    let mut device = three(512);
    // The first segment is freed, said so, and used again; its old batches and its footer are still there.
    device.frontiers = [3, 3];
    device.oldest = (12, 4);
    device.batch(&[(1, 512)], true);
    device.seal();
    device.begin(4);
    device.batch(&[(2, 512)], false);
    let (scan, recovered) = device.has_all([8, 9]);
    assert_eq!((recovered.chain.next, scan.generation), (11, 14));
    assert_eq!(recovered.volumes[&1].records.len(), 5);
    let live: Vec<u32> = recovered.live.iter().map(|live| live.segment).collect();
    assert_eq!(live, [2, 7, 4]);
    // A header alone takes the generation.
    device.generation += 3;
    device.begin(9);
    assert_eq!(device.has_all([8, 9]).0.generation, 18);
}

#[test]
fn segments_that_are_free_are_not_read() {
    let mut device = three(512);
    device.frontiers = [6, 6];
    device.oldest = (13, 7);
    device.batch(&[(1, 512)], true);
    device.seal();
    device.begin(1);
    device.batch(&[(2, 512)], false);
    let (scan, recovered) = device.has_all([8, 9]);
    assert!(scan.batches.iter().all(|batch| batch.link.generation >= 13));
    assert_eq!(recovered.chain.batches.len(), 4);
    // What they hold may rot, and be unreadable.
    let from = device.area.segment_at(4) + 512;
    device.bad.push(from..from + 30_000);
    assert_eq!(device.has_all([8, 9]).0.unreadable, []);
}

#[test]
fn a_later_run_makes_void_what_lies_behind() {
    let mut device = three(512);
    let torn = device.batch(&[(1, 512)], false);
    device.batch(&[(1, 4000)], false);
    device.rot(torn.payload.start);
    let (scan, recovered) = device.has_all([7, 8]);
    device.restart_behind(7, &scan, &recovered);
    // Over the torn one and not to the end of the other.
    let again = device.batch(&[(2, 100)], false);
    assert_eq!(again.number, torn.number);
    let (scan, recovered) = device.has_all([7, 9]);
    assert_eq!(recovered.chain.next, again.number + 1);
    assert!(scan.batches.iter().any(|batch| batch.link.number == again.number + 1));
}

/// What cannot be read is damage there, and is said.
#[test]
fn bytes_that_the_device_does_not_give() {
    let mut device = three(512);
    let durable = device.batch(&[(1, 6000)], false);
    device.known = device.last();
    let tail = device.batch(&[(1, 9000), (2, 300)], false);
    device.batch(&[(2, 400)], false);
    let sector = |at: usize| (at / 4096 * 4096) as u64..(at / 4096 * 4096 + 4096) as u64;

    // A segment's header, and a footer.
    device.bad = vec![sector(device.at(4)), sector(device.at(5) - 1)];
    let (scan, recovered) = device.recover();
    assert_eq!((scan.damaged, &scan.unreadable), (vec![4], &device.bad));
    // Header and first batch are in one sector here: a batch is lost, and nothing behind it.
    assert_eq!(recovered.chain.damaged.len(), 1);
    assert!(recovered.volumes[&1].gap && recovered.volumes[&2].gap);

    // The footer alone: the headers are there.
    device.bad.remove(0);
    assert_eq!(device.has_all([9, 10]).0.unreadable, device.bad);

    // Payload in the tail: the batch is there, and one record of it cannot be read.
    let at = tail.payload.start + 4096;
    device.bad = vec![sector(at)];
    let (scan, recovered) = device.recover();
    assert_eq!(scan.unreadable, device.bad);
    assert_eq!((recovered.chain.next, recovered.chain.damaged.len()), (device.last() + 1, 0));
    let readable = |volume: u32| {
        let records = recovered.volumes[&volume].records.iter();
        records.map(|dirty: &Dirty| dirty.entry.readable).collect::<Vec<bool>>()
    };
    assert_eq!(readable(1).iter().filter(|&&readable| !readable).count(), 1);
    assert!(!readable(1)[8] && readable(2).iter().all(|&readable| readable));

    // A header that was durable: a hole.
    device.bad.clear();
    device.bad.push(durable.header.start as u64..durable.header.end as u64);
    let (scan, recovered) = device.recover();
    assert_eq!(lost(&recovered), [durable.number]);
    assert!(scan.unreadable[0].start <= durable.header.start as u64);
    assert_eq!(recovered.chain.next, device.last() + 1);

    // The whole device.
    device.bad.clear();
    device.bad.push(0..u64::MAX);
    let (scan, recovered) = device.recover();
    assert_eq!(scan.unreadable, [device.area.at..device.area.end()]);
    assert_eq!((scan.damaged.len(), recovered.chain.next), (12, 1));
}

/// All records of volume 1 up to `last`, parked in segment `segment`.
fn park(device: &mut Device, segment: u32, sequences: std::ops::RangeInclusive<u64>) {
    device.begin_parked(segment, 1);
    for sequence in sequences {
        let is = |t: &&Truth| t.record.attachment == 1 && t.record.sequence == sequence;
        let truth = device.truth.iter().find(is).unwrap().clone();
        let sums = pieces::sums(&truth.payload).collect();
        device.park(&[(truth, sums)]);
    }
}

/// The first two segments are freed: what volume 1 had in them is parked in segment 9.
fn parked(seal: bool) -> Device {
    let mut device = three(512);
    park(&mut device, 9, 1..=6);
    if seal {
        device.seal();
    }
    device.frontiers = [0, 6];
    device.oldest = (13, 7);
    let last = device.last();
    // A new segment, since the parked one was open meanwhile.
    device.known = last;
    device.begin(4);
    device.batch(&[(2, 512)], false);
    device
}

#[test]
fn parked_records_come_back_with_the_chain() {
    for seal in [false, true] {
        let device = parked(seal);
        let (_, recovered) = device.has_all([7, 9]);
        let [parked] = &recovered.parked[..] else { panic!("{:?}", recovered.parked) };
        assert_eq!(
            (parked.segment, parked.attachment, parked.batches, parked.records),
            (9, 1, 6, 6)
        );
        assert_eq!(parked.used.bytes == (64 << 10) - 512, seal);
        let live: Vec<u32> = recovered.live.iter().map(|live| live.segment).collect();
        assert_eq!(live, [7, 4]);
    }
}

#[test]
fn a_parked_copy_that_is_torn_is_not_taken_for_a_better_one() {
    // Its original is there yet.
    let mut device = three(512);
    park(&mut device, 9, 1..=6);
    let at = device.at(9) + 512;
    for payload in [600, 3000, 8000, 20_000] {
        device.rot(at + payload);
    }
    device.has_all([7, 8]);
    // An earlier copy is.
    let mut device = parked(true);
    park(&mut device, 10, 1..=6);
    let at = device.at(10) + 512;
    (512..30_000).step_by(5000).for_each(|payload| device.rot(at + payload));
    device.has_all([7, 9]);
    // There is none: it is lost, and the volume is not.
    let mut device = parked(false);
    let end = device.at(9) + 600;
    device.rot(end + 1000);
    let (scan, recovered) = device.recover();
    let found = &recovered.volumes[&1];
    assert_eq!((found.last, found.gap), (7, false));
    assert!(!found.records[0].entry.readable && found.records[1].entry.readable);
    assert_eq!(device.payload(&scan, &found.records[0]), None);
}

#[test]
fn a_volume_whose_parked_segment_is_lost_has_a_gap() {
    // With records behind in the chain, and with none.
    for behind in [true, false] {
        let mut device = if behind {
            parked(true)
        } else {
            let mut device = Device::new(512);
            device.begin(0);
            device.batch(&[(1, 512), (2, 512)], false);
            device.known = device.last();
            park(&mut device, 9, 1..=1);
            device.oldest = (13, 2);
            device.begin(1);
            device.batch(&[(2, 512)], false);
            let (_, recovered) = device.recover();
            assert!(!recovered.volumes[&1].gap && recovered.volumes[&1].last == 1);
            device
        };
        let (from, to) = (device.at(9), device.at(10));
        device.bytes[from..to].fill(0x55);
        let (_, recovered) = device.recover();
        assert!(recovered.volumes[&1].gap, "{behind}");
        assert_eq!(recovered.chain.damaged, []);
    }
}

#[test]
fn a_record_parked_without_its_payload_comes_back_as_that() {
    let mut device = three(512);
    device.begin_parked(9, 1);
    let mut truth = device.truth[0].clone();
    truth.record = Record { flags: Flags { unreadable: true, ..Flags::default() }, ..truth.record };
    truth.payload.clear();
    device.park(&[(truth, Vec::new())]);
    device.frontiers = [0, 6];
    device.oldest = (12, 4);
    device.known = device.last();
    device.begin(5);
    device.batch(&[(2, 512)], false);
    let (_, recovered) = device.recover();
    let first = &recovered.volumes[&1].records[0];
    assert!(first.entry.record.flags.unreadable && !first.entry.readable);
}
