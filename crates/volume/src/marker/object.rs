//! A marker as an object beside a volume's manifest.
//!
//! A PUT replaces the object whole, so there is one copy, and each says which version it is to follow. Whether the store goes by that is
//! asked before the first write: a PUT that is to follow a version which never was must be refused.

use object_store::path::Path;
use object_store::{GetOptions, ObjectStore, ObjectStoreExt};

use super::place::Medium;
use super::{MarkerIoError, PlaceOptions};
use crate::Uri;
use crate::object::manifest::RECORD_BYTES;
use crate::object::requests::{Requests, Trouble, is_conditional};
use crate::object::{below, connect, runtime};

/// The marker below the prefix.
const MARKER: &str = "marker";
/// What says that there is one.
const MARKED: &str = "marked";
/// What is asked for a version that it never had.
const PROBE: &str = "marker.probe";

pub(super) struct ObjectMedium {
    requests: Requests,
    runtime: tokio::runtime::Runtime,
    uri: String,
    prefix: Path,
    look: bool,
    /// The version that was last loaded.
    tag: Option<String>,
    /// Its PUTs are conditional; `None`: nobody has asked.
    conditional: Option<bool>,
    /// It says that there is a marker.
    kept: bool,
}

/// An object as it is found.
struct Got {
    size: u64,
    e_tag: Option<String>,
    /// `None`: it is too long.
    bytes: Option<Vec<u8>>,
}

impl ObjectMedium {
    /// No request is made yet.
    ///
    /// # Errors
    /// What is wrong.
    pub(super) fn connect(uri: &Uri, options: &PlaceOptions) -> Result<ObjectMedium, String> {
        let (store, prefix) = connect(uri, options.timeout)?;
        ObjectMedium::with_store(uri.to_string(), store, prefix, options)
    }

    pub(super) fn with_store(
        uri: String,
        store: Box<dyn ObjectStore>,
        prefix: Path,
        options: &PlaceOptions,
    ) -> Result<ObjectMedium, String> {
        let runtime = runtime().map_err(|e| e.to_string())?;
        let requests = Requests::new(uri.clone(), store, super::bounded(options.timeout));
        let look = options.look;
        Ok(ObjectMedium {
            requests,
            runtime,
            uri,
            prefix,
            look,
            tag: None,
            conditional: None,
            kept: false,
        })
    }

    fn trouble(&self, trouble: &Trouble) -> MarkerIoError {
        let place = self.name();
        match trouble {
            Trouble::Changed => {
                MarkerIoError::Changed { place, now: "another writer was faster".into() }
            }
            Trouble::Missing => MarkerIoError::Changed { place, now: "it is gone".into() },
            Trouble::Failed(why) => MarkerIoError::Unreachable { place, reason: why.clone() },
        }
    }

    /// Whether a PUT that cannot be right is refused.
    fn probe(&self) -> Result<bool, Trouble> {
        let at = below(&self.prefix, PROBE);
        self.runtime.block_on(is_conditional(&self.requests, &at))
    }

    /// What is there.
    fn get(&self) -> Result<Got, Trouble> {
        let at = &below(&self.prefix, MARKER);
        let silence = self.requests.timeout().silence;
        let get = self.requests.again(
            || Some(silence),
            || async {
                let got = self.requests.store().get_opts(at, GetOptions::default()).await?;
                let (size, e_tag) = (got.meta.size, got.meta.e_tag.clone());
                let bytes = match size <= RECORD_BYTES {
                    true => Some(got.bytes().await?.to_vec()),
                    false => None,
                };
                Ok(Got { size, e_tag, bytes })
            },
        );
        self.runtime.block_on(get)
    }

    fn put(&mut self, follows: Option<&str>, bytes: &[u8]) -> Result<(), MarkerIoError> {
        let at = below(&self.prefix, MARKER);
        let put = self.requests.put_record(&at, bytes.to_vec(), follows);
        let put = self.runtime.block_on(put);
        self.tag = put.map_err(|e| self.trouble(&e))?;
        Ok(())
    }

    fn delete(&self, name: &str) -> Result<(), MarkerIoError> {
        let at = below(&self.prefix, name);
        let silence = self.requests.timeout().silence;
        let delete = self.requests.again(|| Some(silence), || self.requests.store().delete(&at));
        match self.runtime.block_on(delete) {
            Ok(()) | Err(Trouble::Missing) => Ok(()),
            Err(e) => Err(self.trouble(&e)),
        }
    }
}

impl Medium for ObjectMedium {
    fn load(&mut self) -> Result<Option<[Vec<u8>; 2]>, MarkerIoError> {
        if !self.look && self.conditional.is_none() {
            self.conditional = Some(self.probe().map_err(|e| self.trouble(&e))?);
        }
        self.tag = None;
        let got = match self.get() {
            Ok(got) => got,
            Err(Trouble::Missing) => return Ok(None),
            Err(e) => return Err(self.trouble(&e)),
        };
        let place = self.name();
        match (got.e_tag, got.bytes) {
            (None, _) => {
                let reason = "the store gives no ETags, and they are needed".to_owned();
                Err(MarkerIoError::Failed { place, reason })
            }
            (_, None) => {
                let reason = format!("has {} bytes, and is no marker", got.size);
                Err(MarkerIoError::NotAMarker { place, reason })
            }
            (tag, Some(bytes)) => {
                self.tag = tag;
                Ok(Some([bytes, Vec::new()]))
            }
        }
    }

    fn create(&mut self, _first: usize, bytes: &[u8]) -> Result<(), MarkerIoError> {
        self.put(None, bytes)
    }

    fn replace(&mut self, _first: usize, bytes: &[u8]) -> Result<(), MarkerIoError> {
        let tag = self.tag.clone();
        self.put(tag.as_deref(), bytes)
    }

    fn clear(&mut self) -> Result<(), MarkerIoError> {
        // First what says that there is one: the other way round a power cut would leave a marker that is missed.
        self.kept = false;
        self.delete(MARKED)?;
        if self.tag.take().is_some() {
            self.delete(MARKER)?;
        }
        Ok(())
    }

    fn was(&mut self) -> Result<bool, MarkerIoError> {
        let at = below(&self.prefix, MARKED);
        match self.runtime.block_on(self.requests.record(&at)) {
            Ok(_) => Ok(true),
            Err(Trouble::Missing) => Ok(false),
            Err(e) => Err(self.trouble(&e)),
        }
    }

    fn keep(&mut self) {
        if self.kept {
            return;
        }
        let at = below(&self.prefix, MARKED);
        let text = format!("there is a write-back marker beside this: {MARKER}\n");
        let put = self.requests.put_record(&at, text.into_bytes(), None);
        match self.runtime.block_on(put) {
            Ok(_) | Err(Trouble::Changed) => self.kept = true,
            Err(e) => tracing::warn!(
                "backing store '{}': it is not noted that there is a marker: {e}",
                self.uri
            ),
        }
    }

    fn is_looked_at(&self) -> bool {
        self.look
    }

    fn is_fenced(&self) -> bool {
        self.conditional == Some(true)
    }

    fn name(&self) -> String {
        format!("marker '{MARKER}' of '{}'", self.uri)
    }
}
