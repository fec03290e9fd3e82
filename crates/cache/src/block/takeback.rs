//! A cache that was given up is used again, without a stop: its device works again, and everything on it is forgotten.
//!
//! In which order is the engine's ([`takeback`](larder_engine::block::node::maintenance::takeback)); here it is carried out, and it is said why not.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use larder_base::Nanos;
use larder_engine::block::Fault;
use larder_engine::block::map::Map;
use larder_engine::block::node::attachment::Step;
use larder_engine::block::node::flushes::{AHEAD, LOCKED};
use larder_engine::block::node::looks::Looks as _;
use larder_engine::block::node::maintenance::takeback::{Again, Anew, NotTakenBack};
use larder_engine::block::node::operator::Operation;
use larder_engine::block::node::quiet::QUIET;
use larder_engine::block::writeback::log::WriteLog;
use larder_format::block::BlockSuperblock;
use larder_runtime::Payload;

use super::attached::Attached;
use super::back::anew::Former;
use super::changing::All;
use super::log::LogThread;
use super::notes::forget_given_up;
use super::open::{CacheError, random, read_superblock};
use super::operators::LOOK;
use super::shard::Out;
use super::{Core, locked};

/// What a cache that is taken back waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakingBack {
    /// What lies in its write log is read.
    Log,
    /// The store of this volume is made durable.
    Store(String),
    /// Requests and other operators' work end.
    Requests,
}

fn fail(reason: impl Into<String>) -> CacheError {
    CacheError::System { what: "the cache is not taken back", reason: reason.into() }
}

impl Core {
    /// Uses a cache again that was given up. It begins with nothing in it.
    ///
    /// # Errors
    /// When it was not given up or cannot be taken back while volumes are served, one of them comes, goes or grows, a store cannot be made durable, requests
    /// under way do not end within 10 s, or the device fails still: it stays given up then.
    pub fn take_back(&self) -> Result<(), CacheError> {
        self.take_back_while(&mut |_| true).map(drop)
    }

    /// The same for somebody who may wait no longer: `go_on` hears what is waited for, and may say no. Returns whether it was done; once nothing is waited
    /// for any more it is. Volumes may come, go and grow while stores are made durable ahead.
    ///
    /// # Errors
    /// As [`Core::take_back`].
    pub fn take_back_while(
        &self,
        go_on: &mut dyn FnMut(&TakingBack) -> bool,
    ) -> Result<bool, CacheError> {
        let mut wanted = true;
        let wanted = &mut wanted;
        let stopped = || locked(&self.log_inbox).stopped;
        // Once it has said no it is not asked again.
        let go_on = &RefCell::new(|now: &TakingBack| {
            *wanted = *wanted && !stopped() && go_on(now);
            *wanted
        });
        let hears = |now: &TakingBack| (go_on.borrow_mut())(now);
        let Some(all) = self.alone_to_take_back(&hears)? else { return Ok(false) };
        // While clients are served: it may be long.
        let former = self.former_log(&mut || hears(&TakingBack::Log))?;
        if !hears(&TakingBack::Requests) {
            return Ok(false);
        }
        let (mut all, mut former) = (Some(all), former);
        let (id, shards) = self.next_operation();
        let mut operation = Operation::take_back(id, shards, &self.layout, Fault::default());
        let done = self.carry(
            &mut operation,
            &mut || hears(&TakingBack::Requests),
            &mut |operation, step| {
                match step {
                    Step::Stores { within } => {
                        let ahead = within == AHEAD;
                        if ahead {
                            // A store that hangs keeps nobody from what is done with other volumes.
                            all = None;
                        }
                        if !self.make_stores_durable(within, &hears)? {
                            return Ok(false);
                        }
                        if ahead {
                            all = self.alone_to_take_back(&hears)?;
                            if all.is_none() {
                                return Ok(false);
                            }
                        }
                    }
                    Step::Anew => match self.back_on_log(former.take()) {
                        // (It has come to its end, and who asked has heard of nothing in time.)
                        _ if self.is_enabled() => {}
                        said => said?.map_err(fail)?,
                    },
                    _ => {}
                }
                operation.done();
                Ok(true)
            },
        )?;
        drop(all);
        if !done && !hears(&TakingBack::Requests) {
            return Ok(false);
        }
        if !done {
            return Err(fail(format!(
                "requests under way did not end within {} s: see to the stores, and ask again",
                LOCKED.as_secs_f64()
            )));
        }
        tracing::warn!("the cache is taken back: it is used again, and begins with nothing in it");
        Ok(true)
    }

