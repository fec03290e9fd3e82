//! The store behind the cache: a filer over a network, or disks.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use larder_base::{Nanos, Rng};
use larder_trace::mix;

use super::spec::{Store as Spec, StoreKind, Timing};

/// What was asked of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StoreCounts {
    pub reads: u64,
    pub writes: u64,
    pub read_bytes: u64,
    pub write_bytes: u64,
    pub flushes: u64,
}

/// One disk: how far its arm has work, and where the last access ended.
#[derive(Clone, Copy, Debug, Default)]
struct Disk {
    free: Nanos,
    end: u64,
}

/// A store in virtual time. See [`Spec`] for what its times mean.
#[derive(Debug)]
pub(crate) struct StoreModel {
    spec: Spec,
    timing: Timing,
    seed: u64,
    /// When each of the filer's servers is free; empty where their number is not limited.
    servers: BinaryHeap<Reverse<Nanos>>,
    disks: Vec<Disk>,
    counts: StoreCounts,
    /// Seconds spent working, over all servers or disks.
    busy: f64,
}

fn micros(us: f64) -> Nanos {
    Nanos((us * 1000.0) as u64)
}

impl StoreModel {
    pub(crate) fn new(spec: &Spec, timing: &Timing, seed: u64) -> StoreModel {
        StoreModel {
            spec: spec.clone(),
            timing: timing.clone(),
            seed,
            servers: (0..timing.backend_servers).map(|_| Reverse(Nanos::ZERO)).collect(),
            disks: vec![Disk::default(); spec.disks.max(1) as usize],
            counts: StoreCounts::default(),
            busy: 0.0,
        }
    }

    /// A read of `len` bytes at `at` of volume `volume`, asked for at `now` on behalf of request `number`: when it is
    /// there. Whether a filer is fast follows from seed, request and place, so that all caches meet the same luck.
    pub(crate) fn read(
        &mut self,
        now: Nanos,
        number: u64,
        (volume, at): (u32, u64),
        len: u64,
    ) -> Nanos {
        self.counts.reads += 1;
        self.counts.read_bytes += len;
        if self.spec.kind == StoreKind::Disk {
            return self.disk(now, (volume, at), len, self.spec.disk_read_mb);
        }
        let t = &self.timing;
        let mut draw = Rng::new(self.seed ^ mix(number ^ mix(at ^ u64::from(volume) << 48)));
        let us =
            if draw.chance(t.backend_fast_share) { t.backend_fast_us } else { t.backend_slow_us };
        let packet = micros(t.network_packet_us);
        let bits = micros(len as f64 * 8.0 * t.network_bit_ns / 1000.0);
        self.serve(now + packet, micros(us)) + packet + bits
    }

    /// A write (or zeros, or a trim, whose bytes do not travel): when it is answered.
    pub(crate) fn write(
        &mut self,
        now: Nanos,
        (volume, at): (u32, u64),
        len: u64,
        travels: bool,
    ) -> Nanos {
        self.counts.writes += 1;
        let bytes = if travels { len } else { 0 };
        self.counts.write_bytes += bytes;
        if self.spec.kind == StoreKind::Disk {
            return self.disk(now, (volume, at), bytes, self.spec.disk_write_mb);
        }
        let t = &self.timing;
        let packet = micros(t.network_packet_us);
        let bits = micros(bytes as f64 * 8.0 * t.network_bit_ns / 1000.0);
        self.serve(now + packet + bits, micros(self.spec.write_us)) + packet
    }

    /// A flush: when it is answered.
    pub(crate) fn flush(&mut self, now: Nanos) -> Nanos {
        self.counts.flushes += 1;
        let t = &self.timing;
        match self.spec.kind {
            // All disks at once.
            StoreKind::Disk => {
                now + micros(self.spec.flush_us.unwrap_or(self.spec.disk_ms * 1000.0))
            }
            StoreKind::Filer => {
                let packet = micros(t.network_packet_us);
                let span = micros(self.spec.flush_us.unwrap_or(self.spec.write_us));
                self.serve(now + packet, span) + packet
            }
        }
    }

    fn serve(&mut self, at: Nanos, span: Nanos) -> Nanos {
        self.busy += span.as_secs_f64();
        match self.servers.pop() {
            Some(Reverse(free)) => {
                let done = Nanos(free.0.max(at.0)) + span;
                self.servers.push(Reverse(done));
                done
            }
            None => at + span,
        }
    }

    /// Every stripe that is touched is one disk's affair, at once. A random access is answered after `disk_ms` at the
    /// earliest; a disk that has others to choose from begins one every 1/`disk_iops`. What goes on where the last
    /// access of that disk ended, or so shortly behind that reading what lies between is sooner done than seeking, takes
    /// the transfer alone.
    fn disk(&mut self, now: Nanos, (volume, at): (u32, u64), len: u64, mb: f64) -> Nanos {
        let stripe = self.spec.stripe.0.max(512);
        let disks = self.disks.len() as u64;
        let mut done = now;
        let (mut from, end) = (at, at.saturating_add(len.max(1)));
        while from < end {
            let number = from / stripe;
            let to = ((number + 1) * stripe).min(end);
            let which = ((number + u64::from(volume)) % disks) as usize;
            // Volumes lie behind one another; stripes of one disk are neighbours there.
            let place = (u64::from(volume) << 48) + number / disks * stripe + from % stripe;
            let transfer = micros((to - from) as f64 / mb);
            let seek = micros(1e6 / self.spec.disk_iops);
            let disk = &mut self.disks[which];
            let begin = Nanos(disk.free.0.max(now.0));
            // A short way forwards is read through sooner than sought.
            let skip = place.checked_sub(disk.end).map(|gap| micros(gap as f64 / mb));
            let (span, least) = if let Some(skip) = skip.filter(|&skip| skip < seek) {
                (skip + transfer, Nanos::ZERO)
            } else {
                (seek + transfer, micros(self.spec.disk_ms * 1000.0) + transfer)
            };
            disk.free = begin + span;
            disk.end = place + (to - from);
            self.busy += span.as_secs_f64();
            done = Nanos(done.0.max(disk.free.0).max((now + least).0));
            from = to;
        }
        done
    }

