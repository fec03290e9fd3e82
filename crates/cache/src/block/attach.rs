//! Volumes come and go while the cache serves: what is planned, and what is said of it. What each step does is the engine's, over [`steps`](super::steps).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use larder_engine::block::Fault;
use larder_engine::block::node::attachment::Attachment;
use larder_engine::block::node::operator::steps::Waits;
use larder_engine::block::node::operator::{NotDone, Operation};
use larder_engine::block::node::start::places::{Comer, NoPlace};
use larder_engine::block::volumes::Found;
use larder_format::block::{BlockSuperblock, VolumeState};

use super::attached::Attached;
use super::attended::{Asker, finishes, is_unwanted};
use super::back::{self, Alone, BackWish};
use super::open::{self, CacheError};
use super::operators::{LOOK, OVERTAKEN};
use super::steps::At;
use super::{Core, Mailbox};
use crate::block::volume::Volume;
use larder_volume::Backing;

/// How far a detach is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detaching {
    /// So many clients still use the volume.
    Clients(u64),
    /// Its marker, which has to say what becomes of it, is not reached.
    Marker,
    /// So many bytes of the write log are still to come to its store.
    Dirty(u64),
    /// Operations end.
    Draining,
    /// So many regions wait to be made durable.
    Durable(u64),
}

/// A volume that comes is planned for so often at most, where others come, grow and go meanwhile.
const PLANS: usize = 16;

