//! The live page, `/metrics` and `/healthz` of a block cache.

mod live;
mod metrics;

use std::fmt;
use std::net::TcpListener;
use std::sync::Arc;

use larder_net::page::{self, Health, Page, PageServer};
use parking_lot::{Mutex, MutexGuard};

use super::Control;
use live::Sampler;
pub use live::{Live, Point};

struct LivePage {
    control: Arc<Control>,
    sampler: Mutex<Sampler>,
}

/// Starts the page's server on a socket that listens already; beside `localhost` and addresses it has the names `hosts`.
///
/// # Errors
/// When the thread cannot be started.
pub fn start(
    listener: TcpListener,
    control: Arc<Control>,
    hosts: &[String],
) -> std::io::Result<PageServer> {
    page::start(listener, LivePage { control, sampler: Mutex::new(Sampler::default()) }, hosts)
}

impl LivePage {
    fn sampler(&self) -> MutexGuard<'_, Sampler> {
        self.sampler.lock()
    }
}

impl Page for LivePage {
    type Live = Live;

    fn document(&self) -> String {
        let (body, script) = (include_str!("body.html"), include_str!("page.js"));
        page::document("Larder block cache", body, script)
    }

    fn live(&self) -> Live {
        self.sampler().live()
    }

    fn metrics(&self) -> Result<String, fmt::Error> {
        metrics::encode(&self.control.status())
    }

    /// In pass-through it still serves: it is healthy, and says what is wrong.
    fn health(&self) -> Health {
        Health { stopping: false, alarms: self.control.status().alarms }
    }

    fn each_second(&self) {
        let (status, latencies) = (self.control.status(), self.control.cache().latencies());
        self.sampler().push(status, latencies);
    }
}
