//! How a volume's write-back is said: as the engine's [`Mode`] is. The bounds are said elsewhere.

use std::fmt;
use std::str::FromStr;

use larder_engine::block::writeback::words::Mode;
pub use larder_engine::block::writeback::words::{BACK, FORM, NotBack, order_name};

use super::{Age, BackConfig, Beyond};

impl fmt::Display for Beyond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Beyond { end, had, dirty, range } = *self;
        write!(f, "its store has {end} bytes and had {had}: it is only read. ")?;
        match dirty {
            0 => write!(f, "Nothing that is dirty lies beyond the end")?,
            _ => write!(
                f,
                "{dirty} bytes that are dirty lie beyond the end, in bytes {} to {}",
                range.0, range.1
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
