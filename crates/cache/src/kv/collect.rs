//! What the store tells of itself.

use std::sync::atomic::Ordering;

use larder_base::{AppId, ByteSize, Now};
use larder_engine::kv::node::{DriveTotals, LogTotals, Totals};
use larder_runtime::Wear;

use super::{Core, Flash, locked};
use crate::kv::{AppStats, CacheStats, DriveStats, FlashStats, TuningStats};

/// Takes away what was counted before `stats reset`.
fn subtract_flash(flash: &mut FlashStats, before: &FlashStats) {
    for (value, before) in [
        (&mut flash.segments_written, before.segments_written),
        (&mut flash.segments_reclaimed, before.segments_reclaimed),
        (&mut flash.objects_written, before.objects_written),
        (&mut flash.objects_dropped, before.objects_dropped),
        (&mut flash.objects_dropped_unread, before.objects_dropped_unread),
        (&mut flash.forced_evictions, before.forced_evictions),
        (&mut flash.bytes_written, before.bytes_written),
        (&mut flash.bytes_rewritten, before.bytes_rewritten),
        (&mut flash.reads, before.reads),
        (&mut flash.false_reads, before.false_reads),
        (&mut flash.bytes_read, before.bytes_read),
        (&mut flash.read_errors, before.read_errors),
        (&mut flash.checksum_errors, before.checksum_errors),
        (&mut flash.write_errors, before.write_errors),
        (&mut flash.first_filled, before.first_filled),
    ] {
        *value = value.saturating_sub(before);
    }
    for ((_, count), (_, before)) in flash.rejected.iter_mut().zip(&before.rejected) {
        *count = count.saturating_sub(*before);
    }
    for drive in &mut flash.drives {
        let Some(before) = before.drives.iter().find(|other| other.place == drive.place) else {
            continue;
        };
        for (value, before) in [
            (&mut drive.bytes_written, before.bytes_written),
            (&mut drive.segments_reclaimed, before.segments_reclaimed),
            (&mut drive.read_errors, before.read_errors),
            (&mut drive.write_errors, before.write_errors),
        ] {
            *value = value.saturating_sub(before);
        }
    }
}

impl Core {
    pub(super) fn collect_stats(&self, now: Now) -> CacheStats {
        let mut stats = self.raw_stats(now);
        let base = locked(&self.baseline);
        for (value, before) in [
            (&mut stats.total_items, base.total_items),
            (&mut stats.client_bytes, base.client_bytes),
            (&mut stats.evictions, base.evictions),
            (&mut stats.evicted_unjudged, base.evicted_unjudged),
            (&mut stats.evicted_unfetched, base.evicted_unfetched),
            (&mut stats.reclaimed, base.reclaimed),
            (&mut stats.crawler_reclaimed, base.crawler_reclaimed),
            (&mut stats.get_expired, base.get_expired),
            (&mut stats.get_flushed, base.get_flushed),
            (&mut stats.lock_waits, base.lock_waits),
            (&mut stats.unverified, base.unverified),
        ] {
            *value = value.saturating_sub(before);
        }
        // Those of flash with them, or write amplification would divide bytes of one time by bytes of another.
        if let (Some(flash), Some(before)) = (&mut stats.flash, &base.flash) {
            subtract_flash(flash, before);
        }
        for app in &mut stats.applications {
            if let Some(before) = base.applications.iter().find(|b| b.name == app.name) {
                app.gets = app.gets.saturating_sub(before.gets);
                app.hits = app.hits.saturating_sub(before.hits);
                app.flash_hits = app.flash_hits.saturating_sub(before.flash_hits);
                app.sets = app.sets.saturating_sub(before.sets);
            }
        }
        stats
    }

    /// Which part of the memory is what, as one line.
    pub(super) fn memory_divided(&self, now: Now) -> String {
        let parts = self.node.totals(now.mono).memory;
        let named = parts
            .iter()
            .map(|(name, bytes)| format!("{} {}", name.replace('_', " "), ByteSize(*bytes)))
            .collect::<Vec<_>>();
        let all = ByteSize(self.node.memory_limit());
        format!("{all} of DRAM are divided: {}", named.join(", "))
    }

