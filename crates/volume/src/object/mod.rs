//! A volume as chunks in an S3-compatible object store.
//!
//! | module | what it is |
//! | --- | --- |
//! | `manifest` | what lies in the store, as bytes |
//! | `client` | how the store is reached |
//! | `requests` | one request: time limit, repetition |
//! | `lease` | who may write |
//! | `chunks` | reads and changes |
//! | `session` | a worker's way to the thread that does all that |
//!
//! A volume is made by [`create`] and attached by [`ObjectBacking::open`]. An attachment that may write takes the lease,
//! raises the manifest's generation on condition that it is as it was read, and then lists the chunks: from then on it knows
//! the ETag of every chunk, and each request says which version it means. What another writer does is thus noticed by the
//! first request that meets it, and ends the use of the volume.

mod chunks;
mod client;
mod lease;
pub mod manifest;
pub(crate) mod requests;
mod session;
#[cfg(test)]
mod tests;

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use object_store::ObjectStore;
use object_store::path::Path;

use super::{Backing, BackingError, Capabilities, Flushing, Identity, OpenOptions, Session, Uri};
use crate::op::MAX_PAYLOAD;
use chunks::Chunks;
pub(crate) use chunks::below;
pub(crate) use client::connect;
use lease::Holding;
use manifest::{LEASE, MANIFEST, Manifest};
use requests::{Requests, Trouble};
use session::Hub;
pub(crate) use session::runtime;
#[cfg(test)]
pub(crate) use tests::Memory;

/// A lease that is not renewed for so long is free.
const LEASE_LASTS: Duration = Duration::from_secs(15);

/// See the [module](self).
pub struct ObjectBacking {
    uri: String,
    about: Capabilities,
    /// Bytes: it may grow.
    size: AtomicU64,
    hub: Hub,
    /// See [`Backing::place`].
    place: String,
}

impl fmt::Debug for ObjectBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectBacking").field("uri", &self.uri).finish_non_exhaustive()
    }
}

/// How an attachment is made.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    options: OpenOptions,
    /// Tells this attachment from all others.
    nonce: u64,
    lease_lasts: Duration,
}

impl ObjectBacking {
    /// Attaches a volume.
    ///
    /// # Errors
    /// [`BackingError::Open`]: it is not there, cannot be reached, or another daemon has it.
    pub fn open(uri: &Uri, options: &OpenOptions) -> Result<ObjectBacking, BackingError> {
        let name = uri.to_string();
        let bad = |reason: String| BackingError::Open { uri: name.clone(), reason };
        let (store, prefix) = client::connect(uri, options.timeout).map_err(&bad)?;
        let nonce = super::nonce().map_err(|e| bad(e.to_string()))?;
        let setup = Setup { options: options.clone(), nonce, lease_lasts: LEASE_LASTS };
        let mut backing = ObjectBacking::with_store(name.clone(), store, prefix, setup)?;
        // By whatever endpoint it is reached. A copy of the volume has its number, in another bucket.
        if let (Ok(Identity::Objects { volume, .. }), Uri::S3 { bucket, prefix, .. }) =
            (backing.hub.identity(), uri)
        {
            let number = u128::from_be_bytes(volume);
            backing.place = format!("objects of volume {number:032x} at {bucket}/{prefix}");
        }
        Ok(backing)
    }

    fn with_store(
        uri: String,
        store: Box<dyn ObjectStore>,
        prefix: Path,
        setup: Setup,
    ) -> Result<ObjectBacking, BackingError> {
        let bad = |reason: String| BackingError::Open { uri: uri.clone(), reason };
        let read_only = setup.options.read_only;
        let (hub, size) = Hub::start(uri.clone(), store, prefix, setup).map_err(&bad)?;
        let about = Capabilities {
            size,
            read_only,
            trim: true,
            fast_zero: true,
            status: true,
            // An object that was put is durable.
            flush: Flushing::Needless,
            minimum: 1,
            maximum: MAX_PAYLOAD,
        };
        let place = uri.clone();
        Ok(ObjectBacking { uri, about, size: AtomicU64::new(size), hub, place })
    }
}

impl Backing for ObjectBacking {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { size: self.size.load(Ordering::SeqCst), ..self.about }
    }

    fn resize(&self, bytes: Option<u64>) -> Result<u64, BackingError> {
        let bad = |reason: String| BackingError::Open { uri: self.uri.clone(), reason };
        let now = self.hub.resize(bytes).map_err(bad)?;
        self.size.store(now, Ordering::SeqCst);
        Ok(now)
    }

    fn identity(&self) -> Result<Identity, BackingError> {
        self.hub.identity().map_err(|reason| BackingError::Open { uri: self.uri.clone(), reason })
    }

    fn place(&self) -> String {
        self.place.clone()
    }

    fn is_lost(&self) -> bool {
        self.hub.is_lost()
    }

    fn session(&self) -> Result<Box<dyn Session>, BackingError> {
        let bad =
            |e: std::io::Error| BackingError::Open { uri: self.uri.clone(), reason: e.to_string() };
        Ok(Box::new(self.hub.session().map_err(bad)?))
    }
}

