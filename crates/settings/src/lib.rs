//! What an operator may set. A server has one list of settings, a struct of clap's ([`SettingsList`]); from it come
//!
//! | what | by |
//! | --- | --- |
//! | the flags of its command, and their help | clap |
//! | `--config FILE`: the keys of a TOML file | [`WithFile`] |
//! | `--print-config`: such a file, with what is in effect | [`print`](fn@print) |
//! | the reference page under `docs/` | [`page`](fn@page) |
//!
//! so that a setting is declared, described and given its default in one place. The command line wins over what comes between
//! (`larder kv`'s `-o`), and that over the file, a list as a whole. What several servers have is declared once, in the groups
//! [`Tls`], [`DriveLife`], [`LivePage`], [`Log`] and [`Recording`], with its checks.
//!
//! A key of the file has the name of its flag. Two things differ: the key of a flag that says no (`--no-first-fill`) says yes
//! (`first-fill = false`), and a setting may be a table of the file, which no flag is ([`Table`]).

#![forbid(unsafe_code)]

mod error;
mod file;
mod list;
mod page;
mod print;
mod refusal;
mod shared;
mod sources;
mod spaces;
#[cfg(test)]
mod tests;

pub use error::{Misplaced, Refused, SettingsError, nearest};
pub use list::{SettingsList, Table, default_is, defaults};
pub use page::page;
pub use print::print;
pub use refusal::refusal;
pub use shared::{DriveLife, LivePage, Log, Recording, Tls};
pub use sources::{Said, WithFile, of_file, of_sources};
pub use spaces::without_spaces;
