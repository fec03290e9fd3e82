//! The other end of the control socket: what the command line asks a daemon with.

use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
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
        "the daemon at '{}'{} has not answered within {} s: it is stopped, or hangs, and will not begin with what was asked; {}, or wait longer with --answer-within",
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

/// The same, where the daemon must say something within `limit`: its answer, or, of what may take long, that it has begun. One that
/// says nothing, as former versions do until there is something to say, is asked how it is: where it answers that, it is waited for.
///
/// # Errors
/// [`ClientError`].
pub fn ask_within(
    path: &Path,
    request: &Request,
    limit: Option<Duration>,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Value, ClientError> {
    let lives = || {
        let asked = ask_of(path, &Request::Status {}, limit, &mut |_| {}, &|| false);
        matches!(asked, Ok(_) | Err(ClientError::Refused { .. }))
    };
    ask_of(path, request, limit, progress, &lives)
}

/// The same, where `lives` finds out whether a daemon that says nothing answers others.
fn ask_of(
    path: &Path,
    request: &Request,
    limit: Option<Duration>,
    progress: &mut dyn FnMut(&Progress),
    lives: &dyn Fn() -> bool,
) -> Result<Value, ClientError> {
    let broken = |reason: String| ClientError::Broken { path: path.to_owned(), reason };
    let mut stream = connect(path, limit)?;
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
    // Until it has said something.
    if let Err(e) = first_byte(&mut from) {
        match late(&e) {
            Some(_) if request.may_take_long() && lives() => {
                from.get_ref().set_read_timeout(None).map_err(|e| broken(e.to_string()))?;
            }
            late => return Err(late.unwrap_or_else(|| broken(e.to_string()))),
        }
    }
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

/// Waits for the first byte, or the end of the stream.
fn first_byte(from: &mut impl BufRead) -> io::Result<()> {
    loop {
        match from.fill_buf() {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            found => return found.map(|_| ()),
        }
    }
}

/// A connection. It is waited for where too many others have not been taken up yet.
fn connected(path: &Path, limit: Option<Duration>) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // What limits sending limits connecting.
    set_socket_timeout(&socket, Timeout::Send, limit)?;
    let address = SocketAddrUnix::new(path)?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address))?;
    Ok(UnixStream::from(socket))
}

fn connect(path: &Path, limit: Option<Duration>) -> Result<UnixStream, ClientError> {
    connected(path, limit).map_err(|e| {
        if let Some(limit) = limit.filter(|_| e.kind() == ErrorKind::WouldBlock) {
            return ClientError::Late { path: path.to_owned(), pid: None, limit };
        }
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc::channel;

    use serde_json::json;

    use super::*;

    const SHORT: Option<Duration> = Some(Duration::from_millis(20));

    fn detach() -> Request {
        Request::Detach { volume: "a".into(), disconnect: false, seconds: None, keep_dirty: false }
    }

    /// A daemon of a former version does not say that it has begun.
    #[test]
    fn one_that_answers_others_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let (asked, looked) = channel();
        let daemon = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            read_line(&mut BufReader::new(&stream), 1 << 20).unwrap().unwrap();
            // Long after the limit.
            looked.recv().unwrap();
            (&stream).write_all(b"{\"ok\":{\"done\":1}}\n").unwrap();
        });
        let lives = || asked.send(()).is_ok();
        let answer = ask_of(&path, &detach(), SHORT, &mut |_| {}, &lives);
        assert_eq!(answer.unwrap(), json!({ "done": 1 }));
        daemon.join().unwrap();
    }

    #[test]
    fn one_that_answers_nobody_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        for request in [detach(), Request::Status {}] {
            let error = ask_within(&path, &request, SHORT, &mut |_| {}).unwrap_err();
            let own = i32::try_from(std::process::id()).unwrap();
            assert!(matches!(error, ClientError::Late { pid, .. } if pid == Some(own)), "{error}");
        }
    }

    /// Commands that gave up leave connections that nobody takes up, until there is room for no more.
    #[test]
    fn connecting_has_a_limit_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let mut waiting = Vec::new();
        let error = loop {
            match connect(&path, SHORT) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
            assert!(waiting.len() < 100, "there is room for all");
        };
        assert!(matches!(error, ClientError::Late { pid: None, .. }), "{error}");
        let error = ask_within(&path, &Request::Status {}, SHORT, &mut |_| {}).unwrap_err();
        assert!(matches!(error, ClientError::Late { .. }), "{error}");
    }
}
