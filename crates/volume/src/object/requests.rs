//! Requests to an object store: with a time limit each, and again until they succeed or the time is over.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::time::Duration;

use object_store::path::Path;
use object_store::{
    Error, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    PutPayload, UpdateVersion,
};
use tokio::time::Instant;

use super::manifest::RECORD_BYTES;
use crate::Timeouts;
use crate::rate_limited::RateLimited;

/// First and longest pause between tries.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Why a request did not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// There is no such object.
    Missing,
    /// The object is not, or no longer, as the request presumes.
    Changed,
    /// Timeouts has ended, or the store refuses for good.
    Failed(String),
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Trouble::Missing => f.write_str("there is no such object"),
            Trouble::Changed => f.write_str("the object was changed by somebody else"),
            Trouble::Failed(why) => f.write_str(why),
        }
    }
}

/// An object as it was got.
#[derive(Debug)]
pub(crate) struct Got {
    /// What was asked for.
    pub(crate) bytes: bytes::Bytes,
    /// Of the whole object.
    pub(crate) meta: ObjectMeta,
}

/// The way to a store.
pub(crate) struct Requests {
    uri: String,
    store: Box<dyn ObjectStore>,
    timeout: Cell<Timeouts>,
    /// What is said of it that it does not answer.
    lines: RefCell<RateLimited>,
}

/// The innermost reason: what wraps it repeats the request.
fn reason(error: &Error) -> String {
    let mut inner: &dyn std::error::Error = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    let (outer, inner) = (error.to_string(), inner.to_string());
    // Answers of a store are short; what a proxy says may be a page.
    let mut text = if outer.contains(&inner) { outer } else { format!("{outer}: {inner}") };
    if let Some((at, _)) = text.char_indices().nth(400) {
        text.truncate(at);
    }
    text
}

impl Requests {
    pub(crate) fn new(uri: String, store: Box<dyn ObjectStore>, timeout: Timeouts) -> Requests {
        Requests { uri, store, timeout: Cell::new(timeout), lines: RefCell::default() }
    }

    pub(crate) fn uri(&self) -> &str {
        &self.uri
    }

    pub(crate) fn timeout(&self) -> Timeouts {
        self.timeout.get()
    }

    pub(crate) fn set_patience(&self, timeout: Timeouts) {
        self.timeout.set(timeout);
    }

    pub(crate) fn store(&self) -> &dyn ObjectStore {
        &*self.store
    }

    /// What was said of it.
    #[cfg(test)]
    pub(crate) fn lines(&self) -> crate::rate_limited::Lines {
        self.lines.borrow().lines()
    }

    /// A request was answered.
    pub(crate) fn well(&self) {
        if self.lines.borrow_mut().well() {
            tracing::info!("backing store '{}': answers again", self.uri);
        }
    }

    /// One was not, and is tried again. Between two tries others may be answered, and each may fail otherwise: a line for
    /// each would be as many as there are requests.
    pub(crate) fn unwell(&self, why: &str) {
        let said = self.lines.borrow_mut().wrong(std::time::Instant::now());
        if let Some(unsaid) = said {
            tracing::warn!("backing store '{}': {why}{unsaid}", self.uri);
        }
    }

