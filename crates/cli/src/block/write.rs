//! What writes do: settings of `larder block serve`.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use larder_base::ByteSize;
use larder_block::backing::{Uri, path_or_uri};
use larder_block::cache::back::{
    Age, BACK, BackConfig, JournalAt, LEAST_BOUND, LogSize, MarkerAt, check_bounds,
};
use larder_engine::block::WriteMode;
use larder_engine::block::node::defaults;

use super::settings::Settings;
use crate::error::CliError;

/// Flags of writes.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct WriteArgs {
    /// What a write does. hdd-ssd (to the store, and allocates in the cache), hdd-upd (to the store, and updates what is cached) or
    /// hdd-inv (to the store, and drops what is cached) hold for all volumes that do not write back. back:ORDER: it is answered when it
    /// is in the cache's write log, and comes to the store later (docs/block.md, Write-back); for one volume with NAME=, else for all.
    /// ORDER is any (a lost cache may cost the file system), ordered (the store alone is always what a disk may hold after a crash:
    /// grain=flush, the default, one with a volatile cache; grain=completion, one without) or journaled (the store with the journal
    /// beside it is always the volume at one moment: at a FLUSH or mark of its clients, or with cut=marks at a mark alone; on-full=cut has it
    /// go on elsewhere where none comes). destage=async (at once), periodic:SECONDS
    /// or none (when half of its bound is held, where writes begin to be slowed down). May be given several times
    #[arg(long, value_name = "[NAME=]MODE", value_parser = write, default_value = defaults::WRITE.as_str(), help_heading = "Cache")]
    write: Vec<WriteSaid>,
    /// What volumes that write back may hold of the write log, each or one of them; above half of it writes are slowed down to what
    /// the store takes. All that is said must fit together into four fifths of the log without its reserve. May be given several times [default: an equal share of four fifths of the log without its
    /// reserve of two segments and one for each volume, at most 4 GiB]
    #[arg(long, value_name = "[NAME=]SIZE", value_parser = dirty_max, help_heading = "Cache")]
    dirty_max: Vec<(Option<String>, ByteSize)>,
    /// How old what is dirty may become, in seconds, of all volumes that write back or one of them: as this is neared it is destaged whatever
    /// its time is, and beyond it there is an alarm. With ,hard no write is answered while the oldest is older, so that a
    /// lost cache costs a span of at most that long. Not with destage=none. May be given several times [default: 60]
    #[arg(long, value_name = "[NAME=]SECONDS[,hard]", value_parser = dirty_age_max, help_heading = "Cache")]
    dirty_age_max: Vec<(Option<String>, Age)>,
    /// Where the marker of a volume is, which says whether a cache holds what the store lacks: a path, or the URI of an NBD export or
    /// object store. Needed where there is no place beside the store (block devices, NBD). May be given several times
    #[arg(long = "marker", value_name = "NAME=PLACE", value_parser = marker, help_heading = "Cache")]
    markers: Vec<(String, String)>,
    /// This volume has no marker: nothing notices that its cache is lost, or an older one comes back. May be given several times
    #[arg(long = "no-marker", value_name = "NAME", help_heading = "Cache")]
    no_markers: Vec<String>,
    /// The store of this volume is the one that it had, moved or renamed, or a whole copy of it made since its cache was last used: you vouch for
    /// that once. Else a cache that holds what the store lacks refuses one that it does not know again. May be given several times
    #[arg(long = "store-moved", value_name = "NAME", help_heading = "Cache")]
    stores_moved: Vec<String>,
    /// Where the journal of a volume with --write back:journaled is: a path of a file (it is made) or block device, or the URI of an NBD export
    /// or object store, of 128 MiB at least. By default it is beside a file (NAME.larder.journal) and in an object store (wb/); block devices and
    /// NBD have no place of their own. Without NAME= it is that of the only volume. May be given several times
    #[arg(long = "journal", value_name = "[NAME=]PLACE", value_parser = journal, help_heading = "Cache")]
    journals: Vec<(Option<String>, String)>,
    /// The journal may be on this host where the store is not: it then covers the loss of the cache device, and not that of the host
    #[arg(long, help_heading = "Cache")]
    journal_local: bool,
    /// What the store of this volume has answered is durable, you vouch: it is never flushed. A store that offers no FLUSH is refused for
    /// write-back without this. Not of files and block devices, which are flushed. May be given several times
    #[arg(long = "store-durable", value_name = "VOLUME", help_heading = "Cache")]
    durable_stores: Vec<String>,
}

