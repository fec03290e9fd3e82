//! Volumes come and go while the cache serves: what the engine's machine asks for meanwhile is done here.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use larder_engine::block::node::attachment::{Attachment, Step};
use larder_engine::block::node::operator::Operation;
use larder_engine::block::node::start::places::NoPlace;
use larder_engine::block::volumes::Found;
use larder_engine::block::{Fault, LineId};
use larder_format::block::VolumeState;

use super::attached::Attached;
use super::open::{self, CacheError};
use super::operators::{LOOK, OVERTAKEN};
use super::{Core, Door, locked};
use crate::block::volume::Volume;

/// How far a detach is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detaching {
    /// So many clients still use the volume.
    Clients(u64),
    /// Operations end.
    Draining,
    /// So many regions wait to be made durable.
    Durable(u64),
}

/// What a detach hears of its volume.
type GoOn<'a> = &'a mut dyn FnMut(Detaching) -> bool;

impl Core {
    /// Takes up a volume; `trust` vouches for a store that cannot tell whether it was changed. Returns whether what was cached of it is used, and if not, why not.
    ///
    /// # Errors
    /// When there is one of that name, it shrank, its identity cannot be found out, or the cache device fails.
    pub fn attach(
        &self,
        volume: &Arc<Volume>,
        trust: bool,
    ) -> Result<Result<(), String>, CacheError> {
        let name = volume.name().to_owned();
        if self.volume(&name).is_some() {
            let reason = "it is attached already: choose another name".to_owned();
            return Err(CacheError::Volume { name, reason });
        }
        self.may_be_recorded(&name)?;
        let comer = open::comer(volume, trust || self.config.trust_unchanged)?;
        let superblock = self.on_log(|log| log.line_space().cloned())?;
        let given_up = !self.is_enabled();
        let without = || Ok(Err("the cache was given up: it is served without".into()));
        let Some(superblock) = superblock else { return without() };
        let planned = Attachment::attach(&superblock, &comer, given_up, Fault::default());
        let attachment = match planned {
            Ok(attachment) => attachment,
            // It has no place in the line space: its store alone orders what is written there.
            Err(_) if given_up => return without(),
            Err(decided) => {
                self.record_arrival(&decided.coming, &decided.outcome, None);
                let Err(why) = decided.outcome else { return without() };
                return Err(open::cannot_come(&NoPlace { name, bytes: comer.bytes, why }));
            }
        };
        let comes = attachment.comes().map(|(decided, taken)| (decided.clone(), taken.clone()));
        let Some((decided, taken)) = comes else { return without() };
        open::say_cold(&decided);
        let id = self.governor.next_id();
        let attached = Attached::new(volume, id, &taken.volume, &superblock, &self.config)?;
        let mut durable = false;
        let (id, shards) = self.next_operation();
        let mut operation = Operation::attachment(id, shards, attachment);
        self.carry(&mut operation, &mut || true, &mut |operation, step| {
            match step {
                Step::Store => attached.make_durable()?,
                Step::Record => {
                    let (applied, is_durable) = self.record_change(operation)?;
                    durable = is_durable;
                    let reason = OVERTAKEN.to_owned();
                    let overtaken = CacheError::Volume { name: name.clone(), reason };
                    return applied.then_some(true).ok_or(overtaken);
                }
                Step::InForce => {
                    if durable {
                        self.record_arrival(&decided.coming, &decided.outcome, Some(&attached));
                    }
                    // Without a cache too: its lines, of which none is cached, are what changes exclude each other by.
                    self.admit_volume(attached.clone());
                }
                _ => {}
            }
            operation.done();
            Ok(true)
        })?;
        if !durable {
            return without();
        }
        Ok(match taken.found {
            Found::Warm if !given_up => Ok(()),
            _ => Err(decided.cold.unwrap_or("it is new to this cache").to_owned()),
        })
    }

    fn admit_volume(&self, attached: Arc<Attached>) {
        let mut volumes = self.volumes.write().unwrap_or_else(PoisonError::into_inner);
        volumes.insert(attached.name.clone(), attached);
        let all = volumes.values().cloned().collect();
        drop(volumes);
        self.governor.set_volumes(all);
        self.restore_selection();
    }

