//! Recording a run: what shards, logs and others were told and decided, in a file, by a thread of its own.
//!
//! Whoever holds a stream appends to its tape; a tape that has a chunk hands it to a queue of 32 MiB and never waits. When
//! the queue is full, the file cannot be written or has reached its limit, recording ends for all streams, the file says so,
//! and the server goes on.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use larder_format::recording::{Chunk, ChunkSink, Ended, end_chunk, file_header, seal};

/// Why recording cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file, or what is to stand at its beginning.
    #[error("record '{}': {why}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A thread.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] std::io::Error),
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What to record, and how much.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordConfig {
    /// The file; it must not be there yet.
    pub file: PathBuf,
    /// Bytes at which recording ends.
    pub limit: u64,
}

/// How recording goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct RecordStats {
    /// Records written.
    pub records: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Why recording ended, if it has.
    pub ended: Option<&'static str>,
}

/// Chunks of 64 KiB that may wait to be written: what a drive may fall behind.
const QUEUE: usize = 512;

const ENDED: [Ended; 4] = [Ended::Stopped, Ended::TooSlow, Ended::WriteFailed, Ended::Limit];

/// What tapes and writer share.
#[derive(Default)]
struct State {
    /// 0 while chunks are wanted, else one more than the place of the reason in [`ENDED`].
    ended: AtomicU8,
    records: AtomicU64,
    bytes: AtomicU64,
}

impl State {
    fn ended(&self) -> Option<Ended> {
        let code = usize::from(self.ended.load(Ordering::Acquire));
        ENDED.get(code.wrapping_sub(1)).copied()
    }

    /// Ends recording, unless it has ended already.
    fn end(&self, why: Ended) -> bool {
        self.ended.compare_exchange(0, why as u8 + 1, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// Where the tapes put their chunks.
struct Feed {
    state: Arc<State>,
    queue: SyncSender<Chunk>,
}

impl ChunkSink for Feed {
    fn put(&mut self, chunk: Chunk) -> bool {
        if !self.is_open() {
            return false;
        }
        match self.queue.try_send(chunk) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                if self.state.end(Ended::TooSlow) {
                    tracing::warn!(
                        "recording ends early: the file cannot be written as fast as requests come. The server goes on; \
                         what is recorded so far can be replayed"
                    );
                }
                false
            }
            Err(TrySendError::Disconnected(_)) => false,
        }
    }

    fn is_open(&self) -> bool {
        self.state.ended.load(Ordering::Relaxed) == 0
    }
}

/// The file of a record in which nothing is written yet. Dropped, it is removed: of a server that does not begin no record is left.
#[derive(Debug)]
pub struct RecordFile {
    file: Option<File>,
    config: RecordConfig,
}

impl RecordFile {
    /// Creates it.
    ///
    /// # Errors
    /// A file that is there already or cannot be written.
    pub fn create(config: &RecordConfig) -> Result<RecordFile, RecordError> {
        let file = create(&config.file).map_err(|e| RecordError::File {
            path: config.file.clone(),
            why: format!("{e}: give a new file in a folder that can be written"),
        })?;
        Ok(RecordFile { file: Some(file), config: config.clone() })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.config.file
    }

