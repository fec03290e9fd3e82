//! `larder block serve`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_base::ByteSize;
use larder_block::backing::{self, Uri};
use larder_block::cache::{CacheConfig, Cached, RulesConfig, Share, Warmth, open, without};
use larder_block::control::{Absent, Control, ControlServer, http};
use larder_block::server::{
    Doors, Listen, Server, ServerConfig, TlsFiles, Volume, VolumeError, Volumes,
};
use larder_block::ublk::{UblkDoors, UblkListen, UblkServer};
use larder_block::vhost::{VhostDoors, VhostListen, VhostServer};
use larder_engine::block::WriteMode;
use larder_engine::block::map::Replacement;
use larder_engine::block::node::readahead;
use larder_format::block::{Layout, Placement};
use larder_net::listen::SocketAccess;
use larder_policy::block::{
    BLOCK_ADMISSION_DEFAULT, BlockAdmissionConfig, EvictionBy, VictimPolicy,
};
use larder_policy::budget::WriteBudgetConfig;
use larder_runtime::record::RecordConfig;
use larder_runtime::{LockError, LockFile, RingChoice, plain};
use tracing::{error, info, warn};

use super::format::failed;
use super::store::StoreArgs;
use super::tell;
use crate::error::CliError;
use crate::signals::{self, Meaning};

/// Shown under the flags.
const EXAMPLES: &str = "\
Examples:
  # A file behind a cache, for QEMU (file=nbd+unix:///disk?socket=/run/larder.sock):
  larder block serve --cache /flash/cache \\
      --volume disk=file:/nfs/disk.img --listen unix:/run/larder.sock
  # Another NBD server as the store; streams are not cached, nor what is touched once:
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
  # Two volumes with their shares, a drive that is to last five years, and the live page:
  larder block serve --cache /flash/cache \\
      --volume db=file:/nfs/db.img --volume www=file:/nfs/www.img \\
      --share db=30%.. --share www=..50% --endurance-tbw 600 \\
      --http 127.0.0.1:11281 --listen unix:/run/larder.sock
  # Over the network, for clients with a certificate (docs/nbd.md):
  larder block serve --cache /flash/cache \\
      --volume disk=file:/nfs/disk.img --listen tcp:0.0.0.0:10809 \\
      --tls-certificate /etc/larder/cert.pem --tls-key /etc/larder/key.pem \\
      --tls-client-ca /etc/larder/clients.pem
  # All of this in a file; its keys are the names of the flags:
  larder block serve --print-config > larder-block.toml
  larder block serve --config larder-block.toml

`larder block status` and the commands beside it ask the daemon that runs.
Writes go to the volume at once (write-through): the cache may be lost at any time without loss of data.
SIGTERM stops it in good order; the next start is warm after that, and after kill -9. SIGUSR1 logs the counters, SIGHUP has it
read the TLS certificates again.";

/// Signals within so long of the first are the same stop.
const ONE_STOP: Duration = Duration::from_millis(500);

/// Memory of one vhost-user device for requests under way, bytes.
const VHOST_BUFFERS: usize = 64 << 20;
/// Memory of one thread of a ublk device for requests under way, bytes.
const UBLK_BUFFERS: usize = 32 << 20;

/// Memory for the connections of one worker thread by default, and the least: twice the longest request, which is read into
/// memory beside the reply's, and an eighth of it for others. Bytes.
const WORKER_MEMORY: (u64, u64) = (256 << 20, 80 << 20);
/// Of a connection beside that, bytes: its input, while something comes.
const CONNECTION_INPUT: u64 = 64 << 10;

/// What connections of one worker may take, bytes.
fn worker_memory(given: Option<ByteSize>, threads: u16) -> Result<u64, CliError> {
    let Some(given) = given else { return Ok(WORKER_MEMORY.0) };
    let each = given.0 / u64::from(threads);
    let machine = larder_runtime::machine::usable_memory().unwrap_or(u64::MAX);
    if each < WORKER_MEMORY.1 {
        return Err(CliError::Usage(format!(
            "--connection-memory {given}: each of {threads} worker threads needs {}: say {} or more, or fewer --threads",
            ByteSize(WORKER_MEMORY.1),
            ByteSize(WORKER_MEMORY.1 * u64::from(threads)),
        )));
    }
    if given.0 > machine {
        return Err(CliError::Usage(format!(
            "--connection-memory {given}: this machine lets it use {}",
            ByteSize(machine)
        )));
    }
    Ok(each)
}

