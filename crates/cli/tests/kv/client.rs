//! A client that sends raw commands and reads raw answers.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

pub(crate) struct Client {
    out: Box<dyn Write + Send>,
    input: BufReader<Box<dyn Read + Send>>,
}

/// A hit: the value, and the CAS where it was asked for.
pub(crate) struct Hit {
    pub(crate) value: Vec<u8>,
    pub(crate) cas: Option<u64>,
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

impl Client {
    pub(crate) fn new(out: UnixStream) -> Client {
        out.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Client::of(Box::new(out.try_clone().unwrap()), Box::new(out))
    }

    pub(crate) fn over(tcp: TcpStream) -> Client {
        tcp.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Client::of(Box::new(tcp.try_clone().unwrap()), Box::new(tcp))
    }

    fn of(out: Box<dyn Write + Send>, input: Box<dyn Read + Send>) -> Client {
        Client { out, input: BufReader::with_capacity(64 << 10, input) }
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)
    }

    /// A line without its end; an error when the other side is gone.
    pub(crate) fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.input.read_line(&mut line)? == 0 || !line.ends_with("\r\n") {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        line.truncate(line.len() - 2);
        Ok(line)
    }

    fn block(&mut self, len: usize) -> io::Result<Vec<u8>> {
        let mut value = vec![0; len + 2];
        self.input.read_exact(&mut value)?;
        if !value.ends_with(b"\r\n") {
            return Err(wrong("a value without its end"));
        }
        value.truncate(len);
        Ok(value)
    }

    /// The answer to a `get`, `gets`, `gat` or `gats` of one key.
    pub(crate) fn classic(&mut self) -> io::Result<Option<Hit>> {
        let line = self.line()?;
        if line == "END" {
            return Ok(None);
        }
        let mut words = line.split(' ');
        if words.next() != Some("VALUE") {
            return Err(wrong(&line));
        }
        let mut words = words.skip(2);
        let len = words.next().and_then(|w| w.parse().ok()).ok_or_else(|| wrong(&line))?;
        let cas = words.next().and_then(|w| w.parse().ok());
        let value = self.block(len)?;
        match self.line()?.as_str() {
            "END" => Ok(Some(Hit { value, cas })),
            other => Err(wrong(other)),
        }
    }

    /// The answer to an `mg` with `v` and `c`.
    pub(crate) fn meta(&mut self) -> io::Result<Option<Hit>> {
        let line = self.line()?;
        if line == "EN" {
            return Ok(None);
        }
        let rest = line.strip_prefix("VA ").ok_or_else(|| wrong(&line))?;
        let mut words = rest.split(' ');
        let len = words.next().and_then(|w| w.parse().ok()).ok_or_else(|| wrong(&line))?;
        let cas = words.find_map(|w| w.strip_prefix('c')).and_then(|w| w.parse().ok());
        Ok(Some(Hit { value: self.block(len)?, cas }))
    }

    pub(crate) fn ask(&mut self, command: &str) -> String {
        self.send(command.as_bytes()).unwrap();
        self.line().unwrap()
    }

    pub(crate) fn set(&mut self, key: &str, value: &[u8]) -> String {
        let mut command = format!("set {key} 0 0 {}\r\n", value.len()).into_bytes();
        command.extend_from_slice(value);
        command.extend_from_slice(b"\r\n");
        self.send(&command).unwrap();
        self.line().unwrap()
    }

    pub(crate) fn get(&mut self, key: &str) -> Option<Vec<u8>> {
        self.send(format!("get {key}\r\n").as_bytes()).unwrap();
        self.classic().unwrap().map(|hit| hit.value)
    }

    pub(crate) fn stats(&mut self, argument: &str) -> BTreeMap<String, String> {
        self.send(format!("stats{argument}\r\n").as_bytes()).unwrap();
        let mut all = BTreeMap::new();
        loop {
            let line = self.line().unwrap();
            if line == "END" {
                return all;
            }
            let (name, value) =
                line.strip_prefix("STAT ").and_then(|l| l.split_once(' ')).expect("a statistic");
            all.insert(name.to_owned(), value.to_owned());
        }
    }

    /// One of `stats larder`.
    pub(crate) fn stat(&mut self, name: &str) -> u64 {
        let all = self.stats(" larder");
        let value = all.get(name).unwrap_or_else(|| panic!("no {name} in {all:?}"));
        value.parse().unwrap_or_else(|_| panic!("{name} is '{value}'"))
    }
}
