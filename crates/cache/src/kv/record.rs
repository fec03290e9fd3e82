//! `--record`: what shards, log, maintenance and applications were told and decided ([`larder_runtime::record`] writes it).

use larder_engine::kv::node::Maintenance;
use larder_engine::kv::record::{MachineTape, RunSetup, Tape};
use larder_runtime::AlignedBuf;
pub use larder_runtime::record::{RecordConfig, RecordStats};
use larder_runtime::record::{RecordError, Recorder as Writer};

use super::{CacheError, Core};

/// A recording under way.
pub(super) struct Recorder(Writer);

impl Recorder {
    /// Creates the file and starts the thread that writes it.
    pub(super) fn start(config: &RecordConfig, setup: &RunSetup) -> Result<Recorder, CacheError> {
        let refused = |why: String| CacheError::Record { path: config.file.clone(), why };
        let text = serde_json::to_vec(setup).map_err(|e| refused(e.to_string()))?;
        // A replay builds on what is read back: it must be the same to the last bit.
        if !serde_json::from_slice::<RunSetup>(&text).is_ok_and(|back| back == *setup) {
            let why = "the configuration does not read back as it is written: write its fractions with fewer digits";
            return Err(refused(why.to_owned()));
        }
        match Writer::start(config, &text, setup.streams()) {
            Ok(writer) => Ok(Recorder(writer)),
            Err(RecordError::File { why, .. }) => Err(refused(why)),
            Err(RecordError::Thread(source)) => {
                Err(CacheError::System { what: "start a thread", source })
            }
        }
    }

    /// The tape of a stream.
    pub(super) fn tape(&self, stream: usize) -> Option<Tape> {
        Some(Tape::new(stream as u16, self.0.sink()?))
    }

    /// The tape of the stream of a machine beside shards and log.
    pub(super) fn machine_tape(&self, stream: usize) -> Option<MachineTape> {
        Some(MachineTape::new(stream as u16, self.0.sink()?))
    }

    pub(super) fn stats(&self) -> RecordStats {
        self.0.stats()
    }
}

impl Core {
    /// Ends recording: nothing asks shards or log any more.
    pub(super) fn end_recording(&self, maintenance: Option<&mut Maintenance<AlignedBuf>>) {
        let Some(recorder) = &self.recorder else { return };
        self.node.end_recording();
        self.node.end_recording_applications();
        if let Some(maintenance) = maintenance {
            maintenance.end_recording();
        }
        recorder.0.finish();
    }
}
