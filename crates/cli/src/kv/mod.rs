//! `larder kv`: from flags to a running server and back.

mod args;
mod machine;
mod pidfile;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use larder_base::ByteSize;
use larder_cache::kv::{CacheConfig, CacheError, Core, FlashFile, Warmth};
use larder_engine::kv::ClockMode;
use larder_engine::kv::node::{PlanError, defaults};
use larder_format::GeometryError;
use larder_kv::config::{Config, Settings};
use larder_kv::server::{Server, Sockets};
use larder_runtime::{Clock, DeviceError, FlashDevice};
use larder_settings::Log;
use tracing::{error, info, warn};

pub(crate) use args::Args;
use pidfile::PidFile;

use crate::error::CliError;
use crate::signals::{self, Meaning};

/// Set in the environment of the process that `-d` starts.
const DAEMON: &str = "LARDER_DAEMON_CHILD";

/// After a second signal what is there has so long to be left in order.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a server that runs is asked for.
enum Asked {
    /// To stop, by a signal of this number.
    Signal(i32),
    /// To stop, by the shutdown command.
    Client,
    /// To read certificates and users again.
    Reload,
}

pub(crate) fn run(args: &Args) -> Result<(), CliError> {
    let given = args.settings()?;
    let child = std::env::var_os(DAEMON).is_some();
    let listens_by_default = given.settings.listen.is_none();
    let objects_fit = given.settings.flash_object_size.is_none();
    let config = Config::resolve(given.settings, &machine::facts(given.flash_folder))
        .map_err(|e| CliError::Usage(e.to_string()))?;
    if args.list.is_printing() {
        larder_runtime::machine::end_on_broken_pipe();
        return crate::out::print(&config.effective.print());
    }
    if args.daemon && !child {
        return start_daemon();
    }
    let settings = config.effective.clone();
    let set_level = start_log(&settings.log, child)?;
    for name in &given.ignored {
        info!("{name}: accepted for compatibility, without effect");
    }
    machine::say_who_reaches(&config.listen, listens_by_default);
    if let Some(why) = &config.why_no_flash {
        warn!(
            "no flash, DRAM alone: {why}; name one that can be written with --data-dir, or the flash with -o ext_path=FILE:SIZE"
        );
    }
    if let Some(flash) =
        config.flash.as_ref().filter(|f| objects_fit && f.object_size > defaults::OBJECT_SIZE)
    {
        info!(
            "the flash index has room for objects of {} on average, so that it fits {} of DRAM: where they are smaller it grows, and \
             where it cannot the log says so; --flash-object-size states their size",
            ByteSize(flash.object_size.into()),
            ByteSize(config.memory)
        );
    }
    machine::raise_descriptor_limit(config.max_connections)?;
    if settings.enable_coredumps {
        machine::enable_core_dumps()?;
    }
    if let Some(user) = &settings.user {
        let needed = config.flash.is_some() || config.memory_file.is_some() || child;
        machine::become_user(user, needed.then_some(config.data_dir.as_path()))?;
    }
    if settings.lock_memory {
        machine::lock_memory()?;
    }
    serve(config, &settings, child, set_level)
}

