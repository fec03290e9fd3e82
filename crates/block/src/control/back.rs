//! Volumes that write back, as an operator has to do with them: how one is to, how far its destaging is, and how it is doing.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use larder_base::ByteSize;
use serde_json::{Value, json};

use super::protocol::{Progress, Refusal, WriteBack};
use super::status::{BackVolume, ShrunkStore};
use super::{Control, GoOn, refused};
use crate::backing::Backing;
use crate::cache::back::{BackConfig, BackStatus, BackWish, MarkerAt, check_mark, order_name};
use crate::cache::{CacheError, Core, Volume};

/// Between two words on how far it is.
const LOOK: Duration = Duration::from_millis(100);

/// What is wanted of a volume that comes, if that can be meant. What is not said is as the daemon was started with.
pub(super) fn wish(cache: &Core, name: &str, said: &WriteBack) -> Result<BackWish, Refusal> {
    let usage = |message: String| Refusal { message, usage: true };
    let mut wish = cache.config().wish_of(name);
    if let Some(mode) = &said.write {
        wish.back = Some(mode.parse().map_err(|e| usage(format!("--write '{mode}': {e}")))?);
    }
    if let Some(most) = said.dirty_max {
        let back = wish.back.as_mut().ok_or_else(|| {
            usage(format!(
                "--dirty-max {}: volume '{name}' does not write back; --write back:ordered has it do so",
                ByteSize(most)
            ))
        })?;
        back.dirty_max = Some(ByteSize(most));
        if let Some(log) = cache.write_log_size() {
            back.check_bound(log).map_err(|e| {
                usage(format!("--dirty-max {}: volume '{name}': {e}", ByteSize(most)))
            })?;
        }
    }
    if let Some(age) = &said.dirty_age_max {
        let back = wish.back.as_mut().ok_or_else(|| {
            usage(format!(
                "--dirty-age-max {age}: volume '{name}' does not write back; --write back:ordered has it do so"
            ))
        })?;
        back.age = Some(age.parse().map_err(|e| usage(format!("--dirty-age-max {age}: {e}")))?);
        back.age().map_err(|e| usage(format!("--dirty-age-max {age}: volume '{name}': {e}")))?;
    }
    match (&said.marker, said.no_marker) {
        (Some(place), true) => {
            return Err(usage(format!(
                "--no-marker: --marker '{place}' says where the marker is: choose one of them"
            )));
        }
        (Some(place), false) => wish.marker = MarkerAt::At(place.clone()),
        (None, true) => wish.marker = MarkerAt::Nowhere,
        (None, false) => {}
    }
    wish.moved |= said.store_moved;
    if let Some(place) = &said.journal {
        if !wish.back.as_ref().is_none_or(BackConfig::is_journaled) {
            return Err(usage(format!(
                "--journal '{place}': volume '{name}' is not journaled; --write back:journaled has it be"
            )));
        }
        wish.journal.at = Some(place.clone());
    }
    wish.journal.local |= said.journal_local;
    if wish.back.is_some() && cache.record_stats().is_some() {
        return Err(refused(format!(
            "volume '{name}' is to write back, and a run that does so cannot be recorded: attach it to a daemon without --record"
        )));
    }
    Ok(wish)
}

