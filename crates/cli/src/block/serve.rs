//! `larder block serve`.

use std::path::PathBuf;
use std::sync::Arc;

use larder_base::ByteSize;
use larder_block::backing::{self, Uri};
use larder_block::cache::{Cache, CacheConfig, CacheStats, Cached, Warmth, open};
use larder_block::server::{Listen, Server, ServerConfig, Volume, Volumes};
use larder_block::vhost::{VhostListen, VhostServer};
use larder_engine::block::WriteMode;
use larder_engine::block::map::Replacement;
use larder_policy::block::{BlockAdmissionConfig, EvictionBy, Reason, VictimPolicy};
use larder_runtime::RingChoice;
use larder_runtime::record::RecordConfig;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use tracing::{error, info};
use tracing_subscriber::EnvFilter;

use super::format::failed;
use super::store::StoreArgs;
use crate::error::CliError;

/// Shown under the flags.
const EXAMPLES: &str = "\
Examples:
  # A file behind a cache, for QEMU (file=nbd+unix:///disk?socket=/run/larder.sock):
  larder block serve --cache /flash/cache --volume disk=file:/nfs/disk.img --listen unix:/run/larder.sock
  # Another NBD server as the store; streams are not cached, nor what is touched once:
  larder block serve --cache /dev/nvme1n1 --volume vm1=nbd://filer:10809/vm1 --listen tcp:127.0.0.1:10809 \\
    --admission seqr+tc
  # A guest's disk without a socket on the way (docs/vhost.md):
  larder block serve --cache /flash/cache --volume disk=file:/nfs/disk.img --listen vhost:/run/larder.disk,volume=disk
  # An object store (first: larder block create s3://bucket/vm1 --size 100g):
  larder block serve --cache /flash/cache --volume vm1=s3://bucket/vm1 --listen unix:/run/larder.sock

Writes go to the volume at once (write-through): the cache may be lost at any time without loss of data.
SIGTERM stops it in good order; the next start is warm after that, and after kill -9. SIGUSR1 logs the counters.";

/// Memory of one vhost-user device for requests under way, bytes.
const VHOST_BUFFERS: usize = 64 << 20;

/// Serve volumes over NBD and vhost-user-blk, through a cache device
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The cache: a file or device that `larder block format` has prepared
    #[arg(long, value_name = "PATH")]
    cache: PathBuf,
    /// A volume and its store: file:PATH, nbd+unix:///EXPORT?socket=PATH, nbd://HOST:PORT/EXPORT or s3://BUCKET/PREFIX; NAME
    /// is the export's. May be given several times
    #[arg(long = "volume", value_name = "NAME=URI", required = true, value_parser = volume)]
    volumes: Vec<(String, Uri)>,
    /// Where to listen: unix:PATH or tcp:HOST:PORT for NBD, vhost:PATH,volume=NAME for one guest's vhost-user-blk disk.
    /// May be given several times
    #[arg(long, value_name = "ADDR", required = true)]
    listen: Vec<String>,
    /// What a write does to the cache: hdd-ssd (allocates), hdd-upd (updates what is cached), hdd-inv (drops it)
    #[arg(long, value_name = "MODE", default_value = "hdd-ssd", value_parser = write_mode)]
    write: WriteMode,
    /// What is cached: all, seqr, sseqr, touch_count, seqr+tc, sseqr+tc, two_lbs; with parameters in parentheses
    #[arg(long, value_name = "NAME", default_value = "all")]
    admission: String,
    /// Which line is evicted: lru, clock, sieve, s3fifo or fifo. May differ from run to run
    #[arg(long, value_name = "NAME", default_value = "lru")]
    replacement: Replacement,
    /// Memory for lines on their way to flash, behind the replies; when it is used up, what is read is not cached
    #[arg(long, value_name = "SIZE", default_value = "64m")]
    fill_memory: ByteSize,
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
    /// Connections at a time
    #[arg(long, value_name = "N", default_value_t = 1024)]
    connections: u64,
    /// Volumes are only read
    #[arg(long)]
    read_only: bool,
    /// Take stores that cannot tell whether they changed (NBD, block devices) as unchanged since the last run
    #[arg(long)]
    trust_unchanged: bool,
    /// Where it is noted that a cache failed and must not be used again [default: /var/lib/larder for root, else
    /// ~/.local/state/larder]
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