    /// Which objects can reach flash, and why no larger ones. `None` without flash.
    pub(super) fn largest_for_flash(&self) -> Option<String> {
        let flash = self.flash()?;
        let (limit, largest) = (self.node.too_large().limit, u64::from(self.node.largest_object()));
        let all = format!("flash takes objects of up to {}", ByteSize(limit.min(largest)));
        Some(if limit >= largest {
            format!("{all}: all that can be stored")
        } else {
            let capacity = ByteSize(flash.flash.capacity());
            format!(
                "{all}, for it has {capacity}; larger ones, of up to {}, are kept in DRAM alone",
                ByteSize(largest)
            )
        })
    }

    pub(super) fn raw_stats(&self, now: Now) -> CacheStats {
        let all = self.node.totals(now.mono);
        let sum = &all.shards;
        let mut s = CacheStats {
            memory_limit: self.node.memory_limit(),
            lock_waits: all.lock_waits,
            unverified: all.unverified,
            index_grown: all.index_steps.grown,
            index_shrunk: all.index_steps.shrunk,
            crawler_reclaimed: all.expired_unasked,
            dram_items: all.dram_objects,
            dram_bytes: all.dram_bytes,
            items: all.dram_objects + all.flash_objects,
            total_items: sum.sets,
            client_bytes: sum.set_bytes,
            evictions: sum.evictions,
            evicted_unjudged: sum.evictions_unjudged,
            evicted_unfetched: sum.evicted_unfetched,
            // memcached finds what a flush has left when its memory is wanted again; ours is free at once.
            reclaimed: sum.expired + all.expired_unasked + all.flushed_replaced,
            get_expired: sum.expired,
            get_flushed: sum.get_flushed,
            ..CacheStats::default()
        };
        if let (Some(flash), Some(log)) = (self.flash(), &all.log) {
            let f = self.flash_stats(flash, &all, log);
            if let Some(why) = &f.degraded {
                s.alarms.push(format!("flash '{}': {why}", flash.name()));
            }
            for drive in f.drives.iter().filter(|drive| drive.degraded && f.degraded.is_none()) {
                s.alarms.push(format!(
                    "flash '{}': writes fail; the other drives take what it would until they succeed again",
                    drive.path
                ));
            }
            if let Some(full) = &all.index_full {
                s.alarms.push(format!("flash '{}': {full}", flash.name()));
            }
            s.flash = Some(f);
        }
        s.memory = all.memory;
        s.record = self.recorder.as_ref().map(|r| r.stats());
        s.capture = self.capture.as_ref().map(|c| c.stats());
        if let Some(why) = s.record.and_then(|r| r.ended) {
            s.alarms.push(format!("recording has ended: {why}; what is recorded so far can be replayed, the server goes on"));
        }
        if s.capture.is_some_and(|c| c.failed) {
            s.alarms.push("the capture cannot be written any further".to_owned());
        }
        for (i, a) in all.apps.iter().enumerate() {
            if a.gets + a.sets + a.flash_bytes == 0 {
                continue;
            }
            let app = AppId(i as u16);
            let report = all.reports.get(&app);
            let model = report.and_then(|r| r.model.as_ref());
            s.applications.push(AppStats {
                name: self.node.name(app),
                gets: a.gets,
                hits: a.hits_dram + a.hits_flash,
                flash_hits: a.hits_flash,
                sets: a.sets,
                dram_bytes: a.dram_bytes,
                flash_bytes: a.flash_bytes,
                model_version: model.map_or(0, |m| u64::from(m.version)),
                model_samples: model.map_or(0, |m| u64::from(m.trained_samples)),
                precision: model.and_then(|m| m.precision).map(f64::from),
                recall: model.and_then(|m| m.recall).map(f64::from),
                unread_writes: report
                    .filter(|r| r.dropped > 0)
                    .map(|r| r.dropped_unread as f64 / r.dropped as f64),
            });
        }
        s
    }