    /// Tries until it is over. `limit` says how long the next try may last: zero is not now, `None` is never again.
    pub(crate) async fn again<T, F>(
        &self,
        limit: impl Fn() -> Option<Duration>,
        mut request: impl FnMut() -> F,
    ) -> Result<T, Trouble>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let end = self.timeout().give_up.map(|timeout| Instant::now() + timeout);
        let mut pause = PAUSE.0;
        loop {
            let why = match limit() {
                None => return Err(Trouble::Failed("the volume is not used any more".into())),
                Some(Duration::ZERO) => {
                    "the lease on the volume could not be renewed in time".to_owned()
                }
                Some(limit) => {
                    let limit = limit.min(self.timeout().silence);
                    match tokio::time::timeout(limit, request()).await {
                        Ok(Ok(done)) => {
                            self.well();
                            return Ok(done);
                        }
                        Ok(Err(Error::NotFound { .. })) => return Err(Trouble::Missing),
                        Ok(Err(
                            Error::Precondition { .. }
                            | Error::AlreadyExists { .. }
                            | Error::NotModified { .. },
                        )) => return Err(Trouble::Changed),
                        Ok(Err(
                            e @ (Error::PermissionDenied { .. }
                            | Error::Unauthenticated { .. }
                            | Error::InvalidPath { .. }),
                        )) => return Err(Trouble::Failed(reason(&e))),
                        Ok(Err(
                            e @ (Error::NotSupported { .. } | Error::NotImplemented { .. }),
                        )) => {
                            let why = format!(
                                "the store has no conditional writes (If-Match), by which a second writer is noticed: use one \
                                 that has, or attach the volume for reading only ({})",
                                reason(&e)
                            );
                            return Err(Trouble::Failed(why));
                        }
                        Ok(Err(e)) => reason(&e),
                        Err(_) => format!("no answer within {:.1} s", limit.as_secs_f32()),
                    }
                }
            };
            self.unwell(&why);
            if end.is_some_and(|end| Instant::now() + pause >= end) {
                return Err(Trouble::Failed(why));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE.1);
        }
    }

    fn any(&self) -> impl Fn() -> Option<Duration> + use<> {
        let silence = self.timeout().silence;
        move || Some(silence)
    }

    /// A part of an object, or all of it; only of the version `tag` if that is given.
    pub(crate) async fn get(
        &self,
        at: &Path,
        range: Option<GetRange>,
        tag: Option<&str>,
    ) -> Result<Got, Trouble> {
        self.again(self.any(), || async {
            let options = GetOptions {
                range: range.clone(),
                if_match: tag.map(str::to_owned),
                ..GetOptions::default()
            };
            let result = self.store.get_opts(at, options).await?;
            let meta = result.meta.clone();
            Ok(Got { bytes: result.bytes().await?, meta })
        })
        .await
    }

    /// A small record, with its version.
    pub(crate) async fn record(&self, at: &Path) -> Result<(Vec<u8>, Option<String>), Trouble> {
        let got = self.get(at, Some(GetRange::Bounded(0..RECORD_BYTES)), None).await?;
        if got.meta.size > RECORD_BYTES {
            return Err(Trouble::Failed(format!(
                "'{at}' has {} bytes: it is not Larder's",
                got.meta.size
            )));
        }
        Ok((got.bytes.to_vec(), got.meta.e_tag))
    }

    /// Writes an object that is to follow the version `follows`; `None`: that is not to be there yet.
    pub(crate) async fn put(
        &self,
        at: &Path,
        bytes: bytes::Bytes,
        follows: Option<&str>,
        limit: impl Fn() -> Option<Duration>,
    ) -> Result<Option<String>, Trouble> {
        let result = self
            .again(limit, || {
                let mode = match follows {
                    None => PutMode::Create,
                    Some(tag) => PutMode::Update(UpdateVersion {
                        e_tag: Some(tag.to_owned()),
                        version: None,
                    }),
                };
                let options = PutOptions { mode, ..PutOptions::default() };
                self.store.put_opts(at, PutPayload::from(bytes.clone()), options)
            })
            .await?;
        Ok(result.e_tag)
    }

    /// Replaces a record. One whose answer was lost is looked up: if it is there, it was written.
    pub(crate) async fn put_record(
        &self,
        at: &Path,
        bytes: Vec<u8>,
        follows: Option<&str>,
    ) -> Result<Option<String>, Trouble> {
        match self.put(at, bytes.clone().into(), follows, self.any()).await {
            Err(Trouble::Changed | Trouble::Missing) => match self.record(at).await? {
                (found, tag) if found == bytes => Ok(tag),
                _ => Err(Trouble::Changed),
            },
            other => other,
        }
    }
}

/// A version that no object ever had.
const NEVER: &str = "\"larder-never\"";

/// Whether the store refuses a PUT that cannot be right: one to `at` that is to follow a version which never was.
pub(crate) async fn is_conditional(requests: &Requests, at: &Path) -> Result<bool, Trouble> {
    let limit = requests.any();
    match requests.put(at, "probe".into(), Some(NEVER), &limit).await {
        Err(Trouble::Changed | Trouble::Missing) => Ok(true),
        Err(e) => Err(e),
        Ok(_) => {
            requests.again(&limit, || requests.store().delete(at)).await?;
            Ok(false)
        }
    }
}
