//! Settings that several servers have, with their checks.

mod drive;
mod live_page;
mod log;
mod recording;
mod tls;

pub use drive::DriveLife;
pub use live_page::LivePage;
pub use log::Log;
pub use recording::Recording;
pub use tls::Tls;
