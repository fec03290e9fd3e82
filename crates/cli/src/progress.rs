//! Progress of what takes longer than a moment: a bar on a terminal, and a line every ten seconds where standard error is
//! a file or a pipe.

use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{
    HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle, TermLike,
};

/// Before so much of the work is done, and so much time has passed, the time left would be a guess.
const KNOWN: (f64, Duration) = (0.01, Duration::from_secs(1));

/// The time left at the mean rate so far, in words; nothing while too little is known. A mean, since work is reported in
/// pieces: between two of them a rate of the last moments falls towards zero.
pub(crate) fn time_left(share: f64, elapsed: Duration) -> String {
    if share < KNOWN.0 || elapsed < KNOWN.1 {
        return String::new();
    }
    let left = elapsed.as_secs_f64() * (1.0 - share).max(0.0) / share;
    format!("{:#} left", HumanDuration(Duration::from_secs_f64(left.min(1e9))))
}

/// Between two lines.
const EVERY: Duration = Duration::from_secs(10);

/// A bar over `total` steps; what `set_message` says stands beside it, with the time left.
pub(crate) fn bar(total: u64) -> ProgressBar {
    let (bar, template) = if io::stderr().is_terminal() {
        (ProgressBar::new(total), "{bar:30} {percent:>3} %  {msg}  {left}")
    } else {
        let lines = Lines::new(io::stderr(), EVERY);
        let target = ProgressDrawTarget::term_like_with_hz(Box::new(lines), 1);
        (ProgressBar::with_draw_target(Some(total), target), "{percent} %  {msg}  {left}")
    };
    let style = ProgressStyle::with_template(template);
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style.with_key(
        "left",
        |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            // Whether somebody reads it must not matter to the work.
            write!(out, "{}", time_left(f64::from(state.fraction()), state.elapsed())).ok();
        },
    ));
    bar
}

/// Whoever waits for so long is told what for.
pub(crate) const SILENT: Duration = Duration::from_secs(2);

/// Says on standard error, where that is no terminal, what a command waits for once that takes long, and says it again when
/// that has changed.
#[derive(Debug)]
pub(crate) struct Waiting {
    hears: Option<Sender<String>>,
    thread: Option<JoinHandle<()>>,
}

impl Waiting {
    /// Begins to wait, for `what`. On a terminal a bar shows it.
    pub(crate) fn begin(what: &str) -> Waiting {
        if io::stderr().is_terminal() {
            return Waiting { hears: None, thread: None };
        }
        Waiting::telling(what, SILENT, |what| {
            // Whether somebody reads it must not matter to the work.
            writeln!(io::stderr(), "larder: waits: {what}").ok();
        })
    }

