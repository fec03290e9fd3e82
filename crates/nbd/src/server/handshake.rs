//! The handshake: options, until an export is chosen.

use std::sync::Arc;

use super::export::{Export, ExportInfo, Exports};
use crate::output::Output;
use crate::wire::{
    BASE_ALLOCATION, INIT_MAGIC, MAX_STRING, OPTION_MAGIC, OPTION_REPLY_MAGIC, be16, be32, be64,
    handshake, info, option, reply,
};

/// The id under which `base:allocation` is reported.
pub(super) const ALLOCATION_ID: u32 = 1;
/// The longest data of one option, bytes: two strings and room for lists.
pub(super) const MAX_OPTION: usize = 4 * MAX_STRING;
/// Of a longer one the data are read and thrown away up to this length, so that the client can go on without it.
const MAX_SKIP: usize = 1 << 20;
/// A client that sends more options than this is not about to choose an export.
const MAX_OPTIONS: u32 = 1000;

/// What a server does about TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsPolicy {
    /// There is none.
    #[default]
    Off,
    /// The client may.
    Offered,
    /// Nothing but TLS and ABORT before it.
    Required,
}

/// What the handshake has agreed upon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    /// Structured replies.
    pub structured: bool,
    /// `base:allocation` may be asked for.
    pub allocation: bool,
}

/// How a step of the handshake ended.
pub(super) enum Step<E> {
    /// This much of the input is used up; go on.
    Consumed(usize),
    /// More input is needed.
    NeedInput,
    /// TLS begins after what is to be sent; so much is used up.
    StartTls(usize),
    /// An export has been chosen; so much is used up.
    Chosen(usize, Arc<E>, Agreed),
    /// The client has gone, properly.
    Aborted,
    /// The connection cannot go on.
    Close(String),
}

#[derive(Debug)]
pub(super) struct Handshake {
    tls: TlsPolicy,
    under_tls: bool,
    /// Something was asked for without TLS, and TLS is required.
    plain: bool,
    greeted: bool,
    no_zeroes: bool,
    fixed: bool,
    structured: bool,
    /// The export that metadata contexts were chosen for.
    allocation_for: Option<String>,
    options: u32,
    /// Bytes still to come of an option that is too long, and its code.
    skip: (usize, u32),
}

impl Handshake {
    /// Begins: the server speaks first.
    pub(super) fn new(tls: TlsPolicy, out: &mut Output) -> Handshake {
        out.push(&INIT_MAGIC.to_be_bytes());
        out.push(&OPTION_MAGIC.to_be_bytes());
        out.push(&(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).to_be_bytes());
        Handshake {
            tls,
            under_tls: false,
            plain: false,
            greeted: false,
            no_zeroes: false,
            fixed: false,
            structured: false,
            allocation_for: None,
            options: 0,
            skip: (0, 0),
        }
    }

    /// TLS is required, and something else was asked for.
    pub(super) fn lacks_tls(&self) -> bool {
        self.plain
    }

    /// What was agreed before TLS could have been altered on its way, so it is forgotten.
    pub(super) fn tls_started(&mut self) {
        self.under_tls = true;
        self.plain = false;
        self.structured = false;
        self.allocation_for = None;
    }

    pub(super) fn step<X: Exports>(
        &mut self,
        input: &[u8],
        exports: &X,
        out: &mut Output,
    ) -> Step<X::Export> {
        if !self.greeted {
            if input.len() < 4 {
                return Step::NeedInput;
            }
            let flags = be32(input, 0);
            let known = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
            if flags & !known != 0 {
                return Step::Close(format!("unknown client flags {flags:#x}"));
            }
            self.fixed = flags & u32::from(handshake::FIXED_NEWSTYLE) != 0;
            self.no_zeroes = flags & u32::from(handshake::NO_ZEROES) != 0;
            self.greeted = true;
            return Step::Consumed(4);
        }
        if self.skip.0 > 0 {
            if input.is_empty() {
                return Step::NeedInput;
            }
            let n = self.skip.0.min(input.len());
            self.skip.0 -= n;
            if self.skip.0 == 0 {
                let message = format!("an option has up to {MAX_OPTION} bytes here");
                error(out, self.skip.1, reply::ERR_TOO_BIG, &message);
            }
            return Step::Consumed(n);
        }
        if input.len() < 16 {
            return Step::NeedInput;
        }
        let magic = be64(input, 0);
        if magic != OPTION_MAGIC {
            return Step::Close(format!("an option begins with {magic:#018x}"));
        }
        let (code, len) = (be32(input, 8), be32(input, 12) as usize);
        // An export's name is followed by transmission: there is no way to say that it is too long.
        if len > MAX_SKIP || (len > MAX_OPTION && (!self.fixed || code == option::EXPORT_NAME)) {
            return Step::Close(format!("option {code} of {len} bytes (most: {MAX_OPTION})"));
        }
        if len <= MAX_OPTION && input.len() < 16 + len {
            return Step::NeedInput;
        }
        self.options += 1;
        if self.options > MAX_OPTIONS {
            return Step::Close(format!("more than {MAX_OPTIONS} options"));
        }
        if len > MAX_OPTION {
            self.skip = (len, code);
            return Step::Consumed(16);
        }
        let Some(data) = input.get(16..16 + len) else { return Step::NeedInput };
        self.option(code, data, 16 + len, input.len() > 16 + len, exports, out)
    }

