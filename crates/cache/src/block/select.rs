//! What is selected of volumes, kept over restarts by their names.
//!
//! A change is in force before it is in the file. Whoever wants it there waits for that, and for nothing else; one of those who wait
//! writes the file for all of them. Nobody else waits for the file, and no lock is held meanwhile.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use larder_engine::block::node::operator::select::{Choice, Kept};
use larder_policy::block::detect::{PARTITION_TABLE_BYTES, Partition, partitions};
use larder_policy::block::{Rule, Selected, VolumeId};
use serde::{Deserialize, Serialize};

use super::attached::Attached;
use super::open::CacheError;
use super::operators::check_range;
use larder_volume::Alone;

use super::{Core, locked, store_file, watch};

/// Largest file of selections that is read, bytes.
const MOST_FILE: u64 = 64 << 20;

/// What is selected of one volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Saved {
    /// Where no range says otherwise: always, never or policy.
    whole: String,
    /// First byte, byte after the last, rule, label.
    ranges: Vec<(u64, u64, String, String)>,
}

impl Saved {
    fn of(kept: &Kept) -> Saved {
        let range = |r: &Selected| (r.start, r.end, r.rule.to_string(), r.label.clone());
        Saved { whole: kept.whole.to_string(), ranges: kept.ranges.iter().map(range).collect() }
    }

    /// What it says, without ranges whose rule this version does not know.
    fn kept(&self) -> Kept {
        let range = |(start, end, rule, label): &(u64, u64, String, String)| {
            let label = label.clone();
            Some(Selected { start: *start, end: *end, rule: rule.parse().ok()?, label })
        };
        Kept {
            whole: self.whole.parse().unwrap_or_default(),
            ranges: self.ranges.iter().filter_map(range).collect(),
        }
    }
}

type File = BTreeMap<String, Saved>;

/// Who waits until what is selected is in the file.
#[derive(Debug, Default)]
pub(super) struct Keeping {
    state: Mutex<Waiting>,
    changed: Condvar,
}

/// Changes that are to come into the file, numbered as they were made.
#[derive(Debug, Default)]
struct Waiting {
    /// By their volumes' names: which volume has it, or nothing is selected any more.
    changes: BTreeMap<String, Option<VolumeId>>,
    wanted: u64,
    /// Somebody writes.
    writes: bool,
    /// The last change that a write was for, well or not, and the last that is in the file.
    tried: u64,
    durable: u64,
    /// Why the last write failed that did.
    why: String,
}

impl Core {
    pub(super) fn selection_file(&self) -> PathBuf {
        self.config.state_dir.join(format!("block-selection-{}.json", self.uuid()))
    }

    fn read_selection(&self) -> Result<File, String> {
        let path = self.selection_file();
        match std::fs::metadata(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(File::new()),
            Ok(meta) if meta.len() > MOST_FILE => return Err("it is too large".to_owned()),
            _ => {}
        }
        let bytes = std::fs::read(&path).map_err(|e| e.to_string())?;
        serde_json::from_slice(&bytes).map_err(|e| e.to_string())
    }

    /// Puts what was selected earlier of volumes that have come in force again.
    pub(super) fn restore_selection(&self, volumes: &[Arc<Attached>]) {
        let saved = match self.read_selection() {
            Ok(saved) => saved,
            Err(error) => {
                tracing::warn!(
                    "'{}' cannot be read, nothing is selected: {error}",
                    self.selection_file().display()
                );
                return;
            }
        };
        for volume in volumes {
            let Some(saved) = saved.get(&volume.name) else { continue };
            let restored = self.node_limits.select(|s| saved.kept().restore(s, volume.id));
            if let Err(error) = restored {
                tracing::warn!("volume '{}': what was selected of it: {error}", volume.name);
            }
        }
    }

    /// Keeps what is selected of a volume.
    fn save_selection(&self, volume: &Attached) -> Result<(), CacheError> {
        let kept = self.keep_selection(&volume.name, Some(volume.id));
        if !self.is_attached(volume) {
            // Nothing is in force of it any more. What the file has of it is for when it comes back.
            let reason = "it was detached meanwhile: select again when it is back".to_owned();
            return Err(CacheError::Volume { name: volume.name.clone(), reason });
        }
        kept.map_err(|why| {
            let reason = format!("{why}: it holds until the daemon ends");
            CacheError::System { what: "what is selected", reason }
        })
    }

    /// Forgets what was selected of a volume that is not attached.
    pub(super) fn forget_selection(&self, name: &str) -> Result<(), CacheError> {
        self.keep_selection(name, None).map_err(|why| {
            let reason = format!("{why}: should volume '{name}' come back, it holds again");
            CacheError::System { what: "what is selected", reason }
        })
    }

