//! Any damage: nothing panics, and no record comes back that was not written.

use larder_base::Rng;
use larder_engine::block::writeback::Fault;
use larder_engine::block::writeback::recovery::recover;

use super::device::{Device, VOLUMES};

/// A log of a few segments, some sealed, some parked, some used again.
fn any(rng: &mut Rng) -> Device {
    let mut device = Device::new(if rng.chance(0.5) { 512 } else { 4096 });
    let mut segments: Vec<u32> = (0..12).collect();
    for _ in 0..rng.range(1, 5) {
        let segment = segments.remove(rng.below(segments.len() as u64) as usize);
        device.begin(segment);
        for _ in 0..rng.range(1, 4) {
            let to = |rng: &mut Rng| (1 + rng.below(2) as u32, rng.range(1, 6000));
            let first = to(rng);
            // Sequences are drawn one by one: two of one volume make two batches.
            device.batch(&[first], rng.chance(0.3));
            if rng.chance(0.3) {
                device.known = device.last();
            }
        }
        if rng.chance(0.6) {
            device.seal();
        }
        if rng.chance(0.3) {
            let spare = segments.remove(0);
            let copies: Vec<_> = device.truth.iter().rev().take(3).cloned().collect();
            let attachment = copies[0].record.attachment;
            device.begin_parked(spare, attachment);
            for truth in copies.into_iter().filter(|t| t.record.attachment == attachment) {
                let sums = larder_format::block::write_log::pieces::sums(&truth.payload).collect();
                device.park(&[(truth, sums)]);
            }
            if rng.chance(0.5) {
                device.seal();
            }
        }
        if rng.chance(0.2) {
            device.run += 1;
        }
    }
    device
}

fn damage(device: &mut Device, rng: &mut Rng) {
    let (from, all) = (device.area.at as usize, device.area.bytes());
    let segment = u64::from(device.area.geometry.bytes());
    // Where something is.
    let place = |rng: &mut Rng| {
        let at = segment * rng.below(12)
            + rng.below(segment) % [512, 2048, segment][rng.below(3) as usize];
        from + if rng.chance(0.2) { segment - 1 - at % segment.min(4096) } else { at } as usize
    };
    for _ in 0..rng.below(6) {
        let at = place(rng);
        let most = (from + all as usize - at).min(1 << rng.range(1, 16));
        let bytes = rng.range(1, most as u64) as usize;
        match rng.below(6) {
            0 => rng.fill(&mut device.bytes[at..at + bytes]),
            1 => device.bytes[at..at + bytes].fill(0),
            2 => device.bytes[at] ^= 1 << rng.below(8),
            3 => device.bad.push(at as u64..(at + bytes) as u64),
            // Written, or copied, to another place.
            _ => {
                let to = from + rng.below(all - bytes as u64) as usize / 512 * 512;
                let at = at / 512 * 512;
                device.bytes.copy_within(at..at + bytes, to);
            }
        }
    }
}

#[test]
fn no_damage_makes_a_record_that_was_not_written() {
    let seeds = std::env::var("LARDER_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    let (mut records, mut gaps, mut holes) = (0, 0, 0);
    for seed in seeds.map_or(0..3_000, |seed| seed..seed + 1) {
        let mut rng = Rng::new(seed);
        let mut device = any(&mut rng);
        damage(&mut device, &mut rng);
        let scan = device.scan();
        let recovered = recover(&scan.batches, &VOLUMES, Fault::default());
        device.check(&scan, &recovered);
        for volume in recovered.volumes.values() {
            for dirty in &volume.records {
                if let Some(payload) = device.payload(&scan, dirty) {
                    let truth = device.truth.iter().find(|t| t.record == dirty.entry.record);
                    assert_eq!(truth.map(|t| &t.payload[..]), Some(payload), "seed {seed}");
                }
            }
            records += volume.records.len();
            gaps += u32::from(volume.gap);
        }
        holes += recovered.chain.damaged.len();
    }
    assert!(
        seeds.is_some() || (records > 10_000 && gaps > 50 && holes > 50),
        "{records} {gaps} {holes}"
    );
}

#[test]
fn a_log_without_damage_comes_back_whole() {
    for seed in 0..1_000 {
        let device = any(&mut Rng::new(seed));
        device.has_all([device.sequence(1), device.sequence(2)]);
    }
}
