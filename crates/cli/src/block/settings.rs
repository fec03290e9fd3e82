//! What can be set of `larder block serve`, in one list: its flags, the keys of its file, and what `--print-config` and
//! docs/block-settings.md show.

use std::path::PathBuf;

use larder_base::ByteSize;
use larder_block::backing::{BackingError, Uri};
use larder_block::cache::Share;
use larder_engine::block::map::Replacement;
use larder_engine::block::node::defaults;
use larder_net::listen::SocketAccess;
use larder_policy::block::{BLOCK_ADMISSION_DEFAULT, EvictionBy, VictimPolicy};
use larder_settings::{DriveLife, LivePage, Log, Recording, SettingsList, Tls, default_is};

use super::store::StoreArgs;
use super::write::WriteArgs;
use crate::error::CliError;

/// Where the live page is unless it is said: nowhere.
pub(super) const DEFAULT_HTTP: &str = "off";

/// Shown under the flags.
const EXAMPLES: &str = "\
Examples:
  # A file behind a cache, for QEMU
  # (file=nbd+unix:///disk?socket=/run/larder.sock):
  larder block serve --cache /flash/cache \\
      --volume disk=file:/nfs/disk.img --listen unix:/run/larder.sock
  # Another NBD server as the store; neither streams nor what is touched once
  # are cached:
  larder block serve --cache /dev/nvme1n1 \\
      --volume vm1=nbd://filer:10809/vm1 --listen tcp:127.0.0.1:10809 \\
      --admission seqr+tc
  # A guest's disk without a socket on the way (docs/vhost.md):
  larder block serve --cache /flash/cache \\
      --volume disk=file:/nfs/disk.img \\
      --listen vhost:/run/larder.disk,volume=disk
  # A disk of this host, /dev/ublkb0 (docs/ublk.md):
  larder block serve --cache /flash/cache \\
      --volume disk=file:/nfs/disk.img --listen ublk:0,volume=disk
  # An object store (first: larder block create s3://bucket/vm1 --size 100g):
  larder block serve --cache /flash/cache \\
      --volume vm1=s3://bucket/vm1 --listen unix:/run/larder.sock
  # Two volumes with their shares, a drive that is to last five years, and the
  # live page:
  larder block serve --cache /flash/cache \\
      --volume db=file:/nfs/db.img --volume www=file:/nfs/www.img \\
      --share db=30%.. --share www=..50% --endurance-tbw 600 \\
      --http 127.0.0.1:11281 --listen unix:/run/larder.sock
  # Writes are answered when they are on local flash; the store alone is always
  # what a disk may hold after a crash:
  larder block format /flash/cache --size 100g --write-log 8g
  larder block serve --cache /flash/cache \\
      --volume db=file:/nfs/db.img --write db=back:ordered \\
      --listen unix:/run/larder.sock
  # Over the network, for clients with a certificate (docs/nbd.md):
  larder block serve --cache /flash/cache \\
      --volume disk=file:/nfs/disk.img --listen tcp:0.0.0.0:10809 \\
      --tls-certificate /etc/larder/cert.pem --tls-key /etc/larder/key.pem \\
      --tls-client-ca /etc/larder/clients.pem
  # All of this in a file; its keys are the names of the flags:
  larder block serve --print-config > larder-block.toml
  larder block serve --config larder-block.toml

`larder block status` and the commands beside it ask the daemon that runs.

Writes go to the volume at once (write-through), and the cache may be lost at any time without loss of data, unless --write says back:ORDER.

SIGTERM stops it in good order; the next start is warm after that, and after kill -9. SIGUSR1 logs the counters, SIGHUP has it read the TLS certificates again.";

