//! What is said over the control socket: one JSON value a line, a request and then its answers.
//!
//! ```text
//! → {"do":"detach","volume":"disk","disconnect":false}
//! ← {"progress":{"what":"","done":0,"total":0}}                where it may take long: it has begun
//! ← {"progress":{"what":"1 client","done":0,"total":0}}        any number of these
//! ← {"ok":{…}}   or   {"error":{"message":"…"}}                one of these, and the connection is closed
//! ```

use std::io::{self, BufRead, Read};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Longest request, bytes: room for the extents of a file in 65,536 pieces.
pub const MOST_REQUEST: usize = 4 << 20;
/// Longest answer, bytes.
pub const MOST_ANSWER: usize = 64 << 20;

/// A request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Everything that is counted.
    Status {},
    /// A volume is to be served.
    Attach {
        /// Its name.
        volume: String,
        /// Its store.
        uri: String,
        /// It is only read.
        #[serde(default)]
        read_only: bool,
        /// Its store, which cannot tell, was not changed by others since it was detached.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        trust_unchanged: bool,
        /// What its store has answered is durable, by the operator's word: it is not flushed.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        store_durable: bool,
        /// Whether it writes back, and how. A daemon that knows no write-back refuses what says anything here.
        #[serde(default, skip_serializing_if = "WriteBack::is_silent")]
        back: WriteBack,
        /// How long it may take before it is not attached; as long as it takes if nothing is said.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seconds: Option<u64>,
    },
    /// All that is dirty is to come to the stores.
    Flush {
        /// Only of this volume.
        #[serde(default)]
        volume: Option<String>,
        /// How long it is waited for; without end if nothing is said.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seconds: Option<u64>,
    },
    /// A consistency point of a volume that writes back.
    Mark {
        /// The volume.
        volume: String,
        /// The mark's name: 1 to 255 bytes.
        name: String,
        /// How long it is waited for; 60 if nothing is said.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seconds: Option<u64>,
    },
    /// What of a volume that writes back cannot be read any more is to be given up.
    Discard {
        /// Its name.
        volume: String,
        /// It is to be done; else it is only told what that would be.
        #[serde(default)]
        yes: bool,
    },
    /// A volume whose store has grown, or is to grow, is to have its size.
    Resize {
        /// Its name.
        volume: String,
        /// To how many bytes its store is to grow; without, it has grown.
        #[serde(default)]
        bytes: Option<u64>,
    },
    /// A volume is to be put aside.
    Detach {
        /// Its name.
        volume: String,
        /// Its clients' connections are closed, instead of waiting for them to go.
        #[serde(default)]
        disconnect: bool,
        /// How long all of it may take before it stays attached. If nothing is said clients are waited for, and what comes to a store that is reached;
        /// all else may take 30 s.
        #[serde(default)]
        seconds: Option<u64>,
        /// What is dirty of it stays in the cache, until it is attached again with that.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        keep_dirty: bool,
    },
    /// A volume that is served writes through from now on, or back if it is said how.
    Write {
        /// Its name.
        volume: String,
        /// How it writes back; what is not said is as the daemon was started with.
        #[serde(default, skip_serializing_if = "WriteBack::is_silent")]
        back: WriteBack,
        /// How long it may take before it stays as it was; without end if nothing is said.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seconds: Option<u64>,
    },
    /// The cache, which was given up, is to be used again.
    TakeBack {
        /// How long it may take before the cache stays out of use; as long as it takes if nothing is said.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seconds: Option<u64>,
    },
    /// All lines of a volume are to go, and if it is not attached, all that is known of it.
    Drop {
        /// Its name.
        volume: String,
    },
    /// How ranges of a volume, a partition or all of it are cached from now on.
    Select {
        /// Its name.
        volume: String,
        /// `always` or `never`; nothing forgets what was selected.
        #[serde(default)]
        rule: Option<String>,
        /// First byte and bytes of each range; without these, a partition and a label: the whole volume.
        #[serde(default)]
        ranges: Option<Vec<(u64, u64)>>,
        /// A partition of the volume, by number.
        #[serde(default)]
        partition: Option<u32>,
        /// What the ranges are: a file's path. Alone, with nothing as the rule: forgets what bears it.
        #[serde(default)]
        label: String,
        /// Bytes of the disk that the ranges were found on: it must be the volume.
        #[serde(default)]
        disk_bytes: Option<u64>,
    },
    /// What is not cached of a volume is to be brought into the cache.
    Prefetch {
        /// Its name.
        volume: String,
        /// First byte and bytes of each range; without, all of it.
        #[serde(default)]
        ranges: Option<Vec<(u64, u64)>>,
    },
    /// What is cached is to be looked at.
    Check {
        /// Only of this volume.
        #[serde(default)]
        volume: Option<String>,
        /// Compare with the stores too.
        #[serde(default)]
        compare: bool,
        /// Drop what is wrong.
        #[serde(default)]
        drop: bool,
    },
    /// Is answered when nothing is done behind the replies any more: fills have ended and are recorded.
    Settle {
        /// How long that may take before it is refused; 60 if nothing is said.
        #[serde(default)]
        seconds: Option<u64>,
    },
    /// What is selected of a volume.
    Selected {
        /// Its name.
        volume: String,
    },
    /// Why a block is cached or not.
    Explain {
        /// Its name.
        volume: String,
        /// Byte of the volume.
        offset: u64,
    },
}

