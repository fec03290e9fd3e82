//! A live page with a sample of the test's own: its server is asked for the page once, and this one plays its part from then on.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use serde_json::Value;

use super::browse;

/// A narrow phone, CSS pixels.
const PHONE: u32 = 360;

/// Serves the page at `/` with this sample, and in a frame as wide as a phone at `/phone`, for as long as the process lives.
pub(crate) fn stage(page: String, sample: &Value) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let phone = format!(
        "<!doctype html><body><iframe src=\"/\" width=\"{PHONE}\" height=\"800\" style=\"border:0\"></iframe><script>setTimeout(() => {{
         const page = document.querySelector('iframe').contentDocument.documentElement;
         document.body.dataset.wide = page.scrollWidth; document.body.dataset.shown = page.clientWidth; }}, 2500)</script>"
    );
    let all = Arc::new((page, phone, sample.to_string()));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let all = all.clone();
            std::thread::spawn(move || answer(stream, &all));
        }
    });
    format!("http://{address}/")
}

fn answer(mut stream: TcpStream, (page, phone, sample): &(String, String, String)) -> Option<()> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).lines();
    let request = lines.next()?.ok()?;
    while !lines.next()?.ok()?.is_empty() {}
    let (kind, body) = match request.split(' ').nth(1)? {
        "/" => ("text/html; charset=utf-8", page.as_str()),
        "/phone" => ("text/html; charset=utf-8", phone.as_str()),
        "/api/live.json" => ("application/json", sample.as_str()),
        _ => ("text/plain", ""),
    };
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
    .ok()
}

/// The page with a script that runs when its first sample is drawn.
pub(crate) fn with_script(page: &str, script: &str) -> String {
    format!("{page}<script>setTimeout(() => {{ {script} }}, 500)</script>")
}

/// The page does not scroll sideways on a phone.
pub(crate) fn fits_a_phone(program: &str, address: &str) {
    let dom = browse(program, &format!("{address}phone"), &["--dump-dom"]);
    let said = |name: &str| -> u32 {
        let (_, rest) =
            dom.split_once(&format!("data-{name}=\"")).unwrap_or_else(|| panic!("{dom}"));
        rest.split('"').next().unwrap().parse().unwrap()
    };
    assert_eq!((said("wide"), said("shown")), (PHONE, PHONE), "it is wider than a phone");
}

/// What a graph shows.
#[derive(Debug)]
pub(crate) struct Drawn {
    /// The runs of each series: points of 600 × 100, from the lower left.
    pub(crate) runs: Vec<(String, Vec<(f64, f64)>)>,
    /// Numbers at the vertical axis, and how far below its top, percent.
    pub(crate) ticks: Vec<(String, f64)>,
    /// Words at the horizontal axis.
    pub(crate) minutes: Vec<String>,
    /// What stands below.
    pub(crate) legend: String,
}

/// The graph of that id.
pub(crate) fn graph(dom: &str, id: &str) -> Drawn {
    let (_, rest) = dom.split_once(&format!("id=\"{id}\"")).unwrap_or_else(|| panic!("no {id}"));
    let figure = rest.split("</figure>").next().unwrap();
    let attribute = |tag: &str, name: &str| -> String {
        let (_, rest) = tag.split_once(&format!("{name}=\"")).unwrap();
        rest.split('"').next().unwrap().to_owned()
    };
    let runs = figure.split("<polyline ").skip(1).map(|tag| {
        let points = attribute(tag, "points");
        let points = points.split(' ').map(|p| {
            let (x, y) = p.split_once(',').unwrap();
            (x.parse().unwrap(), 100.0 - y.parse::<f64>().unwrap())
        });
        (attribute(tag, "stroke"), points.collect())
    });
    let text = |piece: &str| piece.split('<').next().unwrap().to_owned();
    let ticks = figure.split("<span style=\"top:").skip(1).map(|piece| {
        let (top, rest) = piece.split_once('%').unwrap();
        (text(rest.split_once('>').unwrap().1), top.trim().parse().unwrap())
    });
    let (_, below) = figure.split_once("class=\"x\"").unwrap();
    let below = below.split("</div>").next().unwrap();
    let minutes = below.split("<span>").skip(1).map(text).collect();
    let (_, caption) = figure.split_once("<figcaption>").unwrap();
    let caption = caption.split("</figcaption>").next().unwrap();
    let mut legend = String::new();
    for piece in caption.split('<') {
        legend += piece.split_once('>').map_or(piece, |(_, text)| text);
    }
    Drawn { runs: runs.collect(), ticks: ticks.collect(), minutes, legend }
}

impl Drawn {
    /// How many runs the series of that colour has, and that none of them crosses from one side of `at` to the other.
    pub(crate) fn parts(&self, colour: &str, at: f64) -> usize {
        let own: Vec<_> = self.runs.iter().filter(|(stroke, _)| stroke == colour).collect();
        for (_, run) in &own {
            let left = run.iter().all(|&(x, _)| x < at);
            assert!(left || run.iter().all(|&(x, _)| x > at), "a line over the gap: {self:?}");
        }
        own.len()
    }
}