/// Serve volumes over NBD and vhost-user-blk, and as disks of this host, through a cache device
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, mut_arg("http", |arg| default_is(arg, DEFAULT_HTTP)))]
pub(crate) struct Settings {
    /// The cache: a file or device that `larder block format` has prepared
    #[arg(long, value_name = "PATH", help_heading = "Cache")]
    pub(super) cache: PathBuf,
    /// Where there is no such cache at the start, or it is cut short or cannot be read: end with an error, or serve the volumes
    /// without it (with an alarm; when it comes back it is cold). While it runs a cache that fails never stops the volumes
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = OnCacheFailure::Fail, help_heading = "Cache")]
    pub(super) on_cache_failure: OnCacheFailure,
    #[command(flatten)]
    pub(super) writes: WriteArgs,
    /// What is cached: all, seqr, sseqr, touch_count, seqr+tc, sseqr+tc, two_lbs, expected_reads; with parameters in parentheses. By default what
    /// is read or written in sequence may have free slots and displaces nothing
    #[arg(long, value_name = "NAME", default_value = BLOCK_ADMISSION_DEFAULT, help_heading = "Cache")]
    pub(super) admission: String,
    /// Which line is evicted: lru, clock, sieve, s3fifo or fifo; a sparse cache has a clock of its own. May differ from run
    /// to run
    #[arg(long, value_name = "NAME", default_value_t = defaults::REPLACEMENT, help_heading = "Cache")]
    pub(super) replacement: Replacement,
    /// Which segment is reclaimed where the placement is full: fifo, greedy, cost-benefit or random
    #[arg(long, value_name = "NAME", default_value_t = defaults::RECLAIM, help_heading = "Cache")]
    pub(super) reclaim: VictimPolicy,
    /// Who makes room where the placement is full: cache (--replacement drops lines, the cleaner moves all others), gc (the
    /// cleaner keeps a fifth of a segment, the hottest lines) or gc:SHARE
    #[arg(long, value_name = "WHO", default_value_t = defaults::evict(), help_heading = "Cache")]
    pub(super) evict: EvictionBy,
    /// A volume's share of the cache, FLOOR..CEILING in per cent or bytes, of which one may be missing: others leave it its
    /// floor, it takes no more than its ceiling. May be given several times
    #[arg(long = "share", value_name = "NAME=SHARE", value_parser = share, help_heading = "Cache")]
    pub(super) shares: Vec<(String, Share)>,
    /// Memory for lines on their way to flash, behind the replies; when it is used up, what is read is not cached. What is on its way from the write log
    /// to stores may have as much again, of all volumes together; while the store of one stands each other may have one write more (512 KiB),
    /// or one epoch
    #[arg(long, value_name = "SIZE", default_value_t = defaults::FILL_MEMORY, help_heading = "Cache")]
    pub(super) fill_memory: ByteSize,
    /// How far is read ahead of clients that read in sequence and miss, where admission takes what they read (0: not at all)
    #[arg(long, value_name = "SIZE", default_value_t = defaults::READAHEAD, help_heading = "Cache")]
    pub(super) readahead: ByteSize,
    /// A volume and its store: file:PATH, nbd+unix:///EXPORT?socket=PATH, nbd://HOST:PORT/EXPORT or s3://BUCKET/PREFIX; NAME
    /// is the export's. May be given several times; `larder block attach` adds more
    #[arg(long = "volume", value_name = "NAME=URI", value_parser = volume, help_heading = "Volumes")]
    pub(super) volumes: Vec<(String, Uri)>,
    /// Volumes are only read
    #[arg(long, help_heading = "Volumes")]
    pub(super) read_only: bool,
    /// This volume is only read: exported as such, and writes are refused. May be given several times
    #[arg(long = "read-only-volume", value_name = "NAME", help_heading = "Volumes")]
    pub(super) read_only_volumes: Vec<String>,
    /// Take stores that cannot tell whether they changed (NBD, block devices) as unchanged since the last run
    #[arg(long, help_heading = "Volumes")]
    pub(super) trust_unchanged: bool,
    #[command(flatten)]
    pub(super) stores: StoreArgs,
    /// Where to listen: unix:PATH or tcp:HOST:PORT for NBD, vhost:PATH,volume=NAME for one guest's vhost-user-blk disk,
    /// ublk:[ID],volume=NAME for the disk /dev/ublkbID of this host. With a certificate TLS is required over tcp: and offered on unix:; tls=off, on or require after a comma chooses for
    /// one address. May be given several times
    #[arg(long, value_name = "ADDR", required = true, help_heading = "Clients")]
    pub(super) listen: Vec<String>,
    /// Ask nothing of ublk that Linux 6.0 has not: to test what older kernels get
    #[arg(long, hide = true)]
    pub(super) ublk_plain: bool,
    #[command(flatten)]
    pub(super) sockets: SocketArgs,
    /// Worker threads
    #[arg(long, short = 't', value_name = "N", default_value_t = defaults::WORKERS as u16, value_parser = clap::value_parser!(u16).range(1..=64), help_heading = "Clients")]
    pub(super) threads: u16,
    /// Connections at a time. Where there are more, one that has asked nothing for 10 s since it came makes way
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=1_000_000), help_heading = "Clients")]
    pub(super) connections: u64,
    /// Connections at a time from one address over TCP (of IPv6, one network of 64 bits) [default: three quarters of
    /// --connections]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000), help_heading = "Clients")]
    pub(super) connections_per_peer: Option<u64>,
    /// Memory for requests and replies of all NBD connections, and for what is read for them; a connection has no more of
    /// it than is left, so that nobody takes it all [default: 256m for each worker thread]
    #[arg(long, value_name = "SIZE", help_heading = "Clients")]
    pub(super) connection_memory: Option<ByteSize>,
    #[command(flatten)]
    pub(super) tls: Tls,
    #[command(flatten)]
    pub(super) drive: DriveLife,
    /// Where it is noted that a cache failed and must not be used again, what is selected, and what the write budget must
    /// remember [default: /var/lib/larder for root, else ~/.local/state/larder]
    #[arg(long, value_name = "DIR", help_heading = "Operation")]
    pub(super) state_dir: Option<PathBuf>,
    /// The socket that `larder block status` and the commands beside it ask [default: block.sock in the state directory]
    #[arg(long, value_name = "PATH", help_heading = "Operation")]
    pub(super) control: Option<PathBuf>,
    #[command(flatten)]
    pub(super) live_page: LivePage,
    #[command(flatten)]
    pub(super) log: Log,
    #[command(flatten)]
    pub(super) recording: Recording,
}