/// Serve volumes over NBD and vhost-user-blk, and as disks of this host, through a cache device
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The cache: a file or device that `larder block format` has prepared
    #[arg(long, value_name = "PATH")]
    cache: PathBuf,
    /// Where there is no such cache at the start, or it is cut short or cannot be read: end with an error, or serve the volumes
    /// without it (with an alarm; when it comes back it is cold). While it runs a cache that fails never stops the volumes
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = OnCacheFailure::Fail)]
    on_cache_failure: OnCacheFailure,
    /// A volume and its store: file:PATH, nbd+unix:///EXPORT?socket=PATH, nbd://HOST:PORT/EXPORT or s3://BUCKET/PREFIX; NAME
    /// is the export's. May be given several times; `larder block attach` adds more
    #[arg(long = "volume", value_name = "NAME=URI", value_parser = volume)]
    volumes: Vec<(String, Uri)>,
    /// Where to listen: unix:PATH or tcp:HOST:PORT for NBD, vhost:PATH,volume=NAME for one guest's vhost-user-blk disk,
    /// ublk:[ID],volume=NAME for the disk /dev/ublkbID of this host. With a certificate TLS is required over tcp: and offered on unix:; tls=off, on or require after a comma chooses for
    /// one address. May be given several times
    #[arg(long, value_name = "ADDR", required = true)]
    listen: Vec<String>,
    /// Ask nothing of ublk that Linux 6.0 has not: to test what older kernels get
    #[arg(long, hide = true)]
    ublk_plain: bool,
    /// What a write does to the cache: hdd-ssd (allocates), hdd-upd (updates what is cached), hdd-inv (drops it)
    #[arg(long, value_name = "MODE", default_value = "hdd-ssd", value_parser = write_mode)]
    write: WriteMode,
    /// What is cached: all, seqr, sseqr, touch_count, seqr+tc, sseqr+tc, two_lbs; with parameters in parentheses. By default what
    /// is read or written in sequence may have free slots and displaces nothing
    #[arg(long, value_name = "NAME", default_value = BLOCK_ADMISSION_DEFAULT)]
    admission: String,
    /// Which line is evicted: lru, clock, sieve, s3fifo or fifo; a sparse cache has a clock of its own. May differ from run
    /// to run
    #[arg(long, value_name = "NAME", default_value = "lru")]
    replacement: Replacement,
    /// Memory for lines on their way to flash, behind the replies; when it is used up, what is read is not cached
    #[arg(long, value_name = "SIZE", default_value = "64m")]
    fill_memory: ByteSize,
    /// How far is read ahead of clients that read in sequence and miss, where admission takes what they read (0: not at all)
    #[arg(long, value_name = "SIZE", default_value = "1m")]
    readahead: ByteSize,
    /// Which segment is reclaimed where the placement is full: fifo, greedy, cost-benefit or random
    #[arg(long, value_name = "NAME", default_value = "fifo")]
    reclaim: VictimPolicy,
    /// Who makes room where the placement is full: cache (--replacement drops lines, the cleaner moves all others), gc (the
    /// cleaner keeps a fifth of a segment, the hottest lines) or gc:SHARE
    #[arg(long, value_name = "WHO", default_value = "gc")]
    evict: EvictionBy,
    /// Worker threads
    #[arg(long, short = 't', value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    threads: u16,
    /// Connections at a time. Where there are more, one that has asked nothing for 10 s since it came makes way
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    connections: u64,
    /// Connections at a time from one address over TCP (of IPv6, one network of 64 bits) [default: three quarters of
    /// --connections]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    connections_per_peer: Option<u64>,
    /// Memory for requests and replies of all NBD connections, and for what is read for them; a connection has no more of
    /// it than is left, so that nobody takes it all [default: 256m for each worker thread]
    #[arg(long, value_name = "SIZE")]
    connection_memory: Option<ByteSize>,
    /// Volumes are only read
    #[arg(long)]
    read_only: bool,
    /// This volume is only read: exported as such, and writes are refused. May be given several times
    #[arg(long = "read-only-volume", value_name = "NAME")]
    read_only_volumes: Vec<String>,
    /// Take stores that cannot tell whether they changed (NBD, block devices) as unchanged since the last run
    #[arg(long)]
    trust_unchanged: bool,
    /// Where it is noted that a cache failed and must not be used again, what is selected, and what the write budget must
    /// remember [default: /var/lib/larder for root, else ~/.local/state/larder]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Write down what every shard, the log and admission are told and decide, for `larder sim replay`. The file must not
    /// be there yet, and the cache must be empty
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Bytes at which recording ends
    #[arg(long, value_name = "SIZE", default_value = "8g", requires = "record")]
    record_limit: ByteSize,
    #[command(flatten)]
    stores: StoreArgs,
    /// The socket that `larder block status` and the commands beside it ask [default: block.sock in the state directory]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Address of the live page and /metrics, or off [default: off]
    #[arg(long, value_name = "ADDR")]
    http: Option<String>,
    /// Name by which the live page may be asked for, beside localhost and addresses; * for any. May be given several times
    #[arg(long = "http-host", value_name = "NAME")]
    http_hosts: Vec<String>,
    /// How much is logged: error, warn, info, debug, trace, or all (what libraries say too). RUST_LOG in the environment (a
    /// level, or levels by module) wins over it
    #[arg(long, value_name = "LEVEL", default_value = "info", value_parser = ["error", "warn", "info", "debug", "trace", "all"])]
    log_level: String,
    /// More log: -v connections and what clients do wrong, -vv each request of NBD clients, -vvv what libraries say too. Wins over
    /// --log-level and RUST_LOG
    #[arg(short = 'v', action = clap::ArgAction::Count)]
    verbose: u8,
    /// A volume's share of the cache, FLOOR..CEILING in per cent or bytes, of which one may be missing: others leave it its
    /// floor, it takes no more than its ceiling. May be given several times
    #[arg(long = "share", value_name = "NAME=SHARE", value_parser = share)]
    shares: Vec<(String, Share)>,
    #[command(flatten)]
    sockets: SocketArgs,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    budget: BudgetArgs,
}

