//! `larder block discard`.

use std::path::PathBuf;

use larder_base::ByteSize;
use larder_block::backing::{self, OpenOptions, Uri};
use larder_block::cache::back::MarkerAt;
use larder_block::cache::back::discard::{DiscardError, DiscardWish, Discarded, discard};

use super::format::failed;
use crate::error::CliError;

/// Shown under the flags.
const EXAMPLES: &str = "\
Examples:
  # What would be lost? Nothing is changed:
  larder block discard /flash/cache db file:/nfs/db.img
  # The store has become smaller, and is to stay so:
  larder block discard /flash/cache db file:/nfs/db.img --beyond-end --yes
  # The store is gone for good:
  larder block discard /flash/cache db --no-store --yes

`export` what is dirty before, if it may still be wanted. Ends with 0 if it was
given up, with 1 if not.";

/// Gives up writes that a cache has and their store lacks, on a cache device that is not in use
///
/// All that is dirty of a volume, or what lies beyond the end of its store. The marker beside the store is brought in line, so that no older copy of
/// the cache brings back what was given up.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DiscardArgs {
    /// The cache device
    cache: PathBuf,
    /// The volume
    volume: String,
    /// Its store, as for `larder block serve --volume`
    #[arg(value_name = "STORE", required_unless_present = "no_store")]
    store: Option<String>,
    /// Its store is gone: older copies of the cache are not kept from coming back with it
    #[arg(long, conflicts_with_all = ["store", "beyond_end", "marker", "no_marker", "journal", "accept_torn"])]
    no_store: bool,
    /// Only what lies beyond the end of a store that has become smaller; the rest stays
    #[arg(long)]
    beyond_end: bool,
    /// Where its marker is, if it is not beside the store: a path, or the URI of an NBD export or object store
    #[arg(long, value_name = "PLACE", conflicts_with = "no_marker")]
    marker: Option<String>,
    /// It has no marker: older copies of the cache are not kept from coming back
    #[arg(long)]
    no_marker: bool,
    /// Where its journal is, if its order was journaled and it is not beside the store
    #[arg(long, value_name = "PLACE")]
    journal: Option<String>,
    /// Go on where the journal is lost or damaged, and take the store as it is
    #[arg(long)]
    accept_torn: bool,
    /// Do it; without this it is only said what would be lost
    #[arg(long)]
    yes: bool,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &DiscardArgs) -> Result<(), CliError> {
    let usage = |e: &dyn std::fmt::Display| CliError::Usage(e.to_string());
    if !args.cache.exists() {
        return Err(usage(&format!(
            "'{}': there is no such file or device: name a cache device",
            args.cache.display()
        )));
    }
    let store = match &args.store {
        Some(store) => {
            let uri: Uri = store.parse().map_err(|e| usage(&e))?;
            let opened = backing::open_with(&uri, &OpenOptions::default());
            Some(
                opened
                    .map_err(|e| CliError::Runtime(format!("{e}; --no-store does without it")))?,
            )
        }
        None => None,
    };
    let wish = DiscardWish {
        cache: args.cache.clone(),
        volume: args.volume.clone(),
        beyond_end: args.beyond_end,
        marker: match (&args.marker, args.no_marker) {
            (Some(place), _) => MarkerAt::At(place.clone()),
            (None, true) => MarkerAt::Nowhere,
            (None, false) => MarkerAt::Beside,
        },
        journal: args.journal.clone(),
        accept_torn: args.accept_torn,
        yes: args.yes,
    };
    let told = discard(&wish, store.as_deref()).map_err(|error| match error {
        DiscardError::Cache(error) => failed(error),
        DiscardError::Recover(error) => super::recover::failed(error),
    })?;
    let text = match args.json {
        true => serde_json::to_string_pretty(&told)
            .map_err(|e| CliError::Runtime(format!("the answer cannot be printed: {e}")))?,
        false => text(&told, args.beyond_end),
    };
    let printed: Result<(), CliError> = outln!("{}", text.trim_end());
    printed?;
    match told.done {
        true => Ok(()),
        false => Err(CliError::Runtime("nothing was discarded: --yes does it".to_owned())),
    }
}

fn text(told: &Discarded, beyond_end: bool) -> String {
    let what = if told.done { "given up" } else { "would be given up" };
    let mut text = match told.lost_bytes {
        0 => format!("{}: no byte {what}", told.volume),
        lost => format!(
            "{}: {lost} bytes ({}) of writes {what}, in bytes {} to {} of the volume",
            told.volume,
            ByteSize(lost),
            told.first_byte,
            told.end_byte
        ),
    };
    if told.gap {
        text.push_str("; more writes of it were lost before, of bytes that nobody knows");
    }
    if beyond_end {
        text.push_str(&format!("; {} that are dirty stay", ByteSize(told.kept_bytes)));
    }
    if told.done && !told.fenced {
        text.push_str(
            "\nATTENTION: no marker says so: do not use an older copy of this cache any more",
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_is_said_to_the_byte() {
        let told = Discarded {
            volume: "db".into(),
            lost_bytes: 8704,
            first_byte: 4096,
            end_byte: 16384,
            kept_bytes: 1024,
            fenced: true,
            ..Discarded::default()
        };
        let said = text(&told, true);
        assert!(said.contains("8704 bytes") && said.contains("would be given up"), "{said}");
        assert!(said.contains("bytes 4096 to 16384") && said.contains("1 KiB that are"), "{said}");
        let done = text(&Discarded { done: true, fenced: false, gap: true, ..told }, false);
        assert!(done.contains("writes given up") && done.contains("ATTENTION"), "{done}");
        assert!(done.contains("nobody knows") && !done.contains("stay"), "{done}");
    }
}