/// What one `--write` says.
#[derive(Clone, Debug, PartialEq)]
enum WriteSaid {
    /// Of all volumes that do not write back.
    Through(WriteMode),
    /// Of one volume, or of all.
    Back(Option<String>, BackConfig),
}

/// What was said, checked.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Writes {
    /// What volumes do that do not write back.
    pub(super) mode: WriteMode,
    /// Those that write back, of the volumes that are named.
    pub(super) back: BTreeMap<String, BackConfig>,
    /// How volumes write back that come later.
    pub(super) back_by_default: Option<BackConfig>,
    /// Where markers are that are not beside their store.
    pub(super) markers: BTreeMap<String, MarkerAt>,
    /// Volumes whose stores were moved.
    pub(super) moved: BTreeSet<String>,
    /// Where journals are that are not beside their store, and whether they may be local.
    pub(super) journals: BTreeMap<String, JournalAt>,
}

fn usage(text: String) -> CliError {
    CliError::Usage(text)
}

impl Writes {
    /// Whether volumes may hold, each and together, what they are to hold of a log of this size.
    pub(super) fn check_log(&self, log: LogSize) -> Result<(), CliError> {
        let named = self.back.iter().map(|(name, back)| (format!("volume '{name}': "), back));
        let all = self.back_by_default.iter().map(|back| (String::new(), back));
        for (of, back) in named.chain(all) {
            let most = back.dirty_max.unwrap_or_default();
            back.check_bound(log).map_err(|e| usage(format!("--dirty-max {most}: {of}{e}")))?;
        }
        check_bounds(self.back.values(), log).map_err(|e| {
            let stated = self
                .back
                .iter()
                .filter_map(|(name, back)| Some(format!("{name}={}", back.dirty_max?)));
            let stated: Vec<String> = stated.collect();
            usage(format!("--dirty-max {}: {e}", stated.join(", ")))
        })
    }
}

impl WriteArgs {
    /// A marker or journal is none of the files that the daemon has for something else.
    fn not_ours(&self, args: &Settings) -> Result<(), CliError> {
        let markers = self.markers.iter().map(|(_, place)| ("--marker", place));
        let journals = self.journals.iter().map(|(_, place)| ("--journal", place));
        let dir = super::serve::state_dir(args.state_dir.as_ref());
        let control = args.control.clone();
        let control = control.unwrap_or_else(|| super::control::default_socket(&dir));
        let mut ours = vec![
            (control, "the control socket of this daemon".to_owned()),
            (args.cache.clone(), "the cache".to_owned()),
        ];
        for (name, uri) in &args.volumes {
            if let Uri::File { path } = uri {
                ours.push((path.clone(), format!("the store of volume '{name}'")));
            }
        }
        for (flag, place) in markers.chain(journals) {
            let Ok(Uri::File { path }) = path_or_uri(place) else { continue };
            let is = |other: &(PathBuf, String)| whole(&other.0) == whole(&path);
            if let Some((_, what)) = ours.iter().find(|other| is(other)) {
                return Err(usage(format!("{flag} '{place}': is {what}: name another place")));
            }
        }
        Ok(())
    }

    /// What is to be done with the volumes of `args`.
    pub(super) fn checked(&self, args: &Settings) -> Result<Writes, CliError> {
        let mut writes = self.modes(args)?;
        bounds("--dirty-max", &self.dirty_max, &mut writes, args, |back, most| {
            back.dirty_max = most;
            Ok(())
        })?;
        bounds("--dirty-age-max", &self.dirty_age_max, &mut writes, args, |back, age| {
            back.age = age;
            back.age().map(drop).map_err(|e| e.to_string())
        })?;
        self.places(&mut writes, args)?;
        self.check_durable_stores(args)?;
        self.not_ours(args)?;
        let backs = writes.back_by_default.is_some() || !writes.back.is_empty();
        if let Some(file) = args.recording.record.as_ref().filter(|_| backs) {
            return Err(usage(format!(
                "--record '{}': a run that writes back cannot be recorded; leave out --record, or --write back:…",
                file.display()
            )));
        }
        Ok(writes)
    }

    /// Volumes whose stores are vouched for.
    pub(super) fn durable_stores(&self) -> BTreeSet<String> {
        self.durable_stores.iter().cloned().collect()
    }

