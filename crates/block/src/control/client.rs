//! The other end of the control socket: what the command line asks a daemon with.

use std::io::{BufReader, ErrorKind, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;
use serde_json::Value;

use super::protocol::{Answer, MOST_ANSWER, Progress, Request, read_line};

/// Why there is no answer, or not the one that was hoped for.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error(
        "no daemon answers at '{}': {reason}; start one with `larder block serve`, or say with --control where it listens",
        path.display()
    )]
    NoDaemon {
        /// The socket.
        path: PathBuf,
        /// What the system says.
        reason: String,
    },
    /// What is there is no socket.
    #[error("'{}' is no socket: name a daemon's control socket (block.sock in its state directory)", path.display())]
    NoSocket {
        /// What was named.
        path: PathBuf,
    },
    /// It takes requests, and answers none.
    #[error(
        "the daemon at '{}'{} has not answered within {} s: it is stopped, or hangs; {}, or wait longer with --answer-within",
        path.display(),
        pid.map_or_else(String::new, |pid| format!(" (process {pid})")),
        limit.as_secs(),
        pid.map_or_else(|| "see whether it runs".to_owned(), |pid| format!("one that is stopped goes on with `kill -CONT {pid}`"))
    )]
    Late {
        /// The socket.
        path: PathBuf,
        /// The process that listens there, if the system says.
        pid: Option<i32>,
        /// How long it was waited for.
        limit: Duration,
    },
    /// The conversation broke off.
    #[error("the daemon at '{}' has not answered: {reason}", path.display())]
    Broken {
        /// The socket.
        path: PathBuf,
        /// How.
        reason: String,
    },
    /// The daemon says no.
    #[error("{message}")]
    Refused {
        /// What it says.
        message: String,
        /// What was asked cannot be meant.
        usage: bool,
    },
}

/// Asks the daemon that listens at `path`, and waits for as long as it takes; `progress` hears how far it is.
///
/// # Errors
/// [`ClientError`].
pub fn ask(
    path: &Path,
    request: &Request,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Value, ClientError> {
    ask_within(path, request, None, progress)
}

/// The same, where the daemon must say something within `limit`: its answer, or, of what may take long, that it has begun.
///
/// # Errors
/// [`ClientError`].
pub fn ask_within(
    path: &Path,
    request: &Request,
    limit: Option<Duration>,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Value, ClientError> {
    let broken = |reason: String| ClientError::Broken { path: path.to_owned(), reason };
    let mut stream = connect(path)?;
    let pid = socket_peercred(&stream).ok().map(|peer| peer.pid.as_raw_nonzero().get());
    let late = |e: &std::io::Error| {
        let is_late = matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
        let limit = limit.filter(|_| is_late)?;
        Some(ClientError::Late { path: path.to_owned(), pid, limit })
    };
    stream
        .set_read_timeout(limit)
        .and_then(|()| stream.set_write_timeout(limit))
        .map_err(|e| broken(e.to_string()))?;
    let mut text = serde_json::to_vec(request).map_err(|e| broken(e.to_string()))?;
    text.push(b'\n');
    // A daemon that refuses a long request early has said so: that is read below.
    let sent = stream.write_all(&text);
    if let Err(e) = &sent
        && let Some(late) = late(e)
    {
        return Err(late);
    }
    let mut from = BufReader::new(stream);
    loop {
        let line = read_line(&mut from, MOST_ANSWER);
        let line = line.map_err(|e| late(&e).unwrap_or_else(|| broken(e.to_string())))?;
        let Some(line) = line else {
            let reason =
                sent.map_or_else(|e| e.to_string(), |()| "it closed the connection".into());
            return Err(broken(reason));
        };
        let answer = serde_json::from_slice(&line).map_err(|e| {
            broken(format!("its answer is not understood ({e}); is it of another version?"))
        })?;
        match answer {
            Answer::Progress(how_far) => {
                // It lives, and may take its time.
                from.get_ref().set_read_timeout(None).map_err(|e| broken(e.to_string()))?;
                progress(&how_far);
            }
            Answer::Ok(value) => return Ok(value),
            Answer::Error(refusal) => {
                return Err(ClientError::Refused {
                    message: refusal.message,
                    usage: refusal.usage,
                });
            }
        }
    }
}

fn connect(path: &Path) -> Result<UnixStream, ClientError> {
    UnixStream::connect(path).map_err(|e| {
        if path.metadata().is_ok_and(|found| !found.file_type().is_socket()) {
            return ClientError::NoSocket { path: path.to_owned() };
        }
        let reason = match e.kind() {
            ErrorKind::NotFound => "there is no such socket".to_owned(),
            ErrorKind::ConnectionRefused => "nobody listens there any more".to_owned(),
            ErrorKind::PermissionDenied => {
                "this user may not connect to it: ask as the daemon's user".to_owned()
            }
            _ => e.to_string(),
        };
        ClientError::NoDaemon { path: path.to_owned(), reason }
    })
}