/// How a volume that writes back is doing, as it is shown.
pub(super) fn shown(now: &BackStatus) -> BackVolume {
    let s = &now.status;
    let [frontier, acknowledged, promised, last] = s.positions;
    BackVolume {
        mode: now.config.to_string(),
        order: order_name(now.config.order).to_owned(),
        dirty_bytes: s.dirty,
        held_bytes: s.held.0,
        bound_bytes: s.held.1,
        stated_bytes: s.stated,
        nearly_full: s.nearly_full,
        oldest_seconds: now.age.map(|age| age.0 as f64 / 1e9),
        destage_bytes_per_second: s.rate,
        seconds_left: s.left.map(|left| left.0 as f64 / 1e9),
        destaged_bytes: s.destaged,
        generation: now.generation,
        fenced: now.fenced,
        epoch: now.config.is_journaled().then_some(s.epoch),
        failures: u64::from(s.failures),
        slowed_for_budget: s.slowed,
        age_max_seconds: s.age.map(|age| age.most.0 as f64 / 1e9),
        age_hard: s.age.is_some_and(|age| age.hard),
        age_over: s.is_old,
        stored_mark: now.stored_mark.clone(),
        last_mark: now.last_mark.clone(),
        waits_for_mark: s.no_mark,
        large_mark_bytes: s.large_mark.map(|(bytes, _)| bytes),
        epoch_bytes: s.large_mark.map(|(_, most)| most),
        missed_marks: s.missed_marks,
        off_mark: s.off_mark,
        unreadable_bytes: s.unreadable,
        unreadable_stops: s.is_stopped,
        unreadable_unlisted: s.unlisted,
        given_up_bytes: s.given_up,
        unreadable_joins: s.joins,
        closed: now.closed.clone(),
        journal_failure: now.journal_failure.clone(),
        troubles: now.troubles.clone(),
        shrunk: now.shrunk.map(|beyond| ShrunkStore {
            store_bytes: beyond.end,
            had_bytes: beyond.had,
            dirty_bytes: beyond.dirty,
            first_byte: beyond.range.0,
            end_byte: beyond.range.1,
            text: beyond.to_string(),
        }),
        frontier,
        acknowledged,
        promised,
        last,
    }
}

