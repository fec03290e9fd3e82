//! What the store tells of itself.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use larder_base::{AppId, Now};
use larder_engine::kv::{AppStats as EngineApp, LogStats, ShardStats};
use larder_policy::admission::{ModelReport, Reason};

use super::{Flash, KvStore, locked};
use crate::stats::{AppStats, FlashStats, StoreStats};

/// Adds what another shard's decisions say of the same classifier: shares are weighed by the decisions they are of.
fn merge_models(all: &mut ModelReport, part: &ModelReport) {
    let (a, b) = (f64::from(all.scored), f64::from(part.scored));
    let weigh = |x: Option<f32>, y: Option<f32>| match (x, y) {
        (Some(x), Some(y)) if a + b > 0.0 => {
            Some(((f64::from(x) * a + f64::from(y) * b) / (a + b)) as f32)
        }
        (x, y) => x.or(y),
    };
    all.precision = weigh(all.precision, part.precision);
    all.recall = weigh(all.recall, part.recall);
    all.scored = all.scored.saturating_add(part.scored);
    all.samples = all.samples.saturating_add(part.samples);
    all.version = all.version.max(part.version);
    all.trained_samples = all.trained_samples.max(part.trained_samples);
}

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
}

impl KvStore {
    pub(super) fn collect_stats(&self, now: Now) -> StoreStats {
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

    pub(super) fn raw_stats(&self, now: Now) -> StoreStats {
        let mut sum = ShardStats::default();
        let mut apps = vec![EngineApp::default(); AppId::COUNT];
        let mut memory: Vec<(&'static str, u64)> = Vec::new();
        let mut s = StoreStats {
            memory_limit: self.memory.load(Ordering::Relaxed),
            ..StoreStats::default()
        };
        let (mut on_flash, mut ghosts) = (0, 0);
        let (mut first_filled, mut flushed_replaced) = (0, 0);
        let mut rejected = Reason::ALL.map(|reason| (reason.as_str(), 0));
        let mut reports =
            std::collections::BTreeMap::<u16, larder_policy::admission::AppReport>::new();
        for cell in &self.cells {
            s.lock_waits += cell.waits.load(Ordering::Relaxed);
            let shard = cell.lock();
            sum.add(shard.stats());
            s.crawler_reclaimed += shard.expired_unasked();
            flushed_replaced += shard.flushed_replaced();
            s.dram_items += shard.dram_objects() as u64;
            s.dram_bytes += (shard.dram_capacity() - shard.dram_free_bytes()) as u64;
            on_flash += shard.index().len();
            ghosts += shard.index().ghosts();
            for (i, app) in apps.iter_mut().enumerate() {
                app.add(shard.apps().of(AppId(i as u16)));
            }
            for (i, (name, bytes)) in shard.memory().into_iter().enumerate() {
                match memory.get_mut(i) {
                    Some(entry) => entry.1 += bytes as u64,
                    None => memory.push((name, bytes as u64)),
                }
            }
            first_filled += shard.admission().first_filled();
            for (sum, (_, count)) in rejected.iter_mut().zip(shard.admission().rejected()) {
                sum.1 += count;
            }
            for r in shard.admission().report() {
                reports
                    .entry(r.app.0)
                    .and_modify(|all| {
                        all.dropped += r.dropped;
                        all.dropped_unread += r.dropped_unread;
                        match (&mut all.model, &r.model) {
                            (Some(all), Some(part)) => merge_models(all, part),
                            (all @ None, part) => *all = part.clone(),
                            (Some(_), None) => {}
                        }
                    })
                    .or_insert(r);
            }
        }
        s.items = s.dram_items + on_flash;
        s.total_items = sum.sets;
        s.client_bytes = sum.set_bytes;
        s.evictions = sum.evictions;
        s.evicted_unjudged = sum.evictions_unjudged;
        s.evicted_unfetched = sum.evicted_unfetched;
        // memcached finds what a flush has left when its memory is wanted again; ours is free at once.
        s.reclaimed = sum.expired + s.crawler_reclaimed + flushed_replaced;
        s.get_expired = sum.expired;
        s.get_flushed = sum.get_flushed;
        if let Some(flash) = self.flash() {
            flash.log_wanted.fetch_add(1, Ordering::Relaxed);
            let log = locked(&flash.log);
            flash.log_wanted.fetch_sub(1, Ordering::Relaxed);
            memory.push(("segment_buffers", log.memory_bytes() as u64));
            let log_stats = *log.stats();
            // A copy: whoever looks must not change what the log is granted.
            let mut budget = log.budget().clone();
            let rate = budget.rate();
            let available = rate.is_some().then(|| budget.available(now.mono));
            let seconds = now.mono.as_secs_f64().max(1.0);
            let life = budget
                .expected_life_years(log_stats.bytes_written as f64 / seconds)
                .filter(|years| years.is_finite());
            drop(log);
            let mut f = self.flash_stats(flash, &sum, &log_stats);
            f.items = on_flash;
            f.ghosts = ghosts;
            f.rejected = rejected.to_vec();
            f.first_filled = first_filled;
            f.budget_bytes_per_second = rate;
            f.budget_available_bytes = available;
            f.expected_life_years = life;
            if let Some(why) = &f.degraded {
                s.alarms.push(format!("flash '{}': {why}", flash.path));
            }
            s.flash = Some(f);
        }
        s.memory = memory;
        s.record = self.recorder.as_ref().map(|r| r.stats());
        s.capture = self.capture.as_ref().map(|c| c.stats());
        if let Some(why) = s.record.and_then(|r| r.ended) {
            s.alarms.push(format!("recording has ended: {why}"));
        }
        if s.capture.is_some_and(|c| c.failed) {
            s.alarms.push("the capture cannot be written any further".to_owned());
        }
        let names = self.applications.read().unwrap_or_else(PoisonError::into_inner);
        for (i, a) in apps.iter().enumerate() {
            if a.gets + a.sets + a.flash_bytes == 0 {
                continue;
            }
            let report = reports.get(&(i as u16));
            let model = report.and_then(|r| r.model.as_ref());
            s.applications.push(AppStats {
                name: names.name(AppId(i as u16)),
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

    fn flash_stats(&self, flash: &Flash, sum: &ShardStats, log: &LogStats) -> FlashStats {
        let drive = locked(&flash.wear).clone();
        FlashStats {
            drive_host_bytes: drive.as_ref().map(|d| d.host_written),
            drive_nand_bytes: drive.as_ref().and_then(|d| d.nand_written),
            drive_used_percent: drive.as_ref().map(|d| u64::from(d.percentage_used)),
            path: flash.path.clone(),
            admission: flash.admission.clone(),
            capacity_bytes: flash.geometry.capacity(),
            used_bytes: log.live_segments * u64::from(flash.geometry.segment_bytes()),
            segments: u64::from(flash.geometry.segments()),
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
            bytes_read: sum.flash_reads * 4096,
            read_errors: flash.read_errors.load(Ordering::Relaxed).max(sum.flash_read_errors),
            checksum_errors: sum.flash_corrupt,
            write_errors: log.write_errors,
            degraded: log.degraded.then(|| {
                "writes fail; nothing new goes to flash until they succeed again".to_owned()
            }),
            ..FlashStats::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_shards_are_weighed_by_their_decisions() {
        let report = |scored, precision, recall| ModelReport {
            app: AppId(1),
            version: 1,
            trained_at: larder_base::Nanos::ZERO,
            trained_samples: 5,
            samples: 1,
            positive_share: None,
            scored,
            precision,
            recall,
            horizon: larder_base::Nanos::ZERO,
            weights: None,
        };
        let mut all = report(300, Some(0.5), None);
        merge_models(&mut all, &report(100, Some(0.9), Some(0.25)));
        assert!((all.precision.unwrap() - 0.6).abs() < 1e-6);
        assert_eq!((all.recall, all.scored), (Some(0.25), 400));
        merge_models(&mut all, &report(0, None, None));
        assert!((all.precision.unwrap() - 0.6).abs() < 1e-6);
    }
}