fn serve(
    config: Config,
    settings: &Settings,
    child: bool,
    set_level: SetLevel,
) -> Result<(), CliError> {
    let (stop, stops) = mpsc::channel();
    let mut signals = signals::take()?;
    let from_signals = stop.clone();
    // The start is to end, or the stop is to end with what is there.
    let hurry = Arc::new(AtomicBool::new(false));
    let started = Arc::new(AtomicBool::new(false));
    let (hurry_up, has_started) = (hurry.clone(), started.clone());
    std::thread::Builder::new()
        .name("larder-signals".into())
        .spawn(move || {
            let mut stopping = false;
            for signal in signals.forever() {
                match Meaning::of(signal) {
                    Meaning::Reload => drop(from_signals.send(Asked::Reload)),
                    Meaning::Nothing => signals::tell_ignored(signal),
                    // Whoever asks twice does not want to wait. What is in DRAM is lost, then; flash is recovered.
                    Meaning::Stop | Meaning::User if stopping => {
                        // First: whoever writes may wait for nobody to read the log.
                        hurry_up.store(true, Ordering::SeqCst);
                        error!("second signal: ending with what is there");
                        std::thread::sleep(PATIENCE);
                        std::process::exit(1);
                    }
                    Meaning::Stop | Meaning::User => {
                        stopping = true;
                        if !has_started.load(Ordering::SeqCst) {
                            hurry_up.store(true, Ordering::SeqCst);
                            info!("signal {signal}: the start ends");
                        }
                        from_signals.send(Asked::Signal(signal)).ok();
                    }
                }
            }
        })
        .map_err(|e| CliError::Runtime(format!("starting the signal thread: {e}")))?;

    if let Some(path) = &settings.pidfile {
        pidfile::check(path)?;
    }
    // A flash that is another's, before a Unix socket stands there by which this server could be taken for one that runs.
    // (In the data directory it is that one's lock which says whose it is.)
    let drives = config.flash.iter().flat_map(|flash| flash.paths());
    for path in drives.filter(|path| !path.starts_with(&config.data_dir)) {
        FlashDevice::refuse_in_use(path).map_err(|e| CliError::Runtime(e.to_string()))?;
    }
    // Addresses then: one that is in use must leave the store as it is.
    let sockets = Sockets::bind(&config).map_err(|e| CliError::Runtime(e.to_string()))?;
    let page_socket = bind_page(&config)?;
    let hosts = config.http_hosts.clone();
    let log = config.data_dir.join(larder_cache::kv::LOG);
    // Where the log goes on. Without flash nobody else makes it.
    if child
        && config.flash.is_none()
        && !config.data_dir.is_dir()
        && let Err(e) = machine::make_data_dir(&config.data_dir, None)
    {
        warn!("{e}");
    }
    let clock = Arc::new(Clock::start());
    let store = match open_store(&config, &clock, &hurry) {
        Err(e) if hurry.load(Ordering::SeqCst) => {
            info!("stopped: {e}");
            return Ok(());
        }
        opened => opened?,
    };
    started.store(true, Ordering::SeqCst);
    // One that came too late to end the start is a stop as any other.
    hurry.store(false, Ordering::SeqCst);
    describe(&config);
    let on_shutdown = Box::new(move || drop(stop.send(Asked::Client)));
    // A start that fails here leaves the store as a clean stop does: what was warm stays warm.
    let give_up = |e: String| {
        larder_kv::server::Store::shutdown(&*store, clock.now());
        CliError::Runtime(e)
    };
    let server = Server::start_on(sockets, config, store.clone(), clock.clone(), on_shutdown)
        .map_err(|e| give_up(e.to_string()))?;
    server.on_verbosity(set_level);
    let page = match page_socket
        .map(|socket| larder_kv::admin::start(socket, server.view(), &hosts))
    {
        None => None,
        Some(Ok(page)) => {
            let address = page.address();
            info!("live page http://{address}/ and metrics http://{address}/metrics");
            crate::out::warn_of_open_page(address);
            Some(page)
        }
        Some(Err(e)) => {
            server.stop();
            return Err(give_up(format!("starting the live page: {e}: --http off goes without")));
        }
    };
    write_ports(server.addresses(), server.udp_addresses())?;
    let pidfile = match settings.pidfile.as_deref().map(PidFile::write).transpose() {
        Ok(pidfile) => pidfile,
        Err(e) => {
            server.stop();
            larder_kv::server::Store::shutdown(&*store, clock.now());
            return Err(e);
        }
    };
    info!("ready on {}", server.listening().join(", "));
    sd_notify::notify(&[sd_notify::NotifyState::Ready]).ok();
    if child {
        detach(&log);
    }

    loop {
        match stops.recv() {
            Ok(Asked::Reload) => {
                server.reload();
                continue;
            }
            Ok(Asked::Signal(signal)) => info!("stopping: signal {signal}"),
            Ok(Asked::Client) => info!("stopping: asked by a client"),
            Err(_) => info!("stopping"),
        }
        break;
    }
    sd_notify::notify(&[sd_notify::NotifyState::Stopping]).ok();
    larder_runtime::say_stopping();
    drop(page);
    server.stop();
    larder_kv::server::Store::shutdown(&*store, clock.now());
    drop(pidfile);
    info!("stopped");
    Ok(())
}

/// The socket of the live page. A default address that is in use costs the page, not the start.
fn bind_page(config: &Config) -> Result<Option<std::net::TcpListener>, CliError> {
    let Some(address) = &config.http else { return Ok(None) };
    match std::net::TcpListener::bind(address) {
        Ok(socket) => Ok(Some(socket)),
        Err(e) if config.http_explicit => Err(CliError::Runtime(format!(
            "http '{address}': {e}: choose another address, or --http off"
        ))),
        Err(e) => {
            warn!("no live page: http '{address}': {e}; choose another address with --http");
            Ok(None)
        }
    }
}