/// What an operator should look at.
pub(super) fn alarms(name: &str, back: &BackVolume) -> Vec<String> {
    let mut alarms = Vec::new();
    let left = ByteSize(back.dirty_bytes);
    if let Some(shrunk) = &back.shrunk {
        alarms.push(format!(
            "volume '{name}': {} (larder block discard CACHE {name} STORE --beyond-end --yes)",
            shrunk.text
        ));
    }
    if let Some(why) = &back.closed {
        alarms.push(format!(
            "volume '{name}': its write log is closed: {why}; {left} are still to be destaged, then it writes through"
        ));
    }
    if back.failures > 0 {
        let times = if back.failures == 1 { "once" } else { "again and again" };
        let what = match &back.journal_failure {
            Some(why) => format!("its journal, which fails: {why}"),
            None => "its store".to_owned(),
        };
        alarms.push(format!(
            "volume '{name}': destaging fails ({times}, {} in a row): {left} wait for {what}",
            back.failures
        ));
    }
    // (What the alarm above says is not said twice.)
    let said =
        |trouble: &&String| back.failures > 0 && back.journal_failure.as_ref() == Some(*trouble);
    let troubles = back.troubles.iter().filter(|trouble| !said(trouble));
    alarms.extend(troubles.map(|trouble| format!("volume '{name}': {trouble}")));
    if let Some(stated) = back.stated_bytes.filter(|&stated| back.bound_bytes < stated) {
        alarms.push(format!(
            "volume '{name}': it may hold {} of the write log, and not {} as is stated: there is no room for that beside the other volumes; state less \
             (--dirty-max), detach one of them, or format a cache with a larger log",
            ByteSize(back.bound_bytes),
            ByteSize(stated)
        ));
    }
    if back.nearly_full {
        alarms.push(format!(
            "volume '{name}': it holds {} of the {} of the write log that it may: writes are as slow as its store",
            ByteSize(back.held_bytes),
            ByteSize(back.bound_bytes)
        ));
    }
    if back.slowed_for_budget {
        alarms.push(format!(
            "volume '{name}': the write budget is used up: writes are as slow as its store; if that is not enough it is written through for a while"
        ));
    }
    if back.age_over {
        let most = back.age_max_seconds.unwrap_or(0.0);
        let what =
            if back.age_hard { ": no write is answered before it is in the store" } else { "" };
        alarms.push(format!(
            "volume '{name}': its oldest dirty write is {:.0} s old, and may be {most:.0} s{what}",
            back.oldest_seconds.unwrap_or(0.0)
        ));
    }
    if back.unreadable_unlisted {
        alarms.push(format!(
            "volume '{name}': no more stretches that cannot be read can be listed, and what is to come to its store next would leave more: nothing is destaged \
             before some of them are written again as a whole or trimmed, or given up (larder block discard --served {name} --unreadable --yes)"
        ));
    } else if back.unreadable_bytes > 0 && back.closed.is_some() {
        let then = if back.unreadable_stops {
            ", and nothing is destaged any more, and nothing is written"
        } else {
            ""
        };
        alarms.push(format!(
            "volume '{name}': the write log has failed, and {} of what was written cannot be read from it: reads of it fail{then}. The device is read \
             once more when the daemon is started again: do that before anything is given up",
            ByteSize(back.unreadable_bytes)
        ));
    } else if back.unreadable_bytes > 0 {
        let then = if back.unreadable_stops { "; nothing is destaged before" } else { "" };
        alarms.push(format!(
            "volume '{name}': {} of what was written cannot be read from the write log: reads of it fail until it is written again or trimmed, or given up (larder block discard \
             --served {name} --unreadable --yes){then}",
            ByteSize(back.unreadable_bytes)
        ));
    }
    if back.unreadable_joins {
        alarms.push(format!(
            "volume '{name}': what could not be read was written again and goes to the store with all behind it: until it is there the store alone \
             is no image"
        ));
    }
    if let (Some(bytes), Some(most)) = (back.large_mark_bytes, back.epoch_bytes) {
        let cuts = back.mode.contains("on-full=cut");
        let then = match (back.waits_for_mark, cuts) {
            (true, _) => " and nothing is destaged",
            (false, false) => " and nothing behind it is destaged, also when the log is full",
            (false, true) => ", and the store comes to no mark when the log is full",
        };
        let choose = if cuts { "" } else { ", choose on-full=cut" };
        alarms.push(format!(
            "volume '{name}': {} were written before its next mark, and an epoch takes {} at most, so none can end there{then}: \
             name marks more often{choose}, or have all of it brought to the store as it is (larder block flush {name})",
            ByteSize(bytes),
            ByteSize(most)
        ));
    } else if back.waits_for_mark {
        alarms.push(format!(
            "volume '{name}': nothing is destaged before a mark comes that fits its journal: name one (larder block mark {name} NAME), or have \
             all of it brought to the store as it is (larder block flush {name})"
        ));
    }
    if back.off_mark {
        alarms.push(format!(
            "volume '{name}': what its store has is no mark ({} missed since the start): it is again when the next one comes there",
            back.missed_marks
        ));
    }
    alarms
}

/// What an operator should know of a volume that was to write back, and does not.
pub(super) fn goes_through(name: &str) -> String {
    format!(
        "volume '{name}': it is set to write back, and is written through since the write log failed or the cache was out of use; as soon as the cache \
         works again, have it write back (larder block write {name} back:ORDER), or start again"
    )
}

/// What a wait for a store that is not reached says of it, behind how far it is.
pub(super) fn not_reached(store: &dyn Backing) -> String {
    let trouble = store.trouble().filter(|trouble| trouble.state != "changed");
    trouble.map_or_else(String::new, |trouble| format!("; its store {}", trouble.what))
}

/// Why destaging does not get on, where it fails again and again: its journal, or what its store has said last.
fn last_failure(now: &BackStatus, volume: &Volume) -> Option<String> {
    if now.status.failures == 0 {
        return now.troubles.first().cloned();
    }
    now.journal_failure.clone().or_else(|| {
        let last = volume.health().failures().1?;
        Some(format!("its store fails: {}", last.what))
    })
}

