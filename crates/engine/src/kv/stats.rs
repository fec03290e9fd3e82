//! Counters of a shard. All only grow, unless their description says that they are a present state.

use larder_base::AppId;

macro_rules! counters {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $field:ident),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name { $($(#[$doc])* pub $field: u64),+ }

        impl $name {
            /// Adds another's counters to these.
            pub fn add(&mut self, other: &$name) {
                $(self.$field += other.$field;)+
            }

            /// Folds every counter into a digest, in order.
            #[inline]
            pub fn digest(&self, seed: u64, step: fn(u64, u64) -> u64) -> u64 {
                let mut h = seed;
                $(h = step(h, self.$field);)+
                h
            }

            /// Every counter by name, in order.
            pub fn fields(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($field), self.$field)),+]
            }
        }
    };
}

counters! {
    /// What a shard has done.
    ShardStats {
        /// Reads answered from DRAM.
        hits_dram,
        /// Reads answered from flash.
        hits_flash,
        /// Reads of absent keys.
        misses,
        /// Objects found expired on access.
        expired,
        /// Reads that missed because a flush had taken the object out of DRAM (at most 1,024 objects of each flush are
        /// remembered by a shard).
        get_flushed,
        /// Objects written by clients.
        sets,
        /// Bytes of keys and values written by clients: the denominator of CLWA.
        set_bytes,
        /// Objects evicted from DRAM, never to reach flash.
        evictions,
        /// Of these, on the request path, because the cleaner had not kept up.
        evictions_direct,
        /// Of these, with flash and unexpired: a write needed the room at once, and admission was not asked about them or wanted them.
        evictions_unjudged,
        /// Evicted before they were ever read.
        evicted_unfetched,
        /// Flash pages or extents asked for by requests.
        flash_reads,
        /// Of these, reads that did not hold the key: another key's tag matched.
        flash_reads_false,
        /// Bytes of all of these reads.
        flash_read_bytes,
        /// Reads that the device failed.
        flash_read_errors,
        /// Records whose checksum did not hold.
        flash_corrupt,
        /// Objects published on flash.
        flash_written_objects,
        /// Record bytes of the objects published on flash.
        flash_written_bytes,
        /// Staged objects that changed before their segment was durable.
        staged_dead,
        /// Index entries forced out because both buckets were full.
        forced_evictions,
        /// Entries removed because an overwritten key's tag matched, and not put back.
        innocents_lost,
        /// Entries put back after the read showed that they belong to another key.
        innocents_restored,
        /// Objects put back into DRAM from a reclaimed segment.
        reinserted,
        /// Ghosts revived by a read.
        revived,
        /// Objects that died with their segment.
        flash_dropped,
        /// Of these, never read from flash (as far as CLOCK can tell).
        flash_dropped_unread,
        /// Sets refused because no room could be made.
        out_of_memory,
        /// Objects moved from flash to DRAM because they changed.
        brought_in,
    }
}

counters! {
    /// What an application has done in a shard.
    AppStats {
        /// Reads.
        gets,
        /// Reads answered from DRAM.
        hits_dram,
        /// Reads answered from flash.
        hits_flash,
        /// Objects written.
        sets,
        /// Bytes of keys and values written.
        set_bytes,
        /// Arena bytes its objects take now (a present state).
        dram_bytes,
        /// Objects in DRAM now (a present state).
        dram_objects,
        /// Objects written to flash.
        flash_written_objects,
        /// Record bytes written to flash.
        flash_written_bytes,
        /// Bytes of its records on flash now, the dead among them included until their segment goes (a present state).
        flash_bytes,
        /// Objects evicted from DRAM.
        evictions,
    }
}

/// The counters of every application of a shard.
pub struct AppTable(Box<[AppStats]>);

impl Default for AppTable {
    fn default() -> AppTable {
        AppTable(vec![AppStats::default(); AppId::COUNT].into_boxed_slice())
    }
}

impl AppTable {
    /// The counters of `app`.
    pub fn of(&self, app: AppId) -> &AppStats {
        &self.0[app.index()]
    }

    /// [`AppStats::flash_bytes`] of every application, by id: what a restart must keep.
    pub fn flash_bytes(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        self.0.iter().map(|app| app.flash_bytes)
    }

    /// The counters of `app`, to change.
    #[inline]
    pub fn of_mut(&mut self, app: AppId) -> &mut AppStats {
        &mut self.0[app.index()]
    }
}