    /// Puts a volume aside in good order: waits for its clients to leave, ends what is under way, makes it durable, and
    /// remembers by what it is known again. The caller has taken it out of what is exported. `disconnect` closes its
    /// clients' connections. `go_on` hears how far it is, and may say no as long as there are clients. Returns whether it
    /// was put aside, and whether all of it was made durable.
    ///
    /// # Errors
    /// When there is no such volume, or the log's thread has ended.
    pub fn detach(
        &self,
        name: &str,
        disconnect: bool,
        go_on: GoOn<'_>,
    ) -> Result<Option<bool>, CacheError> {
        let attached = self.attached(name)?;
        let volume = attached.volume().clone();
        let of = name.to_owned();
        let record = self.on_log(move |log| {
            log.line_space().and_then(|sb| sb.volumes.iter().find(|v| v.name == of)).cloned()
        })?;
        let record = record.ok_or_else(|| self.no_volume(name))?;
        let attachment = Attachment::detach(&record, &self.layout);
        if disconnect {
            volume.close_clients();
        }
        let mut aside = None;
        let (id, shards) = self.next_operation();
        let mut operation = Operation::attachment(id, shards, attachment);
        // Both who waits for lines and who does a step ask it.
        let go_on = std::cell::RefCell::new(go_on);
        let hears = |how| (go_on.borrow_mut())(how);
        let gone = self.carry(
            &mut operation,
            &mut || hears(Detaching::Draining),
            &mut |operation, step| {
                match step {
                    Step::Clients => {
                        while volume.clients() > 0 {
                            if !hears(Detaching::Clients(volume.clients())) {
                                volume.keep_clients();
                                return Ok(false);
                            }
                            self.pause(LOOK);
                        }
                    }
                    Step::Close => volume.close(),
                    Step::Bits { first, last } => {
                        self.settle_losses(&attached, &mut || hears(Detaching::Draining));
                        let left = self.on_log(move |log| log.hurry(first, last))?;
                        // It is closed already: asked to stop, it only waits no longer for what is not durable yet.
                        let waits =
                            self.is_enabled() && (left == 0 || hears(Detaching::Durable(left)));
                        operation.bits(self.now(), left, waits);
                        return Ok(true);
                    }
                    Step::Record => {
                        operation.known_by(attached.identity());
                        let store = attached.id;
                        self.on_log(move |log| log.forget_store(store))?;
                        let (applied, durable) = self.record_change(operation)?;
                        let stretch = (record.first_group, record.groups);
                        aside = durable.then_some(applied.then_some(stretch));
                        return Ok(true);
                    }
                    Step::InForce => {
                        let durable = operation.way().is_some_and(Attachment::is_durable);
                        self.forget_attached(&attached, durable, aside);
                    }
                    _ => {}
                }
                operation.done();
                Ok(true)
            },
        )?;
        if !gone {
            volume.reopen();
            return Ok(None);
        }
        Ok(operation.way().map(Attachment::is_durable))
    }

    /// A volume is attached no more.
    fn forget_attached(
        &self,
        attached: &Arc<Attached>,
        durable: bool,
        aside: Option<Option<(u64, u64)>>,
    ) {
        let mut volumes = self.volumes.write().unwrap_or_else(PoisonError::into_inner);
        volumes.remove(&attached.name);
        locked(&self.retired).add(attached);
        let all = volumes.values().cloned().collect();
        drop(volumes);
        // Selections are removed by the volume's number and kept by its name: they apply again when it comes back.
        self.governor.select(|selection| selection.remove_volume(attached.id));
        self.governor.set_volumes(all);
        self.record_departure(attached, durable, aside);
        // Its sessions go, with the workers' and this one.
        *locked(&attached.backing) = None;
        self.let_go_of_closed();
    }

    /// Has workers let go of the stores of volumes that are closed.
    pub fn let_go_of_closed(&self) {
        self.governor.gone.fetch_add(1, Ordering::SeqCst);
        self.doors.iter().for_each(Door::wake);
    }

    /// Forgets a volume that is not attached: drops its lines, gives its place up, and what is selected of it. Under its name
    /// another may come. Returns how many lines there were; `None` if `go_on` has said no.
    ///
    /// # Errors
    /// When the cache knows no such volume that is not attached, a record is being written, which has no word for it, or the
    /// cache device fails.
    pub fn forget(
        &self,
        name: &str,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<u64>, CacheError> {
        let fail =
            |reason: &str| CacheError::Volume { name: name.to_owned(), reason: reason.to_owned() };
        let superblock = self.on_log(|log| log.superblock().cloned())?.ok_or_else(|| {
            fail("the cache was given up, and nothing that is cached is used again")
        })?;
        let Some(attachment) = Attachment::forget(&superblock, name, Fault::default()) else {
            let CacheError::Volume { reason, .. } = self.no_volume(name) else {
                return Err(self.no_volume(name));
            };
            let aside = superblock.volumes.iter().filter(|v| v.state == VolumeState::Detached);
            let names: Vec<&str> = aside.map(|v| v.name.as_str()).collect();
            return Err(fail(&match names.len() {
                0 => format!("{reason}; none was put aside"),
                _ => format!("{reason}; put aside were: {}", names.join(", ")),
            }));
        };
        if self.recorder.is_some() {
            return Err(fail(
                "it is not attached, and cannot be forgotten while what happens is recorded: start the cache without a record",
            ));
        }
        let (id, shards) = self.next_operation();
        let mut operation = Operation::attachment(id, shards, attachment);
        let done = self.carry(&mut operation, go_on, &mut |operation, step| {
            match step {
                Step::Record => {
                    let (_, durable) = self.record_change(operation)?;
                    let gone = || fail("the cache device failed, and the cache was given up");
                    return durable.then_some(true).ok_or_else(gone);
                }
                Step::InForce => self.forget_selection(name)?,
                _ => {}
            }
            operation.done();
            Ok(true)
        })?;
        Ok(done.then_some(operation.dropped()))
    }

    pub(super) fn group_bytes(&self) -> u64 {
        u64::from(self.layout.line) * larder_format::block::layout::GROUP_LINES
    }

    pub(super) fn region(&self, line: LineId) -> u32 {
        (line.group().0 / self.layout.region_groups) as u32
    }
}
