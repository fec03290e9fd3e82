//! An object store that speaks as much of S3 as is needed: objects with ETags, conditional requests, ranges, lists in
//! pages; and faults.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Keys of one page of a list.
const PAGE: usize = 5;

#[derive(Default)]
pub(crate) struct State {
    /// Under `/bucket/key`, with a number that makes the ETag.
    objects: Mutex<BTreeMap<String, (Vec<u8>, u64)>>,
    versions: AtomicU64,
    pub(crate) requests: AtomicU64,
    /// Every n-th request is answered with 503; 0: none.
    pub(crate) fail_every: AtomicU64,
    /// Of every n-th request the connection is cut after it was carried out; 0: none.
    pub(crate) cut_every: AtomicU64,
    /// Nothing is answered.
    pub(crate) hang: AtomicBool,
    /// Requests that have come and were not carried out yet.
    pub(crate) under_way: AtomicU64,
}

pub(crate) struct S3 {
    pub(crate) state: Arc<State>,
    address: SocketAddr,
}

impl S3 {
    pub(crate) fn start() -> S3 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State::default());
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = shared.clone();
                std::thread::spawn(move || serve(&state, stream));
            }
        });
        S3 { state, address }
    }

    pub(crate) fn uri(&self, prefix: &str) -> String {
        format!("s3://bucket/{prefix}?endpoint=http://{}", self.address)
    }

    pub(crate) fn remove(&self, key: &str) {
        self.state.objects.lock().unwrap().remove(&format!("/bucket/{key}")).expect("it is there");
    }

    pub(crate) fn text(&self, key: &str) -> String {
        let objects = self.state.objects.lock().unwrap();
        String::from_utf8(objects[&format!("/bucket/{key}")].0.clone()).unwrap()
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        self.state.objects.lock().unwrap().keys().cloned().collect()
    }
}

struct Answer {
    status: &'static str,
    headers: Vec<String>,
    body: Vec<u8>,
}

fn answer(status: &'static str) -> Answer {
    Answer { status, headers: Vec::new(), body: Vec::new() }
}

fn tag(version: u64) -> String {
    format!("\"v{version}\"")
}

/// One connection, until its client hangs up or it is cut.
fn serve(state: &State, stream: TcpStream) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut stream = stream;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let mut words = line.split_whitespace();
        let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim_end().split_once(':') else { break };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
        let len = headers.get("content-length").map_or(0, |l| l.parse().unwrap());
        let mut body = vec![0; len];
        reader.read_exact(&mut body).ok()?;
        let number = state.requests.fetch_add(1, Ordering::SeqCst) + 1;
        state.under_way.fetch_add(1, Ordering::SeqCst);
        while state.hang.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let hit = |every: &AtomicU64| {
            let every = every.load(Ordering::SeqCst);
            every > 0 && number.is_multiple_of(every)
        };
        assert!(headers.contains_key("authorization"), "requests are signed");
        let Answer { status, headers, body } = if hit(&state.fail_every) {
            answer("503 Slow Down")
        } else {
            carry_out(state, &method, &target, &headers, body)
        };
        state.under_way.fetch_sub(1, Ordering::SeqCst);
        if hit(&state.cut_every) {
            return None;
        }
        let mut text = format!("HTTP/1.1 {status}\r\n");
        if !headers.iter().any(|h| h.starts_with("Content-Length")) {
            text.push_str(&format!("Content-Length: {}\r\n", body.len()));
        }
        headers.iter().for_each(|h| text.push_str(&format!("{h}\r\n")));
        text.push_str("\r\n");
        stream.write_all(text.as_bytes()).ok()?;
        stream.write_all(&body).ok()?;
    }
}

