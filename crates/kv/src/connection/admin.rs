//! Administrative commands, and what memcached's clients and tests send to tune it.
//!
//! Commands that tune what Larder does not have (slab classes, LRU segments) are refused as memcached refuses them when
//! the feature is off, so that a tool sees a fact and not a pretence.

use larder_base::{Now, UnixSecs};

use super::Progress;
use super::context::DebugTime;
use super::dump::{Dump, Form};
use super::engine::Engine;
use super::turn::{Act, Turn};
use crate::protocol::number::{parse_i32, parse_i64, parse_ratio, parse_u32};
use crate::protocol::tokens::Tokens;
use crate::protocol::{answer, expiry};

impl<E: Engine> Turn<'_, '_, E> {
    /// Commands that are not about one object, and unknown ones.
    #[cold]
    pub(super) fn administer(&mut self, line_len: usize, line: &[u8]) -> Act<E::Read> {
        let tokens = Tokens::new(line);
        let noreply = tokens.noreply();
        let known = match tokens.get(0) {
            Some(b"flush_all") => return self.flush_all(line_len, &tokens),
            Some(b"shutdown") => return self.shutdown(line_len, &tokens),
            Some(b"verbosity") => self.verbosity(&tokens),
            Some(b"cache_memlimit") => self.memory_limit(&tokens),
            Some(b"extstore") => extstore(&tokens),
            Some(b"slabs") => slabs(&tokens),
            Some(b"lru_crawler") => return self.crawler(line_len, &tokens),
            Some(b"watch") => return self.watch(line_len, &tokens),
            Some(b"debugtime") if self.ctx.config.debug_commands => self.debug_time(&tokens),
            Some(b"refresh_certs") => return self.refresh_certs(line_len),
            _ => {
                if tokens.len() > 1
                    && tokens.as_slice().last().is_some_and(|t| t.starts_with(b"HTTP/"))
                {
                    // A browser, or a web page that makes one speak to us: give it nothing to work with.
                    self.ctx.stats.malformed += 1;
                    return Act::Close(line_len);
                }
                return self.bad(noreply, answer::ERROR, line_len);
            }
        };
        self.say(noreply, known);
        Act::Done(line_len)
    }

    /// `flush_all [<delay>] [noreply]`
    fn flush_all(&mut self, line_len: usize, tokens: &Tokens<'_>) -> Act<E::Read> {
        if self.behind_reads() {
            return Act::Wait(Progress::WaitingForFlash);
        }
        let noreply = tokens.noreply();
        self.ctx.stats.cmd_flush += 1;
        if !self.ctx.config.flush_enabled {
            self.say(noreply, b"CLIENT_ERROR flush_all not allowed");
            return Act::Done(line_len);
        }
        let mut delay = 0;
        if tokens.len() != if noreply { 2 } else { 1 } {
            match tokens.get(1).and_then(parse_i32) {
                Some(n) => delay = n,
                None => return self.bad(noreply, answer::BAD_EXPTIME, line_len),
            }
        }
        self.engine.flush_all(self.now, flush_time(self.now, delay));
        self.say(noreply, b"OK");
        Act::Done(line_len)
    }

    /// `shutdown [graceful]`
    fn shutdown(&mut self, line_len: usize, tokens: &Tokens<'_>) -> Act<E::Read> {
        if !self.ctx.config.shutdown_enabled {
            self.say(false, b"SERVER_ERROR: shutdown not enabled");
            return Act::Done(line_len);
        }
        match (tokens.len(), tokens.get(1)) {
            (1, _) => Act::Shutdown(line_len, false),
            (2, Some(b"graceful")) => Act::Shutdown(line_len, true),
            _ => {
                self.say(false, b"CLIENT_ERROR invalid shutdown mode");
                Act::Done(line_len)
            }
        }
    }

