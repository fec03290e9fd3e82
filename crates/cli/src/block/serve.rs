//! `larder block serve`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_base::ByteSize;
use larder_block::backing::{self, Uri};
use larder_block::cache::back::{BackWish, marker_answers, most_on_its_way, size_of, view};
use larder_block::cache::later::{ComesLater, open_what_answers};
use larder_block::cache::{CacheConfig, CacheError, Cached, RulesConfig, Warmth, open, without};
use larder_block::control::{Absent, Control, ControlServer, HowOpened, Lacks, OpenStore, http};
use larder_block::server::{Doors, Listen, Server, ServerConfig, Volume, VolumeError, Volumes};
use larder_block::ublk::{UblkDoors, UblkListen, UblkServer};
use larder_block::vhost::{VhostDoors, VhostListen, VhostServer};
use larder_engine::block::map::Making;
use larder_engine::block::node::defaults::{self, SizeError};
use larder_engine::block::node::share::{check_floors, check_once};
use larder_format::block::Layout;
use larder_policy::block::BlockAdmissionConfig;
use larder_runtime::{LockError, LockFile, RingChoice, plain};
use tracing::{info, warn};

use super::format::failed;
use super::ours::Ours;
use super::settings::{DEFAULT_HTTP, OnCacheFailure, Settings};
use super::stops::Stops;
use super::tell;
use crate::error::CliError;
use crate::signals::{self, Meaning};

/// Memory of one vhost-user device for requests under way, bytes.
const VHOST_BUFFERS: usize = 64 << 20;
/// Memory of one thread of a ublk device for requests under way, bytes.
const UBLK_BUFFERS: usize = 32 << 20;

/// Memory for the connections of one worker thread by default, and the least: twice the longest request, which is read into
/// memory beside the reply's, and an eighth of it for others. Bytes.
const WORKER_MEMORY: (u64, u64) = (256 << 20, 80 << 20);
/// Of a connection beside that, bytes: its input, while something comes.
const CONNECTION_INPUT: u64 = 64 << 10;

/// What is said where one volume ends a start.
const OTHERS_MEANWHILE: &str =
    "with --on-backing-failure wait the other volumes are served meanwhile";

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
fn check_sizes(args: &Settings) -> Result<(), CliError> {
    let wrong = |flag: &str, size, e: SizeError| CliError::Usage(format!("--{flag} {size}: {e}"));
    let (fill, ahead) = (args.fill_memory, args.readahead);
    defaults::check_fill_memory(fill).map_err(|e| wrong("fill-memory", fill, e))?;
    defaults::check_readahead(ahead).map_err(|e| wrong("readahead", ahead, e))
}

pub(crate) fn run(args: &Settings) -> Result<(), CliError> {
    let mut stops = None;
    match (serve(args, &mut stops), stops) {
        (Err(why), Some(stops)) if stops.came_early() => {
            info!("stopped while it was starting: {why}");
            Ok(())
        }
        (done, _) => done,
    }
}

