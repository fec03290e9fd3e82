//! Flags that a TOML file may give too: every long flag of a command is a key of its file.
//!
//! There is no second list of settings: keys, descriptions and checks are those of the flags, as clap knows them. What
//! is on the command line wins over the file, a list as a whole.

use std::ffi::OsString;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::error::CliError;

const CONFIG: &str = "config";
const PRINT: &str = "print_config";
/// Columns of a printed file.
const WIDTH: usize = 118;

/// The flags `T`, on the command line or in the file that `--config` names.
#[derive(Debug)]
pub(crate) struct WithFile<T> {
    given: ArgMatches,
    flags: PhantomData<T>,
}

impl<T> FromArgMatches for WithFile<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(WithFile { given: matches.clone(), flags: PhantomData })
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

/// What [`WithFile::resolve`] comes to.
pub(crate) enum Resolved<T> {
    /// The flags, those of the file among them.
    Flags(Box<T>),
    /// The file that `--print-config` asks for.
    Printed(String),
}

impl<T: clap::Args> WithFile<T> {
    /// Reads the file, if one is named, and lays the command line over it. `name` is the command as it is typed.
    ///
    /// # Errors
    /// [`CliError::Usage`] naming file, line and key.
    pub(crate) fn resolve(&self, name: &'static str) -> Result<Resolved<T>, CliError> {
        let flags = T::augment_args(Command::new(name).no_binary_name(true));
        let path = self.given.get_one::<PathBuf>(CONFIG);
        let mut words = Vec::new();
        for flag in flags.get_arguments() {
            self.words_of(flag, &mut words);
        }
        if let Some(path) = path {
            let text = std::fs::read_to_string(path).map_err(|e| {
                CliError::Usage(format!(
                    "configuration file '{}' cannot be read: {e}",
                    path.display()
                ))
            })?;
            let file = File { path, text: &text, flags: &flags, name };
            for (flag, found) in file.read()? {
                let id = flag.get_id().as_str();
                if self.given.value_source(id) != Some(ValueSource::CommandLine)
                    && !is_default(flag, &found)
                {
                    words.extend(found);
                }
            }
        }
        let printing = self.given.get_flag(PRINT);
        // What is printed may be a file to be completed.
        let command = if printing { flags.clone().mut_args(|f| f.required(false)) } else { flags };
        let matches = command.clone().try_get_matches_from(words).map_err(|e| {
            let told = said(&e);
            CliError::Usage(match path {
                Some(path) => format!("{told} (configuration file '{}')", path.display()),
                None => told,
            })
        })?;
        if printing {
            return Ok(Resolved::Printed(print(name, &command, &matches)));
        }
        let flags = T::from_arg_matches(&matches).map_err(|e| CliError::Usage(said(&e)))?;
        Ok(Resolved::Flags(Box::new(flags)))
    }

    /// The words that gave this flag on the command line.
    fn words_of(&self, flag: &Arg, words: &mut Vec<OsString>) {
        let id = flag.get_id().as_str();
        if self.given.value_source(id) != Some(ValueSource::CommandLine) {
            return;
        }
        if let (ArgAction::Count, Some(short)) = (flag.get_action(), flag.get_short()) {
            // For the command line alone: it has no long name, and so no key.
            for _ in 0..self.given.get_count(id) {
                words.push(format!("-{short}").into());
            }
            return;
        }
        let Some(long) = flag.get_long() else { return };
        if !takes_value(flag) {
            words.push(format!("--{long}").into());
            return;
        }
        for value in self.given.get_raw(id).into_iter().flatten() {
            let mut word = OsString::from(format!("--{long}="));
            word.push(value);
            words.push(word);
        }
    }
}

fn takes_value(flag: &Arg) -> bool {
    matches!(flag.get_action(), ArgAction::Set | ArgAction::Append)
}

/// Whether these words say what holds anyway. A printed file has the defaults of flags that may not be given without another.
fn is_default(flag: &Arg, words: &[OsString]) -> bool {
    let (Some(long), [default]) = (flag.get_long(), flag.get_default_values()) else {
        return false;
    };
    let mut said = OsString::from(format!("--{long}="));
    said.push(default);
    takes_value(flag) && words == [said]
}

/// Flags that may be given several times with a NAME before the value: in the file, also a table.
fn is_named(flag: &Arg) -> bool {
    matches!(flag.get_action(), ArgAction::Append)
        && flag.get_value_names().is_some_and(|n| n.iter().any(|n| n.starts_with("NAME=")))
}

