//! A journal in an object store, as `larder_volume` has it there: an object for each epoch, whose PUT is atomic and durable, and goes over no other. A PUT
//! whose answer is lost may come late: after others, and after the process that has sent it has ended.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use larder_base::Rng;
use larder_format::block::journal::{COMMIT_AT, DESCRIPTORS_AT};
use larder_format::block::marker::Marker;
use larder_volume::journal::{EpochName, Head, JournalError, JournalPlace, Part};

use super::super::locked;
use super::disk::{Current, Power};

const HEAD: &str = "head";
/// Most bytes of an epoch, with all that belongs to it.
const MOST: u64 = 1 << 20;

/// A PUT: what it is of, its bytes, and the version that it follows (`None`: there is to be no object).
#[derive(Clone, Debug)]
struct Put {
    name: String,
    bytes: Vec<u8>,
    follows: Option<u64>,
}

#[derive(Debug)]
struct Inner {
    power: Power,
    rng: Rng,
    /// Each with its version.
    objects: BTreeMap<String, (u64, Vec<u8>)>,
    versions: u64,
    /// On their way, whoever has sent them.
    late: Vec<Put>,
    /// The share of requests that fails.
    fails: f64,
    /// The next PUT of an epoch is on its way for long.
    lingers: bool,
    /// A PUT goes over whatever is there: what must not be.
    unconditional: bool,
}

/// The objects, which outlive those who use them.
#[derive(Clone, Debug)]
pub(super) struct Objects(Arc<Mutex<Inner>>);

/// Why a request has not done what it was to do.
enum Trouble {
    Failed,
    Changed,
}

fn failed(reason: &str) -> JournalError {
    JournalError::Failed { place: "objects".into(), reason: reason.into() }
}

fn object_of(name: EpochName) -> String {
    format!("{:016x}-{:016x}", name.generation, name.epoch)
}

fn name_of(object: &str) -> Option<EpochName> {
    let (generation, epoch) = object.split_once('-')?;
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    Some(EpochName { generation: number(generation)?, epoch: number(epoch)? })
}

impl Inner {
    /// It comes to the store.
    fn lands(&mut self, put: Put) -> Result<u64, Trouble> {
        let there = self.objects.get(&put.name).map(|(version, _)| *version);
        if there != put.follows && !self.unconditional {
            return Err(Trouble::Changed);
        }
        self.versions += 1;
        self.objects.insert(put.name, (self.versions, put.bytes));
        Ok(self.versions)
    }

    fn put(&mut self, put: Put) -> Result<u64, Trouble> {
        let current = self.power.io();
        let is_epoch = put.name != HEAD;
        if current == Current::Off {
            return Err(Trouble::Failed);
        }
        let lingers = is_epoch && std::mem::take(&mut self.lingers);
        let (goes, share) = (current == Current::Goes, self.fails);
        if !(lingers || goes || self.rng.chance(share)) {
            return self.lands(put);
        }
        // It is lost, or only its answer, or it comes some time.
        match self.rng.below(3) {
            _ if lingers => self.late.push(put),
            0 => {}
            1 => drop(self.lands(put)),
            _ => self.late.push(put),
        }
        Err(Trouble::Failed)
    }

    /// A request that changes nothing, or only takes away.
    fn asks(&mut self) -> Result<(), JournalError> {
        let (current, share) = (self.power.io(), self.fails);
        match current == Current::On && !self.rng.chance(share) {
            true => Ok(()),
            false => Err(failed("no answer")),
        }
    }
}

impl Objects {
    pub(super) fn new(power: &Power, rng: Rng, unconditional: bool) -> Objects {
        Objects(Arc::new(Mutex::new(Inner {
            power: power.clone(),
            rng,
            objects: BTreeMap::new(),
            versions: 0,
            late: Vec::new(),
            fails: 0.0,
            lingers: false,
            unconditional,
        })))
    }

    pub(super) fn open(&self) -> Box<dyn JournalPlace> {
        Box::new(Place {
            objects: self.clone(),
            tag: None,
            tried: None,
            found: Vec::new(),
            written: Vec::new(),
        })
    }

    /// So many of its requests fail from now on.
    pub(super) fn fails(&self, share: f64) {
        locked(&self.0).fails = share;
    }

    pub(super) fn is_failing(&self) -> bool {
        locked(&self.0).fails > 0.0
    }

    /// The next PUT of an epoch is on its way for long.
    pub(super) fn lingers(&self) {
        locked(&self.0).lingers = true;
    }

    /// Some of what is on its way comes to the store; how many.
    pub(super) fn some_land(&self) -> usize {
        let inner = &mut *locked(&self.0);
        let late = std::mem::take(&mut inner.late);
        let count = late.len();
        for put in late {
            match inner.rng.chance(0.5) {
                true => drop(inner.lands(put)),
                false => inner.late.push(put),
            }
        }
        count - inner.late.len()
    }

    /// An object rots, or is removed, or all are. False: there is none.
    pub(super) fn harm(&self, removed: bool) -> bool {
        let inner = &mut *locked(&self.0);
        let names: Vec<String> = inner.objects.keys().cloned().collect();
        if names.is_empty() {
            return false;
        }
        let name = &names[inner.rng.below(names.len() as u64) as usize];
        if removed && inner.rng.chance(0.5) {
            inner.objects.clear();
        } else if removed {
            let name = name.clone();
            inner.objects.remove(&name);
        } else if let Some((_, bytes)) = inner.objects.get_mut(name) {
            let at = inner.rng.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1;
        }
        true
    }