/// What is said of a volume that may write back. What is not said is as the daemon was started with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WriteBack {
    /// How: `back:ordered` and its like.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write: Option<String>,
    /// Bytes of the write log that it may hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_max: Option<u64>,
    /// How old what is dirty may become: `60`, `5,hard`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_age_max: Option<String>,
    /// Where its marker is: a path from the root, or a URI.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub marker: Option<String>,
    /// It has none.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub no_marker: bool,
    /// Its store is the one that it had, moved.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub store_moved: bool,
    /// Where its journal is: a path from the root, or a URI.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub journal: Option<String>,
    /// That may be on this host where the store is not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub journal_local: bool,
}

impl WriteBack {
    /// Nothing is said.
    fn is_silent(&self) -> bool {
        *self == WriteBack::default()
    }
}

/// How far something is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// In words.
    pub what: String,
    /// Of `total`; zero of zero where that is not known.
    pub done: u64,
    /// How much there is to do.
    pub total: u64,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// For people: the thing, its value, the remedy.
    pub message: String,
    /// It cannot be meant, as opposed to: it did not work.
    #[serde(default)]
    pub usage: bool,
}

/// A line of an answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// There will be more.
    Progress(Progress),
    /// It is done.
    Ok(Value),
    /// It is not.
    Error(Refusal),
}

/// A line of at most `most` bytes, without its end; `None` at the end of the stream.
///
/// # Errors
/// Of the stream; `InvalidData` for a longer line or one that is cut off.
pub fn read_line(from: &mut impl BufRead, most: usize) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    from.take(most as u64 + 1).read_until(b'\n', &mut line)?;
    match line.pop() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(line)),
        Some(_) => {
            let why = if line.len() >= most {
                "a line that is too long"
            } else {
                "a line that is cut off"
            };
            Err(io::Error::new(io::ErrorKind::InvalidData, why))
        }
    }
}

impl Request {
    /// Whether it may wait for clients, stores, the cache's device or its log: then an empty progress says at once that it has begun,
    /// and it is not begun where nobody hears that.
    pub fn may_take_long(&self) -> bool {
        !matches!(self, Request::Status {} | Request::Selected { .. })
    }
}

