//! `larder block discard`.

use std::path::PathBuf;

use larder_base::ByteSize;
use larder_block::backing::{self, OpenOptions, Uri};
use larder_block::cache::back::MarkerAt;
use larder_block::cache::back::discard::{DiscardError, DiscardWish, Discarded, discard};
use larder_block::control::protocol::Request;

use super::control::{Daemon, read};
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
  # Some of it cannot be read any more; the rest stays:
  larder block discard /flash/cache db --unreadable --yes
  # The same of a volume that is served:
  larder block discard --served db --unreadable --yes

`export` what is dirty before, if it may still be wanted. Ends with 0 if it was
given up, with 1 if not.";

/// Gives up writes that a cache has and their store lacks, on a cache device that is not in use, or what of a served volume cannot be read
///
/// All that is dirty of a volume, what lies beyond the end of its store, or what cannot be read. The marker beside the store is brought in line, so that no older copy of
/// the cache brings back what was given up.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DiscardArgs {
    /// The cache device
    #[arg(required_unless_present = "served")]
    cache: Option<PathBuf>,
    /// The volume
    #[arg(required_unless_present = "served")]
    volume: Option<String>,
    /// Its store, as for `larder block serve --volume`
    #[arg(value_name = "STORE", required_unless_present_any = ["no_store", "unreadable"])]
    store: Option<String>,
    /// A volume that a running daemon serves, instead of a cache device: with --unreadable
    #[arg(long, value_name = "VOLUME", requires = "unreadable", conflicts_with_all = ["cache", "no_store"])]
    served: Option<String>,
    /// Its store is gone: older copies of the cache are not kept from coming back with it
    #[arg(long, conflicts_with_all = ["store", "beyond_end", "marker", "no_marker", "journal", "accept_torn"])]
    no_store: bool,
    /// Only what lies beyond the end of a store that has become smaller; the rest stays
    #[arg(long)]
    beyond_end: bool,
    /// Only what cannot be read any more: what was there before shows again, from the cache or the store; the rest stays. A write goes as
    /// a whole; what cannot be read later is not given up with it
    #[arg(long, conflicts_with_all = ["store", "no_store", "beyond_end", "marker", "no_marker", "journal", "accept_torn"])]
    unreadable: bool,
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
    /// What the store has answered is durable, though it cannot be flushed (an NBD server without FLUSH)
    #[arg(long)]
    store_durable: bool,
    /// The store is the one that it was, though it lies elsewhere now: asked for with --beyond-end, and of a volume that was journaled
    #[arg(long, conflicts_with_all = ["no_store", "unreadable"])]
    store_moved: bool,
    /// Do it; without this it is only said what would be lost
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    daemon: Daemon,
}

pub(crate) fn run(args: &DiscardArgs) -> Result<(), CliError> {
    let usage = |e: &dyn std::fmt::Display| CliError::Usage(e.to_string());
    if let Some(volume) = &args.served {
        let request = Request::Discard { volume: volume.clone(), yes: args.yes };
        let answer = args.daemon.ask(&request)?;
        return show(args, &read(&answer)?);
    }
    let (Some(cache), Some(volume)) = (&args.cache, &args.volume) else {
        return Err(usage(&"name a cache device and a volume"));
    };
    if !cache.exists() {
        return Err(usage(&format!(
            "'{}': there is no such file or device: name a cache device",
            cache.display()
        )));
    }
    let store = match &args.store {
        Some(store) => {
            let uri: Uri = store.parse().map_err(|e| usage(&e))?;
            let options = OpenOptions { durable: args.store_durable, ..OpenOptions::default() };
            let opened = backing::open_with(&uri, &options);
            Some(opened.map_err(|e| {
                // One that somebody has is there: it is not gone round.
                let text = e.to_string();
                let hint =
                    if text.contains("locked") { "" } else { "; --no-store does without it" };
                CliError::Runtime(text + hint)
            })?)
        }
        None => None,
    };
    let wish = DiscardWish {
        cache: cache.clone(),
        volume: volume.clone(),
        beyond_end: args.beyond_end,
        unreadable: args.unreadable,
        marker: match (&args.marker, args.no_marker) {
            (Some(place), _) => MarkerAt::At(place.clone()),
            (None, true) => MarkerAt::Nowhere,
            (None, false) => MarkerAt::Beside,
        },
        journal: args.journal.clone(),
        accept_torn: args.accept_torn,
        moved: args.store_moved,
        yes: args.yes,
    };
    let told = discard(&wish, store.as_deref()).map_err(|error| match error {
        DiscardError::Cache(error) => failed(error),
        DiscardError::Recover(error) => super::recover::failed(error),
    })?;
    show(args, &told)
}

fn show(args: &DiscardArgs, told: &Discarded) -> Result<(), CliError> {
    let text = match args.daemon.json() {
        true => serde_json::to_string_pretty(told)
            .map_err(|e| CliError::Runtime(format!("the answer cannot be printed: {e}")))?,
        false => text(told, args.beyond_end, args.unreadable),
    };
    let printed: Result<(), CliError> = outln!("{}", text.trim_end());
    printed?;
    match told.done {
        true => Ok(()),
        false => Err(CliError::Runtime("nothing was discarded: --yes does it".to_owned())),
    }
}

fn text(told: &Discarded, beyond_end: bool, unreadable: bool) -> String {
    let what = if told.done { "given up" } else { "would be given up" };
    let mut text = match told.lost_bytes {
        0 => format!("{}: no byte {what}", told.volume),
        lost if unreadable => format!(
            "{}: {lost} bytes ({}) of writes that cannot be read {what}",
            told.volume,
            ByteSize(lost)
        ),
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
    if beyond_end || unreadable {
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
        let said = text(&told, true, false);
        assert!(said.contains("8704 bytes") && said.contains("would be given up"), "{said}");
        assert!(said.contains("bytes 4096 to 16384") && said.contains("1 KiB that are"), "{said}");
        let done = text(&Discarded { done: true, fenced: false, gap: true, ..told }, false, false);
        assert!(done.contains("writes given up") && done.contains("ATTENTION"), "{done}");
        assert!(done.contains("nobody knows") && !done.contains("stay"), "{done}");
    }
}
