//! Settings from several sources, each laid over the next.
//!
//! Whatever a source says is brought to the words that would say it on a command line, and all of them are read by clap: there
//! is one reader and one set of checks.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};
use larder_base::ByteSize;

use crate::error::SettingsError;
use crate::file::File;
use crate::list::{self, SettingsList, key_of, said, switch, takes_value};

const CONFIG: &str = "config";
const PRINT: &str = "print_config";

/// What a source says of a key: the value as it would be typed, true or false for a flag without one.
pub type Said<'a> = (&'a str, &'a str);

/// The settings `T`, on the command line or in the file that `--config` names.
#[derive(Debug)]
pub struct WithFile<T> {
    given: ArgMatches,
    list: PhantomData<T>,
}

impl<T> FromArgMatches for WithFile<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(WithFile { given: matches.clone(), list: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.given = matches.clone();
        Ok(())
    }
}

impl<T: clap::Args> clap::Args for WithFile<T> {
    fn augment_args(command: Command) -> Command {
        // What is required may be in the file.
        let flags = T::augment_args(command).mut_args(|flag| {
            if flag.is_required_set() {
                flag.required(false).required_unless_present_any([CONFIG, PRINT])
            } else {
                flag
            }
        });
        flags
            .arg(
                Arg::new(CONFIG)
                    .long("config")
                    .value_name("FILE")
                    .value_parser(clap::value_parser!(PathBuf))
                    .help_heading("Configuration file")
                    .help("Configuration file, TOML, whose keys are the names of these flags; flags win over it"),
            )
            .arg(
                Arg::new(PRINT)
                    .long("print-config")
                    .action(ArgAction::SetTrue)
                    .help_heading("Configuration file")
                    .help("Print the effective configuration as a commented file, and exit"),
            )
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<T: SettingsList> WithFile<T> {
    /// Whether `--print-config` asks for a file instead of a server.
    pub fn is_printing(&self) -> bool {
        self.given.get_flag(PRINT)
    }

    /// Whether the command line has this setting.
    pub fn is_given(&self, key: &str) -> bool {
        let flags = list::command::<T>();
        let flag = flags.get_arguments().find(|f| key_of(f) == Some(key));
        flag.is_some_and(|f| self.given.value_source(f.get_id().as_str()) == COMMAND_LINE)
    }

    /// The settings: the command line over `between` over the file, if one is named.
    ///
    /// # Errors
    /// What cannot be meant, with file, line and key where it is in the file.
    pub fn settings(&self, between: &[Said<'_>]) -> Result<T, SettingsError> {
        let flags = list::command::<T>();
        let file = self.read()?;
        let file = file.as_ref().map(|(path, text)| File::<T>::new(path, text, &flags));
        settings(self.matches(&flags, between, file.as_ref(), &flags)?, file.as_ref())
    }

    /// The file that `--print-config` asks for, of a list whose defaults are all in it: what is given, as it is given. It may
    /// lack what is required.
    ///
    /// # Errors
    /// As [`WithFile::settings`].
    pub fn printed(&self) -> Result<String, SettingsError> {
        let flags = list::command::<T>();
        let file = self.read()?;
        let file = file.as_ref().map(|(path, text)| File::<T>::new(path, text, &flags));
        let incomplete = flags.clone().mut_args(|f| f.required(false));
        let matches = self.matches(&flags, &[], file.as_ref(), &incomplete)?;
        Ok(crate::print::<T>(&crate::print::as_given(&flags, &matches)))
    }

    fn read(&self) -> Result<Option<(PathBuf, String)>, SettingsError> {
        let Some(path) = self.given.get_one::<PathBuf>(CONFIG) else { return Ok(None) };
        let text = std::fs::read_to_string(path)
            .map_err(|source| SettingsError::Read { path: path.clone(), source })?;
        Ok(Some((path.clone(), text)))
    }

    fn matches(
        &self,
        flags: &Command,
        between: &[Said<'_>],
        file: Option<&File<'_, T>>,
        reader: &Command,
    ) -> Result<ArgMatches, SettingsError> {
        let mut words = Words::default();
        for flag in flags.get_arguments() {
            if self.given.value_source(flag.get_id().as_str()) == COMMAND_LINE {
                words.add(flag, self.words_of(flag));
            }
        }
        lay(words, flags, between, file, reader)
    }

    /// The words that gave this flag on the command line.
    fn words_of(&self, flag: &Arg) -> Vec<OsString> {
        let id = flag.get_id().as_str();
        if let (ArgAction::Count, Some(short)) = (flag.get_action(), flag.get_short()) {
            return vec![format!("-{short}").into(); usize::from(self.given.get_count(id))];
        }
        let Some(long) = flag.get_long() else { return Vec::new() };
        if !takes_value(flag) {
            return vec![format!("--{long}").into()];
        }
        self.given.get_raw(id).into_iter().flatten().map(|value| word(long, value)).collect()
    }
}

const COMMAND_LINE: Option<ValueSource> = Some(ValueSource::CommandLine);

/// The settings that the text of a file states; `path` is for the messages.
///
/// # Errors
/// [`SettingsError::Parse`], naming key and line.
pub fn of_file<T: SettingsList>(text: &str, path: &Path) -> Result<T, SettingsError> {
    let flags = list::command::<T>();
    let file = File::<T>::new(path, text, &flags);
    settings(lay(Words::default(), &flags, &[], Some(&file), &flags)?, Some(&file))
}

/// The settings that `sources` state, the first over the others.
///
/// # Errors
/// [`SettingsError::Flags`] for a value that cannot be meant.
pub fn of_sources<T: SettingsList>(sources: &[&[Said<'_>]]) -> Result<T, SettingsError> {
    let flags = list::command::<T>();
    let mut words = Words::default();
    for source in sources {
        words.add_source(&flags, source);
    }
    settings(lay::<T>(words, &flags, &[], None, &flags)?, None)
}

fn settings<T: SettingsList>(
    matches: ArgMatches,
    file: Option<&File<'_, T>>,
) -> Result<T, SettingsError> {
    let mut settings = T::from_arg_matches(&matches).map_err(|e| SettingsError::Flags(said(&e)))?;
    if let Some(file) = file {
        settings.read_tables(file.text).map_err(|at| file.refused(at))?;
    }
    Ok(settings)
}

fn lay<T: SettingsList>(
    mut words: Words,
    flags: &Command,
    between: &[Said<'_>],
    file: Option<&File<'_, T>>,
    reader: &Command,
) -> Result<ArgMatches, SettingsError> {
    words.add_source(flags, between);
    if let Some(file) = file {
        for (flag, found) in file.read()? {
            if !is_default(flag, &found) {
                words.add(flag, found);
            }
        }
    }
    reader.clone().try_get_matches_from(words.all).map_err(|e| {
        let told = said(&e);
        SettingsError::Flags(match file {
            Some(file) => format!("{told} (configuration file '{}')", file.path.display()),
            None => told,
        })
    })
}

/// The words of a command line, and the flags that it has them of.
#[derive(Default)]
struct Words {
    all: Vec<OsString>,
    taken: Vec<String>,
}

impl Words {
    /// Adds the words of a flag, unless a source above has said it.
    fn add(&mut self, flag: &Arg, words: Vec<OsString>) {
        let id = flag.get_id().as_str();
        if !self.taken.iter().any(|t| t == id) {
            self.taken.push(id.to_owned());
            self.all.extend(words);
        }
    }

    /// Adds a source. What it says twice is as it says last, unless there can be several.
    fn add_source(&mut self, flags: &Command, source: &[Said<'_>]) {
        let mut all: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (key, value) in source {
            all.entry(key).or_default().push(value);
        }
        for (key, values) in all {
            let flag = flags.get_arguments().find(|f| key_of(f) == Some(key));
            debug_assert!(flag.is_some(), "'{key}' is no setting");
            let Some(flag) = flag else { continue };
            let first = match flag.get_action() {
                ArgAction::Append => 0,
                _ => values.len() - 1,
            };
            self.add(flag, values[first..].iter().flat_map(|value| typed(flag, value)).collect());
        }
    }
}

/// The words that give a flag this value.
fn typed(flag: &Arg, value: &str) -> Vec<OsString> {
    if takes_value(flag) {
        return vec![word(flag.get_long().unwrap_or_default(), value.as_ref())];
    }
    switch(flag, value == "true").into_iter().map(Into::into).collect()
}

fn word(long: &str, value: &std::ffi::OsStr) -> OsString {
    let mut word = OsString::from(format!("--{long}="));
    word.push(value);
    word
}

/// Whether these words say what holds anyway. A printed file has the defaults of flags that may not be given without another.
fn is_default(flag: &Arg, words: &[OsString]) -> bool {
    let (Some(long), [default], [said]) = (flag.get_long(), flag.get_default_values(), words)
    else {
        return false;
    };
    let size = |text: &str| text.parse::<ByteSize>().ok();
    let value =
        said.to_str().and_then(|w| w.strip_prefix("--")?.strip_prefix(long)?.strip_prefix('='));
    let (Some(value), Some(default)) = (value, default.to_str()) else { return false };
    // As sizes 1.25 and 1.1 were the same byte: numbers are compared as numbers.
    let number = |text: &str| text.parse::<f64>().ok();
    let same = match (number(value), number(default)) {
        (Some(value), Some(default)) => value == default,
        _ => value == default || size(value).is_some_and(|s| size(default) == Some(s)),
    };
    takes_value(flag) && same
}