/// A request from its line.
///
/// # Errors
/// What is wrong with it.
pub fn parse(line: &[u8]) -> Result<Request, Refusal> {
    serde_json::from_slice(line).map_err(|e| Refusal {
        message: format!("the request is not understood: {e}"),
        usage: true,
    })
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    fn examples() -> Vec<Request> {
        vec![
            Request::Status {},
            Request::Attach {
                volume: "a".into(),
                uri: "file:/x".into(),
                read_only: true,
                trust_unchanged: true,
                store_durable: true,
                back: WriteBack {
                    write: Some("back:ordered".into()),
                    dirty_max: Some(1 << 30),
                    dirty_age_max: Some("5,hard".into()),
                    marker: Some("/m".into()),
                    no_marker: true,
                    store_moved: true,
                    journal: Some("/j".into()),
                    journal_local: true,
                },
                seconds: Some(9),
            },
            Request::TakeBack { seconds: None },
            Request::TakeBack { seconds: Some(3) },
            Request::Flush { volume: None, seconds: None },
            Request::Flush { volume: Some("a".into()), seconds: Some(5) },
            Request::Discard { volume: "a".into(), yes: true },
            Request::Mark { volume: "a".into(), name: "vor dem Umzug: ä".into(), seconds: None },
            Request::Mark { volume: "a".into(), name: "b".into(), seconds: Some(2) },
            Request::Resize { volume: "a".into(), bytes: Some(1 << 40) },
            Request::Detach {
                volume: "ä".into(),
                disconnect: true,
                seconds: Some(7),
                keep_dirty: true,
            },
            Request::Explain { volume: "a".into(), offset: u64::MAX },
            Request::Select {
                volume: "a".into(),
                rule: Some("always".into()),
                ranges: Some(vec![(0, 4096), (u64::MAX, 1)]),
                partition: Some(2),
                label: "/x".into(),
                disk_bytes: Some(5),
            },
            Request::Selected { volume: "a".into() },
            Request::Prefetch { volume: "a".into(), ranges: None },
            Request::Check { volume: None, compare: true, drop: false },
            Request::Settle { seconds: Some(1) },
        ]
    }

    #[test]
    fn requests_read_back_and_unknown_ones_are_refused() {
        for request in examples() {
            let text = serde_json::to_vec(&request).unwrap();
            assert_eq!(parse(&text), Ok(request));
        }
        for wrong in
            ["", "{}", "[]", r#"{"do":"dance"}"#, r#"{"do":"drop"}"#, r#"{"do":"status","x":1}"#]
        {
            assert!(parse(wrong.as_bytes()).unwrap_err().usage, "{wrong}");
        }
    }

    /// Who knows nothing of write-back says and hears what it always did.
    #[test]
    fn an_attach_of_former_versions_is_understood_and_sent() {
        let text = r#"{"do":"attach","volume":"a","uri":"file:/x","read_only":true}"#;
        let request = parse(text.as_bytes()).unwrap();
        assert_eq!(serde_json::to_string(&request).unwrap(), text);
    }

    #[test]
    fn only_what_looks_at_memory_is_quick() {
        let quick: Vec<Request> = examples().into_iter().filter(|r| !r.may_take_long()).collect();
        // (What is explained may be read from the cache's device.)
        assert_eq!(quick, [Request::Status {}, Request::Selected { volume: "a".into() }]);
    }

    #[test]
    fn lines_are_bounded() {
        let mut from = io::Cursor::new(b"one\n\ntwo".to_vec());
        assert_eq!(read_line(&mut from, 10).unwrap().unwrap(), b"one");
        assert_eq!(read_line(&mut from, 10).unwrap().unwrap(), b"");
        assert!(read_line(&mut from, 10).is_err());
        assert_eq!(read_line(&mut from, 10).unwrap(), None);
        let long = vec![b'x'; 100];
        assert!(read_line(&mut io::Cursor::new(long), 10).is_err());
    }

    #[test]
    fn mangled_requests_are_refused_or_read() {
        let mut rng = Rng::new(5);
        let texts: Vec<Vec<u8>> =
            examples().iter().map(|r| serde_json::to_vec(r).unwrap()).collect();
        for _ in 0..5000 {
            let mut text = texts[rng.below(texts.len() as u64) as usize].clone();
            for _ in 0..=rng.below(4) {
                let at = rng.below(text.len() as u64) as usize;
                match rng.below(3) {
                    0 => text[at] = rng.below(256) as u8,
                    1 => text.truncate(at.max(1)),
                    _ => text.insert(at, b"{}[],:\"0-"[rng.below(9) as usize]),
                }
            }
            // It must end, one way or the other.
            let _ = parse(&text);
        }
    }
}
