//! How a volume's write-back is said: as the engine's [`Mode`] is. The bound is said elsewhere.

use std::fmt;
use std::str::FromStr;

use larder_engine::block::writeback::words::Mode;
pub use larder_engine::block::writeback::words::{BACK, FORM, NotBack, order_name};

use super::BackConfig;

impl FromStr for BackConfig {
    type Err = NotBack;

    fn from_str(text: &str) -> Result<BackConfig, NotBack> {
        let Mode { order, pace } = text.parse()?;
        Ok(BackConfig { order, pace, dirty_max: None })
    }
}

impl fmt::Display for BackConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Mode { order: self.order, pace: self.pace }.fmt(f)
    }
}