/// What clap says, in one line.
fn said(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let lines = text.lines().map(str::trim).take_while(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" ")
}

/// A file being read.
struct File<'a> {
    path: &'a Path,
    text: &'a str,
    flags: &'a Command,
    name: &'a str,
}

impl File<'_> {
    /// For each key, the flag and the words that would give it on the command line.
    fn read(&self) -> Result<Vec<(&Arg, Vec<OsString>)>, CliError> {
        let table = DeTable::parse(self.text).map_err(|e| {
            let at = e.span().map_or(0, |s| s.start);
            let line = self.text.lines().nth(self.line(at) - 1).unwrap_or_default();
            let key = line.split('=').next().unwrap_or_default().trim().to_owned();
            self.refused(at, &key, e.message())
        })?;
        let mut out = Vec::new();
        for (key, value) in table.get_ref() {
            let (key, at) = (key.get_ref().as_ref(), key.span().start);
            let flag = self.flags.get_arguments().find(|f| f.get_long() == Some(key));
            let flag = flag.ok_or_else(|| self.refused(at, key, &self.unknown(key)))?;
            let mut words = Vec::new();
            self.words(flag, key, value, &mut words)?;
            out.push((flag, words));
        }
        Ok(out)
    }

    /// The words of one key, each tried alone.
    fn words(
        &self,
        flag: &Arg,
        key: &str,
        value: &Spanned<DeValue<'_>>,
        words: &mut Vec<OsString>,
    ) -> Result<(), CliError> {
        let at = value.span().start;
        let several = matches!(flag.get_action(), ArgAction::Append);
        match value.get_ref() {
            DeValue::Boolean(given) if !takes_value(flag) => {
                if *given {
                    words.push(format!("--{key}").into());
                }
                Ok(())
            }
            _ if !takes_value(flag) => Err(self.refused(at, key, "write true or false")),
            DeValue::Array(list) if several => {
                for entry in list.iter() {
                    let text = self.scalar(key, entry)?;
                    self.add(entry.span().start, key, text, words)?;
                }
                Ok(())
            }
            DeValue::Table(table) if is_named(flag) => {
                for (name, entry) in table {
                    let text = format!("{}={}", name.get_ref(), self.scalar(key, entry)?);
                    self.add(name.span().start, key, text, words)?;
                }
                Ok(())
            }
            _ => self.add(at, key, self.scalar(key, value)?, words),
        }
    }

    fn add(
        &self,
        at: usize,
        key: &str,
        text: String,
        words: &mut Vec<OsString>,
    ) -> Result<(), CliError> {
        let word = format!("--{key}={text}");
        let alone = self.flags.clone().mut_args(|f| f.required(false));
        match alone.try_get_matches_from([&word]) {
            // What belongs together is looked at when all of it is.
            Err(e)
                if !matches!(
                    e.kind(),
                    ErrorKind::MissingRequiredArgument | ErrorKind::ArgumentConflict
                ) =>
            {
                Err(self.refused(at, key, &said(&e)))
            }
            _ => {
                words.push(word.into());
                Ok(())
            }
        }
    }

    /// A value as it would be typed.
    fn scalar(&self, key: &str, value: &Spanned<DeValue<'_>>) -> Result<String, CliError> {
        let what = match value.get_ref() {
            DeValue::String(text) => return Ok(text.clone().into_owned()),
            DeValue::Integer(number) => {
                let parsed = i64::from_str_radix(number.as_str(), number.radix());
                return parsed
                    .map(|n| n.to_string())
                    .map_err(|_| self.refused(value.span().start, key, "the number is too large"));
            }
            DeValue::Float(number) => return Ok(number.as_str().to_owned()),
            DeValue::Boolean(_) => "true or false",
            DeValue::Datetime(_) => "a date",
            DeValue::Array(_) => "a list",
            DeValue::Table(_) => "a table",
        };
        Err(self.refused(value.span().start, key, &format!("{what} is no value for it")))
    }

    /// What to say of a key that is no flag.
    fn unknown(&self, key: &str) -> String {
        let tried = self.flags.clone().try_get_matches_from([format!("--{key}=x")]);
        let near =
            tried.err().and_then(|e| e.get(ContextKind::SuggestedArg).map(|s| s.to_string()));
        match near.as_deref().and_then(|near| near.strip_prefix("--")) {
            Some(near) => format!("is no setting; there is '{near}'"),
            None => "is no setting".to_owned(),
        }
    }

    /// Line of a place in the text, from 1.
    fn line(&self, at: usize) -> usize {
        1 + self.text.as_bytes().iter().take(at).filter(|&&b| b == b'\n').count()
    }

    fn refused(&self, at: usize, key: &str, message: &str) -> CliError {
        CliError::Usage(format!(
            "configuration file '{}' line {}: '{key}': {message} ({} --print-config shows every key)",
            self.path.display(),
            self.line(at),
            self.name,
        ))
    }
}

