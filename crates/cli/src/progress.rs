//! Progress of what takes longer than a moment: a bar on a terminal, and a line every ten seconds where standard error is
//! a file or a pipe.

use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

/// Between two lines.
const EVERY: Duration = Duration::from_secs(10);

/// A bar over `total` steps; what `set_message` says stands beside it, with the time left.
pub(crate) fn bar(total: u64) -> ProgressBar {
    let (bar, template) = if io::stderr().is_terminal() {
        (ProgressBar::new(total), "{bar:30} {percent:>3} %  {msg}  {eta} left")
    } else {
        let lines = Lines::new(io::stderr(), EVERY);
        let target = ProgressDrawTarget::term_like_with_hz(Box::new(lines), 1);
        (ProgressBar::with_draw_target(Some(total), target), "{percent} %  {msg}  {eta} left")
    };
    let style = ProgressStyle::with_template(template);
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
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