    fn check_durable_stores(&self, args: &Settings) -> Result<(), CliError> {
        let mut seen = BTreeMap::new();
        for name in &self.durable_stores {
            let flag = format!("--store-durable {name}");
            known(&flag, name, args)?;
            once(&mut seen, &flag, name, ())?;
            if args.volumes.iter().any(|(n, uri)| n == name && matches!(uri, Uri::File { .. })) {
                return Err(usage(format!(
                    "{flag}: its store is a file or block device, which is flushed: leave it out"
                )));
            }
        }
        Ok(())
    }

    fn modes(&self, args: &Settings) -> Result<Writes, CliError> {
        let mut writes = Writes { mode: defaults::WRITE, ..Writes::default() };
        let mut through = None;
        for said in &self.write {
            match said {
                WriteSaid::Through(mode) => {
                    if let Some(before) = through.replace(*mode) {
                        return Err(usage(format!(
                            "--write {mode}: --write {before} says already what volumes do that do not write back: choose one"
                        )));
                    }
                    writes.mode = *mode;
                }
                WriteSaid::Back(None, back) => {
                    if let Some(before) = writes.back_by_default.replace(back.clone()) {
                        return Err(usage(format!(
                            "--write {back}: --write {before} says already how all volumes write back: choose one, or write \
                             NAME={back}"
                        )));
                    }
                }
                WriteSaid::Back(Some(name), back) => {
                    let flag = format!("--write {name}={back}");
                    known(&flag, name, args)?;
                    if args.read_only || args.read_only_volumes.contains(name) {
                        return Err(usage(format!(
                            "{flag}: volume '{name}' is only read and writes nothing back: leave one of them out"
                        )));
                    }
                    once(&mut writes.back, &flag, name, back.clone())?;
                }
            }
        }
        if let Some(back) = &writes.back_by_default {
            for (name, _) in &args.volumes {
                if !args.read_only && !args.read_only_volumes.contains(name) {
                    writes.back.entry(name.clone()).or_insert_with(|| back.clone());
                }
            }
        }
        Ok(writes)
    }

    fn places(&self, writes: &mut Writes, args: &Settings) -> Result<(), CliError> {
        let mut taken = BTreeMap::new();
        for (name, place) in &self.markers {
            let flag = format!("--marker {name}={place}");
            known(&flag, name, args)?;
            once(&mut writes.markers, &flag, name, MarkerAt::At(place.clone()))?;
            if let Some(other) = taken.insert(place, name) {
                return Err(usage(format!(
                    "{flag}: volume '{other}' has its marker there: name another place"
                )));
            }
        }
        for name in &self.no_markers {
            let flag = format!("--no-marker {name}");
            known(&flag, name, args)?;
            if let Some(MarkerAt::At(place)) = writes.markers.get(name) {
                return Err(usage(format!(
                    "{flag}: --marker {name}={place} says where it is: choose one of them"
                )));
            }
            once(&mut writes.markers, &flag, name, MarkerAt::Nowhere)?;
        }
        for name in &self.stores_moved {
            known(&format!("--store-moved {name}"), name, args)?;
            writes.moved.insert(name.clone());
        }
        self.journals(writes, args, &taken)
    }

    fn journals(
        &self,
        writes: &mut Writes,
        args: &Settings,
        markers: &BTreeMap<&String, &String>,
    ) -> Result<(), CliError> {
        let mut taken = BTreeMap::new();
        for (name, place) in &self.journals {
            let (flag, name) = match (name, &args.volumes[..]) {
                (Some(name), _) => (format!("--journal {name}={place}"), name),
                (None, [only]) => (format!("--journal {place}"), &only.0),
                (None, _) => {
                    return Err(usage(format!(
                        "--journal {place}: it is that of one volume; write NAME={place}"
                    )));
                }
            };
            known(&flag, name, args)?;
            let only_read = args.read_only || args.read_only_volumes.contains(name);
            let journaled = writes.back.get(name).is_some_and(BackConfig::is_journaled);
            if !journaled && !only_read {
                return Err(usage(format!(
                    "{flag}: volume '{name}' is not journaled; --write {name}=back:journaled has it be"
                )));
            }
            for (what, other) in [("marker", markers.get(place)), ("journal", taken.get(place))] {
                if let Some(other) = other {
                    return Err(usage(format!(
                        "{flag}: volume '{other}' has its {what} there: name another place"
                    )));
                }
            }
            taken.insert(place, name);
            let at = JournalAt { at: Some(place.clone()), local: false };
            once(&mut writes.journals, &flag, name, at)?;
        }
        if self.journal_local {
            let all = writes.back.values().chain(&writes.back_by_default);
            if !all.into_iter().any(BackConfig::is_journaled) {
                return Err(usage(
                    "--journal-local: no volume is journaled; --write back:journaled has all be"
                        .to_owned(),
                ));
            }
            for (name, _) in &args.volumes {
                writes.journals.entry(name.clone()).or_default().local = true;
            }
        }
        Ok(())
    }
}