impl SettingsList for Settings {
    const COMMAND: &'static str = "larder block serve";
}

/// What becomes of a start without its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum OnCacheFailure {
    Serve,
    Fail,
}

/// Who may connect to Unix sockets.
#[derive(Debug, clap::Args)]
pub(super) struct SocketArgs {
    /// Permissions of the sockets of unix: and vhost:, octal: who may write to one may connect to it. (The control socket is
    /// always its owner's alone)
    #[arg(long, value_name = "MODE", default_value = "0600", help_heading = "Clients")]
    socket_mode: String,
    /// Group of these sockets, by name or number, as for a QEMU that runs as another user: with --socket-mode 0660
    #[arg(long, value_name = "GROUP", help_heading = "Clients")]
    socket_group: Option<String>,
}

impl SocketArgs {
    pub(super) fn access(&self) -> Result<SocketAccess, CliError> {
        let mode = u32::from_str_radix(&self.socket_mode, 8).ok().filter(|m| *m <= 0o777);
        let mode = mode.ok_or_else(|| {
            CliError::Usage(format!(
                "--socket-mode '{}': write octal permissions from 0 to 777, such as 0660",
                self.socket_mode
            ))
        })?;
        let group = self.socket_group.as_deref().map(group).transpose()?;
        Ok(SocketAccess { mode, group })
    }
}

/// The number of a group of this machine.
fn group(name: &str) -> Result<u32, CliError> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let bad = |reason: String| CliError::Usage(format!("--socket-group '{name}': {reason}"));
    let table =
        std::fs::read_to_string("/etc/group").map_err(|e| bad(format!("/etc/group: {e}")))?;
    let number = |line: &str| {
        let mut fields = line.split(':');
        (fields.next()? == name).then(|| fields.nth(1)?.parse().ok()).flatten()
    };
    table
        .lines()
        .find_map(number)
        .ok_or_else(|| bad("is not in /etc/group: give the name or the number of a group".into()))
}

fn share(text: &str) -> Result<(String, Share), String> {
    let (name, share) = text
        .split_once('=')
        .ok_or_else(|| format!("'{text}' is no volume's share: write NAME=FLOOR..CEILING"))?;
    Ok((name.to_owned(), share.parse()?))
}

fn volume(text: &str) -> Result<(String, Uri), String> {
    let (name, uri) = text.split_once('=').ok_or_else(|| {
        format!("'{text}' is not a volume: write NAME=URI, as in disk=file:/srv/disk.img")
    })?;
    Ok((name.to_owned(), uri.parse().map_err(|e: BackingError| e.to_string())?))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::write::Writes;
    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        settings: Settings,
    }

    /// What the flags show as their defaults is read back as the engine has it.
    #[test]
    fn what_nobody_says_is_as_the_engine_has_it() {
        let said = ["larder", "--cache", "/c", "--listen", "unix:/s"];
        let is = Flags::parse_from(said).settings;
        let writes = is.writes.checked(&is).unwrap();
        assert_eq!(writes, Writes { mode: defaults::WRITE, ..Writes::default() });
        assert_eq!(is.replacement, defaults::REPLACEMENT);
        assert_eq!(is.reclaim, defaults::RECLAIM);
        assert_eq!(is.evict, defaults::evict());
        assert_eq!(is.fill_memory, defaults::FILL_MEMORY);
        assert_eq!(is.readahead, defaults::READAHEAD);
    }
}
