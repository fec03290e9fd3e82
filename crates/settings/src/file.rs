//! Reading a TOML file of settings.

use std::ffi::OsString;
use std::marker::PhantomData;
use std::path::Path;

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, Command};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::error::{Misplaced, SettingsError, line_of, no_setting};
use crate::list::{SettingsList, is_named, key_of, switch, takes_value};
use crate::refusal::refusal_of_value;

/// A file being read.
pub(crate) struct File<'a, T> {
    pub(crate) path: &'a Path,
    pub(crate) text: &'a str,
    flags: &'a Command,
    list: PhantomData<T>,
}

impl<'a, T: SettingsList> File<'a, T> {
    pub(crate) fn new(path: &'a Path, text: &'a str, flags: &'a Command) -> File<'a, T> {
        File { path, text, flags, list: PhantomData }
    }

    /// For each key that is a flag, the flag and the words that would give it on the command line.
    pub(crate) fn read(&self) -> Result<Vec<(&'a Arg, Vec<OsString>)>, SettingsError> {
        let table = DeTable::parse(self.text)
            .map_err(|e| self.refused(Misplaced::of_toml(self.text, &e)))?;
        let mut out = Vec::new();
        for (key, value) in table.get_ref() {
            let (key, at) = (key.get_ref().as_ref(), key.span().start);
            let flag = self.flags.get_arguments().find(|f| key_of(f) == Some(key));
            let may_be_table = T::TABLES.iter().any(|t| t.key == key);
            match flag {
                // The list reads these itself.
                _ if may_be_table && matches!(value.get_ref(), DeValue::Table(_)) => {}
                None if may_be_table => {}
                None => return Err(self.at(at, key, &self.unknown(key))),
                Some(flag) => {
                    let mut words = Vec::new();
                    self.words(flag, key, value, &mut words)?;
                    out.push((flag, words));
                }
            }
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
    ) -> Result<(), SettingsError> {
        let at = value.span().start;
        let several = matches!(flag.get_action(), ArgAction::Append);
        match value.get_ref() {
            DeValue::Boolean(given) if !takes_value(flag) => {
                words.extend(switch(flag, *given).map(OsString::from));
                Ok(())
            }
            _ if !takes_value(flag) => Err(self.at(at, key, "write true or false")),
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
    ) -> Result<(), SettingsError> {
        let word = format!("--{key}={text}");
        let alone = self.flags.clone().mut_args(|f| f.required(false));
        match alone.clone().try_get_matches_from([&word]) {
            // What belongs together is looked at when all of it is.
            Err(e)
                if !matches!(
                    e.kind(),
                    ErrorKind::MissingRequiredArgument | ErrorKind::ArgumentConflict
                ) =>
            {
                Err(self.at(at, key, &refusal_of_value(&alone, &e)))
            }
            _ => {
                words.push(word.into());
                Ok(())
            }
        }
    }

    /// A value as it would be typed.
    fn scalar(&self, key: &str, value: &Spanned<DeValue<'_>>) -> Result<String, SettingsError> {
        let at = value.span().start;
        let what = match value.get_ref() {
            DeValue::String(text) => return Ok(text.clone().into_owned()),
            DeValue::Integer(number) => {
                let parsed = i64::from_str_radix(number.as_str(), number.radix());
                return parsed
                    .map(|n| T::number(key, n))
                    .map_err(|_| self.at(at, key, "the number is too large"));
            }
            DeValue::Float(number) => return Ok(number.as_str().to_owned()),
            DeValue::Boolean(_) => "true or false",
            DeValue::Datetime(_) => "a date",
            DeValue::Array(_) => "a list",
            DeValue::Table(_) => "a table",
        };
        Err(self.at(at, key, &format!("{what} is no value for it")))
    }

    /// What to say of a key that is no setting.
    fn unknown(&self, key: &str) -> String {
        let flags = || self.flags.get_arguments().filter(|f| !f.is_hide_set());
        let negated = flags().find(|f| f.get_long() == Some(key)).and_then(key_of);
        if let Some(negated) = negated {
            return format!("is said by '{negated}': write '{negated} = false'");
        }
        no_setting(key, flags().filter_map(key_of).chain(T::TABLES.iter().map(|t| t.key)))
    }

    fn at(&self, at: usize, key: &str, message: &str) -> SettingsError {
        let line = line_of(self.text, at);
        self.refused(Misplaced { line, key: key.to_owned(), message: message.to_owned() })
    }

    pub(crate) fn refused(&self, at: Misplaced) -> SettingsError {
        SettingsError::Parse { path: self.path.to_owned(), at, command: T::COMMAND }
    }
}
