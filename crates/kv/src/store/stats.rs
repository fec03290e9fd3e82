//! What the store tells of itself.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use larder_base::{AppId, Now};
use larder_engine::kv::{AppStats as EngineApp, LogStats, ShardStats};
use larder_policy::admission::Reason;

use super::{Flash, KvStore, locked};
use crate::stats::{AppStats, FlashStats, StoreStats};

impl KvStore {
    pub(super) fn collect_stats(&self, now: Now) -> StoreStats {
        let mut stats = self.raw_stats(now);
        let base = locked(&self.baseline);
        for (value, before) in [
            (&mut stats.total_items, base.total_items),
            (&mut stats.client_bytes, base.client_bytes),
            (&mut stats.evictions, base.evictions),
            (&mut stats.evicted_unfetched, base.evicted_unfetched),
            (&mut stats.reclaimed, base.reclaimed),
            (&mut stats.get_expired, base.get_expired),
            (&mut stats.lock_waits, base.lock_waits),
        ] {
            *value = value.saturating_sub(before);
        }
        stats
    }

    pub(super) fn raw_stats(&self, now: Now) -> StoreStats {
        let mut sum = ShardStats::default();
        let mut apps = vec![EngineApp::default(); AppId::COUNT];
        let mut memory: Vec<(&'static str, u64)> = Vec::new();
        let mut s = StoreStats { memory_limit: self.memory, ..StoreStats::default() };
        let (mut on_flash, mut ghosts) = (0, 0);
        let mut rejected = Reason::ALL.map(|reason| (reason.as_str(), 0));
        let mut reports =
            std::collections::BTreeMap::<u16, larder_policy::admission::AppReport>::new();
        for cell in &self.cells {
            s.lock_waits += cell.waits.load(Ordering::Relaxed);
            let shard = cell.lock();
            sum.add(shard.stats());
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
            for (sum, (_, count)) in rejected.iter_mut().zip(shard.admission().rejected()) {
                sum.1 += count;
            }
            for r in shard.admission().report() {
                reports
                    .entry(r.app.0)
                    .and_modify(|all| {
                        all.dropped += r.dropped;
                        all.dropped_unread += r.dropped_unread;
                        if all.model.is_none() {
                            all.model = r.model.clone();
                        }
                    })
                    .or_insert(r);
            }
        }
        s.items = s.dram_items + on_flash;
        s.total_items = sum.sets;
        s.client_bytes = sum.set_bytes;
        s.evictions = sum.evictions;
        s.evicted_unfetched = sum.evicted_unfetched;
        s.reclaimed = sum.expired;
        s.get_expired = sum.expired;
        if let Some(flash) = self.flash() {
            let mut log = locked(&flash.log);
            memory.push(("segment_buffers", log.memory_bytes() as u64));
            let log_stats = *log.stats();
            let budget = log.budget_mut();
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
            f.budget_bytes_per_second = rate;
            f.budget_available_bytes = available;
            f.expected_life_years = life;
            if let Some(why) = &f.degraded {
                s.alarms.push(format!("flash '{}': {why}", flash.path));
            }
            s.flash = Some(f);
        }
        s.memory = memory;
        let names = self.applications.read().unwrap_or_else(PoisonError::into_inner);
        for (i, a) in apps.iter().enumerate() {
            if a.gets + a.sets == 0 {
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
        let drive = locked(&flash.drive).clone();
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