/// What becomes of a start without its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum OnCacheFailure {
    Serve,
    Fail,
}

/// Who may connect to Unix sockets.
#[derive(Debug, clap::Args)]
struct SocketArgs {
    /// Permissions of the sockets of unix: and vhost:, octal: who may write to one may connect to it. (The control socket is
    /// always its owner's alone)
    #[arg(long, value_name = "MODE", default_value = "0600")]
    socket_mode: String,
    /// Group of these sockets, by name or number, as for a QEMU that runs as another user: with --socket-mode 0660
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
}

impl SocketArgs {
    fn access(&self) -> Result<SocketAccess, CliError> {
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

/// TLS, as `larder kv` takes it.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "TLS")]
struct TlsArgs {
    /// Certificate chain, PEM: turns TLS on for NBD over TCP
    #[arg(long, value_name = "FILE")]
    tls_certificate: Option<PathBuf>,
    /// Private key of the certificate, PEM
    #[arg(long, value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// CA certificates, PEM: clients that begin TLS must show a certificate signed by one of them
    #[arg(long, value_name = "FILE")]
    tls_client_ca: Option<PathBuf>,
}

impl TlsArgs {
    fn files(&self) -> Result<Option<TlsFiles>, CliError> {
        let lacks = |flag: &str, path: &Path, other: &str| {
            CliError::Usage(format!("{flag} '{}': needs {other} too", path.display()))
        };
        match (&self.tls_certificate, &self.tls_key, &self.tls_client_ca) {
            (Some(certificate), Some(key), client_ca) => Ok(Some(TlsFiles {
                certificate: certificate.clone(),
                key: key.clone(),
                client_ca: client_ca.clone(),
            })),
            (Some(certificate), None, _) => {
                Err(lacks("--tls-certificate", certificate, "--tls-key"))
            }
            (None, Some(key), _) => Err(lacks("--tls-key", key, "--tls-certificate")),
            (None, None, Some(ca)) => {
                Err(lacks("--tls-client-ca", ca, "--tls-certificate and --tls-key"))
            }
            (None, None, None) => Ok(None),
        }
    }
}

/// The drive's life, as `larder kv` takes it.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Drive life")]
struct BudgetArgs {
    /// Rated endurance of the cache device in terabytes written: sets the write budget [default: none, writes are not limited]
    #[arg(long, value_name = "TB", allow_negative_numbers = true)]
    endurance_tbw: Option<f64>,
    /// Rated endurance in drive writes per day over the warranty, instead of terabytes written
    #[arg(long, value_name = "N", visible_alias = "dwpd", allow_negative_numbers = true)]
    endurance_dwpd: Option<f64>,
    /// Years of warranty that --endurance-dwpd is stated for
    #[arg(long, value_name = "N", default_value_t = 5.0, allow_negative_numbers = true)]
    endurance_warranty_years: f64,
    /// Capacity of the whole drive, to which --endurance-dwpd refers [default: the lines of the cache]
    #[arg(long, value_name = "SIZE")]
    drive_capacity: Option<ByteSize>,
    /// Years that the drive should last
    #[arg(
        long,
        value_name = "N",
        visible_alias = "years",
        default_value_t = 5.0,
        allow_negative_numbers = true
    )]
    endurance_years: f64,
    /// Bytes that the drive is expected to program for each byte written to it
    #[arg(long, value_name = "RATIO", default_value_t = 1.1, allow_negative_numbers = true)]
    device_write_amplification: f64,
    /// Hours of write budget that may be saved up for a burst
    #[arg(long, value_name = "HOURS", default_value_t = 6.0, allow_negative_numbers = true)]
    burst_hours: f64,
    /// Hold an empty cache to the write budget too, instead of letting it fill once ahead of it
    #[arg(long)]
    no_first_fill: bool,
}