/// The store behind the server.
fn open_store(
    config: &Config,
    clock: &Arc<Clock>,
    hurry: &Arc<AtomicBool>,
) -> Result<Arc<Core>, CliError> {
    let flash = config.flash.as_ref();
    let store_config = CacheConfig {
        memory: config.memory,
        max_item: config.max_item_size,
        no_eviction: !config.evict,
        clock_max: if config.clock_bits == 1 { 1 } else { defaults::CLOCK_MAX },
        clock_mode: if config.clock_increment { ClockMode::Increment } else { ClockMode::SetMax },
        data_dir: config.data_dir.clone(),
        flash: flash.map(|f| f.path.clone()),
        flash_size: flash.and_then(|f| f.size),
        further: flash.map_or_else(Vec::new, |f| f.further.clone()),
        flash_object_size: flash.map_or(defaults::OBJECT_SIZE, |f| f.object_size),
        format_flash: flash.is_some_and(|f| f.format),
        admission: config.admission.clone(),
        budget: flash.map(|f| f.budget.clone()).unwrap_or_default(),
        applications: config.applications.clone(),
        memory_file: config.memory_file.clone(),
        record: config.record.clone(),
        capture: config.capture.clone(),
        hurry: hurry.clone(),
    };
    let drives = flash.map(|f| FlashFile { path: f.path.clone(), size: f.size });
    for drive in drives.iter().chain(&store_config.further) {
        let size = drive.size.or_else(|| drive.path.metadata().ok().map(|m| m.len()));
        if let Some(size) = size
            && let Some(free) = larder_runtime::machine::shortfall(&drive.path, size)
        {
            warn!(
                "the file system of '{}' has {} free, less than the flash of {} may take: when it is full, nothing more goes \
                 to flash; make room, or lower --flash-size",
                drive.path.display(),
                ByteSize(free),
                ByteSize(size)
            );
        }
    }
    if let Some(file) = &config.memory_file
        && let Some(free) = larder_runtime::machine::shortfall(file, config.memory)
    {
        warn!(
            "the file system of memory-file '{}' has {} free, and what is in DRAM may take {} there: if it does not fit, the \
             next start is cold in DRAM",
            file.display(),
            ByteSize(free),
            ByteSize(config.memory)
        );
    }
    let (store, opened) = larder_cache::kv::open(&store_config, clock).map_err(|e| match e {
        CacheError::Plan(_)
        | CacheError::Geometry(_)
        | CacheError::Admission(_)
        | CacheError::Budget(_)
        | CacheError::Application(_)
        | CacheError::RecordWarm { .. }
        | CacheError::RecordSeveral(_)
        | CacheError::DriveTwice(_)
        | CacheError::MemoryFile { .. }
        | CacheError::Division { .. }
        | CacheError::Device(DeviceError::UnderDev { .. }) => CliError::Usage(with_remedy(&e)),
        e @ CacheError::Drive { .. } if e.to_string().contains("formatted anew") => {
            CliError::Runtime(format!(
                "{e}: start once with --format-flash (what is cached is lost)"
            ))
        }
        e => CliError::Runtime(e.to_string()),
    })?;
    for note in &opened.notes {
        info!("{note}");
    }
    for warning in &opened.warnings {
        warn!("{warning}");
    }
    if let (Some(flash), Some(warmth)) = (flash, &opened.warmth) {
        let path = flash.paths().map(|path| path.display().to_string()).collect::<Vec<_>>();
        let path = path.join("', '");
        if opened.formatted {
            info!("flash '{path}' formatted");
        }
        let millis = opened.recovery.as_millis();
        match warmth {
            Warmth::Memory => {
                info!("warm: {} objects on flash, index found in memory, {millis} ms", opened.kept);
            }
            Warmth::Checkpoint => {
                info!(
                    "warm: {} objects on flash, index read from the checkpoint, {millis} ms",
                    opened.kept
                );
            }
            Warmth::Cold(why) => info!("cold: {why}"),
        }
        if let Some(why) = &opened.why_buffered {
            warn!("flash '{path}' goes through the page cache: {why}");
        }
        if let Some(why) = &opened.why_private {
            warn!("the index does not outlive the process: {why}");
        }
        info!(
            "flash '{path}': {} in use, admission {}",
            ByteSize(opened.flash_bytes),
            config.admission.policy.as_str()
        );
        match opened.budget {
            Some(rate) => info!("write budget {}/s", ByteSize(rate as u64)),
            None => info!("no write budget: --endurance-tbw or --endurance-dwpd sets one"),
        }
    }
    if let Some(record) = &config.record {
        info!(
            "recording in '{}', at most {}: it holds keys, and what they are hashed with",
            record.file.display(),
            ByteSize(record.limit)
        );
    }
    if let Some(capture) = &config.capture {
        info!("capturing {} of the keys in '{}'", capture.share, capture.file.display());
    }
    Ok(store)
}

