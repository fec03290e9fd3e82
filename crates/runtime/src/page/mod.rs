//! What a live page needs: an HTTP server on a thread of its own, and the style and script that all pages share.

mod serve;

use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::http::header;
use axum::response::IntoResponse;
use tokio::sync::oneshot;

pub use serve::{Hosts, MOST_CONNECTIONS};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

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

/// The answer that is a document of [`document`].
pub fn html(document: String) -> impl IntoResponse {
    // Nothing is loaded from elsewhere and the page cannot be framed.
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; \
                  frame-ancestors 'none'";
    (
        [
            (header::CONTENT_TYPE, "text/html; charset=utf-8"),
            (header::CONTENT_SECURITY_POLICY, policy),
            (header::CACHE_CONTROL, "no-cache"),
        ],
        document,
    )
}

/// The content type of `/metrics`.
pub const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

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

/// Serves `app` on a socket that listens already, to requests for `hosts`, and calls `each_second` once a second whether or not somebody looks, so
/// that a page has a past to show.
///
/// # Errors
/// When the thread cannot be started.
pub fn start(
    listener: std::net::TcpListener,
    app: Router,
    hosts: Hosts,
    mut each_second: impl FnMut() + Send + 'static,
) -> std::io::Result<PageServer> {
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
            each_second();
            let second = Duration::from_secs(1);
            let sampling = async {
                let mut tick =
                    tokio::time::interval_at(tokio::time::Instant::now() + second, second);
                tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
                loop {
                    tick.tick().await;
                    each_second();
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