impl BudgetArgs {
    fn config(&self) -> Result<WriteBudgetConfig, CliError> {
        let tbw = match self.endurance_tbw {
            Some(t) if t > 0.0 && t <= 1e7 => Some(ByteSize((t * 1e12) as u64)),
            Some(t) => {
                return Err(CliError::Usage(format!(
                    "--endurance-tbw {t}: it must be a positive number of terabytes"
                )));
            }
            None => None,
        };
        Ok(WriteBudgetConfig {
            tbw,
            dwpd: self.endurance_dwpd,
            warranty_years: self.endurance_warranty_years,
            drive_capacity: self.drive_capacity.unwrap_or(ByteSize(0)),
            years: self.endurance_years,
            device_write_amplification: self.device_write_amplification,
            burst_hours: self.burst_hours,
            first_fill: !self.no_first_fill,
        })
    }
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
    Ok((name.to_owned(), uri.parse().map_err(|e: backing::BackingError| e.to_string())?))
}

fn write_mode(text: &str) -> Result<WriteMode, String> {
    match text {
        "hdd-ssd" => Ok(WriteMode::HddSsd),
        "hdd-upd" => Ok(WriteMode::HddUpd),
        "hdd-inv" => Ok(WriteMode::HddInv),
        _ => Err(format!("'{text}' is not a write mode: choose hdd-ssd, hdd-upd or hdd-inv")),
    }
}

pub(super) fn state_dir(given: Option<&PathBuf>) -> PathBuf {
    if let Some(dir) = given {
        return dir.clone();
    }
    if rustix::process::geteuid().is_root() {
        return "/var/lib/larder".into();
    }
    let home = std::env::var_os("HOME").map_or_else(|| PathBuf::from("."), PathBuf::from);
    std::env::var_os("XDG_STATE_HOME")
        .map_or_else(|| home.join(".local/state"), PathBuf::from)
        .join("larder")
}