    fn verbosity(&mut self, tokens: &Tokens<'_>) -> &'static [u8] {
        match tokens.get(1).and_then(parse_u32) {
            Some(level) => {
                // As memcached, which knows no more.
                self.ctx.admin.verbosity(level.min(2));
                b"OK"
            }
            None => answer::BAD_FORMAT,
        }
    }

    /// `cache_memlimit <MiB>`
    fn memory_limit(&mut self, tokens: &Tokens<'_>) -> &'static [u8] {
        match tokens.get(1).and_then(parse_u32) {
            None => answer::ERROR,
            Some(0..8) => b"MEMLIMIT_TOO_SMALL cannot set maxbytes to less than 8m",
            Some(1_000_000_001..) => b"MEMLIMIT_ADJUST_FAILED input value is megabytes not bytes",
            Some(limit) if self.ctx.admin.memory_limit(limit) => b"OK",
            Some(_) => b"MEMLIMIT_ADJUST_FAILED out of bounds or unable to adjust",
        }
    }

    /// `debugtime p|r|<seconds>`: stops, restarts or moves the server's clock.
    fn debug_time(&mut self, tokens: &Tokens<'_>) -> &'static [u8] {
        let how = match tokens.get(1) {
            Some(b"p") => DebugTime::Pause,
            Some(b"r") => DebugTime::Resume,
            Some(delta) => match parse_i64(delta) {
                Some(delta) => DebugTime::Jump(delta),
                None => return answer::ERROR,
            },
            None => return answer::ERROR,
        };
        self.ctx.admin.debug_time(how);
        b"OK"
    }

    /// `lru_crawler …`: the listings, and what removes expired objects. How fast it goes is not for clients to tune.
    fn crawler(&mut self, line_len: usize, tokens: &Tokens<'_>) -> Act<E::Read> {
        let argument = tokens.get(2).unwrap_or_default();
        let form = match (tokens.len(), tokens.get(1)) {
            (3, Some(b"metadump")) => Form::Meta,
            (3, Some(b"mgdump")) => Form::Mg,
            (3, Some(b"crawl")) => {
                let known = Dump::new(Form::Meta, argument).is_some();
                let text: &[u8] = match known {
                    false => b"BADCLASS invalid class id",
                    true if self.ctx.admin.crawl() => b"OK",
                    true => b"CLIENT_ERROR lru crawler disabled",
                };
                self.say(false, text);
                return Act::Done(line_len);
            }
            (3, Some(b"sleep" | b"tocrawl")) => {
                let sleep = tokens.get(1) == Some(b"sleep");
                let text: &[u8] = match parse_u32(argument) {
                    None => answer::BAD_FORMAT,
                    Some(1_000_001..) if sleep => b"CLIENT_ERROR sleep must be one second or less",
                    Some(_) => b"OK",
                };
                self.say(false, text);
                return Act::Done(line_len);
            }
            (2, Some(how @ (b"enable" | b"disable"))) => {
                self.ctx.admin.crawler(how == b"enable");
                self.say(false, b"OK");
                return Act::Done(line_len);
            }
            _ => return self.bad(tokens.noreply(), answer::ERROR, line_len),
        };
        if !self.ctx.config.dump_enabled {
            self.say(
                false,
                match form {
                    Form::Meta => b"ERROR metadump not allowed",
                    Form::Mg => b"ERROR key dump not allowed",
                },
            );
            return Act::Done(line_len);
        }
        if self.out.unsent() > 0 {
            // As memcached: the answers before it would be in the way of the listing.
            self.say(
                false,
                match form {
                    Form::Meta => b"ERROR cannot pipeline other commands before metadump",
                    Form::Mg => b"ERROR cannot pipeline other commands before mgdump",
                },
            );
            return Act::Done(line_len);
        }
        match Dump::new(form, argument) {
            Some(dump) => {
                self.say(false, b"OK");
                Act::Dump(line_len, dump)
            }
            None => {
                self.say(false, b"BADCLASS invalid class id");
                Act::Done(line_len)
            }
        }
    }

    fn refresh_certs(&mut self, line_len: usize) -> Act<E::Read> {
        match self.ctx.admin.refresh_certs() {
            Some(Ok(())) => self.say(false, b"OK"),
            Some(Err(text)) => {
                let text = text.replace(['\r', '\n'], " ");
                self.say(false, format!("SERVER_ERROR {text}").as_bytes());
            }
            None => self.say(false, answer::ERROR),
        }
        Act::Done(line_len)
    }
}

/// When a flush with this argument takes effect.
fn flush_time(now: Now, delay: i32) -> UnixSecs {
    if delay > 0 { UnixSecs(expiry(now, delay).0).max(now.wall) } else { now.wall }
}

/// `extstore <setting> <n>`: flash is not tuned at run time, but memcached's tests and scripts send these, so numbers
/// are accepted and have no effect.
fn extstore(tokens: &Tokens<'_>) -> &'static [u8] {
    let number = |index| tokens.get(index).and_then(parse_u32);
    let accepted = match tokens.get(1) {
        Some(b"free_memchunks") => number(2).is_some_and(|class| class < 64) && number(3).is_some(),
        Some(
            b"item_size" | b"item_age" | b"low_ttl" | b"recache_rate" | b"compact_under"
            | b"drop_under" | b"max_sleep" | b"drop_unread",
        ) => number(2).is_some(),
        Some(b"max_frag") => tokens.get(2).and_then(parse_ratio).is_some(),
        _ => false,
    };
    if accepted { b"OK" } else { answer::ERROR }
}

/// `slabs …`: there are no slab classes to move memory between, so none can spare a page; the automover's switch is accepted.
fn slabs(tokens: &Tokens<'_>) -> &'static [u8] {
    match (tokens.len(), tokens.get(1)) {
        (4, Some(b"reassign")) => b"NOSPARE source class has no spare pages",
        (3.., Some(b"automove")) => match tokens.get(2).and_then(parse_u32) {
            Some(0..=2) => b"OK",
            Some(_) => answer::ERROR,
            None => answer::BAD_FORMAT,
        },
        _ => answer::ERROR,
    }
}
