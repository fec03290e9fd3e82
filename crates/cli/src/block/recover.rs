//! `larder block recover`.

use std::time::{SystemTime, UNIX_EPOCH};

use larder_block::backing::journal::JournalError;
use larder_block::backing::marker::MarkerIoError;
use larder_block::backing::{self, OpenOptions, Uri};
use larder_block::cache::back::{RecoverError, RecoverWish, Recovery, recover};

use super::control::{duration, two_columns};
use crate::error::CliError;

/// Shown under the flags.
const EXAMPLES: &str = "\
Examples:
  # The host with the cache is gone: from any host that reaches the store
  larder block recover file:/nfs/disk.img
  # A store without a place for its marker:
  larder block recover nbd://filer:10809/vm1 --marker /nfs/vm1.marker
  # One that was journaled, to another export:
  larder block recover nbd://filer/vm1 --marker /nfs/vm1.marker \\
      --journal nbd://filer/vm1-journal

It asks nothing. Ends with 0 if the marker is clean now, whether it was before or not, with 1 if not.";

/// Makes the store of a volume that wrote back whole again, when its cache is lost: gives up what only that cache had
///
/// While a marker beside a store says that a cache holds what the store lacks, Larder serves the store through that cache alone.
/// This makes the marker clean, so that any cache may serve it, and that one, should it come back, counts no more.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RecoverArgs {
    /// The volume's store, as for `larder block serve --volume`
    #[arg(value_name = "STORE")]
    store: String,
    /// Where its marker is, if it is not beside the store: a path, or the URI of an NBD export or object store
    #[arg(long, value_name = "PLACE")]
    marker: Option<String>,
    /// Where its journal is, if its order was journaled and it is not beside the store: a path, or the URI of an NBD export or object store
    #[arg(long, value_name = "PLACE")]
    journal: Option<String>,
    /// Go on where the journal is lost or damaged: the store may be between two moments, and is taken as it is
    #[arg(long)]
    accept_torn: bool,
    /// The store, or a cache, was put back to an older copy: no cache counts any more, even if the marker is clean
    #[arg(long)]
    set_back: bool,
    /// The store is the one that it was, moved or renamed, or a whole copy of it: you vouch for that. One that was journaled is refused without this where it is
    /// not known again
    #[arg(long)]
    store_moved: bool,
    /// What the store has answered is durable, you vouch: it is not flushed. A store that offers no FLUSH (NBD) is refused without this
    #[arg(long)]
    store_durable: bool,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &RecoverArgs) -> Result<(), CliError> {
    let usage = |e: &dyn std::fmt::Display| CliError::Usage(e.to_string());
    let uri: Uri = args.store.parse().map_err(|e| usage(&e))?;
    let options = OpenOptions { durable: args.store_durable, ..OpenOptions::default() };
    let store = backing::open_with(&uri, &options).map_err(|e| CliError::Runtime(e.to_string()))?;
    let wish = RecoverWish {
        marker: args.marker.clone(),
        journal: args.journal.clone(),
        set_back: args.set_back,
        accept_torn: args.accept_torn,
        moved: args.store_moved,
    };
    let told = recover(&*store, &wish).map_err(failed)?;
    let text = match args.json {
        true => serde_json::to_string_pretty(&told)
            .map_err(|e| CliError::Runtime(format!("the answer cannot be printed: {e}")))?,
        false => text(&told, now()),
    };
    outln!("{}", text.trim_end())
}

