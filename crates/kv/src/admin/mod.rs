//! The live page, `/metrics` and `/healthz`, on a thread of their own with a small HTTP server.

mod live;
mod metrics;

use std::fmt;
use std::sync::Mutex;

use larder_net::page::{self, Health, Page};

pub use larder_net::page::PageServer as AdminServer;
pub use live::{Live, LiveApp, LiveTier};

use crate::server::shared::lock;
use crate::server::{Store, View};
use live::Sampler;

struct LivePage<S> {
    view: View<S>,
    sampler: Mutex<Sampler>,
}

/// Starts the page's server on a socket that listens already; beside `localhost` and addresses it has the names `hosts`.
///
/// # Errors
/// When the thread cannot be started.
pub fn start<S: Store>(
    listener: std::net::TcpListener,
    view: View<S>,
    hosts: &[String],
) -> std::io::Result<AdminServer> {
    page::start(listener, LivePage { view, sampler: Mutex::new(Sampler::new()) }, hosts)
}

impl<S: Store> Page for LivePage<S> {
    type Live = Live;

    fn document(&self) -> String {
        page::document("Larder", include_str!("body.html"), include_str!("page.js"))
    }

    fn live(&self) -> Live {
        lock(&self.sampler).live()
    }

    fn metrics(&self) -> Result<String, fmt::Error> {
        metrics::encode(&self.view.sample())
    }

    /// A cache without its flash still serves: it is healthy, and says what is wrong.
    fn health(&self) -> Health {
        let sample = self.view.sample();
        Health { stopping: sample.stopping, alarms: sample.store.alarms }
    }

    fn each_second(&self) {
        let sample = self.view.sample();
        lock(&self.sampler).push(sample);
    }
}