/// How far one volume is.
struct Flushing {
    name: String,
    /// Bytes of the log that it holds.
    left: AtomicU64,
    ended: AtomicBool,
}

impl Control {
    /// A volume that is served writes through from now on, or back.
    pub(super) fn write(
        &self,
        name: &str,
        said: &WriteBack,
        timeout: Option<Duration>,
        go_on: GoOn<'_>,
    ) -> Result<Value, Refusal> {
        let mut wish = wish(&self.cache, name, said)?;
        if said.write.is_none() {
            wish.back = None;
        }
        let begun = Instant::now();
        let is_late = || timeout.is_some_and(|timeout| begun.elapsed() >= timeout);
        let late = Cell::new(false);
        let mut waits = |progress: Progress| {
            late.set(is_late());
            !late.get() && go_on(progress)
        };
        let too_late = |why: &str| {
            refused(format!(
                "volume '{name}' writes as before: it did not change over within {} s{why}",
                timeout.unwrap_or_default().as_secs()
            ))
        };
        let one = self.take(name, &mut waits);
        let _one = match one {
            Err(_) if late.get() => return Err(too_late("; something else is done with it")),
            one => one?,
        };
        let store = self.cache.attached(name)?;
        let trouble = || not_reached(store.volume().backing());
        let mut most = 0;
        let mut hear = |left: u64| {
            most = most.max(left);
            let what =
                format!("volume '{name}': {} of the write log left{}", ByteSize(left), trouble());
            waits(Progress { what, done: most - left, total: most })
        };
        let done = self.cache.change_over(name, &wish, &mut hear).map_err(|error| {
            let through = format!("write through first (larder block write '{name}' through)");
            let refusal = Refusal::from(error);
            let message = refusal.message.replace("write through first", &through);
            Refusal { message, ..refusal }
        })?;
        if !done {
            if late.get() {
                let troubles = self.cache.back_status(name).map(|back| back.troubles);
                let marker = troubles.iter().flatten().next().map(|what| format!("; {what}"));
                let store = Some(trouble()).filter(|what| !what.is_empty());
                return Err(too_late(&store.or(marker).unwrap_or_default()));
            }
            return Err(refused(format!("interrupted: volume '{name}' writes as before")));
        }
        let mode = self.cache.back_status(name).map(|back| back.config.to_string());
        tracing::info!(
            "volume '{name}' writes {} from now on",
            mode.as_deref().unwrap_or("through")
        );
        Ok(json!({ "volume": name, "write": mode }))
    }

    /// A consistency point of a volume.
    pub(super) fn mark(
        &self,
        volume: &str,
        name: &str,
        timeout: Duration,
        go_on: GoOn<'_>,
    ) -> Result<Value, Refusal> {
        check_mark(name).map_err(|message| Refusal { message, usage: true })?;
        let begun = Instant::now();
        let mut late = false;
        let mut hear = || {
            late = begun.elapsed() >= timeout;
            !late && go_on(Progress::default())
        };
        let sequence = self.cache.mark(volume, name, &mut hear)?.ok_or_else(|| {
            let why = match late {
                true => format!("is not durable after {} s", timeout.as_secs()),
                false => "was not waited for".to_owned(),
            };
            refused(format!("volume '{volume}': the mark {why}: it may still come"))
        })?;
        Ok(json!({ "volume": volume, "mark": name, "sequence": sequence }))
    }

