//! What the runs of a test have met.

/// What runs have met, so that a run that proves nothing is noticed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(super) hits_dram: u64,
    pub(super) hits_flash: u64,
    pub(super) false_reads: u64,
    pub(super) restored: u64,
    pub(super) staged_dead: u64,
    pub(super) forced: u64,
    pub(super) reclaimed: u64,
    pub(super) reinserted: u64,
    pub(super) kills: u64,
    pub(super) kept_over_kill: u64,
    pub(super) kills_in_starts: u64,
    pub(super) failed_starts: u64,
    pub(super) from_checkpoint: u64,
    pub(super) cold: u64,
    pub(super) copies: u64,
    pub(super) put_back: u64,
    pub(super) io_errors: u64,
    pub(super) unkept_names: u64,
    pub(super) extents: u64,
    /// Reads of records that lie in several segments.
    pub(super) in_parts: u64,
    pub(super) brought_in: u64,
    /// Runs without flash, and memory files that were believed by them.
    pub(super) alone: u64,
    pub(super) believed_alone: u64,
    /// Memory files that were believed beside flash.
    pub(super) believed: u64,
    /// Memory files that were there and not believed.
    pub(super) disbelieved: u64,
}

impl Seen {
    pub(crate) fn add(&mut self, o: Seen) {
        self.hits_dram += o.hits_dram;
        self.hits_flash += o.hits_flash;
        self.false_reads += o.false_reads;
        self.restored += o.restored;
        self.staged_dead += o.staged_dead;
        self.forced += o.forced;
        self.reclaimed += o.reclaimed;
        self.reinserted += o.reinserted;
        self.kills += o.kills;
        self.kept_over_kill += o.kept_over_kill;
        self.kills_in_starts += o.kills_in_starts;
        self.failed_starts += o.failed_starts;
        self.from_checkpoint += o.from_checkpoint;
        self.cold += o.cold;
        self.copies += o.copies;
        self.put_back += o.put_back;
        self.io_errors += o.io_errors;
        self.unkept_names += o.unkept_names;
        self.extents += o.extents;
        self.in_parts += o.in_parts;
        self.brought_in += o.brought_in;
        self.alone += o.alone;
        self.believed_alone += o.believed_alone;
        self.believed += o.believed;
        self.disbelieved += o.disbelieved;
    }

    pub(crate) fn assert_met_everything(&self) {
        println!("{self:?}");
        let all = [
            self.hits_dram,
            self.hits_flash,
            self.false_reads,
            self.restored,
            self.staged_dead,
            self.forced,
            self.reclaimed,
            self.reinserted,
            self.kills,
            self.kept_over_kill,
            self.kills_in_starts,
            self.failed_starts,
            self.from_checkpoint,
            self.cold,
            self.copies,
            self.put_back,
            self.io_errors,
            self.unkept_names,
            self.extents,
            self.in_parts,
            self.brought_in,
            self.alone,
            self.believed_alone,
            self.believed,
            self.disbelieved,
        ];
        assert!(all.iter().all(|&n| n >= 30), "the runs have hardly met something: {self:?}");
    }
}
