//! The other end of the control socket: what the command line asks a daemon with.

use std::io::{BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

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

/// Asks the daemon that listens at `path`; `progress` hears how far it is.
///
/// # Errors
/// [`ClientError`].
pub fn ask(
    path: &Path,
    request: &Request,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Value, ClientError> {
    let broken = |reason: String| ClientError::Broken { path: path.to_owned(), reason };
    let mut stream = UnixStream::connect(path).map_err(|e| ClientError::NoDaemon {
        path: path.to_owned(),
        reason: match e.kind() {
            std::io::ErrorKind::NotFound => "there is no such socket".to_owned(),
            _ => e.to_string(),
        },
    })?;
    let mut text = serde_json::to_vec(request).map_err(|e| broken(e.to_string()))?;
    text.push(b'\n');
    // A daemon that refuses a long request early has said so: that is read below.
    let sent = stream.write_all(&text);
    let mut from = BufReader::new(stream);
    loop {
        let line = read_line(&mut from, MOST_ANSWER).map_err(|e| broken(e.to_string()))?;
        let Some(line) = line else {
            let reason =
                sent.map_or_else(|e| e.to_string(), |()| "it closed the connection".into());
            return Err(broken(reason));
        };
        let answer = serde_json::from_slice(&line).map_err(|e| {
            broken(format!("its answer is not understood ({e}); is it of another version?"))
        })?;
        match answer {
            Answer::Progress(how_far) => progress(&how_far),
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
