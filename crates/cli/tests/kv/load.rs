//! Clients that do everything at once to a server and remember what they did and saw.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use larder_base::Rng;

use crate::client::{Client, Hit};
use crate::history::{Event, Nanos, What};

/// Which keys are used, and how.
#[derive(Clone, Copy)]
pub(crate) struct Mix {
    /// So many keys get half of the requests.
    pub(crate) few: u32,
    /// The others.
    pub(crate) many: u32,
    /// Most bytes of a value.
    pub(crate) most: u64,
    /// Counters too; their increments cannot be told apart when acknowledgements are lost.
    pub(crate) counters: u32,
    /// Leaves the cleaner the time to take to flash what DRAM cannot hold.
    pub(crate) pause: bool,
}

/// The notebook of a whole test: over all connections and all lives of the server.
pub(crate) struct Notebook {
    start: Instant,
    /// By how much the server's clock was moved ahead, nanoseconds.
    ahead: AtomicU64,
    /// When the server's clock fell behind this book's, and by how much.
    late: Mutex<Vec<(Nanos, Nanos)>>,
    tokens: AtomicU64,
    events: Mutex<Vec<Event>>,
    /// Too much is done to keep all of it: values are checked by themselves alone.
    forgets: bool,
    answers: AtomicU64,
}

const COUNTER: u32 = 1 << 24;
/// Values of counters are tokens too, far from the others'.
const COUNTER_BASE: u64 = 1 << 62;

/// Keys of this kind are stored to expire, and never touched.
pub(crate) fn is_mortal(key: u32) -> bool {
    key % 16 == 15
}

pub(crate) fn name(key: u32) -> String {
    if key >= COUNTER { format!("c{}", key - COUNTER) } else { format!("k{key}") }
}

impl Notebook {
    pub(crate) fn new() -> Notebook {
        Notebook {
            start: Instant::now(),
            ahead: AtomicU64::new(0),
            late: Mutex::default(),
            tokens: AtomicU64::new(1),
            events: Mutex::default(),
            forgets: false,
            answers: AtomicU64::new(0),
        }
    }

    /// For load without end: whether a value is whole and of its key is still checked.
    pub(crate) fn forgetful() -> Notebook {
        Notebook { forgets: true, ..Notebook::new() }
    }

