//! Which volumes keep their lines, where each lies, and what of the line space is nobody's any more.

use larder_format::block::{BlockSuperblock, Layout, Volume, VolumeState};

use crate::block::volumes::{CannotCome, Coming, Found, TakenUp, take_up};
use crate::block::{Fault, LineId, Planted};

/// A volume that is configured, or that an operator asks for.
pub struct Comer {
    /// Its name, 1 to [`MAX_NAME`](larder_format::block::superblock::MAX_NAME) bytes.
    pub name: String,
    /// The size of its store, bytes.
    pub bytes: u64,
    /// By what its store is known again.
    pub identity: [u8; 64],
    /// Whether the store is as the cache left it: by what it was known, and whether it was let go in good order. If not, why.
    pub proves: Proves,
}

/// What compares what a store was known by with what it is now, and knows whether it was let go in good order.
pub type Proves = Box<dyn Fn(&[u8; 64], bool) -> Result<(), &'static str> + Send>;

/// What was decided of a volume that came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decided {
    /// As it came.
    pub coming: Coming,
    /// Its place, and whether its lines are used; or why it cannot come.
    pub outcome: Result<TakenUp, CannotCome>,
    /// Why its lines are not used, if the cache has known it.
    pub cold: Option<&'static str>,
}

/// Decides of one volume; what it decides is in `sb` then. A refusal changes nothing.
pub fn decide(sb: &mut BlockSuperblock, comer: &Comer, fault: Fault) -> Decided {
    let known = sb.volumes.iter().find(|v| v.name == comer.name);
    let proof = known.map(|v| (comer.proves)(&v.identity, v.state == VolumeState::Detached));
    let coming = Coming {
        name: comer.name.clone(),
        bytes: comer.bytes,
        unchanged: proof == Some(Ok(()))
            || (known.is_some() && fault.is(Planted::ChangedStoreBelieved)),
        identity: comer.identity,
    };
    let outcome = if fault.is(Planted::AddressGivenTwice) {
        // Those that were put aside are overlooked.
        let is_there = |v: &Volume| v.state == VolumeState::Attached || v.name == comer.name;
        let (mut seen, aside) = (sb.clone(), sb.clone());
        seen.volumes.retain(is_there);
        let outcome = take_up(&mut seen, &coming);
        if outcome.is_ok() {
            seen.volumes.extend(aside.volumes.into_iter().filter(|v| !is_there(v)));
            *sb = seen;
        }
        outcome
    } else {
        take_up(sb, &coming)
    };
    let cold = match outcome.as_ref().map(|taken| taken.found) {
        Ok(Found::Changed) => proof.and_then(Result::err).or(Some("its store has become smaller")),
        Ok(Found::Grown) => Some("its store has grown"),
        _ => None,
    };
    Decided { coming, outcome, cold }
}

/// The volumes of a run, as its start has decided of them.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// What was decided of each, in the order in which they are configured.
    pub decided: Vec<Decided>,
    /// Stretches of groups whose lines are used: first and number.
    kept: Vec<(u64, u64)>,
    /// Lines of volumes that are not as they were, or that nobody has any more, may be in the durable map.
    gone: bool,
}

/// A volume that cannot come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoPlace {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
    /// Why not.
    pub why: CannotCome,
}

impl Places {
    /// Finds the place of each volume that is configured. What the last run had and this one has not is put aside, and is not
    /// known again: nobody looked at its store when it was let go.
    ///
    /// # Errors
    /// The first volume that cannot come.
    pub fn find(
        sb: &mut BlockSuperblock,
        comers: &[Comer],
        fault: Fault,
    ) -> Result<Places, NoPlace> {
        let mut places = Places::default();
        for volume in &mut sb.volumes {
            let is_asked = comers.iter().any(|c| c.name == volume.name);
            if volume.state == VolumeState::Attached && !is_asked {
                (volume.state, volume.identity) = (VolumeState::Detached, [0; 64]);
            }
            if volume.state == VolumeState::Detached {
                places.kept.push((volume.first_group, volume.groups));
            }
        }
        for comer in comers {
            places.take(sb, comer, fault)?;
        }
        Ok(places)
    }

    /// The same for one more.
    ///
    /// # Errors
    /// If it cannot come.
    pub fn take(
        &mut self,
        sb: &mut BlockSuperblock,
        comer: &Comer,
        fault: Fault,
    ) -> Result<(), NoPlace> {
        let decided = decide(sb, comer, fault);
        let taken = decided.outcome.clone().map_err(|why| NoPlace {
            name: comer.name.clone(),
            bytes: comer.bytes,
            why,
        })?;
        self.decided.push(decided);
        if let Some((first, _)) = taken.former {
            self.kept.retain(|k| k.0 != first);
        }
        let stretch = (taken.volume.first_group, taken.volume.groups);
        // Lines of whoever had the stretch before are not its own.
        self.kept.retain(|k| k.0 + k.1 <= stretch.0 || stretch.0 + stretch.1 <= k.0);
        if taken.found == Found::Warm {
            self.kept.push(stretch);
        } else {
            self.gone |= taken.former.is_some();
        }
        Ok(())
    }

    /// The volumes as they stand in the superblock.
    pub fn volumes(&self) -> impl Iterator<Item = &Volume> {
        self.decided.iter().filter_map(|d| d.outcome.as_ref().ok()).map(|taken| &taken.volume)
    }

    /// Whether a line is used.
    pub(super) fn keeps(&self, line: LineId, layout: &Layout) -> bool {
        let group = line.group().0;
        self.kept.iter().any(|(first, groups)| *first <= group && group < first + groups)
            && line.0 < layout.space_lines()
    }

    /// Whether the durable map may name lines of volumes that are not as they were.
    pub(super) fn has_gone(&self) -> bool {
        self.gone
    }
}
