//! The log of the servers: what its levels are, and who decides.
//!
//! `-v` wins over `RUST_LOG`, and that over `--log-level` or a file. A level is that of Larder's own parts: what the
//! libraries below say of HTTP and TLS is in it from `all` on.

use std::io::IsTerminal;

use larder_settings::Log;
use tracing_subscriber::EnvFilter;

use crate::error::CliError;

const VARIABLE: &str = "RUST_LOG";

/// The level that so many `-v` mean; `None` without one.
pub(crate) fn of_flags(verbose: u8) -> Option<&'static str> {
    match verbose {
        0 => None,
        1 => Some("debug"),
        2 => Some("trace"),
        _ => Some("all"),
    }
}

/// A level as directives.
fn directives(level: &str) -> &str {
    match level {
        // Every crate of ours has a name that begins so.
        "debug" => "info,larder=debug",
        "trace" => "info,larder=trace",
        "all" => "trace",
        level => level,
    }
}

pub(crate) fn filter(level: &str) -> EnvFilter {
    EnvFilter::new(directives(level))
}

/// What is logged: what `verbose` flags say, else what the environment says, else `configured`.
fn chosen(verbose: u8, configured: &str) -> Result<EnvFilter, CliError> {
    if let Some(level) = of_flags(verbose) {
        return Ok(filter(level));
    }
    let Some(text) = std::env::var_os(VARIABLE).filter(|text| !text.is_empty()) else {
        return Ok(filter(configured));
    };
    let text = text.to_string_lossy();
    let bad = |why: String| {
        CliError::Usage(format!(
            "{VARIABLE} '{text}': {why}: write a level (debug), or levels by module (info,larder_kv=trace), or unset it"
        ))
    };
    let level = text.trim();
    if ["all", "debug", "trace"].contains(&level) {
        return Ok(filter(level));
    }
    EnvFilter::try_new(level).map_err(|e| bad(e.to_string()))
}

/// Changes the level while the server runs.
pub(crate) type Reload = Box<dyn Fn(EnvFilter) + Send + Sync>;

/// Begins the log on standard error.
///
/// # Errors
/// `RUST_LOG` that cannot be understood.
pub(crate) fn start(log: &Log, colours: bool) -> Result<Reload, CliError> {
    let json = log.log_format == "json";
    let builder = tracing_subscriber::fmt()
        .with_env_filter(chosen(log.verbose, &log.log_level)?)
        .with_writer(std::io::stderr)
        // A log that cannot be written must not end the server: by default that is reported with a panicking print.
        .log_internal_errors(false);
    // The two builders, and so their handles, are of different types.
    let (done, reload): (_, Reload) = if json {
        let builder = builder.json().with_filter_reloading();
        let handle = builder.reload_handle();
        (builder.try_init(), Box::new(move |filter| drop(handle.reload(filter))))
    } else {
        let ansi = colours && std::io::stderr().is_terminal();
        let builder = builder.with_target(false).with_ansi(ansi).with_filter_reloading();
        let handle = builder.reload_handle();
        (builder.try_init(), Box::new(move |filter| drop(handle.reload(filter))))
    };
    if let Err(e) = done {
        noteln!("larder: the log cannot be set up: {e}");
    }
    Ok(reload)
}
