//! Replies of memcached's text protocol, parsed from a buffer that may end anywhere.

/// What a reply may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// `get`: VALUE … END, or END.
    Get,
    /// Anything answered in one line.
    Line,
}

/// A whole reply at the start of the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply<'a> {
    /// A value; `data` is `None` when it was too long to be kept and not wanted.
    Hit { key: &'a [u8], data: &'a [u8] },
    /// No value.
    Miss,
    /// STORED, DELETED, TOUCHED, OK or a number.
    Done,
    /// NOT_STORED, EXISTS or NOT_FOUND.
    Refused,
    /// SERVER_ERROR object too large for cache.
    TooLarge,
    /// SERVER_ERROR out of memory …
    OutOfMemory,
    /// CLIENT_ERROR cannot increment or decrement non-numeric value.
    NotNumeric,
    /// Any other ERROR, CLIENT_ERROR or SERVER_ERROR, whole line.
    Error(&'a [u8]),
}

/// Progress of the parser.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Parsed<'a> {
    /// A reply that took so many bytes.
    Reply(Reply<'a>, usize),
    /// At least so many bytes in all are needed before it is worth another look.
    Need(usize),
    /// No memcached server says this.
    Garbage(String),
}

/// A line of a reply is never longer: a key of 250 bytes and three numbers.
const MAX_LINE: usize = 2048;
/// No value is announced longer: memcached's own ceiling on -I.
const MAX_VALUE: usize = 1 << 30;

fn quoted(line: &[u8]) -> String {
    line[..line.len().min(100)].escape_ascii().to_string()
}

/// Parses the reply at the start of `buffer`.
pub(crate) fn parse(buffer: &[u8], asked: Asked) -> Parsed<'_> {
    let Some(end) = memchr::memchr(b'\n', &buffer[..buffer.len().min(MAX_LINE)]) else {
        if buffer.len() >= MAX_LINE {
            return Parsed::Garbage(format!(
                "a line longer than {MAX_LINE} bytes: {}",
                quoted(buffer)
            ));
        }
        return Parsed::Need(buffer.len() + 1);
    };
    let line = buffer[..end].strip_suffix(b"\r").unwrap_or(&buffer[..end]);
    let next = end + 1;
    match (asked, line) {
        (Asked::Get, b"END") => Parsed::Reply(Reply::Miss, next),
        (Asked::Get, l) if l.starts_with(b"VALUE ") => value(buffer, l, next),
        (Asked::Line, b"STORED" | b"DELETED" | b"TOUCHED" | b"OK") => {
            Parsed::Reply(Reply::Done, next)
        }
        (Asked::Line, b"NOT_STORED" | b"EXISTS" | b"NOT_FOUND") => {
            Parsed::Reply(Reply::Refused, next)
        }
        (Asked::Line, l) if !l.is_empty() && l.trim_ascii_end().iter().all(u8::is_ascii_digit) => {
            Parsed::Reply(Reply::Done, next)
        }
        (_, l) if l.starts_with(b"SERVER_ERROR object too large") => {
            Parsed::Reply(Reply::TooLarge, next)
        }
        (_, l) if l.starts_with(b"SERVER_ERROR out of memory") => {
            Parsed::Reply(Reply::OutOfMemory, next)
        }
        (_, l) if l.starts_with(b"CLIENT_ERROR cannot increment") => {
            Parsed::Reply(Reply::NotNumeric, next)
        }
        (_, l)
            if l == b"ERROR"
                || l.starts_with(b"CLIENT_ERROR")
                || l.starts_with(b"SERVER_ERROR") =>
        {
            Parsed::Reply(Reply::Error(l), next)
        }
        (_, l) => Parsed::Garbage(format!("'{}'", quoted(l))),
    }
}

/// `VALUE key flags bytes [cas]`, data, END.
fn value<'a>(buffer: &'a [u8], line: &'a [u8], next: usize) -> Parsed<'a> {
    let mut words = line[6..].split(|&b| b == b' ').filter(|w| !w.is_empty());
    let (key, _flags, length) = (words.next(), words.next(), words.next());
    let length = length
        .filter(|l| l.len() <= 10 && l.iter().all(u8::is_ascii_digit))
        .map(|l| l.iter().fold(0usize, |n, d| n * 10 + usize::from(d - b'0')))
        .filter(|&l| l <= MAX_VALUE);
    let (Some(key), Some(length)) = (key, length) else {
        return Parsed::Garbage(format!("'{}'", quoted(line)));
    };
    const TAIL: &[u8] = b"\r\nEND\r\n";
    let all = next + length + TAIL.len();
    if buffer.len() < all {
        return Parsed::Need(all);
    }
    let data = &buffer[next..next + length];
    let tail = &buffer[next + length..all];
    if tail != TAIL {
        return Parsed::Garbage(format!(
            "'{}' after a value of {length} bytes, not END",
            quoted(tail)
        ));
    }
    Parsed::Reply(Reply::Hit { key, data }, all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &[u8] = b"VALUE k 0 5\r\nhello\r\nEND\r\n";

    #[test]
    fn whole_and_in_pieces() {
        for cut in 0..STREAM.len() {
            match parse(&STREAM[..cut], Asked::Get) {
                Parsed::Need(n) => assert!(n > cut && n <= STREAM.len()),
                other => panic!("cut at {cut}: {other:?}"),
            }
        }
        let hit = Reply::Hit { key: b"k", data: b"hello" };
        assert_eq!(parse(STREAM, Asked::Get), Parsed::Reply(hit, STREAM.len()));
        assert_eq!(parse(b"END\r\nmore", Asked::Get), Parsed::Reply(Reply::Miss, 5));
        assert_eq!(parse(b"12  \r\n", Asked::Line), Parsed::Reply(Reply::Done, 6));
        assert_eq!(parse(b"NOT_STORED\r\n", Asked::Line), Parsed::Reply(Reply::Refused, 12));
        assert_eq!(
            parse(b"SERVER_ERROR object too large for cache\r\n", Asked::Line),
            Parsed::Reply(Reply::TooLarge, 41)
        );
    }

    #[test]
    fn garbage_is_refused() {
        let long = vec![b'x'; 5000];
        for bad in [
            &b"HELLO\r\n"[..],
            b"VALUE k 0 x\r\n",
            b"VALUE k 0 99999999999\r\n",
            b"VALUE k 0 1\r\nabcdefghij",
            &long,
        ] {
            assert!(matches!(parse(bad, Asked::Get), Parsed::Garbage(_)), "{bad:?}");
        }
    }

    #[test]
    fn mutated_replies_never_panic() {
        let mut rng = larder_base::Rng::new(11);
        for _ in 0..20_000 {
            let mut bytes = STREAM.to_vec();
            for _ in 0..=rng.below(4) {
                let at = rng.below(bytes.len() as u64) as usize;
                match rng.below(3) {
                    0 => bytes[at] = rng.next_u64() as u8,
                    1 => drop(bytes.remove(at)),
                    _ => bytes.insert(at, b"0123456789 \r\n"[rng.below(13) as usize]),
                }
            }
            for asked in [Asked::Get, Asked::Line] {
                if let Parsed::Reply(_, n) = parse(&bytes, asked) {
                    assert!(n > 0 && n <= bytes.len());
                }
            }
        }
    }
}