    pub(crate) fn counts(&self) -> StoreCounts {
        self.counts
    }

    /// Counting begins.
    pub(crate) fn reset(&mut self) {
        (self.busy, self.counts) = (0.0, StoreCounts::default());
    }

    /// The share of `seconds` that servers or disks worked; of a filer without a limit, the mean number at work.
    pub(crate) fn utilisation(&self, seconds: f64) -> f64 {
        let count = match self.spec.kind {
            StoreKind::Disk => self.disks.len() as f64,
            StoreKind::Filer => f64::from(self.timing.backend_servers.max(1)),
        };
        if seconds <= 0.0 { 0.0 } else { self.busy / seconds / count }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disks(n: u32) -> StoreModel {
        let spec = Spec { kind: StoreKind::Disk, disks: n, ..Spec::default() };
        StoreModel::new(&spec, &Timing::default(), 1)
    }

    /// Holland: 2 × 8.2 + 32.8 + 878 µs for a read of 4 KiB, 141 µs for a write.
    #[test]
    fn a_filer_takes_its_closed_forms() {
        let mut filer = StoreModel::new(&Spec::default(), &Timing::default(), 3);
        let n = 100_000;
        let mut total = 0.0;
        for i in 0..n {
            total += filer.read(Nanos::ZERO, i, (0, i * 4096), 4096).as_secs_f64() * 1e6;
        }
        assert!((total / n as f64 - 927.2).abs() < 0.03 * 927.2, "{}", total / n as f64);
        let write = filer.write(Nanos::ZERO, (0, 0), 4096, true).as_secs_f64() * 1e6;
        assert!((write - (2.0 * 8.2 + 32.768 + 92.0)).abs() < 0.01, "{write}");
        let trim = filer.write(Nanos::ZERO, (0, 0), 1 << 30, false).as_secs_f64() * 1e6;
        assert!((trim - (2.0 * 8.2 + 92.0)).abs() < 0.01, "{trim}");
        assert_eq!((filer.counts().reads, filer.counts().write_bytes), (n, 4096));
    }

    /// Azor's table: 12.6 ms, 150 requests a second, 100 and 90 MB/s.
    #[test]
    fn a_disk_takes_its_closed_forms() {
        let mut disk = disks(1);
        let ms = |n: Nanos| n.as_secs_f64() * 1e3;
        assert!((ms(disk.read(Nanos::ZERO, 0, (0, 1 << 30), 4096)) - 12.64).abs() < 0.01);
        let mut last = Nanos::ZERO;
        for i in 0..1500u64 {
            last = Nanos(disk.read(Nanos::ZERO, i, (0, mix(i) % (1 << 38)), 4096).0.max(last.0));
        }
        let iops = 1501.0 / last.as_secs_f64();
        assert!((148.0..151.0).contains(&iops), "{iops}");
        // One stream after another: a seek, then 100 MB/s and 90 MB/s.
        for (mb, write) in [(100.0, false), (90.0, true)] {
            let (mut disk, mut now) = (disks(1), Nanos::ZERO);
            for i in 0..1000u64 {
                let place = (0, i * 65_536);
                now = match write {
                    false => disk.read(now, i, place, 65_536),
                    true => disk.write(now, place, 65_536, true),
                };
            }
            let rate = 65.536e6 / now.as_secs_f64() / 1e6;
            assert!((rate / mb - 1.0).abs() < 0.03, "{rate}");
        }
    }

    /// Every other page of a stream costs as much as the stream, and no seeks.
    #[test]
    fn short_gaps_are_read_through() {
        let time = |step: u64| {
            let (mut disk, mut now) = (disks(1), Nanos::ZERO);
            for i in 0..10_000u64 / step {
                now = disk.read(now, i, (0, i * step * 4096), 4096);
            }
            now.as_secs_f64()
        };
        let (all, other, hundredth) = (time(1), time(2), time(1000));
        assert!((other / all - 1.0).abs() < 0.05, "{all} {other}");
        assert!((0.11..0.12).contains(&hundredth), "nine seeks: {hundredth}");
    }

    #[test]
    fn stripes_work_side_by_side() {
        let (mut one, mut four) = (disks(1), disks(4));
        for store in [&mut one, &mut four] {
            for i in 0..400u64 {
                store.read(Nanos::ZERO, i, (0, mix(i) % (1 << 40)), 4096);
            }
        }
        let last = |s: &StoreModel| s.disks.iter().map(|d| d.free).max().unwrap().as_secs_f64();
        assert!(last(&four) < 0.4 * last(&one), "{} {}", last(&four), last(&one));
    }
}