fn serve(args: &Settings, stops: &mut Option<Stops>) -> Result<(), CliError> {
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
    let writes = args.writes.checked(args)?;
    let tls = args.tls.files().map_err(|e| usage(&e))?;
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
    let _ = crate::log::start(&args.log, true)?;
    // Before anything is opened: from here on a signal ends it in good order.
    let stops: &Stops = stops.insert(Stops::watch(signals::take()?)?);
    let budget = args.drive.budget().map_err(|e| usage(&e))?;
    let record = args.recording.config().map_err(|e| usage(&e))?;
    check_once(&args.shares).map_err(|e| usage(&format!("--share {e}")))?;
    for (name, share) in &args.shares {
        Volumes::check_name(name).map_err(|e| usage(&format!("--share {name}={share}: {e}")))?;
        // A volume that is attached later has its share too; a name that is mistyped is worth a word.
        if !args.volumes.iter().any(|v| v.0 == *name) {
            let names: Vec<&str> = args.volumes.iter().map(|(name, _)| name.as_str()).collect();
            warn!(
                "--share {name}={share}: no --volume is called '{name}' (these are: {}): it holds when a volume of that name is attached; else correct the name",
                names.join(", ")
            );
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
    let address = args.live_page.address(DEFAULT_HTTP).map_err(|e| usage(&e))?;
    let page = address.map(bind_page).transpose()?;
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
    if let Ok((layout, _)) = &found {
        check_floors(&args.shares, layout.capacity(), layout.line)
            .map_err(|e| usage(&format!("--share {e}")))?;
        let &Settings { replacement, reclaim, evict, .. } = args;
        let making = Making { replacement, reclaim, evict };
        defaults::check_making(&making, layout.placement())
            .map_err(|e| usage(&format!("--{} {}: {e}", e.what, e.value)))?;
    }
    if let (Ok(_), Ok(Some(area))) = (&found, open::write_log_of(&args.cache)) {
        writes.check_log(size_of(&area))?;
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
    let ours = Ours::new(&doors, args, &state_dir);
    let vouched = args.writes.durable_stores();
    let open_store: Arc<OpenStore> = Arc::new(move |name: &str, uri: &Uri, how: HowOpened| {
        let mut options = stores.options(all_read_only || how.read_only, &dir);
        // (What is attached under that name later may be a file: nobody vouches for those.)
        let vouched = vouched.contains(name) && !matches!(uri, Uri::File { .. });
        options.durable = how.durable || vouched;
        ours.open_other(uri, || backing::open_with(uri, &options))
    });
    let mut absent: Vec<Absent> = Vec::new();
    for (name, uri) in &args.volumes {
        let read_only = args.read_only_volumes.contains(name);
        // Before its store: of the same file under the same name it would be said that it is locked.
        volumes.check_free(name).map_err(|e| usage(&e))?;
        if absent.iter().any(|a| a.name == *name) {
            return Err(usage(&VolumeError::Exists(name.clone())));
        }
        let how = HowOpened { read_only, durable: false };
        match stops.open(&open_store, (name, uri, how))? {
            Ok(store) => {
                let wish = BackWish {
                    back: None,
                    marker: writes.markers.get(name).cloned().unwrap_or_default(),
                    journal: writes.journals.get(name).cloned().unwrap_or_default(),
                    moved: writes.moved.contains(name),
                };
                if waits && let Err(e) = stops.attends(|| marker_answers(&*store, &wish)) {
                    let read_only = all_read_only || read_only;
                    let (name, uri, why) = (name.clone(), uri.clone(), e.to_string());
                    absent.push(Absent { name, uri, read_only, why, how: Lacks::More });
                    continue;
                }
                let store = match stops.attends(|| view(name, store, &wish)) {
                    Ok(store) => store,
                    Err(e) if waits && e.may_pass() => {
                        let read_only = all_read_only || read_only;
                        let (name, uri, why) = (name.clone(), uri.clone(), e.to_string());
                        absent.push(Absent { name, uri, read_only, why, how: Lacks::More });
                        continue;
                    }
                    Err(e) => return Err(failed(e)),
                };
                volumes.add(Volume::new(name, store, line, true)).map_err(|e| usage(&e))?;
            }
            Err(e) if waits => {
                let read_only = all_read_only || read_only;
                let (name, uri, why) = (name.clone(), uri.clone(), e.to_string());
                absent.push(Absent { name, uri, read_only, why, how: Lacks::Store });
            }
            Err(e) => {
                return Err(runtime(&format!("volume '{name}': {e} ({OTHERS_MEANWHILE})")));
            }
        }
    }
    let later: Vec<String> = absent.iter().map(|a| a.name.clone()).collect();
    vhost.check(&volumes, &later).map_err(|e| usage(&e))?;
    ublk.check(&volumes, &later).map_err(|e| usage(&e))?;
    let first_disk = workers + vhost.count();
    // What is on its way to stores from the write log may have as much as fills.
    let writes_back = writes.back_by_default.is_some() || !writes.back.is_empty();
    let journaled = writes.back.values().filter(|back| back.is_journaled()).count() as u64;
    let destage = match writes_back {
        true => most_on_its_way(args.fill_memory.0, writes.back.len() as u64, journaled),
        false => 0,
    };
    let config = CacheConfig {
        write: writes.mode,
        back: writes.back,
        back_by_default: writes.back_by_default,
        markers: writes.markers,
        moved: writes.moved,
        journals: writes.journals,
        awaited: later.iter().cloned().collect(),
        replacement: args.replacement,
        reclaim: args.reclaim,
        evict: args.evict,
        admission,
        fill_memory: args.fill_memory,
        readahead: args.readahead,
        // Each device of vhost-user is a worker too, and each thread of a ublk device.
        workers: workers + vhost.count() + ublk.count() * workers,
        queues: 0,
        ring: RingChoice::Auto,
        trust_unchanged: args.trust_unchanged,
        state_dir: state_dir.clone(),
        record,
        rules: RulesConfig { shares: args.shares.clone(), budget },
    };
    let mut open_with = |config, volumes: &[Arc<Volume>]| match &found {
        Ok(_) => open::open(&args.cache, config, volumes),
        Err(why) => without::open_without(&args.cache, config, volumes, why),
    };
    let handle = stops.attends(|| match waits {
        true => open_what_answers(config, volumes.all(), &mut open_with),
        false => open_with(config, &volumes.all()).map(|handle| (handle, Vec::new())),
    });
    // Of a volume that something does not answer for, as of one whose store is not there.
    let (handle, comes_later) = handle.map_err(|e| {
        let of_one = matches!(e, CacheError::NotYet { .. } | CacheError::Journal { .. });
        let passes = of_one && e.may_pass() && !waits;
        match failed(e) {
            CliError::Runtime(why) if passes => runtime(&format!("{why} ({OTHERS_MEANWHILE})")),
            error => error,
        }
    })?;
    for ComesLater { name, why } in comes_later {
        volumes.let_go(&name);
        if let Some((name, uri)) = args.volumes.iter().find(|(of, _)| *of == name) {
            let read_only = all_read_only || args.read_only_volumes.contains(name);
            let (name, uri) = (name.clone(), uri.clone());
            absent.push(Absent { name, uri, read_only, why, how: Lacks::More });
        }
    }
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
    let dirty = cache.write_log_memory();
    let sum =
        stats.map_bytes + args.fill_memory.0 + destage + dirty + connections + inputs + devices;
    info!(
        "memory: at most {} in all: {} for the map, {} for fills (--fill-memory), {} for connections (--connection-memory) and {} \
         for what comes in by {} of them{}{}{}",
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
        if writes_back {
            format!(
                ", {} for what goes from the write log to stores (of the volumes named at the start: each attached later that writes back may have a stretch \
                 more, or if journaled an equal part of --fill-memory)",
                ByteSize(destage)
            )
        } else {
            String::new()
        },
        if dirty == 0 {
            String::new()
        } else {
            format!(", {} for what is dirty, if all of the write log is", ByteSize(dirty))
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
        open_store,
        how,
        env!("CARGO_PKG_VERSION"),
    );
    control.wait_for(absent).map_err(|e| runtime(&format!("a thread: {e}")))?;
    let socket = listen_for_control(&control, args.control.as_ref(), &state_dir)?;
    let page = page
        .map(|socket| http::start(socket, control.clone(), &args.live_page.http_host))
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
    for signal in stops.started() {
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
    info!("stopping");
    // Nothing is attached or detached any more.
    drop(socket);
    control.end_waiting();
    disks.stop();
    devices.stop();
    server.stop();
    tell::dirty(&cache);
    tell::counters(&control);
    drop(page);
    drop(control);
    drop(cache);
    handle.stop();
    Ok(())
}

/// The layout of the cache and the bytes of its file or device; or why there is none, where volumes are served without it.
fn find_cache(args: &Settings) -> Result<Result<(Layout, u64), String>, CliError> {
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
