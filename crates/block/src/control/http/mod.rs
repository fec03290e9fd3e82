//! The live page, `/metrics` and `/healthz` of a block cache.

mod live;
mod metrics;

use std::net::TcpListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use larder_runtime::page::{self, Hosts, METRICS_TYPE, PageServer};

use super::Control;
use live::Sampler;
pub use live::{Live, Point};

struct Context {
    control: Arc<Control>,
    sampler: Mutex<Sampler>,
}

impl Context {
    fn sampler(&self) -> MutexGuard<'_, Sampler> {
        self.sampler.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
    let context = Arc::new(Context { control, sampler: Mutex::new(Sampler::default()) });
    let app = Router::new()
        .route("/", get(live_page))
        .route("/metrics", get(metrics_text))
        .route("/api/live.json", get(live_json))
        .route("/healthz", get(health))
        .with_state(context.clone());
    page::start(listener, app, Hosts::new(hosts.iter().cloned()), move || {
        let (status, latencies) = (context.control.status(), context.control.cache().latencies());
        context.sampler().push(status, latencies);
    })
}

async fn live_page() -> impl IntoResponse {
    page::html(page::document(
        "Larder block cache",
        include_str!("body.html"),
        include_str!("page.js"),
    ))
}

async fn metrics_text(State(context): State<Arc<Context>>) -> impl IntoResponse {
    match metrics::encode(&context.control.status()) {
        Ok(text) => (StatusCode::OK, [(header::CONTENT_TYPE, METRICS_TYPE)], text),
        Err(e) => (
            StatusCode::INTERNAL_SERVER_ERROR,
            [(header::CONTENT_TYPE, "text/plain; charset=utf-8")],
            e.to_string(),
        ),
    }
}

async fn live_json(State(context): State<Arc<Context>>) -> impl IntoResponse {
    let live: Live = context.sampler().live();
    ([(header::CACHE_CONTROL, "no-store")], Json(live))
}

async fn health(State(context): State<Arc<Context>>) -> impl IntoResponse {
    // In pass-through it still serves: it is healthy, and says what is wrong.
    let mut text = "ok\n".to_owned();
    for alarm in context.control.status().alarms {
        text.push_str(&alarm);
        text.push('\n');
    }
    text
}