fn not_waited_for(name: &str) -> CacheError {
    let reason = "whoever asked for it waits no longer".to_owned();
    CacheError::NotYet { name: name.to_owned(), reason }
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
        let wish = BackWish { back: None, ..self.config.wish_of(volume.name()) };
        self.attach_as(volume, trust, &wish)
    }

    /// The same of a volume that may write back, and where its marker is.
    ///
    /// # Errors
    /// As [`Core::attach`], and when its marker forbids it.
    pub fn attach_as(
        &self,
        volume: &Arc<Volume>,
        trust: bool,
        wish: &BackWish,
    ) -> Result<Result<(), String>, CacheError> {
        self.comes(volume, trust, wish)
    }

    /// The same for somebody who may wait no longer: `go_on` hears what does not answer, if something is waited for, and may say no.
    ///
    /// # Errors
    /// As [`Core::attach_as`], and when `go_on` has said no: then it is not attached.
    pub fn attach_while(
        &self,
        volume: &Arc<Volume>,
        trust: bool,
        wish: &BackWish,
        go_on: &mut dyn FnMut(Option<&str>) -> bool,
    ) -> Result<Result<(), String>, CacheError> {
        self.hears_what(go_on, || self.comes(volume, trust, wish))
    }

    /// A store that was opened to be read only, as it is to be served ([`back::view`]), for somebody who may wait no longer.
    ///
    /// # Errors
    /// As of [`back::view`], and when `go_on` has said no.
    pub fn view_while(
        &self,
        name: &str,
        store: Box<dyn Backing>,
        wish: &BackWish,
        go_on: &mut dyn FnMut(Option<&str>) -> bool,
    ) -> Result<Box<dyn Backing>, CacheError> {
        self.hears_what(go_on, || back::view(name, store, wish))
    }

    fn hears_what<R: Send>(
        &self,
        go_on: &mut dyn FnMut(Option<&str>) -> bool,
        work: impl FnOnce() -> Result<R, CacheError> + Send,
    ) -> Result<R, CacheError> {
        let asker = Arc::<Asker>::default();
        let mut hears = |()| go_on(asker.waits_for().as_deref());
        self.attended_by(&asker, (), &mut hears, |_| work())
    }

    fn comes(
        &self,
        volume: &Arc<Volume>,
        trust: bool,
        wish: &BackWish,
    ) -> Result<Result<(), String>, CacheError> {
        let name = volume.name().to_owned();
        if self.volume(&name).is_some() {
            let reason = "it is attached already: choose another name".to_owned();
            return Err(CacheError::Volume { name, reason });
        }
        self.may_be_recorded(&name)?;
        self.check_state_dir(&name)?;
        let sb = self.on_log(|log| log.line_space().cloned())?;
        if wish.back.is_none()
            && let Some(sb) = &sb
        {
            // Before this cache knows it by what it is now, or lets go of its lines.
            self.is_not_dirty_here(volume, wish, sb)?;
        }
        if let Some(sb) = sb.filter(|_| wish.back.is_some()) {
            // Before anything is made, and before this cache knows the store by what it is now.
            back::may_be_journaled(volume, (wish, back::Asking::of(&self.config)), self.path())?;
            back::look(volume, (wish, back::Asking::of(&self.config)), &sb)?;
        }
        let comer = open::comer(volume, trust || self.config.trust_unchanged)?;
        for _ in 0..PLANS {
            if is_unwanted() {
                return Err(not_waited_for(&name));
            }
            if let Some(taken_up) = self.take_up(volume, &comer)? {
                let begun = match is_unwanted() {
                    true => Err(not_waited_for(&name)),
                    false => self.begin_back(volume, wish),
                };
                if let Err(error) = begun {
                    finishes();
                    if self.volume(&name).is_some() {
                        // Nobody has written to it. A store that does not answer is not waited for.
                        let mut goes = |how| !matches!(how, Detaching::Durable(_));
                        self.detach(&name, true, &mut goes)?;
                    }
                    return Err(error);
                }
                return Ok(taken_up);
            }
        }
        Err(CacheError::NotYet { name, reason: OVERTAKEN.to_owned() })
    }

    /// A volume that is not to write back: what this cache has of it is in its store.
    ///
    /// # Errors
    /// When it is not.
    fn is_not_dirty_here(
        &self,
        volume: &Volume,
        wish: &BackWish,
        sb: &BlockSuperblock,
    ) -> Result<(), CacheError> {
        let name = volume.name();
        let record = sb.volumes.iter().find(|v| v.name == name).and_then(|v| v.write_back);
        let Some(record) = record.filter(|record| record.holds.may_be_dirty()) else {
            return Ok(());
        };
        let closed = self.back.get().is_some_and(|back| back.log().closed().is_some());
        let how = (closed || !self.is_enabled(), false);
        let asking = back::Asking::of(&self.config);
        let of = (name, volume.backing());
        let cache = (sb.uuid, sb.epoch);
        back::check_through(of, Some(&record), cache, (wish, asking), how, &sb.volumes).map(drop)
    }

    /// Plans where a volume goes, and carries it through. `None` if another volume has come, grown or gone meanwhile so that the plan holds no more.
    fn take_up(
        &self,
        volume: &Arc<Volume>,
        comer: &Comer,
    ) -> Result<Option<Result<(), String>>, CacheError> {
        let name = volume.name().to_owned();
        let superblock = self.on_log(|log| log.line_space().cloned())?;
        let given_up = !self.is_enabled();
        let without = || Ok(Some(Err("the cache was given up: it is served without".into())));
        let Some(superblock) = superblock else { return without() };
        let planned = Attachment::attach(&superblock, comer, given_up, Fault::default());
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
        let id = self.node_limits.next_id();
        let attached = Attached::new(volume, id, &taken.volume, &superblock, &self.config)?;
        attached.came(&decided);
        let (id, shards) = self.next_operation();
        let mut operation = Operation::attachment(id, shards, attachment);
        let mut io = At { core: self, of: attached, go_on: &mut |_| !is_unwanted() };
        match self.carry_over(&mut operation, &mut io, Operation::attach_step)? {
            Ok(()) => {}
            Err(NotDone::Overtaken) => return Ok(None),
            Err(_) => {
                let reason =
                    "requests for the lines that it would have do not end: try again".to_owned();
                return Err(CacheError::NotYet { name, reason });
            }
        }
        open::say_cold(&decided);
        if !operation.is_recorded() {
            return without();
        }
        Ok(Some(match taken.found {
            Found::Warm if !given_up => Ok(()),
            _ => Err(decided.cold.unwrap_or("it is new to this cache").to_owned()),
        }))
    }

    /// A volume that is served without the cache goes, when the last of its clients has gone: there is nothing to put aside. `disconnect`
    /// closes its clients' connections. `go_on` hears of clients, and may say no. Returns whether it went. The caller has taken it out of what
    /// is exported.
    pub fn let_go(&self, volume: &Volume, disconnect: bool, go_on: GoOn<'_>) -> bool {
        if disconnect {
            volume.close_clients();
        }
        let goes = self.await_clients(volume, go_on);
        if goes {
            volume.close();
            self.let_go_of_closed();
        }
        goes
    }

    /// Waits for a volume's clients to leave. False if `go_on` has said no: they stay.
    fn await_clients(&self, volume: &Volume, go_on: GoOn<'_>) -> bool {
        while volume.clients() > 0 {
            if !go_on(Detaching::Clients(volume.clients())) {
                volume.keep_clients();
                return false;
            }
            self.pause(LOOK);
        }
        true
    }

    /// Waits until nobody else changes a volume over, and until its clients have left if it writes back: while they stay its marker is looked at. `None`
    /// if `go_on` has said no.
    fn alone_without_clients(&self, attached: &Attached, go_on: GoOn<'_>) -> Option<Alone> {
        let volume = attached.volume();
        loop {
            if attached.attachment().is_some() && !self.await_clients(volume, go_on) {
                return None;
            }
            match self.try_alone(attached) {
                // (It has changed over meanwhile.)
                Some(_) if attached.attachment().is_some() && volume.clients() > 0 => {}
                Some(alone) => return Some(alone),
                None if !go_on(Detaching::Draining) => {
                    volume.keep_clients();
                    return None;
                }
                None => self.pause(LOOK),
            }
        }
    }

    /// Puts a volume aside in good order: waits for its clients to leave, ends what is under way, makes it durable, and
    /// remembers by what it is known again. The caller has taken it out of what is exported. `disconnect` closes its
    /// clients' connections. `go_on` hears how far it is, and may say no as long as there are clients. Returns whether it
    /// was put aside, and whether all of it was made durable.
    ///
    /// # Errors
    /// When there is no such volume, or the log's thread has ended: it is served as before then, but exported by nobody.
    pub fn detach(
        &self,
        name: &str,
        disconnect: bool,
        go_on: GoOn<'_>,
    ) -> Result<Option<bool>, CacheError> {
        self.detach_as(name, (disconnect, false), go_on)
    }

    /// The same of a volume that writes back, with what is dirty: it stays in the cache, which may be moved to another host, until the volume
    /// is attached there.
    ///
    /// # Errors
    /// As [`Core::detach`], and when it does not write back, or what is dirty is not durable on the cache device.
    pub fn detach_dirty(
        &self,
        name: &str,
        disconnect: bool,
        go_on: GoOn<'_>,
    ) -> Result<Option<bool>, CacheError> {
        if self.attached(name)?.attachment().is_none() {
            let reason =
                "it does not write back: nothing of it is dirty, and it is detached as it is"
                    .to_owned();
            return Err(CacheError::Volume { name: name.to_owned(), reason });
        }
        self.detach_as(name, (disconnect, true), go_on)
    }

    fn detach_as(
        &self,
        name: &str,
        how: (bool, bool),
        go_on: GoOn<'_>,
    ) -> Result<Option<bool>, CacheError> {
        self.attended(Detaching::Draining, go_on, |go_on| self.puts_aside(name, how, go_on))
    }

    fn puts_aside(
        &self,
        name: &str,
        (disconnect, keep_dirty): (bool, bool),
        go_on: GoOn<'_>,
    ) -> Result<Option<bool>, CacheError> {
        let attached = self.attached(name)?;
        self.check_state_dir(name)?;
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
        let mut carried = None;
        // Nobody changes over how it is written from here on, whichever way that is: it would come back to write back when it has gone.
        let Some(alone) = self.alone_without_clients(&attached, go_on) else { return Ok(None) };
        if let Some(of) = attached.attachment() {
            // What has nothing dirty goes as without it, so that any cache may serve its store. (A store that does not answer would keep it here.)
            let back = self.back.get().filter(|_| volume.backing().trouble().is_none());
            let keep_dirty = keep_dirty && !back.is_some_and(|back| back.log().is_clean(of));
            if keep_dirty && !self.reaches_marker(name, go_on) {
                return Ok(None);
            }
            let mut hears = |left| {
                if keep_dirty {
                    self.leave_store(&volume);
                }
                go_on(Detaching::Dirty(left))
            };
            let done = match keep_dirty {
                true => {
                    // Nobody may see its store from here on: it lacks what is dirty.
                    volume.close();
                    self.carry_back((&attached, &alone), &mut hears).map(|done| {
                        done.map(|(done, wish)| {
                            carried = Some(wish).filter(|_| done);
                            done
                        })
                    })
                }
                false => self.write_back_no_more((&attached, &alone), &mut hears),
            };
            if !matches!(done, Ok(None | Some(true))) {
                self.returns_to_store(&volume);
                volume.reopen();
                return done.map(|_| None);
            }
        }
        let (id, shards) = self.next_operation();
        let mut operation = Operation::attachment(id, shards, attachment);
        let keeps = carried.is_some();
        let mut hears = |waits| {
            let left = keeps && self.leave_store(&volume);
            if left && matches!(waits, Waits::Bits(_)) {
                return false;
            }
            go_on(match waits {
                Waits::Clients(clients) => Detaching::Clients(clients),
                Waits::Lines => Detaching::Draining,
                Waits::Bits(left) => Detaching::Durable(left),
            })
        };
        let mut io = At { core: self, of: attached.clone(), go_on: &mut hears };
        let gone = self.carry_over(&mut operation, &mut io, Operation::detach_step);
        if !matches!(gone, Ok(Ok(()))) {
            self.returns_to_store(&volume);
            finishes();
            // It stays: what is dirty is taken up again before anybody sees it.
            if let Some(wish) = carried {
                self.begin_back(&volume, &wish)?;
            }
            operation.detach_given_up(&mut io);
        }
        Ok(gone?.ok().and_then(|()| operation.way().map(Attachment::is_durable)))
    }

    /// Of a volume that is put aside with what is dirty: its store is asked for nothing more, and what it was asked is waited for no longer, if
    /// it is not reached. (One that is only slow may do later what it was asked: that is waited for.) Returns whether that is so.
    fn leave_store(&self, volume: &Volume) -> bool {
        let leaves = volume.backing().trouble().is_some_and(|trouble| trouble.state == "lost");
        if leaves {
            volume.backing().abandon(true);
            self.mailboxes.iter().for_each(Mailbox::wake);
        }
        leaves
    }

    /// It stays with its store after all: that is looked for again.
    fn returns_to_store(&self, volume: &Volume) {
        volume.backing().abandon(false);
        self.mailboxes.iter().for_each(Mailbox::wake);
    }

    /// Waits until the marker of a volume was looked at: it may lie on a store that is away, and nothing has changed yet. (What is wrong with it
    /// is told when it is written.) False if `go_on` has said no.
    fn reaches_marker(&self, name: &str, go_on: GoOn<'_>) -> bool {
        if !go_on(Detaching::Marker) {
            return false;
        }
        self.reads_marker(name);
        !is_unwanted()
    }

    /// Has workers let go of the stores of volumes that are closed.
    pub fn let_go_of_closed(&self) {
        self.node_limits.gone.fetch_add(1, Ordering::SeqCst);
        self.mailboxes.iter().for_each(Mailbox::wake);
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
        let dirty = |v: &larder_format::block::Volume| {
            v.name == name && v.write_back.is_some_and(|w| w.holds.may_be_dirty())
        };
        if superblock.volumes.iter().any(dirty) {
            return Err(fail(
                "this cache may hold writes of it that its store does not have: attach it, so that they come there, or have its store recovered and \
                 attach it, which gives them up",
            ));
        }
        if self.recorder.is_some() {
            return Err(fail(
                "it is not attached, and a recording cannot express that it is forgotten: attach it and drop its lines, or drop it when \
                 the cache runs without a recording",
            ));
        }
        let (id, shards) = self.next_operation();
        let mut operation = Operation::attachment(id, shards, attachment);
        let mut io = At { core: self, of: name, go_on: &mut |_| go_on() };
        match self.carry_over(&mut operation, &mut io, Operation::forget_step)? {
            Ok(()) => Ok(Some(operation.dropped())),
            Err(NotDone::Overtaken) => Err(fail(OVERTAKEN)),
            Err(NotDone::GivenUp) => {
                Err(fail("the cache device failed, and the cache was given up"))
            }
            Err(NotDone::Unwanted | NotDone::Late) => Ok(None),
        }
    }

    pub(super) fn group_bytes(&self) -> u64 {
        u64::from(self.layout.line) * larder_format::block::layout::GROUP_LINES
    }
}