/// What `said` says with this flag, of all volumes that write back or one of them, is set by `set`, which may say why it cannot be.
fn bounds<T: Copy + std::fmt::Display>(
    flag: &str,
    said: &[(Option<String>, T)],
    writes: &mut Writes,
    args: &Settings,
    set: impl Fn(&mut BackConfig, Option<T>) -> Result<(), String>,
) -> Result<(), CliError> {
    let mut of_one = BTreeMap::new();
    let mut of_all = None;
    for (name, most) in said {
        let Some(name) = name else {
            if writes.back.is_empty() && writes.back_by_default.is_none() {
                return Err(usage(format!(
                    "{flag} {most}: no volume writes back; --write back:ordered has them do so"
                )));
            }
            if let Some(before) = of_all.replace(*most) {
                return Err(usage(format!(
                    "{flag} {most}: {flag} {before} is said already of all volumes: write one, or NAME={most}"
                )));
            }
            continue;
        };
        let flag = format!("{flag} {name}={most}");
        known(&flag, name, args)?;
        if !writes.back.contains_key(name) {
            return Err(usage(format!(
                "{flag}: volume '{name}' does not write back; --write {name}=back:ordered has it do so"
            )));
        }
        once(&mut of_one, &flag, name, *most)?;
    }
    let wrong = |most: Option<T>, of: &str, why: String| {
        let most = most.map_or_else(String::new, |most| format!(" {most}"));
        usage(format!("{flag}{most}: {of}{why}"))
    };
    for (name, back) in &mut writes.back {
        let most = of_one.get(name).copied().or(of_all);
        set(back, most).map_err(|why| wrong(most, &format!("volume '{name}': "), why))?;
    }
    if let Some(back) = &mut writes.back_by_default {
        set(back, of_all).map_err(|why| wrong(of_all, "", why))?;
    }
    Ok(())
}

/// Whether a volume has that name.
fn known(flag: &str, name: &str, args: &Settings) -> Result<(), CliError> {
    if args.volumes.iter().any(|v| v.0 == name) {
        return Ok(());
    }
    let names: Vec<&str> = args.volumes.iter().map(|v| v.0.as_str()).collect();
    let known = match names.is_empty() {
        true => "there is none".to_owned(),
        false => format!("there are {}", names.join(", ")),
    };
    Err(usage(format!("{flag}: no --volume has the name '{name}': {known}")))
}

fn once<T>(all: &mut BTreeMap<String, T>, flag: &str, name: &str, what: T) -> Result<(), CliError> {
    match all.entry(name.to_owned()) {
        Entry::Vacant(entry) => {
            entry.insert(what);
            Ok(())
        }
        Entry::Occupied(_) => {
            Err(usage(format!("{flag}: it is said twice of volume '{name}': write it once")))
        }
    }
}

fn write(text: &str) -> Result<WriteSaid, String> {
    let (name, mode) = match text.split_once('=') {
        // (No name has one; the parts of a mode have.)
        Some((name, mode)) if !name.starts_with(BACK) || mode.starts_with(BACK) => {
            (Some(name.to_owned()), mode)
        }
        _ => (None, text),
    };
    if mode.starts_with(BACK) {
        let back = mode.parse().map_err(|e: larder_block::cache::back::NotBack| e.to_string())?;
        return Ok(WriteSaid::Back(name, back));
    }
    match (mode.parse::<WriteMode>(), name) {
        (Ok(mode), None) => Ok(WriteSaid::Through(mode)),
        (Ok(mode), Some(name)) => Err(format!(
            "{mode} is of all volumes that do not write back: write it without '{name}='"
        )),
        (Err(e), _) => Err(format!("{e}, back:any, back:ordered or back:journaled")),
    }
}

