//! Recording a run.

use std::path::PathBuf;

use larder_base::ByteSize;
use larder_runtime::record::RecordConfig;
use serde::Serialize;

use crate::Refused;

/// Less is not worth a file: a chunk of every stream should fit.
const LEAST: ByteSize = ByteSize::mib(4);

/// What is recorded of a run, for `larder sim replay`.
#[derive(Clone, Debug, PartialEq, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Recording {
    /// Record all inputs and decisions, for larder sim replay. The file must not be there yet (it will hold keys, where there
    /// are keys), and the cache must be empty
    #[arg(long, value_name = "FILE", help_heading = "Recording")]
    pub record: Option<PathBuf>,
    /// Bytes at which recording ends
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "8g",
        requires = "record",
        help_heading = "Recording"
    )]
    pub record_limit: ByteSize,
}

impl Default for Recording {
    fn default() -> Recording {
        crate::defaults()
    }
}

impl Recording {
    /// What to record, if anything.
    ///
    /// # Errors
    /// A limit that nothing fits in.
    pub fn config(&self) -> Result<Option<RecordConfig>, Refused> {
        let limit = self.record_limit;
        if limit < LEAST {
            return Err(Refused::new("record-limit", limit, format!("must be at least {LEAST}")));
        }
        Ok(self.record.clone().map(|file| RecordConfig { file, limit: limit.0 }))
    }
}