    /// Events so far, kept or not.
    pub(crate) fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
    }

    pub(crate) fn now(&self) -> Nanos {
        self.start.elapsed().as_nanos() as Nanos + self.ahead.load(Ordering::Relaxed)
    }

    /// Moves the server's clock ahead (it must have been started with `--enable-debugtime`), and the time of this book with
    /// it: what has expired by then is gone for good, whatever the clock says later. Nobody may be at work meanwhile.
    pub(crate) fn jump(&self, client: &mut Client, seconds: u64) {
        assert_eq!(client.ask(&format!("debugtime {seconds}\r\n")), "OK");
        self.ahead.fetch_add(seconds * 1_000_000_000, Ordering::Relaxed);
    }

    /// A server has begun, and the one before ended at `since` or later. One whose clock was moved ahead, or a later one, begins with the
    /// latest whole second that the one before has told: it cannot know for how long there was none. Nobody may be at work meanwhile.
    pub(crate) fn falls_behind(&self, since: Nanos) {
        if self.ahead.load(Ordering::Relaxed) > 0 {
            let now = self.now();
            self.late.lock().unwrap().push((now, now - since + 1_000_000_000));
        }
    }

    pub(crate) fn token(&self) -> u64 {
        self.tokens.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn note(&self, events: &mut Vec<Event>) {
        self.events.lock().unwrap().append(events);
    }

    /// How many values were read.
    pub(crate) fn reads(&self) -> usize {
        let events = self.events.lock().unwrap();
        events.iter().filter(|e| matches!(e.what, What::Read { .. })).count()
    }

    pub(crate) fn check(&self) {
        let wrong = crate::history::contradictions(
            &self.events.lock().unwrap(),
            &self.late.lock().unwrap(),
        );
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    /// Asks for every key once and notes the answers: how many were there.
    pub(crate) fn sweep(&self, client: &mut Client, mix: &Mix) -> io::Result<u32> {
        let mut events = Vec::new();
        let mut there = 0;
        let keys: Vec<u32> = (0..mix.few + mix.many).collect();
        for chunk in keys.chunks(64) {
            let began = self.now();
            let mut out = Vec::new();
            for &key in chunk {
                out.extend_from_slice(format!("gets {}\r\n", name(key)).as_bytes());
            }
            client.send(&out)?;
            for &key in chunk {
                if let Some(hit) = client.classic()? {
                    there += 1;
                    events.push(read(key, &hit, began, self.now()));
                }
            }
        }
        self.note(&mut events);
        Ok(there)
    }

    /// Flushes everything, and notes it.
    pub(crate) fn flush(&self, client: &mut Client) -> io::Result<()> {
        let began = self.now();
        client.send(b"flush_all\r\n")?;
        let ended = client.line().map(|line| assert_eq!(line, "OK"));
        let event =
            Event { key: 0, what: What::Flush, began, ended: ended.is_ok().then(|| self.now()) };
        self.note(&mut vec![event]);
        ended
    }
}

/// A value that says what it is: key, token, and bytes that follow from the token.
pub(crate) fn value(key: u32, token: u64, most: u64) -> Vec<u8> {
    let mut out = format!("{}={token}=", name(key)).into_bytes();
    let mut rng = Rng::new(token);
    // A few large ones among many small.
    let most = if token.is_multiple_of(64) { most } else { most.min(600) };
    for _ in 0..rng.below(most.max(1)) {
        out.push(b'a' + (rng.next_u64() % 26) as u8);
    }
    out
}

/// The last token of a value, after checking all its bytes.
fn token_of(key: u32, value: &[u8]) -> u64 {
    if key >= COUNTER {
        return std::str::from_utf8(value).ok().and_then(|t| t.trim().parse().ok()).unwrap_or(0);
    }
    // What was appended comes after a '+'.
    let mut last = 0;
    for part in value.split(|&b| b == b'+') {
        let mut fields = part.splitn(3, |&b| b == b'=');
        let (k, t, pad) = (fields.next(), fields.next(), fields.next());
        let token = t.and_then(|t| std::str::from_utf8(t).ok()).and_then(|t| t.parse().ok());
        let Some(token) = token else { return 0 };
        let whole = k == Some(name(key).as_bytes())
            && pad.is_some_and(|pad| {
                let mut rng = Rng::new(token);
                rng.next_u64();
                pad.iter().all(|&b| b == b'a' + (rng.next_u64() % 26) as u8)
            });
        if !whole {
            return 0;
        }
        last = token;
    }
    last
}

fn read(key: u32, hit: &Hit, began: Nanos, ended: Nanos) -> Event {
    let what = What::Read { token: token_of(key, &hit.value), cas: hit.cas };
    Event { key, what, began, ended: Some(ended) }
}

/// What was sent, whose answer is still to come.
enum Asked {
    Store { key: u32, token: u64, ttl: u32 },
    Get { key: u32, meta: bool },
    Delete { key: u32 },
    Touch,
    Add { key: u32 },
}

/// Works on a connection until told to stop or the other side is gone. Everything goes to the notebook.
pub(crate) fn work(book: &Notebook, mut client: Client, mix: Mix, seed: u64, stop: &AtomicBool) {
    let mut rng = Rng::new(seed);
    let mut cas: Option<(u32, u64)> = None;
    let mut events = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        if mix.pause {
            std::thread::sleep(std::time::Duration::from_micros(1_000));
        }
        let (mut out, mut asked) = (Vec::new(), Vec::new());
        for _ in 0..rng.range(1, 24) {
            asked.push(one(book, &mix, &mut rng, &mut cas, &mut out));
        }
        let began = book.now();
        let sent = client.send(&out);
        let mut alive = sent.is_ok();
        for a in asked {
            alive = alive && answer(book, &mut client, &a, began, &mut cas, &mut events).is_ok();
            if !alive && let Asked::Store { key, token, ttl, .. } = a {
                // Perhaps it was carried out.
                events.push(Event { key, what: What::Write { token, ttl }, began, ended: None });
            }
        }
        if book.forgets {
            for e in &events {
                assert!(
                    !matches!(e.what, What::Read { token: 0, .. }),
                    "not what was stored: {e:?}"
                );
            }
            book.answers.fetch_add(events.len() as u64, Ordering::Relaxed);
            events.clear();
        }
        if !alive {
            break;
        }
    }
    book.note(&mut events);
}