fn dirty_age_max(text: &str) -> Result<(Option<String>, Age), String> {
    let (name, age) = match text.split_once('=') {
        Some((name, age)) => (Some(name.to_owned()), age),
        None => (None, text),
    };
    Ok((name, age.parse().map_err(|e: larder_block::cache::back::NotBack| e.to_string())?))
}

fn dirty_max(text: &str) -> Result<(Option<String>, ByteSize), String> {
    let (name, size) = match text.split_once('=') {
        Some((name, size)) => (Some(name.to_owned()), size),
        None => (None, text),
    };
    let size: ByteSize = size.parse().map_err(|e: larder_base::ParseSizeError| e.to_string())?;
    if size < LEAST_BOUND {
        return Err(format!("must be at least {LEAST_BOUND}"));
    }
    Ok((name, size))
}

/// A path without links, as far as it is there.
fn whole(path: &Path) -> PathBuf {
    let here = || {
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Some(dir.canonicalize().ok()?.join(path.file_name()?))
    };
    path.canonicalize().ok().or_else(here).unwrap_or_else(|| path.to_owned())
}

/// Whether a path or URI can be meant.
fn is_place(place: &str) -> Result<(), String> {
    path_or_uri(place).map(drop)
}

fn marker(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, place)) if !place.is_empty() => {
            is_place(place)?;
            Ok((name.to_owned(), place.to_owned()))
        }
        _ => Err(format!(
            "'{text}' is no volume's marker: write NAME=PLACE, as in disk=/var/lib/larder/disk.marker"
        )),
    }
}

fn journal(text: &str) -> Result<(Option<String>, String), String> {
    // (No name has these; a URI has one of them before its parameters.)
    let is_name = |name: &str| !name.is_empty() && !name.contains(['/', ':', '?']);
    let (name, place) = match text.split_once('=') {
        Some((name, place)) if is_name(name) => (Some(name.to_owned()), place),
        _ => (None, text),
    };
    match place.is_empty() {
        false => is_place(place).map(|()| (name, place.to_owned())),
        true => Err(format!(
            "'{text}' is no volume's journal: write PLACE or NAME=PLACE, as in disk=/ssd/disk.journal"
        )),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        settings: Settings,
    }

    fn checked(more: &[&str]) -> Result<Writes, CliError> {
        let said = [
            "larder",
            "--cache",
            "/c",
            "--listen",
            "unix:/s",
            "--control",
            "/run/l.sock",
            "--volume",
            "v=file:/v",
            "--write",
            "back:journaled",
        ];
        let is = Flags::parse_from(said.iter().chain(more)).settings;
        is.writes.checked(&is)
    }

    #[test]
    fn a_marker_or_journal_in_place_of_socket_cache_or_store_is_refused() {
        for flag in ["--journal", "--marker"] {
            for (place, what) in [("/run/l.sock", "control"), ("/c", "the cache"), ("/v", "store")]
            {
                let error = checked(&[flag, &format!("v={place}")]).unwrap_err();
                let text = error.to_string();
                assert!(matches!(error, CliError::Usage(_)), "{text}");
                assert!(
                    text.contains(flag) && text.contains(place) && text.contains(what),
                    "{text}"
                );
            }
        }
        assert!(checked(&["--journal", "v=/ssd/j"]).is_ok());
    }

    #[test]
    fn a_place_of_an_unknown_scheme_is_refused_with_its_flag() {
        for flag in ["--journal", "--marker"] {
            let said = ["larder", "--cache", "/c", "--listen", "unix:/s", flag, "v=http://x"];
            let error = Flags::try_parse_from(said).err().unwrap().to_string();
            assert!(error.contains(flag) && error.contains("v=http://x"), "{error}");
        }
    }

    #[test]
    fn a_bound_that_the_log_does_not_have_is_refused_with_its_flag() {
        let writes = checked(&["--dirty-max", "v=1g"]).unwrap();
        let log = |segments| LogSize { segments, segment: 8 << 20 };
        assert!(writes.check_log(log(256)).is_ok());
        let text = writes.check_log(log(128)).unwrap_err().to_string();
        assert!(text.contains("--dirty-max 1 GiB: volume 'v'"), "{text}");
        assert!(text.contains("800 MiB at most"), "{text}");
    }
}