/// What is wrong with the sizes of a cache, and which flags mend it.
fn with_remedy(error: &CacheError) -> String {
    let remedy = match error {
        CacheError::Plan(PlanError::TooLittleMemory { .. }) => {
            ". Give more memory (-m), less flash (--flash-size), or a larger --flash-object-size"
        }
        CacheError::Plan(PlanError::TooMuchMemory { .. }) => ": lower -m",
        CacheError::Plan(PlanError::ItemTooLarge { .. }) => ": raise -m or lower -I",
        CacheError::Geometry(GeometryError::TooLarge { .. }) => " (--flash-size)",
        _ => "",
    };
    format!("{error}{remedy}")
}

fn describe(config: &Config) {
    info!(
        "{} of DRAM, {} workers, at most {} connections",
        ByteSize(config.memory),
        config.threads,
        config.max_connections
    );
    if config.listen.is_empty() && config.unix.is_none() && config.udp.is_empty() {
        warn!("nothing is listened on: give a port (-p), an address (-l) or a Unix socket (-s)");
    }
    if config.binary_only {
        warn!("the binary protocol is not spoken: with -B binary every client is told so and left");
    }
}

/// Changes the log level to what memcached's verbosity of this number means.
type SetLevel = Box<dyn Fn(u32) + Send + Sync>;

fn start_log(log: &Log, child: bool) -> Result<SetLevel, CliError> {
    let configured = log.log_level.clone();
    let reload = crate::log::start(log, !child)?;
    Ok(Box::new(move |verbosity| {
        let level = match u8::try_from(verbosity).ok().map_or(Some("all"), crate::log::of_flags) {
            Some(level) => level,
            // As started, unless it was started with -v.
            None if ["debug", "trace", "all"].contains(&configured.as_str()) => "info",
            None => configured.as_str(),
        };
        reload(crate::log::filter(level));
        info!("log level {level}: a client has set the verbosity to {verbosity}");
    }))
}

/// Test suites learn ports that the system chose from the file that memcached's environment variable names.
fn write_ports(
    addresses: &[std::net::SocketAddr],
    udp: &[std::net::SocketAddr],
) -> Result<(), CliError> {
    let Some(path) = std::env::var_os("MEMCACHED_PORT_FILENAME").map(PathBuf::from) else {
        return Ok(());
    };
    let mut text = String::new();
    let tcp = addresses.iter().map(|a| ("TCP", a));
    for (kind, a) in tcp.chain(udp.iter().map(|a| ("UDP", a))) {
        text.push_str(&format!(
            "{kind} {}: {}\n",
            if a.is_ipv6() { "INET6" } else { "INET" },
            a.port()
        ));
    }
    let said = std::fs::read_to_string(&path);
    let is_port = |line: &str| line.starts_with("TCP INET") || line.starts_with("UDP INET");
    let found = path.symlink_metadata().is_ok();
    if found && !said.is_ok_and(|text| text.lines().all(is_port)) {
        return Err(CliError::Runtime(format!(
            "MEMCACHED_PORT_FILENAME '{}': holds something else than ports, and would be overwritten: remove it, or name another file",
            path.display()
        )));
    }
    let temporary = path.with_extension("lck");
    std::fs::write(&temporary, text).and_then(|()| std::fs::rename(&temporary, &path)).map_err(
        |e| CliError::Runtime(format!("MEMCACHED_PORT_FILENAME '{}': {e}", path.display())),
    )
}

/// `-d`: runs the same command again in a session of its own, and returns when it is ready or has failed. (A fork
/// would be the other way; it needs unsafe code and can only be done before any thread exists.)
fn start_daemon() -> Result<(), CliError> {
    let failed = |e: std::io::Error| CliError::Runtime(format!("daemon: {e}"));
    let program = std::env::current_exe().map_err(failed)?;
    let mut child = Command::new(program)
        .args(std::env::args_os().skip(1))
        .env(DAEMON, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        BufReader::new(out).read_line(&mut line).map_err(failed)?;
    }
    if line.trim() == "ready" {
        return Ok(());
    }
    // The child has said why on the error output that it shares with us.
    let code = child.wait().map_err(failed)?.code().unwrap_or(1);
    std::process::exit(code)
}

/// In the daemon, once it is ready: says where the log goes on, tells the waiting parent, then leaves its session and its
/// terminal.
fn detach(log: &std::path::Path) {
    let opened = std::fs::OpenOptions::new().append(true).create(true).mode(0o640).open(log);
    match &opened {
        Ok(_) => info!("the log goes on in {}", log.display()),
        Err(e) => warn!("the log ends here: {}: {e}", log.display()),
    }
    rustix::process::setsid().ok();
    let mut out = std::io::stdout();
    out.write_all(b"ready\n").and_then(|()| out.flush()).ok();
    if let Ok(null) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null") {
        rustix::stdio::dup2_stdout(&null).ok();
        rustix::stdio::dup2_stderr(opened.as_ref().unwrap_or(&null)).ok();
    }
}
