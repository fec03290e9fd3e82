//! Signals to a server: what ends it in good order, what has it read files again, and what must not end it.

use signal_hook::consts::{
    SIGALRM, SIGHUP, SIGINT, SIGIO, SIGPROF, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM,
    SIGXCPU, SIGXFSZ,
};
use signal_hook::iterator::Signals;

use crate::error::CliError;

/// Stop in good order.
const STOP: [i32; 3] = [SIGINT, SIGTERM, SIGQUIT];
/// They would end a process that does not expect them, and mean nothing here. (A server that ends so leaves no checkpoint.)
const MEANINGLESS: [i32; 7] = [SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGIO, SIGXCPU, SIGXFSZ];

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// To stop.
    Stop,
    /// To read certificates and the like again.
    Reload,
    /// SIGUSR1, which each server takes in its own way.
    User,
    /// Nothing.
    Nothing,
}

impl Meaning {
    pub(crate) fn of(signal: i32) -> Meaning {
        match signal {
            SIGHUP => Meaning::Reload,
            SIGUSR1 => Meaning::User,
            signal if STOP.contains(&signal) => Meaning::Stop,
            _ => Meaning::Nothing,
        }
    }
}

/// From here on signals come out of this, instead of ending the process.
///
/// # Errors
/// When the system refuses the handlers.
pub(crate) fn take() -> Result<Signals, CliError> {
    let all = STOP.iter().chain(&[SIGHUP, SIGUSR1]).chain(&MEANINGLESS);
    Signals::new(all).map_err(|e| CliError::Runtime(format!("signal handlers: {e}")))
}

/// One line about a signal that does nothing.
pub(crate) fn tell_ignored(signal: i32) {
    tracing::info!(
        "signal {signal} means nothing here: SIGTERM stops, SIGHUP reads certificates and the like again"
    );
}