    fn drive_stats(flash: &Flash, of: &DriveTotals) -> Option<DriveStats> {
        let drive = flash.drive(of.drive)?;
        let (log, wear) = (&of.log.stats, locked(&drive.wear).clone());
        Some(DriveStats {
            place: of.drive,
            path: drive.path.clone(),
            capacity_bytes: of.capacity,
            used_bytes: log.live_segments * u64::from(flash.flash.segment_bytes),
            bytes_written: log.bytes_written,
            segments_reclaimed: log.segments_reclaimed,
            read_errors: drive.read_errors.load(Ordering::Relaxed) + log.read_errors,
            write_errors: log.write_errors,
            budget_bytes_per_second: of.log.budget_rate,
            budget_available_bytes: of.log.budget_available,
            expected_life_years: of.log.expected_life_years,
            host_bytes: wear.as_ref().map(|wear| wear.host_written),
            nand_bytes: wear.as_ref().and_then(|wear| wear.nand_written),
            used_percent: wear.as_ref().map(|wear| u64::from(wear.percentage_used)),
            degraded: log.degraded,
        })
    }

    fn flash_stats(&self, flash: &Flash, all: &Totals, totals: &LogTotals) -> FlashStats {
        let wears: Vec<Option<Wear>> =
            flash.drives.iter().map(|drive| locked(&drive.wear).clone()).collect();
        // Of what not every drive tells the sum would be of some.
        let sum_of = |of: fn(&Wear) -> Option<u64>| {
            wears.iter().map(|wear| wear.as_ref().and_then(of)).sum::<Option<u64>>()
        };
        let used = wears.iter().flatten().map(|wear| u64::from(wear.percentage_used)).max();
        let read_errors =
            flash.drives.iter().map(|drive| drive.read_errors.load(Ordering::Relaxed)).sum::<u64>();
        let segment = u64::from(flash.flash.segment_bytes);
        let (sum, log) = (&all.shards, &totals.stats);
        FlashStats {
            drive_host_bytes: sum_of(|wear| Some(wear.host_written)),
            drive_nand_bytes: sum_of(|wear| wear.nand_written),
            drive_used_percent: used,
            drives: all.drives.iter().filter_map(|of| Self::drive_stats(flash, of)).collect(),
            path: flash.name(),
            admission: flash.admission.clone(),
            capacity_bytes: flash.flash.capacity(),
            used_bytes: log.live_segments * segment,
            segments: flash.flash.capacity() / segment,
            segments_used: log.live_segments,
            segments_written: log.segments_written,
            segments_reclaimed: log.segments_reclaimed,
            objects_written: sum.flash_written_objects,
            objects_dropped: sum.flash_dropped,
            objects_dropped_unread: sum.flash_dropped_unread,
            forced_evictions: sum.forced_evictions,
            bytes_written: log.bytes_written,
            bytes_rewritten: log.bytes_reinserted,
            reads: sum.flash_reads,
            false_reads: sum.flash_reads_false,
            bytes_read: sum.flash_read_bytes,
            read_errors: read_errors.max(sum.flash_read_errors),
            checksum_errors: sum.flash_corrupt,
            write_errors: log.write_errors,
            degraded: log.degraded.then(|| {
                "writes fail; nothing new goes to flash until they succeed again".to_owned()
            }),
            items: all.flash_objects,
            ghosts: all.ghosts,
            rejected: all.rejected.clone(),
            first_filled: all.first_filled,
            tuning: all.tuning.map(|found| TuningStats {
                thrift: found.thrift,
                reason: found.reason.as_str(),
                misses: found.misses,
                gain: found.gain,
            }),
            budget_bytes_per_second: totals.budget_rate,
            budget_available_bytes: totals.budget_available,
            expected_life_years: totals.expected_life_years,
        }
    }
}