/// Sizes that nothing could be done with, and flags that have no effect.
fn check_sizes(args: &Args) -> Result<(), CliError> {
    const FILL: (u64, u64) = (1 << 20, 1 << 40);
    let fill = args.fill_memory;
    if fill.0 < FILL.0 || fill.0 > FILL.1 {
        return Err(CliError::Usage(format!(
            "--fill-memory {fill}: it must be from {} to {}: without any nothing would be cached",
            ByteSize(FILL.0),
            ByteSize(FILL.1)
        )));
    }
    if args.readahead > readahead::FURTHEST {
        return Err(CliError::Usage(format!(
            "--readahead {}: it must be at most {} (0: not at all)",
            args.readahead,
            readahead::FURTHEST
        )));
    }
    Ok(())
}

pub(crate) fn run(args: &Args) -> Result<(), CliError> {
    let usage = |e: &dyn std::fmt::Display| CliError::Usage(e.to_string());
    let runtime = |e: &dyn std::fmt::Display| CliError::Runtime(e.to_string());
    let admission: BlockAdmissionConfig = args
        .admission
        .parse()
        .map_err(|e| usage(&format!("--admission {}: {e}", args.admission)))?;
    let (ublk, others): (Vec<&String>, Vec<&String>) =
        args.listen.iter().partition(|l| UblkListen::is_meant(l));
    let (vhost, nbd): (Vec<&String>, Vec<&String>) =
        others.into_iter().partition(|l| VhostListen::is_meant(l));
    let listen: Vec<Listen> =
        nbd.iter().map(|l| l.parse().map_err(|e| usage(&e))).collect::<Result<_, _>>()?;
    let sockets = args.sockets.access()?;
    let worker_memory = worker_memory(args.connection_memory, args.threads)?;
    check_sizes(args)?;
    let tls = args.tls.files()?;
    if let Some(wants) = listen.iter().find(|l| l.wants_tls() && tls.is_none()) {
        return Err(usage(&format!(
            "--listen {wants}: needs --tls-certificate and --tls-key, or tls=off"
        )));
    }
    let vhost: Vec<VhostListen> =
        vhost.iter().map(|l| l.parse().map_err(|e| usage(&e))).collect::<Result<_, _>>()?;
    let ublk: Vec<UblkListen> =
        ublk.iter().map(|l| l.parse().map_err(|e| usage(&e))).collect::<Result<_, _>>()?;
    // Whether every client over TCP has to show a certificate.
    let guarded =
        tls.as_ref().is_some_and(|t| t.client_ca.is_some()) && listen.iter().all(Listen::is_strict);
    let _ = crate::log::start(args.verbose, &args.log_level, false, true)?;
    // Before anything is opened: from here on a signal ends it in good order.
    let mut signals = signals::take()?;
    let budget = args.budget.config()?;
    for (name, _) in &args.shares {
        // A volume that is attached later has its share too; a name that is mistyped is worth a word.
        if !args.volumes.iter().any(|v| v.0 == *name) {
            warn!("--share {name}: no --volume has that name; it holds when one is attached");
        }
    }
    for name in &args.read_only_volumes {
        if !args.volumes.iter().any(|v| v.0 == *name) {
            return Err(usage(&format!("--read-only-volume {name}: no --volume has that name")));
        }
    }
    // First of all: a former daemon that is stopping has sockets and stores until it ends.
    let state_dir = state_dir(args.state_dir.as_ref());
    let _alone = claim(&state_dir)?;
    // What is plainly not there is said before anything else; what is there may be another daemon's, whose sockets tell more.
    if args.cache.metadata().is_err() {
        find_cache(args)?.ok();
    }
    let wanted = args.http.as_ref().filter(|text| !matches!(text.as_str(), "off" | "none"));
    let page = wanted.map(|address| bind_page(address)).transpose()?;
    let workers = usize::from(args.threads);
    let server_config = ServerConfig {
        listen,
        sockets,
        threads: workers,
        connections: args.connections,
        per_peer: args.connections_per_peer.unwrap_or((args.connections * 3 / 4).max(1)),
        // The other half is what is read from stores meanwhile.
        buffer_bytes: (worker_memory / 2) as usize,
        tls,
        ..ServerConfig::default()
    };
    // What cannot be had is found out before the cache is touched; clients that come meanwhile wait.
    let doors = Doors::open(&server_config).map_err(|e| usage(&e))?;
    let mut vhost = VhostDoors::open(&vhost, sockets).map_err(|e| usage(&e))?;
    let mut ublk = UblkDoors::open(&ublk, args.ublk_plain).map_err(|e| usage(&e))?;
    if ublk.count() > 0 && !larder_runtime::machine::serve_the_kernel() {
        // Before any thread is there: they inherit it.
        warn!(
            "this process may be made to wait for its own disks when memory is short: it lacks CAP_SYS_RESOURCE"
        );
    }
    let found = find_cache(args)?;
    if let Ok((layout, _)) = &found
        && layout.placement() != Placement::Full
    {
        let without = |flag: &str, value: &dyn std::fmt::Display| {
            let (cache, placement) = (args.cache.display(), layout.placement());
            usage(&format!(
                "{flag} {value}: it is of the placement full alone, and cache '{cache}' has {placement}: leave it out"
            ))
        };
        if args.reclaim != VictimPolicy::Fifo {
            return Err(without("--reclaim", &args.reclaim));
        }
        if args.evict != EvictionBy::default() {
            return Err(without("--evict", &args.evict));
        }
    }
    if let Ok((layout, size)) = &found {
        // A sparse file seems to be larger than it will be.
        let most = layout.capacity() * u64::from(layout.line);
        let size = if layout.is_sparse() { most } else { *size };
        if let Some(free) = larder_runtime::machine::shortfall(&args.cache, size) {
            warn!("{}", super::will_not_fit(&args.cache, size, free));
        }
    }
    let line = found.as_ref().map_or(without::LINE, |(layout, _)| layout.line);
    let volumes = Arc::new(Volumes::default());
    let stores = args.stores.clone();
    let waits = stores.waits();
    let (all_read_only, dir) = (args.read_only, state_dir.clone());
    let open_store = move |uri: &Uri, read_only: bool| {
        backing::open_with(uri, &stores.options(all_read_only || read_only, &dir))
    };
    let mut absent: Vec<Absent> = Vec::new();
    for (name, uri) in &args.volumes {
        let read_only = args.read_only_volumes.contains(name);
        // Before its store: of the same file under the same name it would be said that it is locked.
        volumes.check_free(name).map_err(|e| usage(&e))?;
        if absent.iter().any(|a| a.name == *name) {
            return Err(usage(&VolumeError::Exists(name.clone())));
        }
        match open_store(uri, read_only) {
            Ok(store) => {
                volumes.add(Volume::new(name, store, line, true)).map_err(|e| usage(&e))?;
            }
            Err(e) if waits => {
                let read_only = all_read_only || read_only;
                let (name, uri, why) = (name.clone(), uri.clone(), e.to_string());
                absent.push(Absent { name, uri, read_only, why });
            }
            Err(e) => {
                return Err(runtime(&format!(
                    "volume '{name}': {e} (with --on-backing-failure wait the other volumes are served meanwhile)"
                )));
            }
        }
    }
    let later: Vec<String> = absent.iter().map(|a| a.name.clone()).collect();
    vhost.check(&volumes, &later).map_err(|e| usage(&e))?;
    ublk.check(&volumes, &later).map_err(|e| usage(&e))?;
    let first_disk = workers + vhost.count();
    let config = CacheConfig {
        write: args.write,
        replacement: args.replacement,
        reclaim: args.reclaim,
        evict: args.evict,
        admission,
        fill_memory: args.fill_memory,
        readahead: args.readahead,
        // Each device of vhost-user is a worker too, and each thread of a ublk device.
        workers: workers + vhost.count() + ublk.count() * workers,
        ring: RingChoice::Auto,
        trust_unchanged: args.trust_unchanged,
        state_dir: state_dir.clone(),
        record: args.record.clone().map(|file| RecordConfig { file, limit: args.record_limit.0 }),
        rules: RulesConfig { shares: args.shares.clone(), budget },
    };
    let handle = match &found {
        Ok(_) => open::open(&args.cache, config, &volumes.all()),
        Err(why) => without::open_without(&args.cache, config, &volumes.all(), why),
    };
    let handle = handle.map_err(failed)?;
    let cache = handle.cache().clone();
    let layout = cache.layout();
    let stats = cache.stats();
    let how = match &handle.warmth {
        Warmth::Memory => "warm from memory".to_owned(),
        Warmth::Log(_) => "warm from the device".to_owned(),
        Warmth::Cold(why) => format!("cold: {why}"),
    };
    let each = if layout.is_sparse() {
        "whatever is cached".to_owned()
    } else {
        format!("{:.1} bytes a line", stats.map_bytes as f64 / stats.slots as f64)
    };
    info!(
        "cache {}: {} lines of {}, {} of DRAM for the map ({each}), {how}, {} lines cached",
        args.cache.display(),
        stats.slots,
        ByteSize(u64::from(layout.line)),
        ByteSize(stats.map_bytes),
        cache.count_lines(),
    );
    let connections = worker_memory * u64::from(args.threads);
    let inputs = CONNECTION_INPUT * args.connections;
    let devices = (VHOST_BUFFERS * vhost.count()) as u64;
    let sum = stats.map_bytes + args.fill_memory.0 + connections + inputs + devices;
    info!(
        "memory: at most {} in all: {} for the map, {} for fills (--fill-memory), {} for connections (--connection-memory) and {} \
         for what comes in by {} of them{}",
        ByteSize(sum),
        ByteSize(stats.map_bytes),
        args.fill_memory,
        ByteSize(connections),
        ByteSize(inputs),
        args.connections,
        if devices == 0 {
            String::new()
        } else {
            format!(", {} for vhost-user", ByteSize(devices))
        },
    );
    let served = cache.clone();
    let server =
        Server::start_behind(doors, server_config, volumes.clone(), |worker, registry, token| {
            Cached::new(served.clone(), worker, registry, token, RingChoice::Auto)
        })
        .map_err(|e| runtime(&e))?;
    let served = cache.clone();
    let devices =
        VhostServer::start_behind(vhost, server.volumes(), VHOST_BUFFERS, |n, registry, token| {
            Cached::new(served.clone(), workers + n, registry, token, RingChoice::Auto)
        })
        .map_err(|e| runtime(&e))?;
    let served = cache.clone();
    let disks = UblkServer::start_behind(
        ublk,
        server.volumes(),
        workers,
        UBLK_BUFFERS,
        |n, registry, token| {
            Cached::new(served.clone(), first_disk + n, registry, token, RingChoice::Auto)
        },
    )
    .map_err(|e| runtime(&e))?;
    let control = Control::new(
        cache.clone(),
        volumes,
        server.counters().clone(),
        devices.faces().chain(disks.faces()).collect(),
        Box::new(open_store),
        how,
        env!("CARGO_PKG_VERSION"),
    );
    control.wait_for(absent).map_err(|e| runtime(&format!("a thread: {e}")))?;
    let socket = listen_for_control(&control, args.control.as_ref(), &state_dir)?;
    let page = page
        .map(|socket| http::start(socket, control.clone(), &args.http_hosts))
        .transpose()
        .map_err(|e| runtime(&format!("the live page: {e}")))?;
    if let Some(page) = &page {
        let address = page.address();
        info!("live page http://{address}/ and metrics http://{address}/metrics");
        crate::out::warn_of_open_page(address);
    }
    if !guarded && let Some(open) = server.addresses().iter().find(|a| !a.ip().is_loopback()) {
        warn!(
            "whoever reaches {open} may read and write every volume: with --tls-client-ca only clients with a certificate may"
        );
    }
    // Of TCP, the addresses that came of the names, with the ports that the system chose.
    let named = args.listen.iter().filter(|l| !l.starts_with("tcp:")).cloned();
    let found = server.addresses().iter().map(|a| format!("tcp:{a}"));
    info!("ready: {}", named.chain(found).collect::<Vec<_>>().join(", "));
    // A supervisor that is not there is no error.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    for signal in signals.forever() {
        match Meaning::of(signal) {
            Meaning::Stop => break,
            Meaning::Reload => server.reload(),
            Meaning::User => {
                tell::counters(&control);
                tell::record(&cache);
            }
            Meaning::Nothing => signals::tell_ignored(signal),
        }
    }
    // A supervisor that is not there is no error.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    // The next start waits for it.
    larder_runtime::say_stopping();
    // Whoever asks twice does not want to wait: what is on flash is found again all the same. One stop often comes as two
    // signals, to the process and to its group.
    let asked = Instant::now();
    std::thread::Builder::new()
        .name("larder-signals".into())
        .spawn(move || {
            let again = |signal| Meaning::of(signal) == Meaning::Stop && asked.elapsed() > ONE_STOP;
            if signals.forever().any(again) {
                error!("second signal: ending at once");
                std::process::exit(1);
            }
        })
        .map_err(|e| runtime(&format!("a thread: {e}")))?;
    info!("stopping");
    // Nothing is attached or detached any more.
    drop(socket);
    control.end_waiting();
    disks.stop();
    devices.stop();
    server.stop();
    tell::counters(&control);
    drop(page);
    drop(control);
    drop(cache);
    handle.stop();
    Ok(())
}

