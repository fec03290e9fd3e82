//! What a connection is given at each turn: settings, counters, and the server's administrative side.

use std::sync::Arc;

use larder_base::AppId;
use larder_engine::kv::api::{FlashRead, Reply};

use super::ReadToken;
use super::engine::SideEffects;
use crate::protocol::auth::Users;
use crate::watch::{Topics, Watch};

/// Settings of the protocol, the same for all connections of a server.
#[derive(Debug)]
pub struct ProtocolConfig {
    /// What `version` answers.
    pub version: String,
    /// Whether `shutdown` is obeyed (`-A`).
    pub shutdown_enabled: bool,
    /// Whether `flush_all` is obeyed (`-F` turns it off).
    pub flush_enabled: bool,
    /// Whether `debugtime` exists (a hidden flag for conformance tests).
    pub debug_commands: bool,
    /// Objects have a CAS (`-C`: they do not).
    pub cas_enabled: bool,
    /// Commands executed in one turn, after which their answers are sent before more are taken (`-R`).
    pub commands_per_turn: u32,
    /// Serve nobody who does not speak the binary protocol, which is not spoken here (`-B binary`): every client is told
    /// so and left.
    pub binary_only: bool,
    /// Whether keys may be listed (`-X` turns it off).
    pub dump_enabled: bool,
    /// Who must log in before anything else is answered (`--auth-file`).
    pub auth: Option<Arc<Users>>,
}

impl Default for ProtocolConfig {
    fn default() -> ProtocolConfig {
        ProtocolConfig {
            version: env!("CARGO_PKG_VERSION").to_string(),
            shutdown_enabled: false,
            flush_enabled: true,
            debug_commands: false,
            cas_enabled: true,
            commands_per_turn: u32::MAX,
            binary_only: false,
            dump_enabled: true,
            auth: None,
        }
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of one worker, summed over workers by `stats`. Names and meanings are memcached's.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct ConnStats {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl ConnStats {
            /// Adds another worker's counters.
            pub fn add(&mut self, other: &ConnStats) {
                $(self.$name += other.$name;)*
            }

            /// Takes away what was counted up to an earlier moment.
            pub fn subtract(&mut self, earlier: &ConnStats) {
                $(self.$name = self.$name.saturating_sub(earlier.$name);)*
            }

            /// Every counter with its name.
            pub fn each(&self, mut f: impl FnMut(&'static str, u64)) {
                $(f(stringify!($name), self.$name);)*
            }
        }
    };
}

counters! {
    /// Keys asked for by get, gets and mg.
    cmd_get,
    /// Stores that reached the engine.
    cmd_set,
    /// flush_all commands.
    cmd_flush,
    /// touch commands, and keys of gat, gats and mg with T.
    cmd_touch,
    /// meta debug commands (me).
    cmd_meta,
    /// Keys found.
    get_hits,
    /// Keys found on flash (within get_hits and touch_hits).
    get_flash_hits,
    /// Keys not found.
    get_misses,
    /// Deletions that found their object.
    delete_hits,
    /// Deletions that did not.
    delete_misses,
    /// Increments that found their object.
    incr_hits,
    /// Increments that did not.
    incr_misses,
    /// Decrements that found their object.
    decr_hits,
    /// Decrements that did not.
    decr_misses,
    /// Compare-and-set of an object that is gone.
    cas_misses,
    /// Compare-and-set that succeeded.
    cas_hits,
    /// Compare-and-set with another number than the object's.
    cas_badval,
    /// Touches that found their object.
    touch_hits,
    /// Touches that did not.
    touch_misses,
    /// Stores refused because of the object's size.
    store_too_large,
    /// Stores refused because no room could be made.
    store_no_memory,
    /// Attempts to log in.
    auth_cmds,
    /// Attempts that failed.
    auth_errors,
    /// Connections closed because they began in the binary protocol, or because nothing else was to be spoken (`-B binary`).
    binary_refused,
    /// Lines that were no valid command.
    malformed,
    /// Times that a connection had to wait for the shared budget of large values.
    big_buffer_waits,
    /// Large stores that were put off until there was room for them.
    room_waits,
    /// Connections closed because they held large buffers without progress while others waited.
    big_buffer_stalls,
    /// Bytes received.
    bytes_read,
    /// Bytes sent.
    bytes_written,
}

