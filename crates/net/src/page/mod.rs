//! A live page: an HTTP server on a thread of its own with the page, `/api/live.json`, `/metrics` and `/healthz`, and the style
//! and script that all pages share.

mod serve;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use serde::Serialize;
use tokio::sync::oneshot;

use serve::Hosts;
pub use serve::MOST_CONNECTIONS;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// What a server shows of itself.
pub trait Page: Send + Sync + 'static {
    /// What the page draws: the answer of `/api/live.json`.
    type Live: Serialize;

    /// The page itself, of [`document`].
    fn document(&self) -> String;

    /// The answer of `/api/live.json`.
    fn live(&self) -> Self::Live;

    /// The answer of `/metrics`, of [`crate::metrics::text`].
    ///
    /// # Errors
    /// Never in practice: formatting into a string does not fail.
    fn metrics(&self) -> Result<String, fmt::Error>;

    /// The answer of `/healthz`.
    fn health(&self) -> Health;

    /// Called once a second whether or not somebody looks, so that there is a past to show.
    fn each_second(&self);
}

/// How a server does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// It ends: load balancers should look elsewhere.
    pub stopping: bool,
    /// Conditions that an operator should look at. A server that has some still serves, and is healthy.
    pub alarms: Vec<String>,
}

/// A page as one document without outside resources: `body`, and a script that begins with what all pages share (see
/// `page.js`) and goes on with `script`.
pub fn document(title: &str, body: &str, script: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<link rel=\"icon\" href=\"data:,\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n{body}<script>\n{SCRIPT}{script}</script>\n\
         </body>\n</html>\n"
    )
}

/// The content type of `/metrics`.
const METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Nothing is loaded from elsewhere and the page cannot be framed.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; \
                      frame-ancestors 'none'";

async fn html<P: Page>(State(page): State<Arc<P>>) -> impl IntoResponse {
    (
        [
            (header::CONTENT_TYPE, "text/html; charset=utf-8"),
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::CACHE_CONTROL, "no-cache"),
        ],
        page.document(),
    )
}

async fn live<P: Page>(State(page): State<Arc<P>>) -> impl IntoResponse {
    ([(header::CACHE_CONTROL, "no-store")], Json(page.live()))
}

async fn metrics<P: Page>(State(page): State<Arc<P>>) -> impl IntoResponse {
    match page.metrics() {
        Ok(text) => (StatusCode::OK, [(header::CONTENT_TYPE, METRICS)], text),
        Err(e) => (
            StatusCode::INTERNAL_SERVER_ERROR,
            [(header::CONTENT_TYPE, "text/plain; charset=utf-8")],
            e.to_string(),
        ),
    }
}

async fn health<P: Page>(State(page): State<Arc<P>>) -> impl IntoResponse {
    let health = page.health();
    let mut text = if health.stopping { "stopping\n" } else { "ok\n" }.to_owned();
    for alarm in &health.alarms {
        text.push_str(alarm);
        text.push('\n');
    }
    let status = if health.stopping { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    (status, text)
}

/// An HTTP server; it ends when dropped.
pub struct PageServer {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl PageServer {
    /// Where it listens, with the port that the system chose if it was left to it.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for PageServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so on stderr already.
            thread.join().ok();
        }
    }
}

/// Serves a page on a socket that listens already, to requests for `localhost`, for addresses and for these names.
///
/// # Errors
/// When the thread cannot be started.
pub fn start(
    listener: std::net::TcpListener,
    page: impl Page,
    names: &[String],
) -> std::io::Result<PageServer> {
    let (page, hosts) = (Arc::new(page), Hosts::new(names.iter().cloned()));
    let app = routes(page.clone());
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let (stop, stopped) = oneshot::channel::<()>();
    let thread = std::thread::Builder::new().name("larder-http".into()).spawn(move || {
        runtime.block_on(async move {
            let listener = match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => listener,
                Err(e) => {
                    tracing::error!("the live page cannot be served: {e}");
                    return;
                }
            };
            // Before anybody is served: a page without a sample would say of a server what is not so.
            page.each_second();
            let second = Duration::from_secs(1);
            let sampling = async {
                let mut tick =
                    tokio::time::interval_at(tokio::time::Instant::now() + second, second);
                tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
                loop {
                    tick.tick().await;
                    page.each_second();
                }
            };
            tokio::select! {
                () = serve::serve(listener, app, hosts) => {}
                () = sampling => {}
                _ = stopped => {}
            }
        });
    })?;
    Ok(PageServer { address, stop: Some(stop), thread: Some(thread) })
}

fn routes<P: Page>(page: Arc<P>) -> Router {
    Router::new()
        .route("/", get(html::<P>))
        .route("/api/live.json", get(live::<P>))
        .route("/metrics", get(metrics::<P>))
        .route("/healthz", get(health::<P>))
        .with_state(page)
}
