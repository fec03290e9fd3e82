//! The connections of a live page: few of them, none for long without a request, and only requests that are meant for it.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response, StatusCode, header};
use axum::response::IntoResponse;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Connections at a time. One more ends the one that came first: what is served has its descriptors for its own clients.
pub const MOST_CONNECTIONS: usize = 64;
/// For the head of a request to come, also of the next one on a connection that stays.
const HEAD: Duration = Duration::from_secs(10);
/// For a connection in all; a page that is looked at makes a new one.
const LONGEST: Duration = Duration::from_secs(600);
/// Out of descriptors and the like: tried again after this.
const PAUSE: Duration = Duration::from_millis(100);
/// Between two lines in the log about the same thing.
const QUIET: Duration = Duration::from_secs(10);

/// Names that requests may be for, beside `localhost` and addresses. A page of another site can make a browser ask any server
/// by a name of that site's own (DNS rebinding): such a request has the wrong name in it.
#[derive(Clone, Debug, Default)]
pub(super) struct Hosts(Vec<String>);

impl Hosts {
    /// These names too; `*` for any.
    pub(super) fn new(names: impl IntoIterator<Item = String>) -> Hosts {
        Hosts(names.into_iter().map(|name| name.to_ascii_lowercase()).collect())
    }

    /// Whether a request with this `Host` is meant for this page.
    pub(super) fn has(&self, host: &str) -> bool {
        let host = host.to_ascii_lowercase();
        let name = match host.strip_prefix('[') {
            // An address of IPv6.
            Some(rest) => rest.split(']').next().unwrap_or(""),
            None => host.rsplit_once(':').map_or(host.as_str(), |(name, _)| name),
        };
        let name = name.strip_suffix('.').unwrap_or(name);
        name == "localhost"
            || name.parse::<IpAddr>().is_ok()
            || self.0.iter().any(|n| n == "*" || n == name)
    }
}

/// Says something at most once in ten seconds.
#[derive(Default)]
struct Seldom(Option<Instant>);

impl Seldom {
    fn now(&mut self) -> bool {
        let due = self.0.is_none_or(|at| at.elapsed() >= QUIET);
        if due {
            self.0 = Some(Instant::now());
        }
        due
    }
}

/// Serves until it is dropped, and the connections with it.
pub(super) async fn serve(listener: TcpListener, app: Router, hosts: Hosts) {
    let mut open: Connections = Connections::default();
    let (mut crowd, mut failing) = (Seldom::default(), Seldom::default());
    loop {
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(e) => {
                if failing.now() {
                    tracing::warn!("the live page cannot accept: {e}");
                }
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        if open.make_room() && crowd.now() {
            tracing::warn!(
                "the live page has {MOST_CONNECTIONS} connections: the oldest are closed for new ones"
            );
        }
        let (app, hosts) = (app.clone(), hosts.clone());
        open.0.push_back(tokio::spawn(async move {
            let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                answer(app.clone(), hosts.clone(), request)
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD)
                .serve_connection(TokioIo::new(socket), service);
            // However it ends, nothing is left to do: the client has gone away, was too slow or spoke nonsense.
            let _ = tokio::time::timeout(LONGEST, connection).await;
        }));
    }
}

#[derive(Default)]
struct Connections(VecDeque<JoinHandle<()>>);

impl Connections {
    /// Ends the oldest if there are as many as there may be. Returns whether it had to.
    fn make_room(&mut self) -> bool {
        self.0.retain(|task| !task.is_finished());
        let full = self.0.len() >= MOST_CONNECTIONS;
        if full && let Some(oldest) = self.0.pop_front() {
            oldest.abort();
        }
        full
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        for task in &self.0 {
            task.abort();
        }
    }
}

async fn answer(
    app: Router,
    hosts: Hosts,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    // One that names nobody comes from no browser.
    let host = request.headers().get(header::HOST).map(|host| host.to_str().unwrap_or(""));
    if let Some(host) = host.filter(|host| !hosts.has(host)) {
        let text = format!(
            "'{}' is not a name of this page: use its address, or start it with --http-host NAME\n",
            host.escape_default()
        );
        return Ok((StatusCode::MISDIRECTED_REQUEST, text).into_response());
    }
    tower_service::Service::call(&mut app.clone(), request.map(Body::new)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_for_other_names_are_not_meant() {
        let hosts = Hosts::new(["Cache1.example".to_owned()]);
        for host in [
            "127.0.0.1",
            "127.0.0.1:11280",
            "[::1]:1",
            "[::1]",
            "localhost:80",
            "LOCALHOST",
            "localhost.",
            "cache1.example",
            "cache1.example:1",
        ] {
            assert!(hosts.has(host), "{host}");
        }
        for host in
            ["", "evil.example", "evil.example:11280", "localhost.evil", "127.0.0.1.evil", "[evil]"]
        {
            assert!(!hosts.has(host), "{host}");
        }
        assert!(Hosts::new(["*".to_owned()]).has("evil.example"));
    }
}
