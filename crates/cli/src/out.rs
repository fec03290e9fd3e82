//! Standard output and standard error, which may be full, or gone. `println!` and `eprintln!` panic then; clippy refuses
//! them in this crate.

use std::io::{ErrorKind, Write};

use crate::error::CliError;

/// `println!` that is a `Result<(), CliError>`.
macro_rules! outln {
    ($($arg:tt)*) => {
        $crate::out::print(&format!("{}\n", format_args!($($arg)*)))
    };
}

/// `outln!` of a line for people, which goes on below where standard output is narrower.
macro_rules! proseln {
    ($($arg:tt)*) => {
        $crate::table::print_prose(&format!($($arg)*), 2)
    };
}

/// `eprintln!` that goes on where nobody reads: a remark must not end what it is about.
macro_rules! noteln {
    ($($arg:tt)*) => {
        {
            use std::io::Write as _;
            writeln!(std::io::stderr(), $($arg)*).ok();
        }
    };
}

/// Prints to standard output, now rather than when the process ends; a reader that went away (`| head`) is no error.
///
/// # Errors
/// Standard output cannot be written to.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(CliError::Runtime(format!("cannot write to standard output: {e}")))
        }
        _ => Ok(()),
    }
}

/// Says who may look, where a live page is open to more than this machine.
pub(crate) fn warn_of_open_page(address: std::net::SocketAddr) {
    if !address.ip().is_loopback() {
        tracing::warn!(
            "whoever reaches http://{address}/ may look at the live page and /metrics: they ask for no password; --http \
             127.0.0.1:{} shows them to this machine alone",
            address.port()
        );
    }
}

/// What reads back from `value` as JSON. Unlike `serde_json::to_value`, which widens numbers of 32 bits to 64, it has them as
/// text has them: 0.2, not 0.20000000298.
///
/// # Errors
/// What JSON cannot carry.
pub(crate) fn as_json(value: &impl serde::Serialize) -> Result<serde_json::Value, CliError> {
    let failed = |e: serde_json::Error| CliError::Runtime(e.to_string());
    serde_json::from_str(&serde_json::to_string(value).map_err(failed)?).map_err(failed)
}

/// Prints `value` as indented JSON.
///
/// # Errors
/// As [`print`].
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(value).map_err(|e| CliError::Runtime(e.to_string()))?;
    outln!("{text}")
}
