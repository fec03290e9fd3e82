//! Files that simulations leave, and those that say what to simulate.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use larder_sim::report::Report;
use larder_trace::{OutputFile, is_same_file};

use crate::error::CliError;

/// An experiment or a sweep is written by people; what is longer than this is none.
const TEXT_AT_MOST: u64 = 1 << 20;

/// A file that cannot be read or written.
pub(super) fn failed_file(path: &Path, e: &std::io::Error) -> CliError {
    CliError::Runtime(format!("'{}': {e}", path.display()))
}

/// The text of a file that says what to simulate; `what` is what it should be.
pub(super) fn read_text(path: &Path, what: &str) -> Result<String, String> {
    let failed = |e: std::io::Error| format!("cannot read {what} '{}': {e}", path.display());
    let mut text = String::new();
    let read = File::open(path).and_then(|f| f.take(TEXT_AT_MOST + 1).read_to_string(&mut text));
    if read.map_err(failed)? as u64 > TEXT_AT_MOST {
        return Err(format!("'{}' is no {what}: it has more than 1 MiB", path.display()));
    }
    Ok(text)
}

/// A file that a flag names, prepared before the simulation, so that one that cannot be written is told before it.
pub(super) struct Output {
    file: OutputFile,
    path: PathBuf,
    flag: &'static str,
}

impl Output {
    /// `inputs` are the names of what is read: none of them is to be written over.
    pub(super) fn create(
        path: &Path,
        flag: &'static str,
        inputs: &[&str],
    ) -> Result<Output, CliError> {
        let name = path.display().to_string();
        if inputs.iter().any(|input| is_same_file(input, &name)) {
            return Err(CliError::Usage(format!("{flag}: '{name}' is read: name another file")));
        }
        let file = OutputFile::create(path)
            .map_err(|e| CliError::Runtime(format!("{flag}: cannot write '{name}': {e}")))?;
        Ok(Output { file, path: path.to_owned(), flag })
    }

    pub(super) fn write(mut self, bytes: &[u8]) -> Result<(), CliError> {
        let written = self.file.write_all(bytes).and_then(|()| self.file.commit());
        written.map_err(|e| {
            CliError::Runtime(format!("{}: cannot write '{}': {e}", self.flag, self.path.display()))
        })
    }

    pub(super) fn write_report(self, report: &Report) -> Result<(), CliError> {
        let html = report.html().map_err(|e| CliError::Runtime(e.to_string()))?;
        self.write(html.as_bytes())
    }
}

/// Writes a file of an output directory.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    let written = OutputFile::create(path).and_then(|mut file| {
        file.write_all(bytes)?;
        file.commit()
    });
    written.map_err(|e| failed_file(path, &e))
}
