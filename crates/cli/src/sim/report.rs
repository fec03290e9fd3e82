//! Files that simulations leave: written whole or not at all.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use larder_sim::report::Report;

use crate::error::CliError;

/// A file that cannot be read or written.
pub(super) fn failed_file(path: &Path, e: &std::io::Error) -> CliError {
    CliError::Runtime(format!("'{}': {e}", path.display()))
}

/// Writes beside the file and renames, so that it is there whole, or as it was before.
pub(super) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    let failed = |e| failed_file(path, &e);
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let new = PathBuf::from(name);
    let mut file = File::create(&new).map_err(failed)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(failed)?;
    std::fs::rename(&new, path).map_err(failed)
}

/// Writes a report to the file that `--html` names.
pub(super) fn write_html(report: &Report, path: &Path) -> Result<(), CliError> {
    let html = report.html().map_err(|e| CliError::Runtime(e.to_string()))?;
    write_atomically(path, html.as_bytes()).map_err(|e| CliError::Runtime(format!("--html: {e}")))
}