/// The layout of the cache and the bytes of its file or device; or why there is none, where volumes are served without it.
fn find_cache(args: &Args) -> Result<Result<(Layout, u64), String>, CliError> {
    let name = args.cache.display();
    let (why, error) = match args.cache.metadata() {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let why = format!("cache '{name}': there is no such file or device");
            let remedy = format!("`larder block format {name} --size SIZE` makes one");
            (why.clone(), CliError::Runtime(format!("{why}: {remedy}")))
        }
        Err(e) => {
            let why = format!("cache '{name}': {}", plain(&e));
            (why.clone(), CliError::Runtime(why))
        }
        Ok(meta) => match open::layout_of(&args.cache) {
            Ok(layout) => return Ok(Ok((layout, meta.len()))),
            Err(e) if !e.is_of_no_cache() => return Err(failed(e)),
            Err(e) => (e.to_string(), failed(e)),
        },
    };
    if args.on_cache_failure == OnCacheFailure::Serve {
        return Ok(Err(why));
    }
    Err(match error {
        CliError::Runtime(text) => CliError::Runtime(format!(
            "{text} (with --on-cache-failure serve volumes are served without it)"
        )),
        other => other,
    })
}

/// The state directory for this daemon alone: two would write each other's notes, and the operator would ask the wrong one.
fn claim(dir: &Path) -> Result<Option<LockFile>, CliError> {
    let refused = |e: std::io::Error| {
        warn!("the state directory '{}' cannot be used: {}", dir.display(), plain(&e));
    };
    if let Err(e) = std::fs::create_dir_all(dir) {
        refused(e);
        return Ok(None);
    }
    match LockFile::take(&dir.join("block.lock")) {
        Ok(lock) => Ok(Some(lock)),
        Err(LockError::Held(holder)) => {
            let by = holder.map_or_else(|| "another process".to_owned(), |h| h.to_string());
            Err(CliError::Runtime(format!(
                "the state directory '{}' is in use by {by}: stop that daemon, or give this one another --state-dir",
                dir.display()
            )))
        }
        Err(LockError::System(e)) => {
            refused(e);
            Ok(None)
        }
    }
}

fn bind_page(address: &str) -> Result<std::net::TcpListener, CliError> {
    if address.rsplit_once(':').is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
        return Err(CliError::Usage(format!(
            "--http '{address}' is not an address: write HOST:PORT, as in 127.0.0.1:11281"
        )));
    }
    std::net::TcpListener::bind(address)
        .map_err(|e| CliError::Runtime(format!("--http '{address}': {}", plain(&e))))
}

/// The control socket. One that another daemon has by default costs the socket, not the start.
fn listen_for_control(
    control: &Arc<Control>,
    given: Option<&PathBuf>,
    state_dir: &Path,
) -> Result<Option<ControlServer>, CliError> {
    let path = match given {
        Some(path) => path.clone(),
        None => {
            // It is said below what is wrong with it.
            let _ = std::fs::create_dir_all(state_dir);
            super::control::default_socket(state_dir)
        }
    };
    match ControlServer::start(control.clone(), &path) {
        Ok(server) => {
            info!("control socket {}", path.display());
            Ok(Some(server))
        }
        Err(e) if given.is_some() => Err(CliError::Runtime(e.to_string())),
        Err(e) => {
            warn!("no control socket: {e}; --control chooses another path");
            Ok(None)
        }
    }
}
