//! How a subcommand fails, and the exit code that goes with it.

use std::process::ExitCode;

/// A failure of a subcommand: one line naming the thing, its value and the remedy.
#[derive(Debug, thiserror::Error)]
#[allow(dead_code, reason = "each subcommand uses the kinds that it can meet")]
pub(crate) enum CliError {
    /// A flag, a configuration or an input that cannot be meant: exit code 2.
    #[error("{0}")]
    Usage(String),
    /// Something went wrong while running: exit code 1.
    #[error("{0}")]
    Runtime(String),
    /// The user asked for the end (SIGINT): exit code 130, as of a process that the signal ended.
    #[error("{0}")]
    Interrupted(String),
}

impl CliError {
    /// 2 for usage, 130 for an interruption, 1 for anything else.
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            CliError::Usage(_) => ExitCode::from(2),
            CliError::Runtime(_) => ExitCode::from(1),
            CliError::Interrupted(_) => ExitCode::from(130),
        }
    }
}