/// What lies below knows nothing of flags.
pub(super) fn failed(error: RecoverError) -> CliError {
    let text = error.to_string();
    match error {
        RecoverError::Marker(MarkerIoError::NoPlace { store, why }) => CliError::Usage(format!(
            "backing store '{store}' has no place for a write-back marker: {why}; name the place that it has with --marker"
        )),
        RecoverError::Marker(MarkerIoError::Option { .. }) => {
            CliError::Usage(format!("--marker {text}"))
        }
        RecoverError::NoJournal(JournalError::NoPlace { store, why }) => CliError::Usage(format!(
            "backing store '{store}' has no place for a journal: {why}; name the place that it has with --journal"
        )),
        RecoverError::NoJournal(JournalError::Option { .. }) => {
            CliError::Usage(format!("--journal {text}"))
        }
        RecoverError::NoJournal(_) => CliError::Usage(text),
        RecoverError::Torn { .. } => CliError::Runtime(text.replace(
            "have the cache or the journal back, or accept that it is torn",
            "have the cache or the journal back (--journal says where it is), or take the store as it is with --accept-torn",
        )),
        RecoverError::NoMarker(_) => {
            CliError::Runtime(text.replace("name its place", "name its place with --marker"))
        }
        RecoverError::OtherStore(_) => CliError::Runtime(
            text.replace("say that the store was moved", "say so with --store-moved"),
        ),
        RecoverError::CannotFlush(_) => {
            CliError::Runtime(text.replace("or vouch that", "or vouch with --store-durable that"))
        }
        RecoverError::Elsewhere { named, .. } => CliError::Usage(
            text.replace("name that one's place", &format!("name it with --marker '{named}'"))
                .replace("as its place", "with --marker"),
        ),
        _ => CliError::Runtime(text),
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// What was found and done, for people. `now` is in seconds since the Unix epoch.
fn text(told: &Recovery, now: u64) -> String {
    let unknown = || "not known".to_owned();
    let mut rows: Vec<(&str, String)> = vec![("store", told.store.clone())];
    let state = match told.was.as_str() {
        "damaged" => "both copies were damaged".to_owned(),
        "gone" => "it was gone, and there had been one".to_owned(),
        "carried" => {
            "it said that the volume was put aside in the cache with what was dirty".to_owned()
        }
        "closing" | "closed" => {
            "it said that the write log of the cache had failed, and what it held was on its way to the store"
                .to_owned()
        }
        was => format!("it was {was}"),
    };
    rows.push(("marker", format!("{}: {state}", told.marker)));
    if !told.recovered {
        rows.push((
            "done",
            "nothing: the marker says that no cache holds what the store lacks".to_owned(),
        ));
        return two_columns(rows);
    }
    let on = |host: &String| format!(", of host '{host}'");
    let cache = told.cache.clone().unwrap_or_else(unknown);
    rows.push(("cache", cache + &told.host.as_ref().map_or_else(String::new, on)));
    rows.push(("order", told.order.clone().unwrap_or_else(unknown)));
    let since = told
        .not_older_than
        .map(|at| format!("{}, {} ago", utc(at), duration(now.saturating_sub(at) as f64)));
    rows.push(match (&since, told.was.as_str()) {
        (_, "clean") => {
            ("lost", "nothing that the marker knew of; what caches hold counts no more".into())
        }
        (Some(since), _) => ("not older than", since.clone()),
        (None, _) => {
            ("lost", "at most all that was written since the marker was last clean".into())
        }
    });
    if let Some(sequence) = told.sequence.filter(|_| told.was != "clean") {
        rows.push((
            "sequence",
            format!("the store has all up to record {sequence} of that cache's log"),
        ));
    }
    if let Some(mark) = &told.mark {
        let printable: String = mark.chars().filter(|c| !c.is_control()).collect();
        rows.push(("mark", format!("'{printable}' is the last that the store is known to have")));
    }
    if since.is_some() {
        rows.push(("lost", "at most what was written after that".to_owned()));
    }
    let image = match told.order.as_deref() {
        _ if told.joined => {
            "what could not be read in the cache had been written again, and came to the store with all behind it, perhaps not to its end: the store may be an image \
             that never existed. Check it, and restore what is broken"
        }
        Some("ordered") => {
            "the store is what a disk with a volatile cache may hold after a power cut: file systems and databases find their way \
             from there as after one"
        }
        Some("ordered,grain=completion") => {
            "the store is what a disk may hold when its host has crashed: file systems and databases find their way from there as \
             after that"
        }
        Some("journaled") if told.torn.is_some() => {
            "the journal was not replayed: the store may have some of what was to come to it at once and not the rest, which no volume ever was. \
             Check it, and restore what is broken"
        }
        Some("journaled") => {
            "what the journal had is in the store: it is the volume as it was at one moment, and file systems and databases find \
             their way from there as after a crash"
        }
        _ => {
            "the store may be an image that never existed: newer writes may be there where older ones are missing. Check it, and \
             restore what is broken"
        }
    };
    if let Some(why) = &told.torn {
        rows.push(("torn", why.clone()));
    }
    if told.was != "clean" {
        rows.push(("image", image.to_owned()));
    }
    let fenced = match told.fenced {
        true => String::new(),
        false => {
            "; neither the store nor its marker keeps away a daemon that serves it still, with the cache that is taken for lost: see to it that none does"
                .to_owned()
        }
    };
    // (It is far ahead so that no copy of a cache has a higher one.)
    let ahead = match told.generation >> 32 {
        0 => "",
        _ => " (far ahead, so that no copy of a cache has a later one)",
    };
    rows.push((
        "done",
        format!(
            "the marker is clean, generation {}{ahead}: any cache may serve it{fenced}",
            told.generation
        ),
    ));
    two_columns(rows)
}

/// A time as people read it, in UTC: `2026-11-27 03:25:10 UTC`.
fn utc(seconds: u64) -> String {
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    // Days since 0000-03-01, in eras of 400 years, after Howard Hinnant's `civil_from_days`.
    let z = days + 719_468;
    let (era, of_era) = (z / 146_097, z % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_709_164_799, "2024-02-28 23:59:59 UTC"),
            (1_700_000_000, "2023-11-14 22:13:20 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }

    #[test]
    fn what_is_lost_is_said_as_at_most() {
        let dirty = Recovery {
            store: "file:/d".into(),
            marker: "marker '/d.larder'".into(),
            was: "dirty".into(),
            recovered: true,
            cache: Some("uuid".into()),
            host: Some("there".into()),
            order: Some("ordered".into()),
            not_older_than: Some(1_700_000_000),
            sequence: Some(4711),
            torn: None,
            joined: false,
            mark: Some("nightly".into()),
            generation: 6,
            fenced: true,
        };
        let said = |told: &Recovery| text(told, 1_700_000_060).replace('\n', " ");
        let has = |told: &Recovery, words: &[&str]| {
            let said = said(told).split_whitespace().collect::<Vec<_>>().join(" ");
            for word in words {
                assert!(said.contains(word), "no '{word}' in {said}");
            }
        };
        has(
            &dirty,
            &[
                "uuid, of host 'there'",
                "2023-11-14 22:13:20 UTC, 60.0 s ago",
                "at most what was written after that",
                "volatile cache",
                "generation 6",
            ],
        );
        assert!(!said(&dirty).contains("see to it"));
        has(&dirty, &["sequence the store has all up to record 4711 of that cache's log"]);
        has(&dirty, &["mark 'nightly' is the last", "it was dirty"]);
        let carried = Recovery { was: "carried".into(), ..dirty.clone() };
        has(
            &carried,
            &["put aside in the cache with what was dirty", "mark 'nightly' is the last"],
        );
        let journaled = Recovery { order: Some("journaled".into()), ..dirty.clone() };
        has(&journaled, &["journal", "at one moment"]);
        let torn = Recovery { torn: Some("it is lost".into()), ..journaled };
        has(&torn, &["torn it is lost", "not replayed", "Check it"]);
        let joined = Recovery { joined: true, ..dirty.clone() };
        has(&joined, &["written again", "never existed", "Check it"]);
        let any = Recovery { order: Some("any".into()), fenced: false, ..dirty.clone() };
        has(&any, &["never existed", "see to it that none does", "at most"]);
        let lost = Recovery {
            was: "damaged".into(),
            cache: None,
            host: None,
            order: None,
            not_older_than: None,
            sequence: None,
            ..dirty.clone()
        };
        assert!(!said(&lost).contains("sequence"));
        has(&lost, &["both copies were damaged", "not known", "at most all", "never existed"]);
        let clean = Recovery { was: "clean".into(), recovered: false, ..dirty };
        has(&clean, &["it was clean", "nothing: the marker says"]);
    }
}