    fn option<X: Exports>(
        &mut self,
        code: u32,
        data: &[u8],
        used: usize,
        more: bool,
        exports: &X,
        out: &mut Output,
    ) -> Step<X::Export> {
        if !self.fixed && code != option::EXPORT_NAME {
            return Step::Close(format!("option {code} without fixed newstyle"));
        }
        let locked = self.tls == TlsPolicy::Required && !self.under_tls;
        if locked && !matches!(code, option::STARTTLS | option::ABORT) {
            self.plain = true;
            if code == option::EXPORT_NAME {
                return Step::Close("an export was asked for without TLS".into());
            }
            error(out, code, reply::ERR_TLS_REQD, "this server requires TLS");
            return Step::Consumed(used);
        }
        match code {
            option::EXPORT_NAME => return self.export_name(data, used, exports, out),
            option::ABORT => {
                ack(out, code);
                return Step::Aborted;
            }
            option::LIST if !data.is_empty() => {
                error(out, code, reply::ERR_INVALID, "LIST takes no data");
            }
            option::LIST => {
                for (name, description) in exports.list() {
                    let mut payload = Vec::with_capacity(4 + name.len() + description.len());
                    payload.extend_from_slice(&(name.len() as u32).to_be_bytes());
                    payload.extend_from_slice(name.as_bytes());
                    payload.extend_from_slice(description.as_bytes());
                    answer(out, code, reply::SERVER, &payload);
                }
                ack(out, code);
            }
            option::STARTTLS if !data.is_empty() => {
                error(out, code, reply::ERR_INVALID, "STARTTLS takes no data");
            }
            option::STARTTLS if self.under_tls => {
                error(out, code, reply::ERR_INVALID, "TLS has begun already");
            }
            option::STARTTLS if self.tls == TlsPolicy::Off => {
                error(out, code, reply::ERR_POLICY, "there is no TLS at this address");
            }
            // Whatever follows in plain text was put there by someone who could not read the answer.
            option::STARTTLS if more => {
                return Step::Close("plain text behind STARTTLS".into());
            }
            option::STARTTLS => {
                ack(out, code);
                return Step::StartTls(used);
            }
            option::INFO | option::GO => return self.info(code, data, used, exports, out),
            option::STRUCTURED_REPLY if !data.is_empty() => {
                error(out, code, reply::ERR_INVALID, "STRUCTURED_REPLY takes no data");
            }
            option::STRUCTURED_REPLY => {
                self.structured = true;
                ack(out, code);
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(code, data, exports, out);
            }
            _ => error(out, code, reply::ERR_UNSUP, "this option is not known here"),
        }
        Step::Consumed(used)
    }

    fn agreed(&self, name: &str) -> Agreed {
        Agreed {
            structured: self.structured,
            allocation: self.structured && self.allocation_for.as_deref() == Some(name),
        }
    }

    fn export_name<X: Exports>(
        &mut self,
        data: &[u8],
        used: usize,
        exports: &X,
        out: &mut Output,
    ) -> Step<X::Export> {
        let Ok(name) = text(data) else {
            return Step::Close("an export's name that is not text".into());
        };
        let Some(export) = exports.find(name) else {
            return Step::Close(format!("no export has the name '{}'", printable(name)));
        };
        let about = export.info();
        out.push(&about.size.to_be_bytes());
        out.push(&about.transmission_flags(self.structured).to_be_bytes());
        if !self.no_zeroes {
            out.push(&[0; 124]);
        }
        Step::Chosen(used, export, self.agreed(name))
    }