fn state_dir(given: Option<&PathBuf>) -> PathBuf {
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

pub(crate) fn run(args: &Args) -> Result<(), CliError> {
    let usage = |e: &dyn std::fmt::Display| CliError::Usage(e.to_string());
    let runtime = |e: &dyn std::fmt::Display| CliError::Runtime(e.to_string());
    let admission: BlockAdmissionConfig = args
        .admission
        .parse()
        .map_err(|e| usage(&format!("--admission {}: {e}", args.admission)))?;
    let (vhost, nbd): (Vec<&String>, Vec<&String>) =
        args.listen.iter().partition(|l| VhostListen::is_meant(l));
    let listen: Vec<Listen> =
        nbd.iter().map(|l| l.parse().map_err(|e| usage(&e))).collect::<Result<_, _>>()?;
    let vhost: Vec<VhostListen> =
        vhost.iter().map(|l| l.parse().map_err(|e| usage(&e))).collect::<Result<_, _>>()?;
    start_log();
    // Before anything is opened: from here on a signal ends it in good order.
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGUSR1])
        .map_err(|e| runtime(&format!("signal handlers: {e}")))?;
    let layout = open::layout_of(&args.cache).map_err(failed)?;
    let volumes = Arc::new(Volumes::default());
    let state_dir = state_dir(args.state_dir.as_ref());
    let options = args.stores.options(args.read_only, &state_dir);
    for (name, uri) in &args.volumes {
        let store = backing::open_with(uri, &options).map_err(|e| runtime(&e))?;
        volumes.add(Volume::new(name, store, layout.line, true)).map_err(|e| usage(&e))?;
    }
    let workers = usize::from(args.threads);
    let config = CacheConfig {
        write: args.write,
        replacement: args.replacement,
        reclaim: args.reclaim,
        evict: args.evict,
        admission,
        fill_memory: args.fill_memory,
        // Each device of vhost-user is a worker too.
        workers: workers + vhost.len(),
        ring: RingChoice::Auto,
        trust_unchanged: args.trust_unchanged,
        state_dir,
        record: args.record.clone().map(|file| RecordConfig { file, limit: args.record_limit.0 }),
    };
    let handle = open::open(&args.cache, config, &volumes.all()).map_err(failed)?;
    let cache = handle.cache().clone();
    let stats = cache.stats();
    let how = match &handle.warmth {
        Warmth::Memory => "warm from memory".to_owned(),
        Warmth::Log(_) => "warm from the device".to_owned(),
        Warmth::Cold(why) => format!("cold: {why}"),
    };
    info!(
        "cache {}: {} lines of {}, {} of DRAM for the map ({:.1} bytes a line), {how}, {} lines cached",
        args.cache.display(),
        stats.slots,
        ByteSize(u64::from(layout.line)),
        ByteSize(stats.map_bytes),
        stats.map_bytes as f64 / stats.slots as f64,
        cache.count_lines(),
    );
    let server_config = ServerConfig {
        listen,
        threads: workers,
        connections: args.connections,
        ..ServerConfig::default()
    };
    let served = cache.clone();
    let server = Server::start(server_config, volumes, |worker, registry, token| {
        Cached::new(served.clone(), worker, registry, token, RingChoice::Auto)
    })
    .map_err(|e| runtime(&e))?;
    let served = cache.clone();
    let devices =
        VhostServer::start(&vhost, server.volumes(), VHOST_BUFFERS, |n, registry, token| {
            Cached::new(served.clone(), workers + n, registry, token, RingChoice::Auto)
        })
        .map_err(|e| runtime(&e))?;
    let addresses: Vec<String> = server.addresses().iter().map(ToString::to_string).collect();
    info!("ready: {} {}", args.listen.join(", "), addresses.join(", "));
    // A supervisor that is not there is no error.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    for signal in signals.forever() {
        if signal != SIGUSR1 {
            break;
        }
        tell(&cache.stats());
        tell_record(&cache);
    }
    // Whoever asks twice does not want to wait: what is on flash is found again all the same.
    std::thread::Builder::new()
        .name("larder-signals".into())
        .spawn(move || {
            if signals.forever().any(|signal| signal != SIGUSR1) {
                error!("second signal: ending at once");
                std::process::exit(1);
            }
        })
        .map_err(|e| runtime(&format!("a thread: {e}")))?;
    info!("stopping");
    devices.stop();
    server.stop();
    tell(&cache.stats());
    drop(cache);
    handle.stop();
    Ok(())
}

fn start_log() {
    use std::io::IsTerminal;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    // A second log in one process is a mistake of tests alone.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .log_internal_errors(false)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        .try_init();
}

/// How recording goes, where it was asked for.
fn tell_record(cache: &Cache) {
    if let Some(record) = cache.record_stats() {
        let ended = record.ended.unwrap_or("it goes on");
        info!("record: {} records, {}: {ended}", record.records, ByteSize(record.bytes));
    }
}

fn tell(stats: &CacheStats) {
    let e = &stats.engine;
    let share = |part: u64, of: u64| if of == 0 { 0.0 } else { 100.0 * part as f64 / of as f64 };
    info!(
        "lines read {}, of them {:.1} % from flash and {:.1} % shared with others; written {}; filled {}, evicted {}, \
         updated {}, dropped {}; corrupt {}, errors of the cache {}, of volumes {}",
        e.read_lines,
        share(e.read_hits, e.read_lines),
        share(e.read_shared, e.read_lines),
        e.write_lines,
        e.fills,
        e.evicted,
        e.updated,
        e.dropped,
        e.corrupt,
        e.flash_errors,
        e.backing_errors,
    );
    let rejected: Vec<String> = Reason::ALL
        .iter()
        .filter(|&&r| stats.verdicts.rejected(r) > 0)
        .map(|&r| format!("{} {}", r.as_str(), stats.verdicts.rejected(r)))
        .collect();
    info!(
        "admitted {}, rejected: {}; map: {} records, {} snapshots, {} regions with a bit{}",
        stats.verdicts.admitted,
        if rejected.is_empty() { "none".to_owned() } else { rejected.join(", ") },
        stats.log.records,
        stats.log.snapshots,
        stats.regions_set,
        if stats.enabled { "" } else { "; the cache was given up, volumes are in pass-through" },
    );
}
