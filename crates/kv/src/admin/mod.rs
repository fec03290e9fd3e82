//! The live page, `/metrics` and `/healthz`, on a thread of their own with a small HTTP server.

mod live;
mod metrics;
mod view;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use tokio::sync::oneshot;

pub use live::{Live, LiveApp, LiveTier};
pub use view::View;

use crate::server::Store;
use crate::server::shared::lock;
use live::Sampler;

/// The page: one document without outside resources.
const PAGE: &str = include_str!("page.html");

/// The HTTP server of the live page; it ends when dropped.
pub struct AdminServer {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl AdminServer {
    /// Where it listens, with the port that the system chose if it was left to it.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for AdminServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

struct Context<S> {
    view: View<S>,
    sampler: Mutex<Sampler>,
}

/// Starts the page's server on a socket that listens already.
///
/// # Errors
/// When the thread cannot be started.
pub fn start<S: Store>(
    listener: std::net::TcpListener,
    view: View<S>,
) -> std::io::Result<AdminServer> {
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let (stop, stopped) = oneshot::channel::<()>();
    let context = Arc::new(Context { view, sampler: Mutex::new(Sampler::new()) });
    let app = Router::new()
        .route("/", get(page))
        .route("/metrics", get(metrics_text::<S>))
        .route("/api/live.json", get(live_json::<S>))
        .route("/healthz", get(health::<S>))
        .with_state(context.clone());
    let thread = std::thread::Builder::new().name("larder-http".into()).spawn(move || {
        runtime.block_on(async move {
            let listener = match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => listener,
                Err(e) => {
                    tracing::error!("the live page cannot be served: {e}");
                    return;
                }
            };
            // Samples are taken whether or not somebody looks, so that the page has a past to show.
            let sampling = async {
                let mut tick = tokio::time::interval(std::time::Duration::from_secs(1));
                tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
                loop {
                    tick.tick().await;
                    let sample = context.view.sample();
                    lock(&context.sampler).push(sample);
                }
            };
            tokio::select! {
                served = async { axum::serve(listener, app).await } => {
                    if let Err(e) = served {
                        tracing::error!("the live page has ended: {e}");
                    }
                }
                () = sampling => {}
                _ = stopped => {}
            }
        });
    })?;
    Ok(AdminServer { address, stop: Some(stop), thread: Some(thread) })
}

async fn page() -> impl IntoResponse {
    // Nothing is loaded from elsewhere and the page cannot be framed.
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; \
                  frame-ancestors 'none'";
    (
        [
            (header::CONTENT_TYPE, "text/html; charset=utf-8"),
            (header::CONTENT_SECURITY_POLICY, policy),
            (header::CACHE_CONTROL, "no-cache"),
        ],
        PAGE,
    )
}

async fn metrics_text<S: Store>(State(context): State<Arc<Context<S>>>) -> impl IntoResponse {
    match metrics::encode(&context.view.sample()) {
        Ok(text) => (
            StatusCode::OK,
            [(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")],
            text,
        ),
        Err(e) => (
            StatusCode::INTERNAL_SERVER_ERROR,
            [(header::CONTENT_TYPE, "text/plain; charset=utf-8")],
            e.to_string(),
        ),
    }
}

async fn live_json<S: Store>(State(context): State<Arc<Context<S>>>) -> impl IntoResponse {
    let live: Live = lock(&context.sampler).live();
    ([(header::CACHE_CONTROL, "no-store")], Json(live))
}

async fn health<S: Store>(State(context): State<Arc<Context<S>>>) -> impl IntoResponse {
    let sample = context.view.sample();
    // A cache without its flash still serves: it is healthy, and says what is wrong.
    let mut text = if sample.stopping { "stopping\n".to_owned() } else { "ok\n".to_owned() };
    for alarm in &sample.store.alarms {
        text.push_str(alarm);
        text.push('\n');
    }
    let status = if sample.stopping { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    (status, text)
}