    fn info<X: Exports>(
        &mut self,
        code: u32,
        data: &[u8],
        used: usize,
        exports: &X,
        out: &mut Output,
    ) -> Step<X::Export> {
        let parsed = take_string(data).and_then(|(name, rest)| {
            let count = usize::from(be16(rest.get(..2).ok_or("the list is missing")?, 0));
            let list = &rest[2..];
            if list.len() != 2 * count {
                return Err("the list has another length than it says");
            }
            Ok((name, list.chunks_exact(2).map(|c| be16(c, 0)).collect::<Vec<u16>>()))
        });
        let (name, wanted) = match parsed {
            Ok(parsed) => parsed,
            Err(reason) => {
                error(out, code, reply::ERR_INVALID, reason);
                return Step::Consumed(used);
            }
        };
        let Some(export) = exports.find(name) else {
            let message = format!("no export has the name '{}'", printable(name));
            error(out, code, reply::ERR_UNKNOWN, &message);
            return Step::Consumed(used);
        };
        let about = export.info();
        let mut payload = Vec::with_capacity(16);
        payload.extend_from_slice(&info::EXPORT.to_be_bytes());
        payload.extend_from_slice(&about.size.to_be_bytes());
        payload.extend_from_slice(&about.transmission_flags(self.structured).to_be_bytes());
        answer(out, code, reply::INFO, &payload);
        self.further_info(code, &about, &wanted, out);
        ack(out, code);
        if code == option::GO {
            return Step::Chosen(used, export, self.agreed(name));
        }
        Step::Consumed(used)
    }

    fn further_info(&self, code: u32, about: &ExportInfo, wanted: &[u16], out: &mut Output) {
        let mut send = |kind: u16, body: &[u8]| {
            let mut payload = kind.to_be_bytes().to_vec();
            payload.extend_from_slice(body);
            answer(out, code, reply::INFO, &payload);
        };
        // Each at most once, however often it is asked for.
        if wanted.contains(&info::NAME) {
            send(info::NAME, about.name.as_bytes());
        }
        if wanted.contains(&info::DESCRIPTION) && !about.description.is_empty() {
            send(info::DESCRIPTION, about.description.as_bytes());
        }
        if wanted.contains(&info::BLOCK_SIZE) {
            let sizes = about.block;
            let mut body = [0; 12];
            body[..4].copy_from_slice(&sizes.minimum.to_be_bytes());
            body[4..8].copy_from_slice(&sizes.preferred.to_be_bytes());
            body[8..].copy_from_slice(&sizes.maximum.to_be_bytes());
            send(info::BLOCK_SIZE, &body);
        }
    }

    fn meta_context<X: Exports>(&mut self, code: u32, data: &[u8], exports: &X, out: &mut Output) {
        let set = code == option::SET_META_CONTEXT;
        if set {
            self.allocation_for = None;
        }
        if !self.structured {
            return error(out, code, reply::ERR_INVALID, "structured replies come first");
        }
        let parsed = take_string(data).and_then(|(name, rest)| {
            let count = be32(rest.get(..4).ok_or("the number of queries is missing")?, 0);
            let mut rest = &rest[4..];
            let mut found = count == 0 && !set;
            for _ in 0..count {
                let (query, further) = take_string(rest)?;
                // `base:` in a listing asks for everything in that name space.
                found |= query == BASE_ALLOCATION || (!set && query == "base:");
                rest = further;
            }
            if !rest.is_empty() {
                return Err("bytes behind the last query");
            }
            Ok((name, found))
        });
        let (name, found) = match parsed {
            Ok(parsed) => parsed,
            Err(reason) => return error(out, code, reply::ERR_INVALID, reason),
        };
        if exports.find(name).is_none() {
            let message = format!("no export has the name '{}'", printable(name));
            return error(out, code, reply::ERR_UNKNOWN, &message);
        }
        if found {
            let id = if set { ALLOCATION_ID } else { 0 };
            let mut payload = id.to_be_bytes().to_vec();
            payload.extend_from_slice(BASE_ALLOCATION.as_bytes());
            answer(out, code, reply::META_CONTEXT, &payload);
            if set {
                self.allocation_for = Some(name.to_owned());
            }
        }
        ack(out, code);
    }
}

/// A string's length and text, and what follows.
fn take_string(data: &[u8]) -> Result<(&str, &[u8]), &'static str> {
    let len = be32(data.get(..4).ok_or("a string's length is missing")?, 0) as usize;
    let bytes = data[4..].get(..len).ok_or("a string is longer than the option")?;
    Ok((text(bytes)?, &data[4 + len..]))
}

fn text(bytes: &[u8]) -> Result<&str, &'static str> {
    if bytes.len() > MAX_STRING {
        return Err("a string is longer than 4096 bytes");
    }
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err("a string is not UTF-8 text"),
    }
}

/// A name from a client, fit for one line of a log or message.
fn printable(name: &str) -> String {
    let mut out: String = name.chars().flat_map(char::escape_debug).take(80).collect();
    if name.len() > 80 {
        out.push('…');
    }
    out
}

fn answer(out: &mut Output, code: u32, kind: u32, payload: &[u8]) {
    out.push(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.push(&code.to_be_bytes());
    out.push(&kind.to_be_bytes());
    out.push(&(payload.len() as u32).to_be_bytes());
    out.push(payload);
}

fn ack(out: &mut Output, code: u32) {
    answer(out, code, reply::ACK, &[]);
}

fn error(out: &mut Output, code: u32, kind: u32, message: &str) {
    answer(out, code, kind, message.as_bytes());
}