/// One use of a key, for `stats detail`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefixUse {
    /// A read, and whether it hit.
    Get {
        /// The key was found.
        hit: bool,
    },
    /// A store.
    Set,
    /// A deletion.
    Delete,
}

/// How `debugtime` moves the server's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DebugTime {
    /// Stop.
    Pause,
    /// Go on.
    Resume,
    /// Jump by this many seconds.
    Jump(i64),
}

/// The server behind the connections. Methods write whole answers, ends of line included.
pub trait Admin {
    /// `stats` with its arguments (without the command, trimmed; empty for the general statistics).
    fn stats(&mut self, arguments: &[u8], out: &mut Vec<u8>);

    /// `verbosity`.
    fn verbosity(&mut self, _level: u32) {}

    /// `cache_memlimit`, in MiB. False when the limit cannot be changed to that.
    fn memory_limit(&mut self, _mebibytes: u32) -> bool {
        false
    }

    /// `lru_crawler enable` and `disable`.
    fn crawler(&mut self, _on: bool) {}

    /// `lru_crawler crawl`. False when the crawler is off.
    fn crawl(&mut self) -> bool {
        false
    }

    /// `watch`: from now on the connection is told of these.
    ///
    /// # Errors
    /// The answer that refuses it.
    fn watch(&mut self, _topics: Topics) -> Result<(), &'static [u8]> {
        Err(b"CLIENT_ERROR watch commands not allowed")
    }

    /// `debugtime`.
    fn debug_time(&mut self, _how: DebugTime) {}

    /// `refresh_certs`: reads the TLS certificates again. `None` when the server has no TLS.
    fn refresh_certs(&mut self) -> Option<Result<(), String>> {
        None
    }

    /// A key was used; called only while [`ConnContext::detail`] is set.
    fn prefix_use(&mut self, _key: &[u8], _how: PrefixUse) {}
}

/// What one turn of a connection works with; it belongs to the worker.
pub struct ConnContext<'a, R = FlashRead> {
    /// Settings.
    pub config: &'a ProtocolConfig,
    /// The worker's counters.
    pub stats: &'a mut ConnStats,
    /// Reads to perform; their bytes come back through [`super::Connection::flash_done`].
    pub reads: &'a mut Vec<(ReadToken, R)>,
    /// What else the engine asked for.
    pub side: &'a mut SideEffects,
    /// The administrative side.
    pub admin: &'a mut dyn Admin,
    /// `stats detail` is on: report every use of a key.
    pub detail: bool,
    /// The application of the listener that the connection came by; `None`: each key's own.
    pub app: Option<AppId>,
    /// Somebody watches: what happens is to be told.
    pub watch: Option<Watch<'a>>,
}

impl ConnStats {
    /// Counts a store that the engine answered.
    pub(super) fn count_store(&mut self, reply: &Reply<'_>, cas: bool) {
        match reply {
            Reply::TooLarge => {
                self.store_too_large += 1;
                return;
            }
            Reply::OutOfMemory => {
                self.store_no_memory += 1;
                return;
            }
            Reply::Stored { .. } if cas => self.cas_hits += 1,
            Reply::Exists if cas => self.cas_badval += 1,
            Reply::NotFound if cas => self.cas_misses += 1,
            _ => {}
        }
        self.cmd_set += 1;
    }

    /// Counts an increment or decrement that the engine answered.
    pub(super) fn count_arith(&mut self, reply: &Reply<'_>, decrement: bool) {
        let (hits, misses) = if decrement {
            (&mut self.decr_hits, &mut self.decr_misses)
        } else {
            (&mut self.incr_hits, &mut self.incr_misses)
        };
        match reply {
            Reply::Number(..) => *hits += 1,
            Reply::NotFound => *misses += 1,
            _ => {}
        }
    }
}