/// The flags as a file, each under its description; those that are not given are commented out.
fn print(name: &str, flags: &Command, matches: &ArgMatches) -> String {
    let mut out = String::new();
    comment(
        &mut out,
        &format!(
            "The effective configuration of `{name}`, as --config FILE reads it. `{name} --help` shows the flags."
        ),
    );
    for flag in flags.get_arguments() {
        let Some(long) = flag.get_long() else { continue };
        if flag.is_hide_set() {
            continue;
        }
        out.push('\n');
        comment(&mut out, &flag.get_help().map(ToString::to_string).unwrap_or_default());
        let id = flag.get_id().as_str();
        if !takes_value(flag) {
            out.push_str(&format!("{long} = {}\n", matches.get_flag(id)));
            continue;
        }
        let values: Vec<String> = matches
            .get_raw(id)
            .into_iter()
            .flatten()
            .map(|value| literal(&value.to_string_lossy()))
            .collect();
        match (values.as_slice(), flag.get_action()) {
            ([], _) => out.push_str(&format!("# {long} =\n")),
            (many, ArgAction::Append) => {
                out.push_str(&format!("{long} = [{}]\n", many.join(", ")));
            }
            ([one, ..], _) => out.push_str(&format!("{long} = {one}\n")),
        }
    }
    out
}

fn comment(out: &mut String, text: &str) {
    let mut line = String::from("#");
    for word in text.split_whitespace() {
        if line.len() + 1 + word.len() > WIDTH {
            out.push_str(&line);
            out.push('\n');
            line = String::from("#");
        }
        line.push(' ');
        line.push_str(word);
    }
    out.push_str(&line);
    out.push('\n');
}