    /// There is no head any more.
    pub(super) fn behead(&self) {
        locked(&self.0).objects.remove(HEAD);
    }
}

/// See `ObjectPlace` of `larder_volume`, which this is without its requests.
struct Place {
    objects: Objects,
    /// The version of the head that was last read or written.
    tag: Option<u64>,
    /// What may be the head by now.
    tried: Option<Vec<u8>>,
    found: Vec<EpochName>,
    /// Those that were written before the last one: they go when the next is there.
    written: Vec<EpochName>,
}

impl Place {
    fn load(&self, name: EpochName) -> Result<Option<(u64, Vec<u8>)>, JournalError> {
        let inner = &mut *locked(&self.objects.0);
        inner.asks()?;
        Ok(inner.objects.get(&object_of(name)).cloned())
    }

    fn list(&mut self) -> Result<(), JournalError> {
        let inner = &mut *locked(&self.objects.0);
        inner.asks()?;
        self.found = inner.objects.keys().filter_map(|name| name_of(name)).collect();
        Ok(())
    }

    fn delete(&self, name: EpochName) -> Result<(), JournalError> {
        let inner = &mut *locked(&self.objects.0);
        inner.asks()?;
        inner.objects.remove(&object_of(name));
        Ok(())
    }
}

impl JournalPlace for Place {
    fn head(&mut self) -> Result<Head, JournalError> {
        let inner = &mut *locked(&self.objects.0);
        self.tag = None;
        inner.asks()?;
        let Some((tag, bytes)) = inner.objects.get(HEAD) else { return Ok(Head::None) };
        self.tag = Some(*tag);
        Ok(Marker::decode(bytes).map_or(Head::Damaged, |head| Head::Of(Box::new(head))))
    }

    fn look(&mut self) -> Result<Head, JournalError> {
        let tag = self.tag;
        let head = self.head();
        self.tag = tag;
        head
    }

    fn set_head(&mut self, head: &Marker) -> Result<(), JournalError> {
        let inner = &mut *locked(&self.objects.0);
        if let Some(tried) = &self.tried {
            inner.asks()?;
            let there = inner.objects.get(HEAD).filter(|(_, bytes)| bytes == tried);
            self.tag = there.map_or(self.tag, |(tag, _)| Some(*tag));
        }
        let put = Put { name: HEAD.into(), bytes: head.encode(), follows: self.tag };
        self.tried = Some(put.bytes.clone());
        let done = inner.put(put);
        self.tag = Some(done.map_err(|_| failed("the head was not written"))?);
        self.tried = None;
        Ok(())
    }

    fn most(&self) -> u64 {
        MOST
    }

    fn write(&mut self, name: EpochName, commit: &[u8], body: &[u8]) -> Result<(), JournalError> {
        let mut object = vec![0; DESCRIPTORS_AT as usize + body.len()];
        let at = COMMIT_AT as usize;
        object[at..at + commit.len()].copy_from_slice(commit);
        object[DESCRIPTORS_AT as usize..].copy_from_slice(body);
        let mut follows = None;
        loop {
            let put = Put { name: object_of(name), bytes: object.clone(), follows };
            let put = locked(&self.objects.0).put(put);
            match put {
                Ok(_) => break,
                // Of this generation nobody else writes.
                Err(Trouble::Changed) if follows.is_none() => match self.load(name)? {
                    Some((_, bytes)) if bytes == object => break,
                    Some((tag, _)) => follows = Some(tag),
                    None => return Err(failed("changed")),
                },
                Err(_) => return Err(failed("an epoch was not written")),
            }
        }
        // The epochs before are applied, and this one is whole.
        for old in std::mem::replace(&mut self.written, vec![name]) {
            if old != name && self.delete(old).is_err() {
                self.written.push(old);
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), JournalError> {
        Ok(())
    }

    fn parts(&mut self) -> Result<Vec<Part>, JournalError> {
        self.list()?;
        self.written.clone_from(&self.found);
        Ok((0..self.found.len()).map(Part).collect())
    }

    fn read(&mut self, part: Part, at: u64, len: usize) -> Result<Option<Vec<u8>>, JournalError> {
        let Some(&name) = self.found.get(part.0) else { return Ok(None) };
        let Some((_, bytes)) = self.load(name)? else { return Ok(None) };
        let at = at as usize;
        Ok(bytes.get(at..at + len).map(<[u8]>::to_vec))
    }

    fn renew(&mut self, _: Part, _: &[Range<u64>]) -> Result<(), JournalError> {
        Ok(())
    }

    fn has_older(&self) -> bool {
        self.written.len() > 1
    }

    fn empty(&mut self) -> Result<(), JournalError> {
        self.list()?;
        for name in std::mem::take(&mut self.found) {
            self.delete(name)?;
        }
        self.written.clear();
        Ok(())
    }

    fn rest(&mut self) {}

    fn describe(&self) -> String {
        "objects".into()
    }
}