    fn telling(what: &str, after: Duration, tell: impl Fn(&str) + Send + 'static) -> Waiting {
        let (hears, heard) = channel::<String>();
        let mut what = what.to_owned();
        let run = move || {
            let mut told = String::new();
            let mut due = Instant::now() + after;
            loop {
                match heard.recv_timeout(due.saturating_duration_since(Instant::now())) {
                    Ok(now) => what = now,
                    Err(RecvTimeoutError::Timeout) => {
                        if what != told {
                            tell(&what);
                            told.clone_from(&what);
                        }
                        due = Instant::now() + after;
                    }
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        };
        // Without a thread it is not said.
        let thread = std::thread::Builder::new().name("larder-waits".into()).spawn(run).ok();
        Waiting { hears: Some(hears), thread }
    }

    /// What it waits for now.
    pub(crate) fn hear(&self, what: &str) {
        if let Some(hears) = &self.hears {
            hears.send(what.to_owned()).ok();
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        drop(self.hears.take());
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// What a bar would draw, now and then as a line.
#[derive(Debug)]
struct Lines<W> {
    state: Mutex<State<W>>,
    every: Duration,
}

#[derive(Debug)]
struct State<W> {
    out: W,
    line: String,
    last: Instant,
}

impl<W: Write> Lines<W> {
    fn new(out: W, every: Duration) -> Lines<W> {
        Lines { state: Mutex::new(State { out, line: String::new(), last: Instant::now() }), every }
    }

    fn with(&self, f: impl FnOnce(&mut State<W>)) -> io::Result<()> {
        f(&mut self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        Ok(())
    }
}

impl<W: Write + Send + std::fmt::Debug> TermLike for Lines<W> {
    fn width(&self) -> u16 {
        120
    }
    fn move_cursor_up(&self, _: usize) -> io::Result<()> {
        Ok(())
    }
    fn move_cursor_down(&self, _: usize) -> io::Result<()> {
        Ok(())
    }
    fn move_cursor_right(&self, _: usize) -> io::Result<()> {
        Ok(())
    }
    fn move_cursor_left(&self, _: usize) -> io::Result<()> {
        Ok(())
    }
    fn write_line(&self, text: &str) -> io::Result<()> {
        self.with(|s| s.line.push_str(text))
    }
    fn write_str(&self, text: &str) -> io::Result<()> {
        self.with(|s| s.line.push_str(text))
    }
    fn clear_line(&self) -> io::Result<()> {
        self.with(|s| s.line.clear())
    }
    fn flush(&self) -> io::Result<()> {
        self.with(|s| {
            let line = std::mem::take(&mut s.line);
            let text = line.trim();
            if !text.is_empty() && s.last.elapsed() >= self.every {
                s.last = Instant::now();
                // Whether somebody reads it must not matter to the work.
                writeln!(s.out, "larder: {text}").ok();
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[derive(Clone, Debug, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn lines(every: Duration) -> String {
        let out = Shared::default();
        let target = ProgressDrawTarget::term_like(Box::new(Lines::new(out.clone(), every)));
        let bar = ProgressBar::with_draw_target(Some(4), target);
        bar.set_style(ProgressStyle::with_template("{percent} %  {msg}").unwrap());
        for i in 0..4 {
            bar.set_message(format!("step {i}"));
            bar.inc(1);
            bar.tick();
        }
        bar.finish_and_clear();
        String::from_utf8(out.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn the_time_left_follows_from_what_is_done() {
        let seconds = Duration::from_secs;
        assert_eq!(time_left(0.5, seconds(10)), "10s left");
        assert_eq!(time_left(0.25, seconds(60)), "3m left");
        assert_eq!(time_left(1.0, seconds(60)), "0s left");
        // Nothing is known of the whole, or it has only begun.
        for (share, elapsed) in [(0.0, seconds(9)), (0.001, seconds(9)), (0.5, seconds(0))] {
            assert_eq!(time_left(share, elapsed), "", "{share} {elapsed:?}");
        }
    }

    #[test]
    fn what_is_waited_for_is_said_once_and_when_it_changes() {
        let (said, all) = channel();
        let waiting = Waiting::telling("the daemon", Duration::from_millis(1), move |what| {
            said.send(what.to_owned()).unwrap();
        });
        assert_eq!(all.recv().unwrap(), "the daemon");
        waiting.hear("the daemon");
        waiting.hear("a client");
        assert_eq!(all.recv().unwrap(), "a client");
        drop(waiting);
        assert!(all.recv().is_err(), "nothing is said twice");
        // What is over in time is not said.
        let (said, all) = channel();
        let waiting = Waiting::telling("the daemon", Duration::from_secs(86_400), move |what| {
            said.send(what.to_owned()).unwrap();
        });
        drop(waiting);
        assert!(all.recv().is_err());
    }

    #[test]
    fn a_line_at_a_time_and_none_too_often() {
        let all = lines(Duration::ZERO);
        assert!(
            all.lines().count() >= 1 && all.contains("larder: ") && all.contains(" %  step"),
            "{all}"
        );
        assert!(all.lines().all(|l| l.starts_with("larder: ")), "{all}");
        assert_eq!(lines(Duration::from_secs(3600)), "");
    }
}