    /// Brings all that is dirty of a volume, or of all that write back, to the stores: side by side, since one that fails keeps no
    /// other.
    pub(super) fn flush(
        &self,
        name: Option<&str>,
        timeout: Option<Duration>,
        go_on: GoOn<'_>,
    ) -> Result<Value, Refusal> {
        let cache = &*self.cache;
        let names = match name {
            Some(name) => vec![cache.attached(name)?.name.clone()],
            None => {
                let all = cache.volumes().into_iter().map(|v| v.name.clone());
                all.filter(|name| cache.back_status(name).is_some()).collect()
            }
        };
        let of = |name: String| {
            let left = cache.back_status(&name).map_or(0, |now| now.status.held.0);
            Flushing { name, left: AtomicU64::new(left), ended: AtomicBool::new(false) }
        };
        let all: Vec<Flushing> = names.into_iter().map(of).collect();
        let stop = AtomicBool::new(false);
        let mut late = false;
        let outcomes: Vec<Result<bool, CacheError>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (all.iter())
                .map(|one| {
                    let stop = &stop;
                    let run = move || {
                        let mut hear = |left| {
                            one.left.store(left, Ordering::Relaxed);
                            !stop.load(Ordering::Relaxed)
                        };
                        let done = cache.destage(&one.name, &mut hear);
                        one.ended.store(true, Ordering::Release);
                        done
                    };
                    std::thread::Builder::new().name("block-flush".into()).spawn_scoped(scope, run)
                })
                .collect();
            let begun = Instant::now();
            let mut hear = |progress: Progress| {
                late |= timeout.is_some_and(|timeout| begun.elapsed() >= timeout);
                let troubles: Vec<String> = (all.iter())
                    .filter(|one| !one.ended.load(Ordering::Acquire))
                    .filter_map(|one| {
                        let attached = cache.volume(&one.name)?;
                        let trouble = not_reached(attached.volume().backing());
                        (!trouble.is_empty()).then(|| format!("; volume '{}'{trouble}", one.name))
                    })
                    .collect();
                let what = format!("{}{}", progress.what, troubles.concat());
                !late && go_on(Progress { what, ..progress })
            };
            hear_all(&all, threads.iter().filter(|t| t.is_ok()).count(), &stop, &mut hear);
            let no_thread =
                |e: std::io::Error| CacheError::System { what: "a thread", reason: e.to_string() };
            let panicked = || CacheError::System {
                what: "destaging",
                reason: "its thread ended early".to_owned(),
            };
            let join = |thread: std::io::Result<std::thread::ScopedJoinHandle<'_, _>>| {
                thread.map_err(no_thread)?.join().unwrap_or_else(|_| Err(panicked()))
            };
            threads.into_iter().map(join).collect()
        });
        let mut report = Vec::new();
        for (one, outcome) in all.iter().zip(outcomes) {
            let done = match outcome {
                // Of the only one that was asked for it is the whole answer.
                Err(error) if name.is_some() => return Err(error.into()),
                Err(error) => Err(error.to_string()),
                Ok(done) => Ok(done),
            };
            let now = cache.back_status(&one.name);
            let left = now.as_ref().map_or(0, |now| now.status.dirty);
            let held = now.as_ref().map_or(0, |now| now.status.held.0);
            let all_there = done == Ok(true);
            report.push(json!({
                "volume": one.name,
                "destaged": all_there,
                "dirty_bytes": if all_there { 0 } else { left },
                "held_bytes": if all_there { 0 } else { held },
                "trouble": done.err().or_else(|| {
                    let attached = cache.volume(&one.name).filter(|_| !all_there)?;
                    let trouble = not_reached(attached.volume().backing());
                    let away = trouble.strip_prefix("; ").map(str::to_owned);
                    away.or_else(|| last_failure(now.as_ref()?, attached.volume()))
                }),
                "writes_through": now.is_none(),
            }));
        }
        let interrupted = stop.load(Ordering::Relaxed) && !late;
        Ok(json!({ "volumes": report, "interrupted": interrupted, "timed_out": late }))
    }
}