    /// Nobody does anything with volumes as long as what this returns lives, and the cache may be taken back as far as can be seen. `None` if `hears` has
    /// said no.
    fn alone_to_take_back(
        &self,
        hears: &dyn Fn(&TakingBack) -> bool,
    ) -> Result<Option<All<'_>>, CacheError> {
        let all = self.changing.all(&mut || hears(&TakingBack::Requests)).map_err(|which| {
            fail(format!(
                "'{which}' is being attached, detached or resized: take the cache back when that has ended"
            ))
        })?;
        if all.is_some() {
            self.may_take_back()?;
        }
        Ok(all)
    }

    fn may_take_back(&self) -> Result<(), CacheError> {
        if self.is_enabled() {
            let closed = self.back.get().is_some_and(|back| back.log().closed().is_some());
            if self.why_given_up().is_none() && (!closed || self.log_drains()) {
                return Err(fail("it is in use"));
            }
            // It is being given up at this moment, and whoever asks has read the line that says so.
            self.on_log(|_| ())?;
        }
        let anew = "start the daemon again: the cache is cold then";
        if self.stand_in {
            return Err(fail(format!("it was not there at the start; when it is, {anew}")));
        }
        if self.layout.is_sparse() {
            return Err(fail(format!("it is sparse; {anew}")));
        }
        if self.recorder.is_some() {
            return Err(fail(format!(
                "what happens was recorded, and the record has ended; {anew}"
            )));
        }
        if self.is_unlinked() {
            return Err(fail("its file was removed: format another and start the daemon again"));
        }
        if let Some(why) = self.why_log_stays() {
            return Err(fail(why));
        }
        Ok(())
    }

    fn back_on_log(&self, former: Option<Former>) -> Result<Result<(), String>, CacheError> {
        self.on_log(|log| take_back(log, former))
    }

    /// All stores are made durable, side by side, within `timeout`. False if `hears` has said no.
    ///
    /// # Errors
    /// When one cannot be.
    fn make_stores_durable(
        &self,
        timeout: Nanos,
        hears: &dyn Fn(&TakingBack) -> bool,
    ) -> Result<bool, CacheError> {
        let until = Instant::now() + Duration::from_nanos(timeout.0);
        let written = |volume: &Arc<Attached>| !volume.volume().capabilities().read_only;
        let volumes = self.volumes();
        let wanted: Vec<_> =
            volumes.iter().filter(|v| written(v)).map(|v| (v, v.flusher.want())).collect();
        for (volume, number) in wanted {
            loop {
                let left = until.saturating_duration_since(Instant::now());
                match volume.flusher.wait(number, left.min(LOOK)) {
                    Some(true) => break,
                    None if !left.is_zero() => {}
                    // It was put aside meanwhile, in good order.
                    _ if !self.volumes().iter().any(|now| Arc::ptr_eq(now, volume)) => break,
                    _ => return Err(volume.is_not_durable(timeout)),
                }
                if !hears(&TakingBack::Store(volume.name.clone())) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}

/// The cache is used again. All of its lines are locked.
///
/// # Errors
/// In words: it stays given up.
pub(super) fn take_back(log: &mut LogThread, former: Option<Former>) -> Result<(), String> {
    let cache = log.cache().clone();
    let random = random().map_err(|e| e.to_string())?;
    let again = Again { idle: QUIET, random, fault: Fault::default() };
    let mut anew = Empty { cache: &cache, out: Out::default(), former, log: None };
    log.begin_anew(again, &mut anew).map_err(
        |why| match why {
            NotTakenBack::InUse => "it is in use".to_owned(),
            NotTakenBack::Busy => "operations of its device have not ended: ask again".to_owned(),
            NotTakenBack::Unread(why) | NotTakenBack::Log(why) => why,
            NotTakenBack::Dirty(name) => format!(
                "its write log, which has failed, may have writes of volume '{name}' that the store of that lacks"
            ),
            NotTakenBack::Other => format!(
                "'{}' holds another cache by now: start the daemon again",
                cache.path().display()
            ),
            NotTakenBack::Failed(e) => {
                format!("{e} still: replace it, format it and start the daemon again")
            }
        },
    )
}

/// The cache that is to be empty.
struct Empty<'a> {
    cache: &'a Core,
    out: Out,
    /// What lies in the write log, and the one that takes its place, with the superblock of its run.
    former: Option<Former>,
    log: Option<(WriteLog<Payload>, BlockSuperblock)>,
}

impl Anew for Empty<'_> {
    fn found(&mut self) -> Result<BlockSuperblock, String> {
        read_superblock(&self.cache.device).map_err(|e| e.to_string())
    }

    fn is_idle(&mut self, shard: u32) -> bool {
        self.cache.is_idle(shard)
    }

    fn log_is_idle(&mut self) -> bool {
        self.cache.log_is_over()
    }

    fn may_be_dirty(&mut self, name: &str, attachment: u32) -> bool {
        self.cache.log_has(name, attachment)
    }

    fn begin_log(&mut self, superblock: &BlockSuperblock) -> Result<(), String> {
        if superblock.write_log.is_none() {
            return Ok(());
        }
        let former = self.former.as_ref().ok_or("its write log was not read")?;
        let log = self.cache.log_anew(superblock, former).map_err(|e| e.to_string())?;
        self.log = Some((log, superblock.clone()));
        Ok(())
    }

    fn empty_map(&mut self, shard: u32) -> Map {
        let Core { layout, placing, config, region, .. } = self.cache;
        region.empty_map(layout, *placing, config.making(), shard)
    }

    fn begin_anew(&mut self, shard: u32, map: Map) -> bool {
        self.cache.with(shard, None, &mut self.out, |s, _| s.begin_anew(map))
    }

    fn disable(&mut self, shard: u32) {
        let now = self.cache.now();
        self.cache.with(shard, None, &mut self.out, |s, fx| s.disable(now, fx));
    }

    fn own(&mut self, superblock: &BlockSuperblock) {
        self.cache.region.own(superblock);
    }

    fn in_force(&mut self) {
        if let Some((log, superblock)) = self.log.take() {
            self.cache.use_log(log, &superblock);
        }
        // I/O that has ended may have asked once more that it be given up, and this thread has not heard of it.
        locked(&self.cache.log_inbox).mail.resumed();
        for volume in self.cache.volumes() {
            volume.account.set(0);
        }
        *locked(&self.cache.node_limits.given_up) = None;
        *locked(&self.cache.node_limits.not_noted) = None;
        self.cache.enabled.store(true, Ordering::SeqCst);
    }

    fn forget(&mut self) {
        forget_given_up(&self.cache.config.state_dir, self.cache.uuid());
    }
}
