//! The log.

use serde::Serialize;

/// How much is logged, and how it is written.
#[derive(Clone, Debug, PartialEq, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Log {
    /// How much is logged; all: what libraries say too. RUST_LOG in the environment (a level, or levels by module) wins over it
    #[arg(
        long,
        value_name = "LEVEL",
        default_value = "info",
        value_parser = ["error", "warn", "info", "debug", "trace", "all"],
        help_heading = "Log"
    )]
    pub log_level: String,
    /// How log lines are written
    #[arg(
        long,
        value_name = "FORMAT",
        default_value = "text",
        value_parser = ["text", "json"],
        help_heading = "Log"
    )]
    pub log_format: String,
    /// More log: -v connections and what clients do wrong, -vv each request, -vvv what libraries say too. Wins over --log-level
    /// and RUST_LOG
    #[arg(
        short = 'v',
        alias = "verbose",
        action = clap::ArgAction::Count,
        help_heading = "Log"
    )]
    #[serde(skip)]
    pub verbose: u8,
}

impl Default for Log {
    fn default() -> Log {
        crate::defaults()
    }
}