fn one(
    book: &Notebook,
    mix: &Mix,
    rng: &mut Rng,
    cas: &mut Option<(u32, u64)>,
    out: &mut Vec<u8>,
) -> Asked {
    use std::io::Write;
    if mix.counters > 0 && rng.chance(0.1) {
        let key = COUNTER + rng.below(u64::from(mix.counters)) as u32;
        return if rng.chance(0.8) {
            write!(out, "incr {} 1\r\n", name(key)).unwrap();
            Asked::Add { key }
        } else {
            let token = COUNTER_BASE + (book.token() << 20);
            let verb = if rng.chance(0.7) { "add" } else { "set" };
            write!(out, "{verb} {} 0 0 19\r\n{token}\r\n", name(key)).unwrap();
            Asked::Store { key, token, ttl: 0 }
        };
    }
    let key = if rng.chance(0.5) {
        rng.below(u64::from(mix.few)) as u32
    } else {
        mix.few + rng.below(u64::from(mix.many)) as u32
    };
    let k = name(key);
    let ttl = if is_mortal(key) { rng.range(1, 3) as u32 } else { 0 };
    match rng.below(100) {
        0..42 => {
            let token = book.token();
            let value = value(key, token, mix.most);
            let len = value.len();
            match rng.below(12) {
                0 => write!(out, "add {k} 3 {ttl} {len}\r\n").unwrap(),
                1 => write!(out, "replace {k} 3 {ttl} {len}\r\n").unwrap(),
                2 | 3 if ttl == 0 => {
                    let mut appended = vec![b'+'];
                    appended.extend_from_slice(&value);
                    write!(out, "append {k} 0 0 {}\r\n", appended.len()).unwrap();
                    out.extend_from_slice(&appended);
                    out.extend_from_slice(b"\r\n");
                    return Asked::Store { key, token, ttl };
                }
                4..7 => write!(out, "ms {k} {len} T{ttl}\r\n").unwrap(),
                7 | 8 if cas.is_some_and(|(of, _)| of == key) => {
                    let (_, unique) = cas.take().unwrap();
                    write!(out, "cas {k} 3 {ttl} {len} {unique}\r\n").unwrap();
                }
                _ => write!(out, "set {k} 3 {ttl} {len}\r\n").unwrap(),
            }
            out.extend_from_slice(&value);
            out.extend_from_slice(b"\r\n");
            Asked::Store { key, token, ttl }
        }
        42..50 => {
            write!(out, "delete {k}\r\n").unwrap();
            Asked::Delete { key }
        }
        50..54 if ttl == 0 => {
            write!(out, "touch {k} 0\r\n").unwrap();
            Asked::Touch
        }
        54..58 if ttl == 0 => {
            write!(out, "gats 0 {k}\r\n").unwrap();
            Asked::Get { key, meta: false }
        }
        58..70 => {
            write!(out, "mg {k} v c\r\n").unwrap();
            Asked::Get { key, meta: true }
        }
        _ => {
            // Half of the time the key whose CAS is about to be used.
            let key = cas.filter(|_| rng.chance(0.3)).map_or(key, |(of, _)| of);
            write!(out, "gets {}\r\n", name(key)).unwrap();
            Asked::Get { key, meta: false }
        }
    }
}

fn answer(
    book: &Notebook,
    client: &mut Client,
    asked: &Asked,
    began: Nanos,
    cas: &mut Option<(u32, u64)>,
    events: &mut Vec<Event>,
) -> io::Result<()> {
    match *asked {
        Asked::Store { key, token, ttl, .. } => {
            let line = client.line()?;
            let ended = match line.as_str() {
                "STORED" | "HD" => Some(book.now()),
                "NOT_STORED" | "EXISTS" | "NOT_FOUND" | "NS" | "NF" | "EX" => return Ok(()),
                // No memory at this moment: the old value is gone, the new one is not there.
                l if l.starts_with("SERVER_ERROR out of memory") => return Ok(()),
                other => panic!("'{other}' is no answer to a write"),
            };
            events.push(Event { key, what: What::Write { token, ttl }, began, ended });
        }
        Asked::Get { key, meta } => {
            let hit = if meta { client.meta()? } else { client.classic()? };
            if let Some(hit) = hit {
                if let Some(unique) = hit.cas {
                    *cas = Some((key, unique));
                }
                events.push(read(key, &hit, began, book.now()));
            }
        }
        Asked::Delete { key } => {
            let line = client.line()?;
            assert!(line == "DELETED" || line == "NOT_FOUND", "'{line}'");
            events.push(Event { key, what: What::Remove, began, ended: Some(book.now()) });
        }
        Asked::Touch => {
            let line = client.line()?;
            assert!(line == "TOUCHED" || line == "NOT_FOUND", "'{line}'");
        }
        Asked::Add { key } => {
            let line = client.line()?;
            if let Ok(token) = line.parse::<u64>() {
                let what = What::Write { token, ttl: 0 };
                events.push(Event { key, what, began, ended: Some(book.now()) });
            } else {
                assert_eq!(line, "NOT_FOUND");
            }
        }
    }
    Ok(())
}

/// Runs `connections` workers while `meanwhile` does something to the server; returns when all have ended.
pub(crate) fn under_load<R>(
    book: &Notebook,
    mix: Mix,
    connections: u64,
    seed: u64,
    connect: impl Fn() -> Client,
    meanwhile: impl FnOnce() -> R,
) -> R {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for i in 0..connections {
            let (client, stop) = (connect(), &stop);
            scope.spawn(move || work(book, client, mix, seed * 1000 + i, stop));
        }
        let result = meanwhile();
        stop.store(true, Ordering::Relaxed);
        result
    })
}