/// A number where it reads back as it is, else a string.
fn literal(text: &str) -> String {
    let same = |number: Option<String>| number.is_some_and(|n| n == text);
    if same(text.parse::<i64>().ok().map(|n| n.to_string())) {
        return text.to_owned();
    }
    if text.contains('.') && same(text.parse::<f64>().ok().map(|n| n.to_string())) {
        return text.to_owned();
    }
    toml::Value::String(text.to_owned()).to_string()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, PartialEq, clap::Args)]
    struct Flags {
        /// Where it is
        #[arg(long)]
        path: PathBuf,
        /// How many
        #[arg(long, short, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
        number: u16,
        /// A share
        #[arg(long, allow_negative_numbers = true)]
        share: Option<f64>,
        /// Things and what they are; a description that is so long that it does not fit on one line of the file that is printed
        #[arg(long = "thing", value_name = "NAME=WHAT")]
        things: Vec<String>,
        /// Only with things
        #[arg(long, requires = "things")]
        only: bool,
        /// How many things
        #[arg(long, default_value_t = 8, requires = "things")]
        most: u16,
    }

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        flags: WithFile<Flags>,
    }

    fn resolve(file: Option<&str>, words: &[&str]) -> Result<Resolved<Flags>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.toml");
        let mut all = vec!["program".to_owned()];
        if let Some(text) = file {
            std::fs::write(&path, text).unwrap();
            all.push(format!("--config={}", path.display()));
        }
        all.extend(words.iter().map(|w| (*w).to_owned()));
        let program = Program::try_parse_from(all).map_err(|e| said(&e))?;
        program.flags.resolve("program").map_err(|e| e.to_string())
    }

    fn flags(file: &str, words: &[&str]) -> Flags {
        match resolve(Some(file), words) {
            Ok(Resolved::Flags(flags)) => *flags,
            Ok(Resolved::Printed(text)) => panic!("{text}"),
            Err(e) => panic!("{e}"),
        }
    }

    #[test]
    fn the_command_line_wins_and_lists_are_whole() {
        let file = "path = \"/a b\"\nnumber = 0x10\nshare = -0.25\nonly = true\n[thing]\nb = 2\na = \"one\"\n";
        let all = flags(file, &[]);
        assert_eq!((all.path.as_path(), all.number), (Path::new("/a b"), 16));
        assert_eq!((all.share, all.only), (Some(-0.25), true));
        assert_eq!(all.things, ["a=one", "b=2"]);
        let over = flags(file, &["-n", "3", "--thing", "c=3", "--path=/x"]);
        assert_eq!((over.number, over.path.as_path()), (3, Path::new("/x")));
        assert_eq!((over.things.as_slice(), over.share), (&["c=3".to_owned()][..], Some(-0.25)));
        let listed = flags("thing = [\"z=1\", \"y=2\"]\npath = \"p\"\nonly = false", &[]);
        assert_eq!((listed.things, listed.number), (vec!["z=1".to_owned(), "y=2".to_owned()], 2));
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, line, words) in [
            ("path = \"p\"\nnumbr = 3\n", 2, "'numbr': is no setting; there is 'number'"),
            ("path = \"p\"\nzzz = 3\n", 2, "'zzz': is no setting ("),
            ("path = \"p\"\n\nnumber = 65", 3, "'number': invalid value '65'"),
            ("number = \"many\"", 1, "'number': invalid value 'many'"),
            ("number = [3]", 1, "'number': a list is no value"),
            ("number = true", 1, "'number': true or false is no value"),
            ("only = 1", 1, "'only': write true or false"),
            ("path = \"p\"\n[number]\nx = 1", 2, "'number': a table is no value"),
            ("path = 1979-05-27", 1, "'path': a date"),
            ("number = 99999999999999999999", 1, "'number': the number is too large"),
            ("path = \"p\"\nnumber = ", 2, "'number': "),
            ("number = 1\nnumber = 2", 2, "'number': duplicate key"),
            ("[thing]\na = 1\nb = [1]", 3, "'thing': a list"),
        ] {
            let Err(error) = resolve(Some(text), &["--path=x"]) else { panic!("{text}") };
            let at = format!("x.toml' line {line}: ");
            assert!(error.contains(&at) && error.contains(words), "{text}: {error}");
            assert!(!error.contains('\n') && error.contains("program --print-config"), "{error}");
        }
    }

    #[test]
    fn what_is_missing_is_said() {
        let Err(error) = resolve(None, &[]) else { panic!() };
        assert!(error.contains("required") && error.contains("--path"), "{error}");
        let Err(error) = resolve(Some("number = 3"), &[]) else { panic!() };
        assert!(error.contains("--path <PATH>") && error.contains("x.toml"), "{error}");
        let Err(error) = resolve(Some("path = \"p\"\nonly = true"), &[]) else { panic!() };
        assert!(error.contains("--thing"), "{error}");
    }

    #[test]
    fn what_is_printed_reads_back() {
        let print = |file: Option<&str>, words: &[&str]| match resolve(file, words) {
            Ok(Resolved::Printed(text)) => text,
            Ok(Resolved::Flags(_)) => panic!("not printed"),
            Err(e) => panic!("{e}"),
        };
        let words =
            ["--path", "/a \"b\"\\c", "--share=1e3", "--thing=a=1", "--thing=b=2.5", "--only"];
        let text = print(None, &[&words[..], &["--print-config"]].concat());
        assert!(
            text.contains("\nthing = [\"a=1\", \"b=2.5\"]\n") && text.contains("\nnumber = 2\n")
        );
        assert!(text.lines().all(|line| line.len() <= WIDTH), "{text}");
        assert_eq!(print(Some(&text), &["--print-config"]), text);
        let read = flags(&text, &[]);
        assert_eq!(read.path, Path::new("/a \"b\"\\c"));
        assert_eq!((read.share, read.only, read.things.len()), (Some(1000.0), true, 2));
        // Defaults of flags that need another are no mistake.
        let bare = print(None, &["--print-config", "--path=p"]);
        assert!(bare.contains("\nmost = 8\n"), "{bare}");
        assert_eq!((flags(&bare, &[]).most, print(Some(&bare), &["--print-config"])), (8, bare));
        // A file to begin with.
        let empty = print(None, &["--print-config"]);
        assert!(
            empty.contains("\n# path =\n")
                && empty.contains("\n# thing =\n")
                && empty.contains("\nonly = false\n"),
            "{empty}"
        );
    }
}