    /// Begins it: see [`Recorder::start`].
    ///
    /// # Errors
    /// A setup that is too long, a file that cannot be written.
    pub fn start(mut self, setup: &[u8], streams: usize) -> Result<Recorder, RecordError> {
        let config = self.config.clone();
        let refused = |why: String| RecordError::File { path: config.file.clone(), why };
        let header = file_header(setup)
            .ok_or_else(|| refused("the configuration is too long to be recorded".to_owned()))?;
        let written = self.file.as_mut().map(|file| file.write_all(&header)).transpose();
        written.map_err(|e| refused(e.to_string()))?;
        let file = self.file.take().ok_or_else(|| refused("it is gone".to_owned()))?;
        let state = Arc::new(State::default());
        state.bytes.store(header.len() as u64, Ordering::Relaxed);
        let (queue, chunks) = sync_channel(QUEUE);
        let writer = Writer {
            file: BufWriter::with_capacity(256 << 10, file),
            path: config.file.clone(),
            limit: config.limit,
            full: false,
            records: vec![0; streams],
            latest: VecDeque::new(),
            state: state.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("larder-record".into())
            .spawn(move || writer.run(&chunks))
            .map_err(RecordError::Thread)?;
        Ok(Recorder { state, queue: Mutex::new(Some(queue)), thread: Mutex::new(Some(thread)) })
    }
}

impl Drop for RecordFile {
    fn drop(&mut self) {
        if self.file.is_some() {
            // If it stays, the next record is refused and says so.
            let _ = std::fs::remove_file(&self.config.file);
        }
    }
}

/// A recording under way.
pub struct Recorder {
    state: Arc<State>,
    queue: Mutex<Option<SyncSender<Chunk>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Recorder {
    /// Creates the file, begins it with `setup` (what a replay builds on) and starts the thread that writes it. It has
    /// `streams` streams at least; others may begin later.
    ///
    /// # Errors
    /// A file that is there already or cannot be written, a setup that is too long.
    pub fn start(
        config: &RecordConfig,
        setup: &[u8],
        streams: usize,
    ) -> Result<Recorder, RecordError> {
        RecordFile::create(config)?.start(setup, streams)
    }

    /// Where the tape of a stream puts its chunks.
    /// `None` when recording is over.
    pub fn sink(&self) -> Option<Box<dyn ChunkSink>> {
        let queue = locked(&self.queue).clone()?;
        Some(Box::new(Feed { state: self.state.clone(), queue }))
    }

    /// How it goes.
    pub fn stats(&self) -> RecordStats {
        RecordStats {
            records: self.state.records.load(Ordering::Relaxed),
            bytes: self.state.bytes.load(Ordering::Relaxed),
            ended: self.state.ended().map(Ended::as_str),
        }
    }

    /// Writes what is queued and the end of the file. All tapes must have ended.
    pub fn finish(&self) {
        drop(locked(&self.queue).take());
        if let Some(thread) = locked(&self.thread).take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that writes the record had died");
        }
    }
}

/// Nobody else may read it: it holds keys and the secret with which they are hashed.
fn create(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

struct Writer {
    file: BufWriter<File>,
    path: PathBuf,
    limit: u64,
    /// The limit is reached: what comes is let go.
    full: bool,
    /// Written, by stream.
    records: Vec<u64>,
    /// Where the latest chunks end in the file, with their streams and numbers of records.
    latest: VecDeque<(u64, u16, u32)>,
    state: Arc<State>,
}

/// Chunks of which it is known where they end: more than the buffer before the file holds.
const LATEST: usize = 64;

impl Writer {
    fn run(mut self, chunks: &Receiver<Chunk>) {
        let path = self.path.display().to_string();
        let mut failed = false;
        loop {
            let result = match chunks.recv_timeout(Duration::from_secs(1)) {
                // Nothing may follow where something is missing.
                Ok(_) if failed || self.full => Ok(()),
                Ok(chunk) => self.write(&chunk),
                Err(RecvTimeoutError::Timeout) if self.state.ended().is_some() => break,
                // Whoever looks at the file, or finds it after a kill, sees all but the last second.
                Err(RecvTimeoutError::Timeout) => self.file.flush(),
                Err(RecvTimeoutError::Disconnected) => break,
            };
            if let Err(error) = result {
                failed = true;
                self.state.end(Ended::WriteFailed);
                tracing::error!(
                    %error,
                    file = path,
                    "the record cannot be written any further; the server goes on. Check the space on its file system"
                );
            }
        }
        self.state.end(Ended::Stopped);
        let why = self.state.ended().unwrap_or(Ended::Stopped);
        if failed {
            self.end_in_place();
            return;
        }
        let end = end_chunk(why, &self.records);
        match self.file.write_all(&end).and_then(|()| self.file.flush()) {
            Ok(()) => tracing::info!(
                file = path,
                records = self.records.iter().sum::<u64>(),
                "record closed: {}",
                why.as_str()
            ),
            Err(error) => {
                tracing::error!(%error, file = path, "the end of the record cannot be written")
            }
        }
    }

    fn write(&mut self, chunk: &Chunk) -> std::io::Result<()> {
        let head = seal(chunk.stream, chunk.first, chunk.records, &chunk.payload);
        let bytes = (head.len() + chunk.payload.len()) as u64;
        if self.state.bytes.load(Ordering::Relaxed) + bytes > self.limit {
            self.full = true;
            if self.state.end(Ended::Limit) {
                tracing::warn!(
                    file = %self.path.display(),
                    "recording ends: the file has reached {} (record-limit); the server goes on",
                    larder_base::ByteSize(self.limit)
                );
            }
            return Ok(());
        }
        self.file.write_all(&head)?;
        self.file.write_all(&chunk.payload)?;
        self.state.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.state.records.fetch_add(u64::from(chunk.records), Ordering::Relaxed);
        // Streams may begin later than the file.
        let stream = usize::from(chunk.stream);
        if stream >= self.records.len() {
            self.records.resize(stream + 1, 0);
        }
        self.records[stream] += u64::from(chunk.records);
        if self.latest.len() == LATEST {
            self.latest.pop_front();
        }
        let end = self.state.bytes.load(Ordering::Relaxed);
        self.latest.push_back((end, chunk.stream, chunk.records));
        Ok(())
    }

    /// Says in a file that cannot grow any more why it ends: over the last of what there is, for which no room is needed.
    fn end_in_place(self) {
        let Writer { file, path, mut records, mut latest, .. } = self;
        // What waits in the buffer does not come into the file any more.
        let (file, _) = file.into_parts();
        let written = file.metadata().map_or(0, |m| m.len());
        while let Some((at, stream, count)) = latest.pop_back() {
            let end = end_chunk(Ended::WriteFailed, &records);
            let after = at + end.len() as u64;
            if after <= written {
                let ended = file.write_all_at(&end, at).and_then(|()| file.set_len(after));
                if let Err(error) = ended {
                    let file = path.display().to_string();
                    tracing::error!(%error, file, "the end of the record cannot be written");
                }
                return;
            }
            if let Some(records) = records.get_mut(usize::from(stream)) {
                *records = records.saturating_sub(u64::from(count));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, SeekFrom};

    use super::*;

    /// A file that takes no byte beyond its first `bytes`, as on a full disk.
    fn full_at(bytes: u64) -> (File, File) {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
        let file = File::from(memfd_create("record", MemfdFlags::ALLOW_SEALING).unwrap());
        file.set_len(bytes).unwrap();
        fcntl_add_seals(&file, SealFlags::GROW).unwrap();
        (file.try_clone().unwrap(), file)
    }

    fn written(room: u64, chunks: usize) -> (Vec<u8>, Vec<u64>) {
        let (file, mut again) = full_at(room);
        let state = Arc::new(State::default());
        let writer = Writer {
            file: BufWriter::with_capacity(256 << 10, file),
            path: PathBuf::from("record"),
            limit: u64::MAX,
            full: false,
            records: vec![0; 2],
            latest: VecDeque::new(),
            state: state.clone(),
        };
        let (queue, received) = sync_channel(chunks);
        let mut ends = Vec::new();
        for i in 0..chunks {
            let chunk = Chunk {
                stream: (i % 2) as u16,
                first: 10 * (i as u64 / 2),
                records: 10,
                payload: vec![i as u8; 60_000],
            };
            let head = seal(chunk.stream, chunk.first, chunk.records, &chunk.payload);
            ends.push(ends.last().unwrap_or(&0) + (head.len() + chunk.payload.len()) as u64);
            queue.send(chunk).unwrap();
        }
        drop(queue);
        writer.run(&received);
        assert_eq!(state.ended(), Some(Ended::WriteFailed));
        let mut bytes = Vec::new();
        again.seek(SeekFrom::Start(0)).unwrap();
        again.read_to_end(&mut bytes).unwrap();
        (bytes, ends)
    }

    #[test]
    fn a_file_that_cannot_grow_says_so_at_its_end() {
        for (room, whole) in [(1_000_000, 16), (960_010, 15), (61_000, 1)] {
            let (bytes, ends) = written(room, 40);
            // The last chunk that is whole and leaves room for the end.
            let at = ends[whole - 1];
            let (first, second) = ((whole as u64).div_ceil(2) * 10, whole as u64 / 2 * 10);
            let end = end_chunk(Ended::WriteFailed, &[first, second]);
            assert_eq!(bytes.len() as u64, at + end.len() as u64, "room for {room}");
            assert_eq!(&bytes[at as usize..], end);
        }
    }
}
