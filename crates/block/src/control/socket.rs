//! The control socket: a thread that accepts, and one for each of a few connections.

use std::collections::VecDeque;
use std::io::{BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Control;
use super::protocol::{Answer, MOST_REQUEST, Progress, Refusal, Request, parse, read_line};
use crate::served::{ServerError, bind_unix};
use larder_net::listen::{SocketAccess, UnixPath};

/// Connections at a time.
const MOST: usize = 16;
/// For a request to come, and for an answer to be taken.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two lines of progress.
const EVERY: Duration = Duration::from_millis(200);

/// The control socket, until it is dropped.
pub struct ControlServer {
    stop: Arc<AtomicBool>,
    listener: Arc<UnixListener>,
    thread: Option<JoinHandle<()>>,
    _path: UnixPath,
}

impl ControlServer {
    /// Listens at `path`, which only the owner may connect to.
    ///
    /// # Errors
    /// When somebody listens there, or the socket or a thread cannot be had.
    pub fn start(control: Arc<Control>, path: &Path) -> Result<ControlServer, ServerError> {
        let name = format!("control socket '{}'", path.display());
        let (listener, guard) = bind_unix(&name, path, SocketAccess::OWNER)?;
        // Its thread has nothing else to wait for; dropping the server ends that.
        listener
            .set_nonblocking(false)
            .map_err(|source| ServerError::System { what: "the control socket", source })?;
        let (listener, stop) = (Arc::new(listener), Arc::new(AtomicBool::new(false)));
        let (theirs, stopped) = (listener.clone(), stop.clone());
        let thread = std::thread::Builder::new()
            .name("block-control".into())
            .spawn(move || accept(&control, &theirs, &stopped))
            .map_err(|source| ServerError::System { what: "a thread", source })?;
        Ok(ControlServer { stop, listener, thread: Some(thread), _path: guard })
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Ends a thread that waits in accept; one that does not is told by the flag.
        let _ = rustix::net::shutdown(self.listener.as_fd(), rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so on stderr already.
            let _ = thread.join();
        }
    }
}

/// A connection that has not asked anything yet.
struct Idle {
    number: u64,
    stream: Arc<UnixStream>,
}

fn accept(control: &Arc<Control>, listener: &UnixListener, stop: &Arc<AtomicBool>) {
    let open = Arc::new(AtomicUsize::new(0));
    // In the order in which they came.
    let idle: Arc<Mutex<VecDeque<Idle>>> = Arc::default();
    let mut number = 0;
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    while !stop.load(Ordering::SeqCst) {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(_) if stop.load(Ordering::SeqCst) => break,
            Err(error) => {
                tracing::warn!(%error, "the control socket cannot accept");
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        threads.retain(|t| !t.is_finished());
        // Whoever asks nothing makes way, the one that came first before others.
        let in_the_way = (open.load(Ordering::SeqCst) >= MOST).then(|| idle.lock().pop_front());
        if let Some(Some(oldest)) = &in_the_way {
            // Its thread reads the end, and ends.
            let _ = oldest.stream.shutdown(std::net::Shutdown::Both);
        } else if in_the_way.is_some() {
            let message = format!("{MOST} others ask something already: try again");
            say(&mut &stream, &Answer::Error(Refusal { message, usage: false }));
            continue;
        }
        open.fetch_add(1, Ordering::SeqCst);
        number += 1;
        let (mine, stream) = (number, Arc::new(stream));
        idle.lock().push_back(Idle { number, stream: stream.clone() });
        let (control, stop, count) = (control.clone(), stop.clone(), open.clone());
        let waiting = idle.clone();
        let spawned = std::thread::Builder::new().name("block-control".into()).spawn(move || {
            let asked = || waiting.lock().retain(|i| i.number != mine);
            serve(&control, &stream, &stop, &asked);
            asked();
            count.fetch_sub(1, Ordering::SeqCst);
        });
        match spawned {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                idle.lock().retain(|i| i.number != number);
                open.fetch_sub(1, Ordering::SeqCst);
                tracing::warn!(%error, "no thread for a control connection");
            }
        }
    }
    for thread in threads {
        let _ = thread.join();
    }
}

/// Writes a line. Returns whether it was taken.
fn say(stream: &mut &UnixStream, answer: &Answer) -> bool {
    let Ok(mut text) = serde_json::to_vec(answer) else { return false };
    text.push(b'\n');
    stream.write_all(&text).is_ok()
}

/// Says that it has begun with what may take long. Returns false where nobody is there to hear: they take it for failed by now, and
/// may have done something else.
fn is_heard(mut stream: &UnixStream, request: &Request) -> bool {
    !request.may_take_long() || say(&mut stream, &Answer::Progress(Progress::default()))
}

/// Whether whoever asked has gone. (One that has said all that it has to say may listen still.)
fn has_hung_up(stream: &UnixStream) -> bool {
    let mut wanted = [PollFd::new(stream, PollFlags::empty())];
    let found = poll(&mut wanted, Some(&Timespec::default()));
    found.is_ok() && wanted[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

/// One request and its answer.
fn serve(control: &Control, stream: &UnixStream, stop: &AtomicBool, asked: &dyn Fn()) {
    let limits = stream
        .set_read_timeout(Some(PATIENCE))
        .and_then(|()| stream.set_write_timeout(Some(PATIENCE)));
    if limits.is_err() {
        return;
    }
    let mut out = stream;
    let line = match read_line(&mut BufReader::new(stream), MOST_REQUEST) {
        Ok(Some(line)) => line,
        Ok(None) => return,
        Err(error) => {
            let message = format!("the request cannot be read: {error}");
            say(&mut out, &Answer::Error(Refusal { message, usage: true }));
            return;
        }
    };
    asked();
    let mut said = Instant::now();
    let mut go_on = |progress: Progress| {
        if stop.load(Ordering::SeqCst) || has_hung_up(stream) {
            return false;
        }
        if said.elapsed() < EVERY {
            return true;
        }
        said = Instant::now();
        say(&mut out, &Answer::Progress(progress))
    };
    let outcome = match parse(&line) {
        Ok(request) if !is_heard(stream, &request) => {
            tracing::info!("a command was not begun: whoever gave it did not wait for it");
            return;
        }
        Ok(request) => control.perform(request, &mut go_on),
        Err(refusal) => Err(refusal),
    };
    let answer = outcome.map_or_else(Answer::Error, Answer::Ok);
    say(&mut &*stream, &answer);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_gone_is_told_from_who_has_said_all() {
        let (client, server) = UnixStream::pair().unwrap();
        assert!(!has_hung_up(&server));
        client.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(!has_hung_up(&server), "it listens");
        drop(client);
        assert!(has_hung_up(&server));
    }

    #[test]
    fn what_nobody_waits_for_is_not_begun() {
        let (client, server) = UnixStream::pair().unwrap();
        let drop_it = Request::Drop { volume: "a".into() };
        assert!(is_heard(&server, &drop_it));
        let said = read_line(&mut BufReader::new(&client), MOST_REQUEST).unwrap().unwrap();
        let said: Answer = serde_json::from_slice(&said).unwrap();
        assert_eq!(said, Answer::Progress(Progress::default()));
        drop(client);
        assert!(!is_heard(&server, &drop_it));
        // Looking harms nobody.
        assert!(is_heard(&server, &Request::Status {}));
    }
}
