//! The handshake: structured replies if the server has them, then the export.

use crate::output::Output;
use crate::server::BlockSizes;
use crate::wire::{
    BASE_ALLOCATION, INIT_MAGIC, MAX_PAYLOAD, OLDSTYLE_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    be16, be32, be64, handshake, info, option, reply, transmission,
};

/// The longest reply to an option that is taken, bytes.
const MAX_REPLY: usize = 16 << 10;
/// A server that answers one option with more replies than this is not about to finish.
const MAX_REPLIES: u32 = 1000;

/// What was agreed upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// Of the export, bytes.
    pub size: u64,
    /// Of [`transmission`].
    pub flags: u16,
    /// The server's sizes of requests, or the protocol's defaults.
    pub block: BlockSizes,
    /// Structured replies.
    pub structured: bool,
    /// The id of `base:allocation`, where block status may be asked for.
    pub allocation: Option<u32>,
}

impl Negotiated {
    /// Whether the server has set a flag of [`transmission`].
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Nothing may be written.
    pub fn read_only(&self) -> bool {
        self.has(transmission::READ_ONLY)
    }
}

pub(super) enum Step {
    Consumed(usize),
    NeedInput,
    Ready(usize, Negotiated),
    Close(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiting {
    Greeting,
    Structured,
    MetaContext,
    Go,
    /// The reply to EXPORT_NAME has no header.
    ExportName,
}

#[derive(Debug)]
pub(super) struct Handshake {
    export: String,
    waiting: Waiting,
    zeroes: bool,
    replies: u32,
    structured: bool,
    allocation: Option<u32>,
    size_and_flags: Option<(u64, u16)>,
    block: BlockSizes,
}

impl Handshake {
    pub(super) fn new(export: &str) -> Handshake {
        Handshake {
            export: export.to_owned(),
            waiting: Waiting::Greeting,
            zeroes: true,
            replies: 0,
            structured: false,
            allocation: None,
            size_and_flags: None,
            // What may be assumed of a server that says nothing (the specification, "Block size constraints").
            block: BlockSizes { minimum: 1, preferred: 4096, maximum: MAX_PAYLOAD },
        }
    }

    pub(super) fn step(&mut self, input: &[u8], out: &mut Output) -> Step {
        match self.waiting {
            Waiting::Greeting => self.greeting(input, out),
            Waiting::ExportName => {
                let len = if self.zeroes { 134 } else { 10 };
                if input.len() < len {
                    return Step::NeedInput;
                }
                self.size_and_flags = Some((be64(input, 0), be16(input, 8)));
                self.ready(len)
            }
            _ => {
                if input.len() < 20 {
                    return Step::NeedInput;
                }
                let len = be32(input, 16) as usize;
                if be64(input, 0) != OPTION_REPLY_MAGIC {
                    return Step::Close("a reply to an option has the wrong magic number".into());
                }
                if len > MAX_REPLY {
                    return Step::Close(format!("a reply to an option of {len} bytes"));
                }
                let Some(data) = input.get(20..20 + len) else { return Step::NeedInput };
                self.replies += 1;
                if self.replies > MAX_REPLIES {
                    return Step::Close("no end of replies to one option".into());
                }
                self.reply(be32(input, 8), be32(input, 12), data, 20 + len, out)
            }
        }
    }

    fn greeting(&mut self, input: &[u8], out: &mut Output) -> Step {
        if input.len() < 16 {
            return Step::NeedInput;
        }
        if be64(input, 0) != INIT_MAGIC {
            return Step::Close("this is not an NBD server".into());
        }
        match be64(input, 8) {
            OPTION_MAGIC => {}
            OLDSTYLE_MAGIC => {
                return Step::Close("the server speaks the old style of NBD only".into());
            }
            _ => return Step::Close("this is not an NBD server".into()),
        }
        if input.len() < 18 {
            return Step::NeedInput;
        }
        let flags = be16(input, 16) & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        self.zeroes = flags & handshake::NO_ZEROES == 0;
        out.push(&u32::from(flags).to_be_bytes());
        if flags & handshake::FIXED_NEWSTYLE == 0 {
            self.ask(Waiting::ExportName, option::EXPORT_NAME, self.export.clone().as_bytes(), out);
        } else {
            self.ask(Waiting::Structured, option::STRUCTURED_REPLY, &[], out);
        }
        Step::Consumed(18)
    }

    fn ask(&mut self, waiting: Waiting, code: u32, data: &[u8], out: &mut Output) {
        self.waiting = waiting;
        self.replies = 0;
        out.push(&OPTION_MAGIC.to_be_bytes());
        out.push(&code.to_be_bytes());
        out.push(&(data.len() as u32).to_be_bytes());
        out.push(data);
    }

    fn ask_go(&mut self, out: &mut Output) {
        let mut data = string(&self.export);
        data.extend_from_slice(&1u16.to_be_bytes());
        data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
        self.ask(Waiting::Go, option::GO, &data, out);
    }

    fn reply(&mut self, code: u32, kind: u32, data: &[u8], used: usize, out: &mut Output) -> Step {
        let expected = match self.waiting {
            Waiting::Structured => option::STRUCTURED_REPLY,
            Waiting::MetaContext => option::SET_META_CONTEXT,
            _ => option::GO,
        };
        if code != expected {
            return Step::Close(format!("a reply to option {code} instead of {expected}"));
        }
        if kind == reply::ERR_TLS_REQD {
            return Step::Close("the server requires TLS".into());
        }
        let failed = kind & reply::ERROR != 0;
        match self.waiting {
            Waiting::Structured if kind == reply::ACK => {
                self.structured = true;
                let mut data = string(&self.export);
                data.extend_from_slice(&1u32.to_be_bytes());
                data.extend_from_slice(&string(BASE_ALLOCATION));
                self.ask(Waiting::MetaContext, option::SET_META_CONTEXT, &data, out);
            }
            Waiting::Structured if failed => self.ask_go(out),
            Waiting::MetaContext if kind == reply::META_CONTEXT => {
                if data.get(4..) == Some(BASE_ALLOCATION.as_bytes()) {
                    self.allocation = Some(be32(data, 0));
                }
            }
            Waiting::MetaContext if kind == reply::ACK => self.ask_go(out),
            Waiting::MetaContext if failed => {
                self.allocation = None;
                self.ask_go(out);
            }
            Waiting::Go if kind == reply::INFO => return self.info(data, used),
            Waiting::Go if kind == reply::ACK => return self.ready(used),
            Waiting::Go if kind == reply::ERR_UNSUP => {
                self.ask(
                    Waiting::ExportName,
                    option::EXPORT_NAME,
                    self.export.clone().as_bytes(),
                    out,
                );
            }
            Waiting::Go if failed => {
                let name = &self.export;
                let text: String = String::from_utf8_lossy(data)
                    .chars()
                    .filter(|c| !c.is_control())
                    .take(200)
                    .collect();
                let what = match kind {
                    reply::ERR_UNKNOWN => format!("the server has no export '{name}'"),
                    reply::ERR_POLICY => format!("the server does not allow the export '{name}'"),
                    reply::ERR_SHUTDOWN => "the server is stopping".to_owned(),
                    _ => format!("the server refuses the export '{name}' ({kind:#x})"),
                };
                return Step::Close(if text.is_empty() { what } else { format!("{what}: {text}") });
            }
            _ => return Step::Close(format!("an unexpected reply {kind:#x} to option {code}")),
        }
        Step::Consumed(used)
    }

    fn info(&mut self, data: &[u8], used: usize) -> Step {
        let Some(kind) = data.get(..2) else {
            return Step::Close("information about the export without a type".into());
        };
        match (be16(kind, 0), data.len()) {
            (info::EXPORT, 12) => self.size_and_flags = Some((be64(data, 2), be16(data, 10))),
            (info::BLOCK_SIZE, 14) => {
                let (minimum, preferred, maximum) = (be32(data, 2), be32(data, 6), be32(data, 10));
                let sane = minimum.is_power_of_two()
                    && minimum <= 64 << 10
                    && preferred.is_power_of_two()
                    && preferred >= minimum
                    && maximum >= minimum;
                if !sane {
                    return Step::Close(format!(
                        "block sizes that cannot be: {minimum}, {preferred}, {maximum}"
                    ));
                }
                self.block = BlockSizes { minimum, preferred, maximum: maximum.min(MAX_PAYLOAD) };
            }
            (info::EXPORT | info::BLOCK_SIZE, len) => {
                return Step::Close(format!("information about the export of {len} bytes"));
            }
            _ => {}
        }
        Step::Consumed(used)
    }

    fn ready(&self, used: usize) -> Step {
        let Some((size, flags)) = self.size_and_flags else {
            return Step::Close("the server did not tell the export's size".into());
        };
        if flags & transmission::HAS_FLAGS == 0 {
            return Step::Close(format!("transmission flags that cannot be: {flags:#x}"));
        }
        if i64::try_from(size).is_err() {
            return Step::Close(format!("an export of {size} bytes"));
        }
        Step::Ready(
            used,
            Negotiated {
                size,
                flags,
                block: self.block,
                structured: self.structured,
                allocation: self.allocation,
            },
        )
    }
}

fn string(text: &str) -> Vec<u8> {
    let mut out = (text.len() as u32).to_be_bytes().to_vec();
    out.extend_from_slice(text.as_bytes());
    out
}
