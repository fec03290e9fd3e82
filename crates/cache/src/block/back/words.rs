//! How a volume's write-back is said: as the engine's [`Mode`] is. The bounds are said elsewhere.

use std::fmt;
use std::str::FromStr;

use larder_base::ByteSize;
use larder_engine::block::writeback::bounds;
pub use larder_engine::block::writeback::bounds::{LogSize, NotHeld};
use larder_engine::block::writeback::words::Mode;
pub use larder_engine::block::writeback::words::{BACK, FORM, NotBack, order_name};

use larder_format::block::write_log::record::MAX_MARK;

use super::{Age, BackConfig, Beyond};

impl fmt::Display for Beyond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Beyond { end, had, dirty, range } = *self;
        let (had, has) = (ByteSize(had), ByteSize(end));
        write!(f, "its store has {has} and had {had}: it is only read. ")?;
        match dirty {
            0 => write!(f, "Nothing that is dirty lies beyond the end")?,
            _ => write!(
                f,
                "{} that are dirty lie beyond the end, in bytes {} to {}",
                ByteSize(dirty),
                range.0,
                range.1
            )?,
        }
        write!(f, ". Restore its size and attach it again, or stop and discard what lies beyond")
    }
}

impl FromStr for BackConfig {
    type Err = NotBack;

    fn from_str(text: &str) -> Result<BackConfig, NotBack> {
        let Mode { order, pace } = text.parse()?;
        Ok(BackConfig { order, pace, dirty_max: None, age: None })
    }
}

impl BackConfig {
    /// How old what is dirty may become: as it is said, or what is usual for its pace.
    ///
    /// # Errors
    /// When it is said, and data stay dirty until the log is full.
    pub fn age(&self) -> Result<Option<Age>, NotBack> {
        Mode { order: self.order, pace: self.pace }.age(self.age)
    }
}

impl fmt::Display for BackConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Mode { order: self.order, pace: self.pace }.fmt(f)
    }
}

/// Less of the log is not worth having: a batch of it may be as long.
pub const LEAST_BOUND: ByteSize = ByteSize(bounds::LEAST);

impl BackConfig {
    /// Whether a volume may hold of a log of this size what it is to hold.
    ///
    /// # Errors
    /// What is wrong, and what to do.
    pub fn check_bound(&self, log: LogSize) -> Result<(), NotHeld> {
        log.check(&[self.dirty_max.map(|most| most.0)])
    }
}

/// Whether all volumes that write back may hold of a log of this size together what they are to hold.
///
/// # Errors
/// What is wrong, and what to do.
pub fn check_bounds<'a>(
    all: impl Iterator<Item = &'a BackConfig>,
    log: LogSize,
) -> Result<(), NotHeld> {
    let stated: Vec<Option<u64>> = all.map(|back| back.dirty_max.map(|most| most.0)).collect();
    log.check(&stated)
}

/// Whether a mark may have this name.
///
/// # Errors
/// What is wrong with it, and what one may be.
pub fn check_mark(name: &str) -> Result<(), String> {
    let what = match name.len() {
        0 => "is empty".to_owned(),
        len if len > MAX_MARK => format!("has {len} bytes"),
        _ if name.chars().any(char::is_control) => "has control characters".to_owned(),
        _ => return Ok(()),
    };
    let begins: String = name.chars().take(32).collect();
    let more = if begins.len() < name.len() { "…" } else { "" };
    Err(format!(
        "mark '{}{more}': the name {what}: a mark has 1 to {MAX_MARK} bytes of UTF-8, without control characters",
        begins.escape_debug()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_a_mark_that_cannot_be_is_refused_in_one_line() {
        assert!(check_mark("nightly 2026-11-27 ä").is_ok() && check_mark(&"x".repeat(255)).is_ok());
        for (name, word) in [("", "is empty"), ("a\nb", "control"), ("\u{1b}[2J", "control")] {
            let why = check_mark(name).unwrap_err();
            assert!(why.contains(word) && why.contains("1 to 255 bytes"), "{why}");
            assert!(!why.chars().any(char::is_control), "{why}");
        }
        let why = check_mark(&"x".repeat(70_000)).unwrap_err();
        assert!(why.contains("70000 bytes") && why.len() < 300, "{why}");
    }
}
