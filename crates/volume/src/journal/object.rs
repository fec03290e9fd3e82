//! A journal in an object store: an object for each epoch.
//!
//! A PUT is atomic and durable, so there is nothing to flush, and an object is whole or not there. The PUT of an epoch is conditional: a holder
//! that was paused and comes back replaces nothing.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use larder_format::block::journal::{COMMIT_AT, DESCRIPTORS_AT, PART_BYTES};
use larder_format::block::marker::{Marker, MarkerError};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use super::{EpochName, Head, JournalError, JournalPlace, Part, Use};
use crate::object::requests::{Requests, Trouble, is_conditional};
use crate::object::{below, connect, runtime};
use crate::{Timeouts, Uri};

/// The folder below the prefix.
const FOLDER: &str = "wb";
/// The head below it.
const HEAD: &str = "wb/head";
/// What is asked for a version that it never had.
const PROBE: &str = "wb/probe";

/// Epochs that are over are deleted so many at a time,
const AT_ONCE: usize = 4;
/// and each is waited for no longer than that.
const PATIENCE: Duration = Duration::from_secs(2);

pub(super) struct ObjectPlace {
    requests: Requests,
    runtime: tokio::runtime::Runtime,
    uri: String,
    prefix: Path,
    for_use: Use,
    /// The version of the head that was last read or written.
    tag: Option<String>,
    /// What may be the head by now: it could not be written, or that was not heard.
    tried: Option<Vec<u8>>,
    /// The epochs that were found last.
    found: Vec<EpochName>,
    /// The one that was read last.
    loaded: Option<(EpochName, Bytes)>,
    /// Those that were written before the last one: they go when the next is there.
    written: Vec<EpochName>,
}

fn object_of(name: EpochName) -> String {
    format!("{FOLDER}/{:016x}-{:016x}", name.generation, name.epoch)
}

fn name_of(object: &str) -> Option<EpochName> {
    let (generation, epoch) = object.split_once('-')?;
    let number = |text: &str| (text.len() == 16).then(|| u64::from_str_radix(text, 16).ok())?;
    Some(EpochName { generation: number(generation)?, epoch: number(epoch)? })
}

impl ObjectPlace {
    pub(super) fn connect(
        uri: &Uri,
        for_use: Use,
        timeout: Timeouts,
    ) -> Result<ObjectPlace, JournalError> {
        let open = |reason| JournalError::Open { place: format!("journal '{uri}'"), reason };
        let (store, prefix) = connect(uri, timeout).map_err(open)?;
        ObjectPlace::with_store(uri.to_string(), store, prefix, for_use, timeout)
    }

    pub(super) fn with_store(
        uri: String,
        store: Box<dyn ObjectStore>,
        prefix: Path,
        for_use: Use,
        timeout: Timeouts,
    ) -> Result<ObjectPlace, JournalError> {
        let open =
            |reason: String| JournalError::Open { place: format!("journal '{uri}'"), reason };
        let runtime = runtime().map_err(|e| open(e.to_string()))?;
        let requests = Requests::new(uri.clone(), store, timeout);
        if for_use == Use::Make {
            let probe = below(&prefix, PROBE);
            let conditional = runtime.block_on(is_conditional(&requests, &probe));
            if !conditional.map_err(|e| open(e.to_string()))? {
                return Err(JournalError::NoPlace {
                    store: uri,
                    why: "it has no conditional writes, and a paused holder could put an old epoch over a new one".into(),
                });
            }
        }
        Ok(ObjectPlace {
            requests,
            runtime,
            uri,
            prefix,
            for_use,
            tag: None,
            tried: None,
            found: Vec::new(),
            loaded: None,
            written: Vec::new(),
        })
    }

    fn failed(&self, trouble: &Trouble) -> JournalError {
        JournalError::Failed { place: self.describe(), reason: trouble.to_string() }
    }

    /// Deletes an object, without patience: what is over and stays does no harm, and nothing is to wait for it.
    fn delete_once(&self, name: &str) -> Result<(), String> {
        let at = below(&self.prefix, name);
        let limit = self.requests.timeout().silence.min(PATIENCE);
        let delete = async { tokio::time::timeout(limit, self.requests.store().delete(&at)).await };
        match self.runtime.block_on(delete) {
            Ok(Ok(()) | Err(object_store::Error::NotFound { .. })) => Ok(()),
            Ok(Err(e)) => Err(e.to_string()),
            Err(_) => Err("no answer in time".into()),
        }
    }

    /// Names below the folder.
    fn list(&mut self) -> Result<(), JournalError> {
        let folder = below(&self.prefix, FOLDER);
        let silence = self.requests.timeout().silence;
        let list = self.requests.again(
            || Some(silence),
            || async {
                let mut found = Vec::new();
                let mut stream = self.requests.store().list(Some(&folder));
                while let Some(meta) = stream.next().await {
                    found.extend(meta?.location.filename().and_then(name_of));
                }
                Ok(found)
            },
        );
        let found = self.runtime.block_on(list);
        let mut found = found.map_err(|e| self.failed(&e))?;
        found.sort();
        self.found = found;
        Ok(())
    }

    fn load(&mut self, name: EpochName) -> Result<Option<(Bytes, Option<String>)>, JournalError> {
        let at = below(&self.prefix, &object_of(name));
        match self.runtime.block_on(self.requests.get(&at, None, None)) {
            Ok(got) => Ok(Some((got.bytes, got.meta.e_tag))),
            Err(Trouble::Missing) => Ok(None),
            Err(e) => Err(self.failed(&e)),
        }
    }
}

