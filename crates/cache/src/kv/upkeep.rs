//! A cache without threads of its own: what the cleaner and the trainer do else, its program does between requests.

use std::sync::Arc;

use larder_base::{Nanos, Now};
use larder_engine::kv::node::{DriveUpkeep, Maintenance, Turn};
use larder_runtime::{AlignedBuf, Clock};

use super::cleaner::{Disk, DriveFx, Fx};
use super::open::{Ready, prepare_any};
use super::{CacheConfig, CacheError, Core, Opened};

/// The maintenance of a cache without threads.
pub struct Upkeep {
    core: Arc<Core>,
    maintenance: Maintenance<AlignedBuf>,
    further: Vec<DriveUpkeep<AlignedBuf>>,
}

/// Opens a cache without threads: whoever has the [`Upkeep`] calls [`Upkeep::turn`].
///
/// # Errors
/// As [`super::open`].
pub fn open_without_threads(
    config: &CacheConfig,
    clock: &Arc<Clock>,
) -> Result<(Arc<Core>, Opened, Upkeep), CacheError> {
    let Ready { store, opened, maintenance, further } = prepare_any(config, clock)?;
    let core = Arc::new(store);
    Ok((core.clone(), opened, Upkeep { core, maintenance, further }))
}

impl Upkeep {
    /// Does all that is due at `now`, and what the cache was woken for: segments are written, expired objects go, models are fitted. It
    /// may take as long as the flash does. Tells when it is due again; a request that wakes the cleaner may want it before.
    pub fn turn(&mut self, now: Now) -> Nanos {
        let Upkeep { core, maintenance, further } = self;
        let mut first = Disk::first(core.flash());
        // Drives take turns: each looks once more after another has done something.
        let mut idle = 0;
        loop {
            if core.notifier.hear().rung {
                maintenance.wake();
                further.iter_mut().for_each(DriveUpkeep::wake);
            }
            let mut wanted = None;
            let fit = |samples, seed| wanted = Some((samples, seed));
            let turn = maintenance.turn(now, &core.node, &mut first, &mut Fx { cache: core, fit });
            let mut worked = turn == Turn::Again;
            if let Some((set, seed)) = wanted {
                let model = core.fit(&set, seed);
                maintenance.fitted(now, &core.node, set.app, model);
                worked = true;
            }
            for upkeep in further.iter_mut() {
                let mut disk = Disk(core.flash().map(|flash| (flash, upkeep.drive())));
                let turn = upkeep.turn(now, &core.node, &mut disk, &mut DriveFx(core));
                if turn == Turn::Again {
                    worked = true;
                    maintenance.wake();
                }
            }
            idle = if worked { 0 } else { idle + 1 };
            if let Turn::At(due) = turn
                && (further.is_empty() && !worked || idle > 1)
            {
                return due;
            }
        }
    }

    /// Ends the cache, as [`Core::shutdown`] does where there are threads.
    pub fn close(self, now: Now) {
        self.core.refuse();
        self.core.close(Some(self.maintenance), self.further, now);
    }
}
