//! How a volume's write-back is said: as the engine's [`Mode`] is. The bounds are said elsewhere.

use std::fmt;
use std::str::FromStr;

use larder_engine::block::writeback::words::Mode;
pub use larder_engine::block::writeback::words::{BACK, FORM, NotBack, order_name};

use super::{Age, BackConfig};

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
