//! The whole way of settings, by a list that has one of each kind.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{CommandFactory, Parser};

use crate::list::said;
use crate::{Misplaced, SettingsList, Table, WithFile};

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
    /// Wipe it off [default: it stays]
    #[arg(long = "no-dust", action = clap::ArgAction::SetFalse, help_heading = "Care")]
    dust: bool,
    /// For tests
    #[arg(long, hide = true)]
    hidden: bool,
    #[arg(skip)]
    corners: BTreeMap<String, u8>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Corners {
    north: Option<u8>,
}

impl SettingsList for Flags {
    const COMMAND: &'static str = "program";
    const TABLES: &'static [Table] = &[Table {
        key: "corners",
        help: "What is in the corners",
        example: || "[corners]\nnorth = 1\n".to_owned(),
    }];

    fn read_tables(&mut self, text: &str) -> Result<(), Misplaced> {
        #[derive(serde::Deserialize)]
        struct Found {
            corners: Option<Corners>,
        }
        let found: Found = toml::from_str(text).map_err(|e| Misplaced::of_toml(text, &e))?;
        let Some(north) = found.corners.and_then(|c| c.north) else { return Ok(()) };
        if north > 9 {
            return Err(Misplaced { line: 2, key: "north".into(), message: "at most 9".into() });
        }
        self.corners.insert("north".into(), north);
        Ok(())
    }
}

#[derive(Parser)]
struct Program {
    #[command(flatten)]
    list: WithFile<Flags>,
    /// Not of a file
    #[arg(long)]
    alone: bool,
}

/// The command line with these words and a file of this text.
fn given(
    file: Option<&str>,
    words: &[&str],
) -> Result<(WithFile<Flags>, tempfile::TempDir), String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.toml");
    let mut all = vec!["program".to_owned()];
    if let Some(text) = file {
        std::fs::write(&path, text).unwrap();
        all.push(format!("--config={}", path.display()));
    }
    all.extend(words.iter().map(|w| (*w).to_owned()));
    let program = Program::try_parse_from(all).map_err(|e| said(&e))?;
    assert!(!program.alone);
    Ok((program.list, dir))
}

fn resolve(file: Option<&str>, words: &[&str]) -> Result<Flags, String> {
    let (list, _dir) = given(file, words)?;
    list.settings(&[]).map_err(|e| e.to_string())
}

fn flags(file: &str, words: &[&str]) -> Flags {
    resolve(Some(file), words).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn the_command_line_wins_and_lists_are_whole() {
    let file =
        "path = \"/a b\"\nnumber = 0x10\nshare = -0.25\nonly = true\n[thing]\nb = 2\na = \"one\"\n";
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
        ("path = \"p\"\n\nnumber = 65", 3, "'number': '65': write a whole number from 1 to 64"),
        ("number = \"many\"", 1, "'number': 'many': write a whole number from 1 to 64"),
        ("number = [3]", 1, "'number': a list is no value"),
        ("number = true", 1, "'number': true or false is no value"),
        ("only = 1", 1, "'only': write true or false"),
        ("path = \"p\"\n[number]\nx = 1", 2, "'number': a table is no value"),
        ("path = 1979-05-27", 1, "'path': a date"),
        ("number = 99999999999999999999", 1, "'number': the number is too large"),
        ("path = \"p\"\nnumber = ", 2, "'number': "),
        ("number = 1\nnumber = 2", 2, "'number': duplicate key"),
        ("[thing]\na = 1\nb = [1]", 3, "'thing': a list"),
        ("\nno-dust = true", 2, "'no-dust': is said by 'dust': write 'dust = false'"),
        ("dust = 0", 1, "'dust': write true or false"),
        ("corners = 5", 1, "'corners': invalid type"),
        ("[corner]\nnorth = 1", 1, "'corner': is no setting; there is 'corners'"),
        ("[corners]\nnort = 1", 2, "'nort': is no setting; there is 'north'"),
        ("[corners]\nnorth = 99", 2, "'north': at most 9"),
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
    let print = |file: Option<&str>, words: &[&str]| {
        let (list, _dir) = given(file, words).unwrap();
        assert!(list.is_printing());
        list.printed().unwrap_or_else(|e| panic!("{e}"))
    };
    let words = ["--path", "/a \"b\"\\c", "--share=1e3", "--thing=a=1", "--thing=b=2.5", "--only"];
    let text = print(None, &[&words[..], &["--print-config"]].concat());
    assert!(text.contains("\nthing = [\"a=1\", \"b=2.5\"]\n") && text.contains("\nnumber = 2\n"));
    assert!(text.lines().all(|line| line.len() <= 118), "{text}");
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

#[test]
fn a_flag_that_says_no_is_a_key_that_says_yes() {
    for (file, words, between, dust) in [
        ("", &[][..], &[][..], true),
        ("dust = false\n", &[], &[], false),
        ("dust = true\n", &[], &[], true),
        ("dust = true\n", &["--no-dust"], &[], false),
        ("dust = false\n", &[], &[("dust", "true")], true),
        ("", &["--no-dust"], &[("dust", "true")], false),
    ] {
        let file = format!("path = \"p\"\n{file}");
        let (list, _dir) = given(Some(&file), words).unwrap();
        assert_eq!(list.settings(between).unwrap().dust, dust, "{file} {words:?} {between:?}");
        let printed = list.printed().unwrap();
        assert!(printed.contains("\n# If false: wipe it off"), "{printed}");
    }
}

#[test]
fn what_comes_between_wins_over_the_file_and_its_last_word_counts() {
    let file = Some("path = \"p\"\nnumber = 3\nshare = 0.5\n");
    let (list, _dir) = given(file, &["--share=1"]).unwrap();
    let between = [("number", "4"), ("share", "2"), ("number", "5")];
    let settings = list.settings(&between).unwrap();
    assert_eq!((settings.number, settings.share), (5, Some(1.0)));
    assert!(list.is_given("share") && !list.is_given("number") && !list.is_given("dust"));
}

#[test]
fn tables_are_the_lists_to_read() {
    let settings = flags("path = \"p\"\n[corners]\nnorth = 3\n", &[]);
    assert_eq!(settings.corners["north"], 3);
    let (list, _dir) = given(Some("path = \"p\"\nhidden = true\n"), &["--print-config"]).unwrap();
    let text = list.printed().unwrap();
    assert!(text.ends_with("# What is in the corners\n# [corners]\n"), "{text}");
    assert!(text.contains("\nhidden = true\n"), "what is in effect is printed: {text}");
}

#[test]
fn the_page_has_every_flag_by_heading() {
    let text = crate::page::<Flags>(&Program::command(), "make it");
    for line in [
        "# Settings of `program`",
        "| `number` | `-n`, `--number NUMBER` | 2 | How many |",
        "| `thing` | `--thing NAME=WHAT` |  | Things and what they are; a description that is so long that it does not fit on one \
         line of the file that is printed |",
        "| `only` | `--only` | false | Only with things |",
        "## Care",
        "| `dust` | `--no-dust` | true | If false: wipe it off |",
        "| – | `--alone` |  | Not of a file |",
        "`corners`: What is in the corners.",
        "north = 1",
    ] {
        assert!(text.lines().any(|l| l == line), "no '{line}' in {text}");
    }
    assert!(!text.contains("hidden") && text.contains("`make it`"), "{text}");
}
