//! The live page, `/metrics` and `/healthz`, on a thread of their own with a small HTTP server.

mod live;
mod metrics;
mod view;

use std::sync::{Arc, Mutex};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
pub use larder_runtime::page::PageServer as AdminServer;
use larder_runtime::page::{self, Hosts, METRICS_TYPE};

pub use live::{Live, LiveApp, LiveTier};
pub use view::View;

use crate::server::Store;
use crate::server::shared::lock;
use live::Sampler;

struct Context<S> {
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
    let context = Arc::new(Context { view, sampler: Mutex::new(Sampler::new()) });
    let app = Router::new()
        .route("/", get(live_page))
        .route("/metrics", get(metrics_text::<S>))
        .route("/api/live.json", get(live_json::<S>))
        .route("/healthz", get(health::<S>))
        .with_state(context.clone());
    page::start(listener, app, Hosts::new(hosts.iter().cloned()), move || {
        let sample = context.view.sample();
        lock(&context.sampler).push(sample);
    })
}

async fn live_page() -> impl IntoResponse {
    page::html(page::document("Larder", include_str!("body.html"), include_str!("page.js")))
}

async fn metrics_text<S: Store>(State(context): State<Arc<Context<S>>>) -> impl IntoResponse {
    match metrics::encode(&context.view.sample()) {
        Ok(text) => (StatusCode::OK, [(header::CONTENT_TYPE, METRICS_TYPE)], text),
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