impl JournalPlace for ObjectPlace {
    fn head(&mut self) -> Result<Head, JournalError> {
        let at = below(&self.prefix, HEAD);
        self.tag = None;
        match self.runtime.block_on(self.requests.record(&at)) {
            Ok((bytes, tag)) => {
                self.tag = tag;
                match Marker::decode(&bytes) {
                    Ok(marker) => Ok(Head::Of(Box::new(marker))),
                    Err(MarkerError::Damaged) => Ok(Head::Damaged),
                    Err(why) => Err(JournalError::NotAJournal {
                        place: format!("object '{HEAD}' of '{}'", self.uri),
                        reason: format!("is no journal's head: {why}"),
                    }),
                }
            }
            Err(Trouble::Missing) => Ok(Head::None),
            Err(e) => Err(self.failed(&e)),
        }
    }

    fn look(&mut self) -> Result<Head, JournalError> {
        let tag = self.tag.clone();
        let head = self.head();
        self.tag = tag;
        head
    }

    fn set_head(&mut self, head: &Marker) -> Result<(), JournalError> {
        let at = below(&self.prefix, HEAD);
        let bytes = head.encode();
        if let Some(tried) = self.tried.take() {
            let there = self.runtime.block_on(self.requests.record(&at));
            match there {
                Ok((found, tag)) if found == tried => self.tag = tag,
                Ok(_) | Err(Trouble::Missing) => {}
                Err(e) => {
                    self.tried = Some(tried);
                    return Err(self.failed(&e));
                }
            }
        }
        let put = self.requests.put_record(&at, bytes.clone(), self.tag.as_deref());
        match self.runtime.block_on(put) {
            Ok(tag) => self.tag = tag,
            Err(e) => {
                self.tried = Some(bytes);
                return Err(self.failed(&e));
            }
        }
        Ok(())
    }

    fn most(&self) -> u64 {
        PART_BYTES
    }

    fn write(&mut self, name: EpochName, commit: &[u8], body: &[u8]) -> Result<(), JournalError> {
        let mut object = vec![0; DESCRIPTORS_AT as usize + body.len()];
        let at = COMMIT_AT as usize;
        object[at..at + commit.len()].copy_from_slice(commit);
        object[DESCRIPTORS_AT as usize..].copy_from_slice(body);
        let object = Bytes::from(object);
        let at = below(&self.prefix, &object_of(name));
        let silence = self.requests.timeout().silence;
        let limit = move || Some(silence);
        let mut follows = None;
        loop {
            let put = self.requests.put(&at, object.clone(), follows.as_deref(), limit);
            match self.runtime.block_on(put) {
                Ok(_) => break,
                // An earlier try that was not answered, or whose answer was lost, is there: of this generation nobody else writes.
                Err(Trouble::Changed | Trouble::Missing) if follows.is_none() => {
                    match self.load(name)? {
                        Some((bytes, _)) if bytes == object => break,
                        Some((_, Some(tag))) => follows = Some(tag),
                        _ => return Err(self.failed(&Trouble::Changed)),
                    }
                }
                Err(e) => return Err(self.failed(&e)),
            }
        }
        self.loaded = None;
        // The epochs before are applied, and this one is whole.
        let old = std::mem::replace(&mut self.written, vec![name]);
        let (now, later) = old.split_at(old.len().min(AT_ONCE));
        for &old in now.iter().filter(|&&old| old != name) {
            if let Err(why) = self.delete_once(&object_of(old)) {
                tracing::debug!("{}: an epoch that is over stays there: {why}", self.describe());
                self.written.push(old);
            }
        }
        self.written.extend(later.iter().filter(|&&old| old != name));
        Ok(())
    }

    fn flush(&mut self) -> Result<(), JournalError> {
        Ok(())
    }

    fn parts(&mut self) -> Result<Vec<Part>, JournalError> {
        self.list()?;
        if self.for_use == Use::Make {
            // What a run before has left goes with the next epoch.
            self.written.clone_from(&self.found);
        }
        Ok((0..self.found.len()).map(Part).collect())
    }

    fn read(&mut self, part: Part, at: u64, len: usize) -> Result<Option<Vec<u8>>, JournalError> {
        let Some(&name) = self.found.get(part.0) else { return Ok(None) };
        if self.loaded.as_ref().is_none_or(|(loaded, _)| *loaded != name) {
            let Some((bytes, _)) = self.load(name)? else { return Ok(None) };
            self.loaded = Some((name, bytes));
        }
        let range = usize::try_from(at).ok().and_then(|at| Some(at..at.checked_add(len)?));
        let bytes = self.loaded.as_ref().zip(range).and_then(|((_, b), range)| b.get(range));
        Ok(bytes.map(<[u8]>::to_vec))
    }

    fn renew(&mut self, _part: Part, _ranges: &[Range<u64>]) -> Result<(), JournalError> {
        Ok(())
    }

    fn has_older(&self) -> bool {
        self.written.len() > 1
    }

    fn empty(&mut self) -> Result<(), JournalError> {
        self.list()?;
        for name in std::mem::take(&mut self.found) {
            self.delete_once(&object_of(name))
                .map_err(|reason| JournalError::Failed { place: self.describe(), reason })?;
        }
        self.written.clear();
        Ok(())
    }

    fn rest(&mut self) {
        self.loaded = None;
    }

    fn describe(&self) -> String {
        format!("journal '{FOLDER}/' of '{}'", self.uri)
    }
}
