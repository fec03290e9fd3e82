//! How the stores behind volumes are treated: settings of `larder block serve`.

use std::path::Path;
use std::time::Duration;

use larder_block::backing::{OpenOptions, Timeouts};

/// What a client's I/O does while a store cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum OnFailure {
    Wait,
    Fail,
}

/// Flags for stores.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StoreArgs {
    /// While a store over a network (NBD, S3) cannot be reached: let I/O wait for as long as it takes, or fail it after
    /// --backing-give-up. With wait, a store of any kind that is not there at the start keeps no other volume: its own is served
    /// when it comes
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = OnFailure::Fail, help_heading = "Stores")]
    on_backing_failure: OnFailure,
    /// Seconds without such a store after which I/O fails
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u32).range(1..=86_400), help_heading = "Stores")]
    backing_give_up: u32,
    /// Seconds without an answer after which a request goes to such a store again, by a new connection. That has 10 s to come about, whatever this is
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3_600), help_heading = "Stores")]
    backing_timeout: u32,
    /// Take no lock or lease on the stores, where locks do not work: no other host must write to them
    #[arg(long, help_heading = "Stores")]
    no_lease: bool,
    /// Do not look whether somebody else changes a file while it is served: to test what is cached
    #[arg(long, hide = true)]
    no_watch: bool,
}

impl StoreArgs {
    /// Whether volumes wait for their stores.
    pub(super) fn waits(&self) -> bool {
        self.on_backing_failure == OnFailure::Wait
    }

    /// For the opening of a store; `state` is the daemon's directory.
    pub(crate) fn options(&self, read_only: bool, state: &Path) -> OpenOptions {
        let give_up = Duration::from_secs(u64::from(self.backing_give_up));
        let timeout = Timeouts {
            silence: Duration::from_secs(u64::from(self.backing_timeout)),
            give_up: (self.on_backing_failure == OnFailure::Fail).then_some(give_up),
            ..Timeouts::default()
        };
        OpenOptions {
            read_only,
            direct: true,
            timeout,
            lease: !self.no_lease,
            notes: Some(state.join("stores")),
            watch: !self.no_watch,
            ..OpenOptions::default()
        }
    }
}