fn carry_out(
    state: &State,
    method: &str,
    target: &str,
    headers: &BTreeMap<String, String>,
    body: Vec<u8>,
) -> Answer {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    if !path.starts_with("/bucket") {
        return answer("404 Not Found");
    }
    let mut objects = state.objects.lock().unwrap();
    if method == "GET" && query.contains("list-type=2") {
        return list(&objects, query);
    }
    let found = objects.get(path);
    let condition = |name: &str| headers.get(name).map(String::as_str);
    let matches = |wanted: &str| {
        found.is_some_and(|f| tag(f.1).trim_matches('"') == wanted.trim_matches('"'))
    };
    if condition("if-match").is_some_and(|wanted| found.is_some() && !matches(wanted)) {
        return answer("412 Precondition Failed");
    }
    match method {
        "PUT" => {
            if condition("if-none-match") == Some("*") && found.is_some() {
                return answer("412 Precondition Failed");
            }
            if condition("if-match").is_some() && found.is_none() {
                return answer("404 Not Found");
            }
            let version = state.versions.fetch_add(1, Ordering::SeqCst);
            objects.insert(path.to_owned(), (body, version));
            Answer { headers: vec![format!("ETag: {}", tag(version))], ..answer("200 OK") }
        }
        "GET" | "HEAD" => {
            let Some((bytes, version)) = found else { return answer("404 Not Found") };
            let mut headers = vec![
                format!("ETag: {}", tag(*version)),
                "Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT".to_owned(),
            ];
            let mut status = "200 OK";
            let mut range = 0..bytes.len();
            if let Some(wanted) = condition("range") {
                let (from, to) = wanted.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
                range = match (from.parse::<usize>(), to.parse::<usize>()) {
                    (Ok(from), Ok(to)) => from..(to + 1).min(bytes.len()),
                    (Ok(from), Err(_)) => from..bytes.len(),
                    (Err(_), Ok(last)) => bytes.len().saturating_sub(last)..bytes.len(),
                    _ => return answer("400 Bad Request"),
                };
                if range.start >= bytes.len() {
                    return answer("416 Range Not Satisfiable");
                }
                status = "206 Partial Content";
                let (from, to) = (range.start, range.end - 1);
                headers.push(format!("Content-Range: bytes {from}-{to}/{}", bytes.len()));
            }
            let mut body = bytes[range].to_vec();
            if method == "HEAD" {
                headers.push(format!("Content-Length: {}", body.len()));
                body.clear();
            }
            Answer { status, headers, body }
        }
        _ => answer("405 Method Not Allowed"),
    }
}

fn list(objects: &BTreeMap<String, (Vec<u8>, u64)>, query: &str) -> Answer {
    let parameter = |name: &str| {
        let value = query.split('&').find_map(|p| p.strip_prefix(name)?.strip_prefix('='))?;
        Some(value.replace("%2F", "/"))
    };
    let prefix = parameter("prefix").unwrap_or_default();
    let after = parameter("continuation-token").or(parameter("start-after")).unwrap_or_default();
    let names = objects.iter().filter_map(|(path, object)| {
        let key = path.strip_prefix("/bucket/")?;
        (key.starts_with(&prefix) && *key > *after).then_some((key, object))
    });
    let all: Vec<_> = names.collect();
    let mut text = "<?xml version=\"1.0\"?><ListBucketResult>".to_owned();
    for (key, (bytes, version)) in all.iter().take(PAGE) {
        text.push_str(&format!(
            "<Contents><Key>{key}</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified>\
             <ETag>&quot;v{version}&quot;</ETag><Size>{}</Size></Contents>",
            bytes.len()
        ));
    }
    if all.len() > PAGE {
        let last = all[PAGE - 1].0;
        text.push_str(&format!(
            "<IsTruncated>true</IsTruncated><NextContinuationToken>{last}</NextContinuationToken>"
        ));
    } else {
        text.push_str("<IsTruncated>false</IsTruncated>");
    }
    text.push_str("</ListBucketResult>");
    Answer { body: text.into_bytes(), ..answer("200 OK") }
}