/// Says how far they are until all have ended, or whoever asked is not there any more.
fn hear_all(all: &[Flushing], threads: usize, stop: &AtomicBool, go_on: GoOn<'_>) {
    let sum = || all.iter().map(|one| one.left.load(Ordering::Relaxed)).sum::<u64>();
    let ended = || all.iter().filter(|one| one.ended.load(Ordering::Acquire)).count();
    let (begun, first) = (Instant::now(), sum());
    let mut most = first;
    while ended() < threads {
        let left = sum();
        most = most.max(left);
        let rate = first.saturating_sub(left) as f64 / begun.elapsed().as_secs_f64().max(0.001);
        let of = match all {
            [one] => format!("volume '{}'", one.name),
            all => format!("{} volumes", all.len()),
        };
        let what = match rate as u64 {
            0 => format!(
                "{of}: {} of the write log left, none has come to the store so far",
                ByteSize(left)
            ),
            rate => format!("{of}: {} of the write log left, {}/s", ByteSize(left), ByteSize(rate)),
        };
        if !go_on(Progress { what, done: most - left, total: most }) {
            stop.store(true, Ordering::Relaxed);
        }
        std::thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::back::{Age, BackConfig, Status};

    fn status(status: Status, closed: Option<&str>) -> BackVolume {
        shown(&BackStatus {
            config: BackConfig::default(),
            generation: 7,
            fenced: true,
            status,
            age: Some(larder_base::Nanos::from_millis(1500)),
            stored_mark: None,
            last_mark: Some("nightly".into()),
            closed: closed.map(str::to_owned),
            journal_failure: None,
            troubles: Vec::new(),
            shrunk: None,
        })
    }

    fn dirty(dirty: u64, held: (u64, u64), rate: f64, failures: u32) -> Status {
        Status {
            dirty,
            held,
            oldest: None,
            rate,
            left: Some(larder_base::Nanos::from_secs(6)),
            positions: [1, 4, 2, 5],
            epoch: 0,
            failures,
            destaged: 9,
            ..Status::default()
        }
    }

    #[test]
    fn a_status_has_times_in_seconds() {
        let moves = status(dirty(1000, (3000, 8000), 500.0, 0), None);
        assert_eq!((moves.seconds_left, moves.oldest_seconds), (Some(6.0), Some(1.5)));
        assert_eq!((moves.generation, moves.order.as_str()), (7, "ordered"));
        let none = Status { left: None, ..dirty(1000, (3000, 8000), 0.0, 0) };
        assert_eq!(status(none, None).seconds_left, None);
        assert_eq!(
            (moves.stored_mark.as_deref(), moves.last_mark.as_deref()),
            (None, Some("nightly"))
        );
        assert!(alarms("a", &moves).is_empty());
    }

    #[test]
    fn a_closed_log_a_failing_store_and_a_full_log_are_alarms() {
        let full = Status { nearly_full: true, ..dirty(4096, (7900, 8000), 0.0, 3) };
        let bad = status(full, Some("the cache device failed"));
        let all = alarms("a", &bad);
        assert_eq!(all.len(), 3, "{all:?}");
        for (alarm, words) in all.iter().zip([
            ["closed: the cache device failed", "4 KiB are still"],
            ["3 in a row", "wait for its store"],
            ["writes are as slow", "that it may"],
        ]) {
            assert!(alarm.starts_with("volume 'a': "), "{alarm}");
            assert!(words.iter().all(|w| alarm.contains(w)), "{alarm}");
        }
    }

    #[test]
    fn a_bound_that_is_lowered_is_an_alarm_with_what_is_stated_and_what_is_in_force() {
        let of = |stated, bound| {
            let lowered = Status { stated, held: (0, bound), ..Status::default() };
            let shown = status(lowered, None);
            assert_eq!((shown.stated_bytes, shown.bound_bytes), (stated, bound));
            alarms("a", &shown)
        };
        let all = of(Some(40 << 20), 10 << 20);
        assert_eq!(all.len(), 1, "{all:?}");
        assert!(all[0].contains("10 MiB") && all[0].contains("not 40 MiB as is stated"), "{all:?}");
        assert!(of(Some(40 << 20), 40 << 20).is_empty() && of(None, 1 << 20).is_empty());
    }

    #[test]
    fn epochs_are_shown_of_what_has_them_alone() {
        assert_eq!(status(Status { epoch: 3, ..Status::default() }, None).epoch, None);
        let order = crate::cache::back::Order::Journaled(crate::cache::back::Cuts::Flushes);
        let of = BackStatus {
            config: BackConfig { order, ..BackConfig::default() },
            generation: 1,
            fenced: false,
            status: Status { epoch: 3, ..Status::default() },
            age: None,
            stored_mark: None,
            last_mark: None,
            closed: None,
            journal_failure: None,
            troubles: Vec::new(),
            shrunk: None,
        };
        assert_eq!((shown(&of).epoch, shown(&of).fenced), (Some(3), false));
    }

    #[test]
    fn what_cannot_be_read_is_an_alarm() {
        let lost = Status { unreadable: 8192, is_stopped: true, joins: true, ..Status::default() };
        let all = alarms("a", &status(lost, None));
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(all[0].contains("8 KiB of what was written cannot be read"), "{all:?}");
        assert!(all[0].ends_with("; nothing is destaged before"), "{all:?}");
        assert!(all[1].contains("no image"), "{all:?}");
    }

    #[test]
    fn a_full_list_that_stops_a_volume_is_an_alarm_though_nothing_shows_that_cannot_be_read() {
        let full = Status { is_stopped: true, unlisted: true, ..Status::default() };
        let all = alarms("a", &status(full, None));
        assert_eq!(all.len(), 1, "{all:?}");
        assert!(all[0].contains("nothing is destaged") && all[0].contains("discard --served a"));
    }

    #[test]
    fn of_a_mark_that_fits_no_epoch_the_alarm_says_so_and_what_to_do() {
        let large = Some((20 << 20, 16 << 20));
        let waits = Status { no_mark: true, large_mark: large, ..Status::default() };
        let all = alarms("a", &status(waits, None));
        assert_eq!(all.len(), 1, "{all:?}");
        for words in ["20 MiB were written", "takes 16 MiB at most", "on-full=cut"] {
            assert!(all[0].contains(words), "{all:?}");
        }
        // It is known before the log fills up.
        let large = Status { large_mark: large, ..Status::default() };
        let all = alarms("a", &status(large, None));
        assert_eq!(all.len(), 1, "{all:?}");
        assert!(all[0].contains("20 MiB were written") && all[0].contains("also when the log"));
    }

    #[test]
    fn where_the_journal_fails_the_alarm_names_it_and_not_the_store() {
        let why = "journal '/j': no space".to_owned();
        let mut bad = status(dirty(4096, (4096, 8000), 0.0, 3), None);
        bad.troubles = vec!["marker '/m' was removed".to_owned(), why.clone()];
        bad.journal_failure = Some(why);
        let all = alarms("a", &bad);
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(all[0].contains("wait for its journal, which fails: journal '/j': no space"));
        assert!(!all[0].contains("store"), "{all:?}");
        assert_eq!(all[1], "volume 'a': marker '/m' was removed");
        // It fails while nothing waits for it.
        bad.failures = 0;
        assert_eq!(alarms("a", &bad)[1], "volume 'a': journal '/j': no space");
    }

    #[test]
    fn old_data_and_marks_that_do_not_come_are_alarms() {
        let most = Age { most: larder_base::Nanos::from_secs(1), hard: true };
        let all = alarms(
            "a",
            &status(
                Status {
                    age: Some(most),
                    is_old: true,
                    no_mark: true,
                    off_mark: true,
                    missed_marks: 3,
                    ..Status::default()
                },
                None,
            ),
        );
        assert_eq!(all.len(), 3, "{all:?}");
        for (alarm, words) in all.iter().zip([
            ["2 s old, and may be 1 s", "no write is answered"],
            ["before a mark comes", "larder block mark a NAME"],
            ["is no mark", "3 missed"],
        ]) {
            assert!(words.iter().all(|w| alarm.contains(w)), "{alarm}");
        }
    }
}