fn missing(uri: &str, trouble: &Trouble) -> String {
    match trouble {
        Trouble::Missing => format!(
            "there is no volume ({MANIFEST}) or no such bucket: make one with larder block create '{uri}' --size SIZE"
        ),
        other => other.to_string(),
    }
}

async fn manifest(
    requests: &Requests,
    prefix: &Path,
) -> Result<(Manifest, Option<String>), String> {
    let at = below(prefix, MANIFEST);
    let (bytes, tag) = requests.record(&at).await.map_err(|e| missing(requests.uri(), &e))?;
    if tag.is_none() {
        return Err("it gives no ETags, and they are needed".into());
    }
    Ok((Manifest::decode(&bytes)?, tag))
}

/// Attaches: see the [module](self).
async fn attach(
    requests: Requests,
    prefix: &Path,
    setup: &Setup,
    lost: Arc<AtomicBool>,
) -> Result<Rc<Chunks>, String> {
    let (mut record, mut tag) = manifest(&requests, prefix).await?;
    let holding = if setup.options.read_only {
        Holding::new(None, None)
    } else {
        let taken = match setup.options.lease {
            true => {
                let mine = lease::mine(setup.nonce, setup.lease_lasts);
                Some(lease::take(&requests, prefix, mine).await?)
            }
            false => None,
        };
        // Whoever had it before may have written to the last moment.
        (record, tag) = manifest(&requests, prefix).await?;
        let generation = record.generation + 1;
        record.generation = generation;
        let at = below(prefix, MANIFEST);
        tag = requests.put_record(&at, record.encode(), tag.as_deref()).await.map_err(
            |e| match e {
                Trouble::Changed => {
                    "another daemon is attaching it at this moment: stop that one first".to_owned()
                }
                other => format!("its {MANIFEST} cannot be written: {other}"),
            },
        )?;
        Holding::new(Some(generation), taken)
    };
    let chunks = Rc::new(Chunks::new(requests, prefix.clone(), record, tag, holding, lost));
    chunks.list().await.map_err(|e| format!("its chunks cannot be listed: {e}"))?;
    Ok(chunks)
}

/// Renews the lease, or looks whether a writer has come, for ever.
async fn keep(chunks: Rc<Chunks>, prefix: Path, look: Duration) {
    loop {
        match chunks.holding.pause() {
            Some(pause) => {
                tokio::time::sleep(pause).await;
                match chunks.holding.renew(&chunks.requests, &prefix, false).await {
                    Ok(()) | Err(Trouble::Failed(_)) => {}
                    Err(Trouble::Changed | Trouble::Missing) => {
                        chunks.fence(format!("another writer has taken the lease ({LEASE})"));
                        return;
                    }
                }
            }
            None => {
                tokio::time::sleep(look).await;
                chunks.check_manifest().await;
                if chunks.is_fenced() {
                    return;
                }
            }
        }
    }
}

/// Makes a volume of `size` bytes, all zeroes, in chunks of `chunk` bytes (chosen by size if `None`). It is not attached.
///
/// # Errors
/// [`BackingError::Open`]: there is one already, it cannot be laid out, or the store cannot be reached.
pub fn create(
    uri: &Uri,
    size: u64,
    chunk: Option<u32>,
    volume: [u8; 16],
    options: &OpenOptions,
) -> Result<Manifest, BackingError> {
    let name = uri.to_string();
    let bad = |reason: String| BackingError::Open { uri: name.clone(), reason };
    let (store, prefix) = client::connect(uri, options.timeout).map_err(&bad)?;
    let manifest = Manifest::new(volume, size, chunk).map_err(&bad)?;
    let runtime = session::runtime().map_err(|e| bad(e.to_string()))?;
    let timeout = session::at_first(options.timeout);
    let requests = Requests::new(name.clone(), store, timeout);
    runtime.block_on(make(&requests, &prefix, &manifest)).map_err(&bad)?;
    Ok(manifest)
}

async fn make(requests: &Requests, prefix: &Path, manifest: &Manifest) -> Result<(), String> {
    let at = below(prefix, MANIFEST);
    match requests.put_record(&at, manifest.encode(), None).await {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err("it gives no ETags, and they are needed".into()),
        Err(Trouble::Changed) => Err("there is a volume already: choose another prefix".into()),
        Err(Trouble::Missing) => Err("there is no such bucket: make it first".into()),
        Err(e) => Err(e.to_string()),
    }
}
