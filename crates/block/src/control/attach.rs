//! A volume comes.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::protocol::{Progress, Refusal, WriteBack};
use super::{Control, GoOn, HowOpened, LOOK, TAKEN, back, refused, released};
use crate::backing::{Backing, BackingError, Uri};
use crate::cache::back::BackWish;
use crate::cache::{CacheError, Volume, Volumes};

/// Whoever has broken it off waits for so long until all have let go of its store.
const BROKEN_OFF: Duration = Duration::from_millis(300);

/// Why a volume whose store is open was not attached.
pub(super) struct NotAttached {
    pub(super) refusal: Refusal,
    /// It may go another time, without anything being changed.
    pub(super) may_pass: bool,
    /// What was waited for that did not answer, when it was waited for last.
    waited_for: Option<String>,
}

impl From<Refusal> for NotAttached {
    fn from(refusal: Refusal) -> NotAttached {
        NotAttached { refusal, may_pass: false, waited_for: None }
    }
}

impl From<CacheError> for NotAttached {
    fn from(error: CacheError) -> NotAttached {
        NotAttached { may_pass: error.may_pass(), refusal: error.into(), waited_for: None }
    }
}

impl Control {
    pub(super) fn attach(
        &self,
        name: &str,
        uri: &str,
        (how, trust): (HowOpened, bool),
        (back, timeout): (&WriteBack, Option<Duration>),
        go_on: GoOn<'_>,
    ) -> Result<Value, Refusal> {
        let usage = |e: String| Refusal { message: e, usage: true };
        let begun = Instant::now();
        let late = Cell::new(false);
        let go_on: GoOn<'_> = &mut |progress: Progress| {
            late.set(timeout.is_some_and(|timeout| begun.elapsed() >= timeout));
            !late.get() && go_on(progress)
        };
        let uri: Uri = uri.parse().map_err(|e: BackingError| usage(e.to_string()))?;
        let mut wish = back::wish(&self.cache, name, back)?;
        if how.read_only {
            if back.write.is_some() {
                return Err(usage(format!(
                    "volume '{name}' is only read and writes nothing back: leave out --read-only or --write"
                )));
            }
            wish.back = None;
        }
        let not_waited = |what: &str| match timeout.filter(|_| late.get()) {
            Some(timeout) => refused(format!(
                "volume '{name}' is not attached: {what} after {} s",
                timeout.as_secs()
            )),
            None => refused(format!("interrupted: volume '{name}' is not attached")),
        };
        let _one = match self.take(name, go_on) {
            Err(_) if late.get() => return Err(not_waited("something else is done with it still")),
            one => one?,
        };
        if self.volumes.find(name).is_some() && !name.is_empty() {
            return Err(refused(format!(
                "volume '{name}' is attached already: choose another name"
            )));
        }
        if let Some(other) = self.waiting.store_of(name).filter(|other| *other != uri) {
            return Err(refused(format!(
                "volume '{name}' waits for its store '{other}': detach it first, or choose another name"
            )));
        }
        Volumes::check_name(name).map_err(|e| usage(e.to_string()))?;
        // Before notes about the store are opened there.
        self.cache.check_state_dir(name)?;
        let store = self.open_while(name, &uri, how, go_on).map_err(|e| {
            refused(match self.volume_of(&uri) {
                Some(other) => format!("{e}: it is the store of volume '{other}' already"),
                None => e.to_string(),
            })
        })?;
        let store = store.ok_or_else(|| not_waited("its store is not open"))?;
        let attached = self.attach_store(name, store, trust, (&wish, go_on));
        let attached = attached.map_err(|e| match late.get() {
            true => {
                let what = e.waited_for.unwrap_or_else(|| "what it needs".to_owned());
                not_waited(&format!("{what} has not answered"))
            }
            false => e.refusal,
        })?;
        self.forget_waiting(name);
        Ok(attached)
    }

    /// Opens a store. `None` if `go_on` has said no meanwhile: whoever opens it still lets go of it then.
    fn open_while(
        &self,
        name: &str,
        uri: &Uri,
        how: HowOpened,
        go_on: GoOn<'_>,
    ) -> Result<Option<Box<dyn Backing>>, BackingError> {
        let (tell, told) = mpsc::channel();
        let (open, of, at) = (self.open.clone(), name.to_owned(), uri.clone());
        let thread = std::thread::Builder::new().name("block-opens".into());
        // (Whoever has asked may be gone: what it would have been told goes with the message.)
        let spawned = thread.spawn(move || drop(tell.send(open(&of, &at, how))));
        if spawned.is_err() {
            return (self.open)(name, uri, how).map(Some);
        }
        loop {
            match told.recv_timeout(LOOK) {
                Ok(opened) => return opened.map(Some),
                Err(RecvTimeoutError::Disconnected) => {
                    let reason = "whoever opened it has ended early".to_owned();
                    return Err(BackingError::Open { uri: uri.to_string(), reason });
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            let what = format!("volume '{name}': its store '{uri}' is not open yet");
            if !go_on(Progress { what, ..Progress::default() }) {
                return Ok(None);
            }
        }
    }

    /// The volume that has this store, as far as its name or its file tells.
    fn volume_of(&self, uri: &Uri) -> Option<String> {
        use std::os::unix::fs::MetadataExt as _;
        let inode = |uri: &Uri| match uri {
            Uri::File { path } => path.metadata().ok().map(|m| (m.dev(), m.ino())),
            _ => None,
        };
        let of = inode(uri);
        let is = |other: &Uri| other == uri || (of.is_some() && inode(other) == of);
        let all = self.cache.volumes();
        let other = all.iter().find(|v| v.volume().backing().uri().parse().is_ok_and(|u| is(&u)));
        other.map(|v| v.name.clone())
    }

    /// The rest of it, once the store is open. Of a name one at a time.
    pub(super) fn attach_store(
        &self,
        name: &str,
        store: Box<dyn Backing>,
        trust: bool,
        (wish, go_on): (&BackWish, GoOn<'_>),
    ) -> Result<Value, NotAttached> {
        let usage = |e: String| Refusal { message: e, usage: true };
        let uri = store.uri().to_owned();
        Volumes::check_name(name).map_err(|e| usage(e.to_string()))?;
        let mut waited_for = None;
        let mut hear = |what: Option<&str>| {
            let says = what.unwrap_or("what it needs");
            let what_waits = format!("volume '{name}': {says} has not answered yet");
            let goes_on = go_on(Progress { what: what_waits, ..Progress::default() });
            // (Once it is broken off nothing is waited for any more.)
            if goes_on || what.is_some() {
                waited_for = what.map(str::to_owned);
            }
            goes_on
        };
        let store = match self.cache.view_while(name, store, wish, &mut hear) {
            Ok(store) => store,
            Err(error) => return Err(NotAttached { waited_for, ..error.into() }),
        };
        let volume = Arc::new(Volume::new(name, store, self.cache.line_bytes(), true));
        // The same store may be about to come as another volume, or to go.
        let place = volume.backing().place();
        let _store = loop {
            match self.cache.changing().try_store(place.clone()) {
                Some(one) => break one,
                None if hear(Some("whatever else is done with its store")) => {
                    std::thread::sleep(TAKEN);
                }
                None => {
                    let why = format!("volume '{name}': something else is done with its store");
                    return Err(NotAttached { waited_for, ..refused(why).into() });
                }
            }
        };
        let alike = self.volumes.expect(&volume).map_err(|e| refused(e.to_string()))?;
        let attached = self.cache.attach_while(&volume, trust, wish, &mut hear);
        let warm = match attached {
            Ok(warm) => warm,
            Err(error) => {
                // Whoever hears of it may want its store at once.
                volume.close();
                self.cache.let_go_of_closed();
                self.volumes.gone(&volume);
                let begun = Instant::now();
                released(name, &volume, &mut || hear(None) || begun.elapsed() < BROKEN_OFF);
                return Err(NotAttached { waited_for, ..error.into() });
            }
        };
        self.volumes.restore(volume.clone()).map_err(|e| refused(e.to_string()))?;
        let how = match &warm {
            Ok(()) => "warm".to_owned(),
            Err(why) => format!("cold: {why}"),
        };
        tracing::info!("volume '{name}' is attached: {uri}, {how}");
        if let Some(alike) = alike {
            tracing::warn!("{alike}");
        }
        Ok(json!({
            "volume": name,
            "uri": uri,
            "bytes": volume.capabilities().size,
            "read_only": volume.capabilities().read_only,
            "warm": warm.is_ok(),
            "why_cold": warm.err(),
            "write": self.cache.back_status(name).map(|back| back.config.to_string()),
        }))
    }
}