    /// What is selected of a volume now is in the file when this returns, or that nothing is.
    fn keep_selection(&self, name: &str, of: Option<VolumeId>) -> Result<(), String> {
        let Keeping { state, changed } = &self.node_limits.selecting;
        let mut waiting = locked(state);
        waiting.wanted += 1;
        let mine = waiting.wanted;
        waiting.changes.insert(name.to_owned(), of);
        while waiting.tried < mine {
            if waiting.writes {
                waiting = changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            waiting.writes = true;
            let (last, changes) = (waiting.wanted, std::mem::take(&mut waiting.changes));
            drop(waiting);
            let written = self.write_selection(&changes);
            waiting = locked(state);
            (waiting.writes, waiting.tried) = (false, last);
            match written {
                Ok(()) => waiting.durable = last,
                Err(why) => {
                    waiting.why = why;
                    // They go with the next write, unless they are out of date by then.
                    for (name, of) in changes {
                        waiting.changes.entry(name).or_insert(of);
                    }
                }
            }
            changed.notify_all();
        }
        if waiting.durable >= mine { Ok(()) } else { Err(waiting.why.clone()) }
    }

    /// Writes the file with these changes.
    fn write_selection(&self, changes: &BTreeMap<String, Option<VolumeId>>) -> Result<(), String> {
        // What cannot be read is left as it is: it is what is selected of other volumes.
        let mut all = self.read_selection().map_err(|e| {
            let file = self.selection_file();
            format!(
                "'{}' cannot be read: {e}: mend or remove it, then select again",
                file.display()
            )
        })?;
        let before = all.clone();
        for (name, of) in changes {
            let kept = of.map(|id| self.node_limits.kept(id)).unwrap_or_default();
            // Looked at behind what is selected: a volume is attached no more before nothing is selected of it.
            if of.is_some() && self.volume(name).map(|v| v.id) != *of {
                continue;
            }
            if kept.is_empty() {
                all.remove(name);
            } else {
                all.insert(name.clone(), Saved::of(&kept));
            }
        }
        if all == before {
            return Ok(());
        }
        if let Some(trouble) = self.state_dir_trouble() {
            return Err(trouble);
        }
        let bytes = serde_json::to_vec_pretty(&all).map_err(|e| e.to_string())?;
        let path = self.selection_file();
        store_file(&path, &bytes)
            .map_err(|e| format!("'{}' cannot be written: {e}", path.display()))
    }

    fn selected_ranges(&self, id: VolumeId) -> Vec<(u64, u64, String, String)> {
        Saved::of(&self.node_limits.kept(id)).ranges
    }

    /// Selects ranges of a volume (start and length in bytes), or all of it: `rule` nothing forgets what was selected
    /// there. What is never to be cached is dropped. It is kept over restarts. Returns how many ranges are selected of the
    /// volume, and how many lines were dropped.
    ///
    /// # Errors
    /// When the volume is not attached, a range is not in it or there are too many: nothing has changed then; or when it
    /// cannot be kept.
    pub fn select(
        &self,
        name: &str,
        rule: Option<Rule>,
        ranges: Option<&[(u64, u64)]>,
        label: &str,
    ) -> Result<(u64, u64), CacheError> {
        let volume = self.attached(name)?;
        let fail = |reason: String| CacheError::Volume { name: name.to_owned(), reason };
        for &(start, bytes) in ranges.unwrap_or_default() {
            check_range(&volume, start, bytes)?;
        }
        let choice = Choice { rule, ranges, label };
        let outcome = self.node_limits.select(|selection| choice.put(selection, volume.id));
        outcome.map_err(|e| fail(e.to_string()))?;
        let drops = choice.drops(volume.bytes());
        // Its store may hang: others select meanwhile.
        let dropped = self.drop_ranges(&volume, &drops, &mut || true)?.unwrap_or(0);
        // What is in force by then is kept, whoever has selected it.
        self.save_selection(&volume)?;
        Ok((self.selected_of(&volume).1, dropped))
    }

    /// Forgets every range of a volume that was selected under this label. Returns how many there were.
    ///
    /// # Errors
    /// When the volume is not attached, or that cannot be kept.
    pub fn unselect_label(&self, name: &str, label: &str) -> Result<u64, CacheError> {
        let volume = self.attached(name)?;
        let gone = self.node_limits.select(|s| s.clear_label(volume.id, label));
        self.save_selection(&volume)?;
        Ok(gone as u64)
    }

    /// What is selected of a volume: first byte, byte after the last, rule and label of each range.
    ///
    /// # Errors
    /// When the volume is not attached.
    pub fn selection(&self, name: &str) -> Result<Vec<(u64, u64, String, String)>, CacheError> {
        Ok(self.selected_ranges(self.attached(name)?.id))
    }

    /// Bytes that are pinned, of all volumes, and how many may be: if more are, lines that are pinned are still admitted
    /// always, but not kept from being evicted.
    pub fn pinned(&self) -> (u64, u64) {
        self.node_limits.pinned()
    }

    /// The partitions of a volume, as its first bytes list them (MBR: the primary ones), by number: first byte and bytes.
    ///
    /// # Errors
    /// When the volume is not attached, or its store does not answer.
    pub fn partitions(&self, name: &str) -> Result<Vec<Partition>, CacheError> {
        let volume = self.attached(name)?;
        let fail = |reason: String| CacheError::Volume { name: name.to_owned(), reason };
        let session = volume.volume().backing().session().map_err(|e| fail(e.to_string()))?;
        let mut session = Alone::new(session).map_err(|e| fail(e.to_string()))?;
        let bytes = (PARTITION_TABLE_BYTES as u64).min(volume.bytes()) as usize;
        let head = watch::read(&mut session, 0, bytes, || locked(&self.log_inbox).stopped)
            .ok_or_else(|| fail("its store does not answer: try again".to_owned()))?;
        // What a table says need not lie in the volume.
        let inside = |p: &Partition| {
            p.bytes > 0 && p.start.checked_add(p.bytes).is_some_and(|end| end <= volume.bytes())
        };
        Ok(partitions(&head).into_iter().filter(inside).collect())
    }
}
