//! The configuration of `larder kv`: sources, defaults that suit the machine, and the checks.
//!
//! [`Settings`] is the list of what can be set. Flags win over `-o`, that over the file, the file over the defaults
//! (`larder_settings`). [`Config::resolve`] makes from [`Machine`] what is silent, and refuses what cannot work, with the
//! arithmetic.

mod extended;
mod settings;
mod tables;
mod tls;

use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use larder_base::ByteSize;
use larder_cache::kv::{CaptureConfig, FlashFile, flash_in_the_way, own_file};
use larder_engine::kv::node::AdmissionNeed;
use larder_engine::kv::node::defaults::{self, SizeError};
use larder_policy::admission::AdmissionConfig;
use larder_policy::application::{Applications, ApplicationsConfig};
use larder_policy::budget::WriteBudgetConfig;
use larder_runtime::record::RecordConfig;
use larder_settings::Refused;

pub use extended::{Options, extended_options};
pub use larder_policy::application::ApplicationsTable;
pub use settings::Settings;
pub use tables::AdmissionSetting;
pub use tls::{CIPHERS, ClientCertificates, ListenTls, TlsConfig, TlsVersion};

/// Why a configuration was refused: one line naming the thing, its value and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// An `-o` option.
    #[error("Illegal suboption \"{option}\": {reason}")]
    Option {
        /// As given.
        option: String,
        /// What is wrong.
        reason: String,
    },
    /// A value that cannot be meant.
    #[error(transparent)]
    Value(#[from] Refused),
    /// Shares of applications.
    #[error(transparent)]
    Applications(#[from] larder_policy::application::ApplicationError),
}

/// The facts about the machine that defaults are made from.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Bytes of memory this process may use: the machine's, or the control group's limit when that is lower.
    pub memory: u64,
    /// Processors.
    pub cpus: usize,
    /// Where state goes when `data-dir` is not given.
    pub state_dir: PathBuf,
    /// Whether that directory was named by somebody, who expects flash in it. One that is only the usual place may be out of reach, as
    /// in a container whose file system is read-only: then a cache of which nobody asks for flash goes without.
    pub state_dir_is_named: bool,
    /// Where to listen when `listen` is not given, by the environment; `None`: on this machine alone.
    pub listen: Option<Vec<String>>,
    /// Bytes free in a directory (or in its nearest parent that exists).
    pub free_space: fn(&Path) -> Option<u64>,
    /// Whether files can be made in a directory, which can be made itself if it is not there.
    ///
    /// # Errors
    /// Why not.
    pub can_hold_files: fn(&Path) -> std::io::Result<()>,
}

/// An address to listen on, before names are looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenAddress {
    /// Host name or address.
    pub host: String,
    /// Port; 0 for one that the system chooses.
    pub port: u16,
    /// How it is secured.
    pub tls: ListenTls,
    /// The application that all requests which come in here belong to; `None`: the one of the key's prefix.
    pub application: Option<String>,
}

/// How flash is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoChoice {
    /// io_uring where the system allows it, threads elsewhere.
    Auto,
    /// io_uring or an error.
    Uring,
    /// A pool of threads.
    Threads,
}

/// The flash tier.
#[derive(Clone, Debug, PartialEq)]
pub struct FlashConfig {
    /// File or block device.
    pub path: PathBuf,
    /// Bytes to use; `None`: all of an existing file or device.
    pub size: Option<u64>,
    /// Further drives.
    pub further: Vec<FlashFile>,
    /// Mean record size that the index is sized for, bytes.
    pub object_size: u32,
    /// Rated endurance, and what follows from it.
    pub budget: WriteBudgetConfig,
    /// How it is read.
    pub io: IoChoice,
    /// Format it whatever it holds.
    pub format: bool,
}

impl FlashConfig {
    /// All files and devices.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        std::iter::once(self.path.as_path()).chain(self.further.iter().map(|f| f.path.as_path()))
    }
}

/// A configuration that is complete and has been checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// TCP addresses.
    pub listen: Vec<ListenAddress>,
    /// UDP addresses.
    pub udp: Vec<ListenAddress>,
    /// Only the binary protocol was asked for, which is not spoken.
    pub binary_only: bool,
    /// Unix socket and its permissions.
    pub unix: Option<(PathBuf, u32)>,
    /// Accept queue.
    pub backlog: u32,
    /// Most connections.
    pub max_connections: u32,
    /// Refuse over the limit at once.
    pub maxconns_fast: bool,
    /// Close idle connections after this.
    pub idle_timeout: Option<Duration>,
    /// Worker threads.
    pub threads: usize,
    /// Requests from one connection per turn.
    pub requests_per_event: u32,
    /// DRAM for objects and index, bytes.
    pub memory: u64,
    /// Largest object, bytes.
    pub max_item_size: u32,
    /// Bytes of big buffers, each way.
    pub buffer_limit: u64,
    /// Evict to make room.
    pub evict: bool,
    /// flush_all allowed.
    pub flush_enabled: bool,
    /// Listing keys allowed.
    pub dump_enabled: bool,
    /// Objects have a CAS.
    pub cas_enabled: bool,
    /// watch allowed.
    pub watch_enabled: bool,
    /// Bytes of log lines held for each connection that watches.
    pub watcher_bytes: usize,
    /// The same for each worker thread until its turn ends.
    pub worker_bytes: usize,
    /// Expired objects are removed in the background.
    pub lru_crawler: bool,
    /// shutdown allowed.
    pub shutdown_enabled: bool,
    /// debugtime allowed.
    pub debugtime_enabled: bool,
    /// Prefix delimiter.
    pub prefix_delimiter: u8,
    /// Count by prefix from the start.
    pub stats_detail: bool,
    /// User file for authentication.
    pub auth_file: Option<PathBuf>,
    /// TLS.
    pub tls: Option<TlsConfig>,
    /// State directory.
    pub data_dir: PathBuf,
    /// Flash; `None`: DRAM alone.
    pub flash: Option<FlashConfig>,
    /// Why there is no flash, where nobody has said that there be none.
    pub why_no_flash: Option<String>,
    /// Admission policy and its parameters.
    pub admission: AdmissionConfig,
    /// Applications and their shares.
    pub applications: ApplicationsConfig,
    /// CLOCK bits.
    pub clock_bits: u8,
    /// A read raises CLOCK by one instead of setting it to the highest.
    pub clock_increment: bool,
    /// File that keeps what is in DRAM over a stop in good order.
    pub memory_file: Option<PathBuf>,
    /// Record the run.
    pub record: Option<RecordConfig>,
    /// Capture a sample of the requests.
    pub capture: Option<CaptureConfig>,
    /// Live page and metrics: HOST:PORT.
    pub http: Option<String>,
    /// Names of the live page, beside `localhost` and addresses.
    pub http_hosts: Vec<String>,
    /// The address was asked for (a taken default is no reason to fail).
    pub http_explicit: bool,
    /// The same, as settings: what `--print-config` shows and `stats settings` reports.
    pub effective: Settings,
}

/// Default address of the live page and of `/metrics`.
pub const DEFAULT_HTTP: &str = "127.0.0.1:11280";
/// memcached's port.
pub const DEFAULT_PORT: u16 = 11211;
/// Memory for large requests being received, and for large replies being sent, each.
const BUFFER_LIMIT: ByteSize = ByteSize::mib(32);

fn value(key: &'static str, value: impl ToString, remedy: impl Into<String>) -> ConfigError {
    Refused::new(key, value, remedy).into()
}

impl Config {
    /// Completes `given` with defaults that suit `machine` and checks the whole.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for the first setting that cannot work.
    pub fn resolve(given: Settings, machine: &Machine) -> Result<Config, ConfigError> {
        let mut s = given;
        let buffer_limit_given = s.buffer_limit.is_some();
        let http_explicit = s.live_page.http.is_some();

        // Network.
        let udp_port = s.udp_port;
        if !(-1..=65535).contains(&udp_port) {
            return Err(value(
                "udp-port",
                udp_port,
                "must be between 1 and 65535, 0 for no UDP, or -1 for any free one",
            ));
        }
        let tcp = s.port.is_some_and(|p| p != 0) || s.listen.is_some() || s.unix_socket.is_none();
        if udp_port != 0 && s.port.is_none() {
            s.port = Some(udp_port);
        }
        let certificate = s.tls.tls_certificate.is_some();
        for (set, key) in [(s.auth_file.is_some(), "auth-file"), (certificate, "tls-certificate")] {
            if udp_port != 0 && set {
                return Err(value(
                    "udp-port",
                    udp_port,
                    format!("UDP would go past {key}: leave one of the two out"),
                ));
            }
        }
        if !["ascii", "auto", "binary"].contains(&s.protocol.as_str()) {
            return Err(value("protocol", s.protocol, "must be ascii, auto or binary"));
        }
        let port = *s.port.get_or_insert(if tcp { i32::from(DEFAULT_PORT) } else { 0 });
        if !(-1..=65535).contains(&port) {
            return Err(value(
                "port",
                port,
                "must be between 1 and 65535, 0 for no TCP, or -1 for any free one",
            ));
        }
        let mut listen = Vec::new();
        if port != 0 {
            let port = port.max(0) as u16;
            let (key, names) = listen_names(&mut s, machine);
            for name in names {
                listen.push(parse_listen(key, &name, port)?);
            }
        }
        let mut udp = Vec::new();
        if udp_port != 0 {
            let (key, names) = listen_names(&mut s, machine);
            for name in names {
                let address = parse_listen(key, &name, 0)?;
                udp.push(ListenAddress { port: udp_port.max(0) as u16, ..address });
            }
        }
        let mask = u32::from_str_radix(s.unix_mask.trim(), 8).ok().filter(|m| *m <= 0o777);
        let mask = mask.ok_or_else(|| {
            let remedy = "write octal permissions from 0 to 777, such as 0770";
            value("unix-mask", &s.unix_mask, remedy)
        })?;
        let unix = s.unix_socket.clone().map(|p| (p, mask));
        if s.conn_limit == 0 {
            return Err(value("conn-limit", 0, "must be greater than 0"));
        }
        let threads = *s.threads.get_or_insert(machine.cpus.clamp(1, 4));
        if threads == 0 || threads > 256 {
            return Err(value("threads", threads, "must be between 1 and 256"));
        }
        if s.max_reqs_per_event == 0 {
            return Err(value("max-reqs-per-event", 0, "must be greater than 0"));
        }

        // Memory.
        let memory =
            s.memory_limit.get_or_insert_with(|| ByteSize(defaults::memory(machine.memory))).0;
        let item = s.max_item_size.0;
        let fits = defaults::check_memory(memory, item);
        if let Err(e @ SizeError::LittleMemory) = fits {
            return Err(value("memory-limit", ByteSize(memory), e.to_string()));
        }
        if let Err(e @ SizeError::SmallItem) = fits {
            return Err(value("max-item-size", item, e.to_string()));
        }
        fits.map_err(|e| value("max-item-size", ByteSize(item), with_remedy(&e)))?;
        let buffer_limit = s.buffer_limit.get_or_insert(BUFFER_LIMIT).0;
        if buffer_limit < 2 * item {
            if buffer_limit_given {
                return Err(value(
                    "buffer-limit",
                    ByteSize(buffer_limit),
                    format!("must hold at least two objects of max-item-size {}", ByteSize(item)),
                ));
            }
            s.buffer_limit = Some(ByteSize(2 * item));
        }

        // memcached's -D takes the first character of whatever follows (its scripts quote it in several ways).
        let prefix_delimiter = match s.prefix_delimiter.as_bytes() {
            [c] if c.is_ascii_graphic() => *c,
            _ => {
                return Err(value(
                    "prefix-delimiter",
                    s.prefix_delimiter,
                    "write one printable ASCII character, such as ':'",
                ));
            }
        };
        let tls = tls::resolve(&mut s, &listen)?;

        // Flash.
        let why_no_flash = find_data_dir(&mut s, machine);
        let data_dir = s.data_dir.get_or_insert_with(|| machine.state_dir.clone()).clone();
        let setting = s.admission.take().unwrap_or_else(|| {
            AdmissionSetting::Name(AdmissionConfig::default().policy.as_str().into())
        });
        let mut admission = setting.resolve().map_err(|e| {
            let name = match &setting {
                AdmissionSetting::Name(name) => name.as_str(),
                AdmissionSetting::Table(_) => "",
            };
            value("admission", name, e.to_string())
        })?;
        let objective = &mut admission.flashiness.objective;
        *objective = *s.admission_objective.get_or_insert(*objective);
        admission.expected_reads.objective = admission.flashiness.objective;
        let flash = resolve_flash(&mut s, &data_dir, memory, &admission, machine)?;
        // What is a setting of its own is said there alone.
        let mut shown = admission.clone();
        shown.flashiness.objective = Default::default();
        shown.expected_reads.objective = Default::default();
        shown.first_fill = true;
        s.admission = Some(AdmissionSetting::Table(Box::new(shown)));
        let applications = s.applications.resolve(prefix_delimiter)?;
        let named: Vec<&str> = listen.iter().filter_map(|l| l.application.as_deref()).collect();
        applications_of_listeners(&applications, &named)?;
        if !(1..=2).contains(&s.clock_bits) {
            return Err(value("clock-bits", s.clock_bits, "must be 1 or 2"));
        }
        let clock_increment = match s.clock_mode.as_str() {
            "set-max" => false,
            "increment" => true,
            _ => return Err(value("clock-mode", s.clock_mode, "must be set-max or increment")),
        };

        let (watcher_bytes, worker_bytes) = resolve_log_buffers(&s)?;
        let record = s.recording.config()?;
        // Written so that NaN falls outside.
        if !(s.capture_share > 0.0 && s.capture_share <= 1.0) {
            let must = "must be above 0 and at most 1";
            return Err(value("capture-share", s.capture_share, must));
        }
        let memory_file = resolve_memory_file(&s, flash.as_ref())?;
        own_files_are_left_alone(&s, &data_dir, flash.as_ref())?;

        let http = s.live_page.address(DEFAULT_HTTP)?.map(str::to_owned);
        s.live_page.http.get_or_insert_with(|| DEFAULT_HTTP.into());
        Ok(Config {
            udp,
            binary_only: s.protocol == "binary",
            listen,
            unix,
            backlog: s.listen_backlog,
            max_connections: s.conn_limit,
            maxconns_fast: s.maxconns_fast,
            idle_timeout: (s.idle_timeout > 0)
                .then(|| Duration::from_secs(u64::from(s.idle_timeout))),
            threads,
            requests_per_event: s.max_reqs_per_event,
            memory,
            max_item_size: item as u32,
            buffer_limit: s.buffer_limit.map_or(buffer_limit, |b| b.0),
            evict: !s.disable_evictions,
            flush_enabled: !s.disable_flush_all,
            dump_enabled: !s.disable_dumping,
            cas_enabled: !s.disable_cas,
            watch_enabled: !s.disable_watch,
            watcher_bytes,
            worker_bytes,
            lru_crawler: s.lru_crawler,
            shutdown_enabled: s.enable_shutdown,
            debugtime_enabled: s.enable_debugtime,
            prefix_delimiter,
            stats_detail: s.stats_detail,
            auth_file: s.auth_file.clone(),
            tls,
            data_dir,
            flash,
            why_no_flash,
            admission,
            applications,
            clock_bits: s.clock_bits,
            clock_increment,
            memory_file,
            record,
            capture: s.capture(),
            http,
            http_hosts: s.live_page.http_host.clone(),
            http_explicit,
            effective: s,
        })
    }
}

/// The variable of the environment that says where to listen.
pub const LISTEN_VARIABLE: &str = "LARDER_LISTEN";

/// Addresses to listen on, and what names them. Reachable from outside only when asked, or where only the outside would ask: a
/// cache without authentication on every interface is a known way to lose data and to amplify attacks.
fn listen_names(s: &mut Settings, machine: &Machine) -> (&'static str, Vec<String>) {
    let given = s.listen.is_some();
    let by_default = || vec!["127.0.0.1".into(), "::1".into()];
    let names = s.listen.get_or_insert_with(|| machine.listen.clone().unwrap_or_else(by_default));
    // memcached takes semicolons too.
    let names = names.iter().flat_map(|n| n.split([',', ';'])).map(str::trim);
    let names = names.filter(|n| !n.is_empty()).map(str::to_owned).collect();
    (if given { "listen" } else { LISTEN_VARIABLE }, names)
}

/// Where nobody has named a directory and the usual one cannot be had: the memory file's, if there is one, and no flash unless it was
/// asked for. Returns why there is none.
fn find_data_dir(s: &mut Settings, machine: &Machine) -> Option<String> {
    if s.data_dir.is_some() || machine.state_dir_is_named || s.flash.is_some() {
        return None;
    }
    let why = (machine.can_hold_files)(&machine.state_dir).err()?;
    if s.flash_size.is_some() || s.format_flash || s.drive != Default::default() {
        return None;
    }
    s.flash = Some(vec!["none".into()]);
    let beside = s.memory_file.as_deref().and_then(Path::parent);
    if let Some(dir) = beside.filter(|dir| !dir.as_os_str().is_empty()) {
        s.data_dir = Some(dir.to_owned());
    }
    Some(format!(
        "the usual data directory '{}' cannot be used: {why}",
        machine.state_dir.display()
    ))
}

/// That the listeners' applications can be told apart, beside those that have shares.
fn applications_of_listeners(
    config: &ApplicationsConfig,
    names: &[&str],
) -> Result<(), ConfigError> {
    let mut applications = Applications::new(config)?;
    for name in names {
        applications
            .register(name)
            .map_err(|e| value("listen", format!("app={name}"), e.to_string()))?;
    }
    Ok(())
}

/// Bytes of log lines for each connection that watches, and for each worker: memcached's sizes, between what holds some lines
/// and what twenty watchers may take without being thought of.
fn resolve_log_buffers(s: &Settings) -> Result<(usize, usize), ConfigError> {
    let sized = |key, size: ByteSize| match size.0 {
        0x1000..=0x400_0000 => Ok(size.0 as usize),
        _ => Err(value(key, size, "must be between 4 KiB and 64 MiB")),
    };
    let watcher = sized("watcher-logbuf-size", s.watcher_logbuf_size)?;
    Ok((watcher, sized("worker-logbuf-size", s.worker_logbuf_size)?))
}

/// That no setting names for something else what the cache keeps for itself.
fn own_files_are_left_alone(
    s: &Settings,
    data_dir: &Path,
    flash: Option<&FlashConfig>,
) -> Result<(), ConfigError> {
    let flash: Vec<&Path> = flash.into_iter().flat_map(FlashConfig::paths).collect();
    for path in &flash {
        if let Some(what) = flash_in_the_way(data_dir, path) {
            return Err(value("flash", path.display(), format!("{what}: name another file")));
        }
    }
    for (key, path) in [
        ("memory-file", &s.memory_file),
        ("pidfile", &s.pidfile),
        ("record", &s.recording.record),
        ("capture", &s.capture),
        ("unix-socket", &s.unix_socket),
    ] {
        if let Some(path) = path
            && let Some(what) = own_file(data_dir, flash.iter().copied(), path)
        {
            return Err(value(key, path.display(), format!("{what}: name another file")));
        }
    }
    Ok(())
}

fn resolve_memory_file(
    s: &Settings,
    flash: Option<&FlashConfig>,
) -> Result<Option<PathBuf>, ConfigError> {
    let Some(file) = &s.memory_file else { return Ok(None) };
    let shown = file.display();
    if file.file_name().is_none() {
        return Err(value("memory-file", shown, "must be the path of a file"));
    }
    if flash.is_some_and(|flash| flash.paths().any(|path| path == file)) {
        return Err(value("memory-file", shown, "is the flash: name another file"));
    }
    // The server removes its PID file when it ends.
    let mut description = file.clone().into_os_string();
    description.push(".meta");
    if s.pidfile.as_ref().is_some_and(|pid| pid == file || *pid == *description) {
        let why = "or FILE.meta beside it, is the pidfile too: name another file";
        return Err(value("memory-file", shown, why));
    }
    if s.recording.record.is_some() {
        let why = "goes not together with record, which begins with an empty cache: leave one of them out";
        return Err(value("memory-file", shown, why));
    }
    Ok(Some(file.clone()))
}

fn resolve_flash(
    s: &mut Settings,
    data_dir: &Path,
    memory: u64,
    admission: &AdmissionConfig,
    machine: &Machine,
) -> Result<Option<FlashConfig>, ConfigError> {
    let need = AdmissionNeed::of(admission);
    let paths = s.flash.get_or_insert_with(|| vec![data_dir.join("flash")]).clone();
    let none = paths.iter().any(|path| path.as_os_str() == "none");
    if none && paths.len() > 1 {
        let why = "goes not together with the name of a drive: leave one of them out";
        return Err(value("flash", "none", why));
    }
    if let Some(size) = s.flash_size.clone().filter(|sizes| !none && sizes.len() > paths.len()) {
        let more = &size[paths.len()];
        let why = "is one more than there are drives: each size belongs to one, in their order";
        return Err(value("flash-size", more, why));
    }
    let said =
        |i: usize, s: &Settings| s.flash_size.as_ref().and_then(|sizes| sizes.get(i).copied());
    if let Some(size) = s.flash_size.as_ref().filter(|sizes| !none && sizes.len() < paths.len()) {
        // A drive that is there says itself how large it is; which sizes are whose must be plain.
        let why = format!(
            "says the size of {} of {} drives: give each drive its size, in their order, or none to any",
            size.len(),
            paths.len()
        );
        let all = size.iter().map(ByteSize::to_string).collect::<Vec<_>>().join(", ");
        return Err(value("flash-size", all, why));
    }
    let path = paths.first().cloned().unwrap_or_default();
    let total = s
        .flash_size
        .as_ref()
        .map(|sizes| sizes.iter().fold(0, |sum: u64, size| sum.saturating_add(size.0)));
    let object_size = match (s.flash_object_size, total) {
        (Some(size), _) => size.0,
        (None, Some(flash)) => defaults::object_size(flash, memory, need),
        (None, None) => defaults::OBJECT_SIZE.into(),
    };
    s.flash_object_size = Some(ByteSize(object_size));
    defaults::check_object_size(object_size)
        .map_err(|e| value("flash-object-size", object_size, e.to_string()))?;
    let budget = s.drive.budget()?;
    let io = match s.io.as_str() {
        "auto" => IoChoice::Auto,
        "uring" => IoChoice::Uring,
        "threads" => IoChoice::Threads,
        other => return Err(value("io", other, "must be auto, uring or threads")),
    };
    if none {
        s.flash_size = None;
        return Ok(None);
    }
    let mut sizes = Vec::with_capacity(paths.len());
    for (i, path) in paths.iter().enumerate() {
        let size = match said(i, s) {
            Some(size) => Some(size.0),
            // An existing file or device says itself how large it is.
            None if path.exists() => None,
            None if paths.len() > 1 => {
                let why =
                    "is not there yet: give each drive its size with flash-size, in their order";
                return Err(value("flash", path.display(), why));
            }
            None => {
                let dir = path.parent().filter(|p| !p.as_os_str().is_empty());
                let free = (machine.free_space)(dir.unwrap_or(Path::new("."))).unwrap_or(0);
                Some(defaults::flash(free, memory, object_size, need))
            }
        };
        sizes.push(size);
    }
    let sum = |all: Option<u64>, size: &Option<u64>| Some(all?.saturating_add((*size)?));
    if let Some(all) = sizes.iter().fold(Some(0), sum) {
        defaults::check_flash(all, memory, object_size)
            .map_err(|e| value("flash-size", ByteSize(all), with_remedy(&e)))?;
        s.flash_size = Some(sizes.iter().flatten().map(|size| ByteSize(*size)).collect());
    }
    let format = s.format_flash;
    let further = paths.iter().zip(&sizes).skip(1);
    let further =
        further.map(|(path, size)| FlashFile { path: path.clone(), size: *size }).collect();
    let size = sizes.first().copied().flatten();
    let object_size = object_size as u32;
    Ok(Some(FlashConfig { path, size, further, object_size, budget, io, format }))
}

/// What is wrong with a size, and which settings mend it.
fn with_remedy(error: &SizeError) -> String {
    let remedy = match error {
        SizeError::LargeItem { .. } => ": lower it or raise memory-limit",
        SizeError::LittleFlash => "; --flash none runs without flash",
        SizeError::LargeIndex { .. } => {
            ": raise memory-limit, lower flash-size, or raise flash-object-size if objects are larger"
        }
        SizeError::LittleMemory
        | SizeError::SmallItem
        | SizeError::HugeItem
        | SizeError::ObjectOnFlash => "",
    };
    format!("{error}{remedy}")
}

/// `host`, `host:port`, `[v6]`, `[v6]:port`, a bare v6 address, each perhaps after `app=NAME:` and `notls:`.
fn parse_listen(
    key: &'static str,
    text: &str,
    default_port: u16,
) -> Result<ListenAddress, ConfigError> {
    let bad = |remedy: &str| value(key, text, remedy);
    let (rest, application) = match text.strip_prefix("app=") {
        Some(rest) => match rest.split_once(':') {
            Some((name, rest)) if !name.is_empty() => (rest, Some(name.to_owned())),
            _ => return Err(bad("write app=NAME:HOST:PORT")),
        },
        None => (text, None),
    };
    let (rest, tls) = [ListenTls::Off, ListenTls::Basic, ListenTls::Mutual]
        .into_iter()
        .find_map(|tls| Some((rest.strip_prefix(tls.prefix())?, tls)))
        .unwrap_or((rest, ListenTls::Default));
    let port_of = |p: &str| {
        p.parse::<u16>()
            .ok()
            .filter(|p| *p != 0)
            .ok_or_else(|| bad("the port must be between 1 and 65535"))
    };
    let (host, port) = if let Some(v6) = rest.strip_prefix('[') {
        let (host, tail) = v6.split_once(']').ok_or_else(|| bad("write [ADDRESS]:PORT"))?;
        match tail.strip_prefix(':') {
            Some(p) => (host, port_of(p)?),
            None if tail.is_empty() => (host, default_port),
            None => return Err(bad("write [ADDRESS]:PORT")),
        }
    } else if rest.parse::<Ipv6Addr>().is_ok() {
        (rest, default_port)
    } else {
        match rest.rsplit_once(':') {
            Some((host, p)) => (host, port_of(p)?),
            None => (rest, default_port),
        }
    };
    let host = if host == "*" { "0.0.0.0" } else { host };
    let name_ok = host.parse::<IpAddr>().is_ok()
        || (!host.is_empty()
            && host
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.' || b == b'_'));
    if !name_ok {
        return Err(bad("write HOST, HOST:PORT or [ADDRESS]:PORT"));
    }
    Ok(ListenAddress { host: host.to_owned(), port, tls, application })
}

#[cfg(test)]
mod tests {
    use larder_policy::admission::Objective;
    use larder_settings::{DriveLife, LivePage, Tls};

    use super::*;

    fn machine() -> Machine {
        Machine {
            memory: 16 << 30,
            cpus: 8,
            state_dir: "/nonexistent/larder".into(),
            state_dir_is_named: false,
            listen: None,
            free_space: |_| Some(100 << 30),
            can_hold_files: |_| Ok(()),
        }
    }

    #[test]
    fn the_environment_says_where_to_listen_if_nothing_else_does() {
        let hosts = |given: Option<&str>, listen: Option<&str>| {
            let list = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
            let machine = Machine { listen: listen.map(list), ..machine() };
            let given = Settings { listen: given.map(list), ..Settings::default() };
            let hosts = |c: Config| c.listen.into_iter().map(|l| l.host).collect::<Vec<_>>();
            let found = Config::resolve(given, &machine).map(hosts);
            found.map(|hosts| hosts.join(" ")).map_err(|e| e.to_string())
        };
        for (given, environment, wanted) in [
            (None, None, "127.0.0.1 ::1"),
            (None, Some("0.0.0.0 ::"), "0.0.0.0 ::"),
            (Some("10.0.0.1"), Some("0.0.0.0 ::"), "10.0.0.1"),
            (Some(" 10.0.0.1 ; ::1"), None, "10.0.0.1 ::1"),
        ] {
            assert_eq!(hosts(given, environment), Ok(wanted.to_owned()));
        }
        let e = hosts(None, Some("a:b:c")).unwrap_err();
        assert!(e.contains("LARDER_LISTEN 'a:b:c'"), "{e}");
        // A Unix socket takes the place of TCP there too.
        let machine = Machine { listen: Some(vec!["0.0.0.0".into()]), ..machine() };
        let unix = Settings { unix_socket: Some("/tmp/s".into()), ..Settings::default() };
        assert!(Config::resolve(unix, &machine).unwrap().listen.is_empty());
    }

    /// In a container there may be no home, and nothing that can be written to.
    #[test]
    fn where_nothing_can_be_kept_flash_that_nobody_asked_for_is_left_out() {
        let machine = Machine {
            can_hold_files: |_| Err(std::io::ErrorKind::PermissionDenied.into()),
            ..machine()
        };
        let c = Config::resolve(Settings::default(), &machine).unwrap();
        assert!(c.flash.is_none());
        let why = c.why_no_flash.unwrap();
        assert!(why.contains("'/nonexistent/larder'") && why.contains("permission"), "{why}");
        assert_eq!(c.effective.flash.unwrap()[0].to_str(), Some("none"), "it is printed");
        let memory = Settings { memory_file: Some("/state/file".into()), ..Settings::default() };
        let c = Config::resolve(memory, &machine).unwrap();
        assert_eq!((c.data_dir.to_str(), c.flash), (Some("/state"), None));
        // Whoever asks for flash, or names its place, learns what is wrong with that.
        let named = Machine { state_dir_is_named: true, ..machine.clone() };
        assert!(Config::resolve(Settings::default(), &named).unwrap().flash.is_some());
        for asks in [
            Settings { data_dir: Some("/d".into()), ..Settings::default() },
            Settings { flash: Some(vec!["/f".into()]), ..Settings::default() },
            Settings { flash_size: Some(vec![ByteSize::mib(64)]), ..Settings::default() },
            Settings {
                drive: DriveLife { endurance_tbw: Some(600.0), ..DriveLife::default() },
                ..Settings::default()
            },
        ] {
            let c = Config::resolve(asks, &machine).unwrap();
            assert!(c.flash.is_some() && c.why_no_flash.is_none());
        }
    }

    /// How large objects are need not be said: an index for flash that is large for the memory is made to fit it.
    #[test]
    fn the_index_of_a_large_flash_fits_the_memory() {
        let given = |object| Settings {
            flash: Some(vec!["/f".into()]),
            flash_size: Some(vec![ByteSize::gib(20)]),
            memory_limit: Some(ByteSize::mib(512)),
            flash_object_size: object,
            ..Settings::default()
        };
        let c = Config::resolve(given(None), &machine()).unwrap();
        assert!((900..2048).contains(&c.flash.unwrap().object_size));
        let again = larder_settings::of_file(&c.effective.print(), Path::new("p")).unwrap();
        assert_eq!(
            Config::resolve(again, &machine()).unwrap().effective.print(),
            c.effective.print()
        );
        // What is said is held to.
        let e = Config::resolve(given(Some(ByteSize(280))), &machine()).unwrap_err().to_string();
        assert!(e.contains("flash-object-size"), "{e}");
    }

    #[test]
    fn the_flag_of_the_objective_is_over_the_table() {
        let table = |objective| {
            let mut config = AdmissionConfig::default();
            config.flashiness.objective = objective;
            Some(AdmissionSetting::Table(Box::new(config)))
        };
        for (flag, table, wanted) in [
            (None, None, Objective::Requests),
            (None, table(Objective::Bytes), Objective::Bytes),
            (Some(Objective::Bytes), None, Objective::Bytes),
            (Some(Objective::Requests), table(Objective::Bytes), Objective::Requests),
        ] {
            let given =
                Settings { admission_objective: flag, admission: table, ..Settings::default() };
            let config = Config::resolve(given, &machine()).unwrap();
            assert_eq!(config.admission.flashiness.objective, wanted);
            assert_eq!(config.admission.expected_reads.objective, wanted);
            assert_eq!(config.effective.admission_objective, Some(wanted), "it is printed");
        }
    }

    #[test]
    fn defaults_suit_the_machine() {
        let c = Config::resolve(Settings::default(), &machine()).unwrap();
        assert_eq!(c.memory, 2 << 30);
        assert_eq!(c.threads, 4);
        // The index takes a quarter of the memory, 6 bytes for each of 280: less than a quarter of what is free.
        let flash = ((2 << 30) / 4 / 6 * 280) >> 20 << 20;
        assert_eq!(c.flash.as_ref().unwrap().size, Some(flash));
        assert_eq!(c.listen.len(), 2);
        let small = Machine { memory: 256 << 20, cpus: 1, ..machine() };
        let c = Config::resolve(Settings::default(), &small).unwrap();
        assert_eq!((c.memory, c.threads), (64 << 20, 1));
        assert!(c.flash.unwrap().size.unwrap() <= 2 << 30, "the index must fit");
    }

    #[test]
    fn the_effective_configuration_resolves_to_itself() {
        let c = Config::resolve(Settings::default(), &machine()).unwrap();
        let text = c.effective.print();
        let read = larder_settings::of_file(&text, Path::new("p")).unwrap();
        let again = Config::resolve(read, &machine()).unwrap();
        assert_eq!(again.effective, c.effective);
    }

    #[test]
    fn listen_addresses() {
        for (text, host, port, tls, app) in [
            ("10.0.0.1", "10.0.0.1", 1, ListenTls::Default, None),
            ("10.0.0.1:22", "10.0.0.1", 22, ListenTls::Default, None),
            ("::1", "::1", 1, ListenTls::Default, None),
            ("[::1]:33", "::1", 33, ListenTls::Default, None),
            ("notls:localhost:4", "localhost", 4, ListenTls::Off, None),
            ("app=shop:10.0.0.1", "10.0.0.1", 1, ListenTls::Default, Some("shop")),
            ("app=shop:::1", "::1", 1, ListenTls::Default, Some("shop")),
            ("app=a-b:[::1]:33", "::1", 33, ListenTls::Default, Some("a-b")),
            ("mtls:[::1]:4", "::1", 4, ListenTls::Mutual, None),
            ("btls:h", "h", 1, ListenTls::Basic, None),
            ("app=shop:notls:localhost:4", "localhost", 4, ListenTls::Off, Some("shop")),
        ] {
            let application = app.map(str::to_owned);
            let want = ListenAddress { host: host.into(), port, tls, application };
            assert_eq!(parse_listen("listen", text, 1).unwrap(), want, "{text}");
        }
        for text in [
            "",
            ":1",
            "a:0",
            "a:99999",
            "[::1",
            "[::1]x",
            "a b",
            "app=",
            "app=:h:1",
            "app=shop",
            "app=shop:",
        ] {
            assert!(parse_listen("listen", text, 1).is_err(), "{text}");
        }
    }

    #[test]
    fn a_unix_socket_takes_the_place_of_tcp() {
        let s = Settings { unix_socket: Some("/tmp/s".into()), ..Settings::default() };
        assert!(Config::resolve(s.clone(), &machine()).unwrap().listen.is_empty());
        let s = Settings { port: Some(5), ..s };
        assert_eq!(Config::resolve(s, &machine()).unwrap().listen.len(), 2);
    }

    #[test]
    fn impossible_values_say_why() {
        let base = || Settings { flash: Some(vec!["none".into()]), ..Settings::default() };
        let drive = |drive| Settings { drive, ..base() };
        let cases: Vec<(Settings, &[&str])> = vec![
            (Settings { threads: Some(0), ..base() }, &["threads '0'", "between"]),
            (Settings { max_item_size: ByteSize(1000), ..base() }, &["1000", "1024"]),
            (Settings { max_item_size: ByteSize::mib(256), ..base() }, &["256 MiB", "128 MiB"]),
            (
                Settings {
                    max_item_size: ByteSize::mib(40),
                    memory_limit: Some(ByteSize::mib(64)),
                    ..base()
                },
                &["40 MiB", "half", "64 MiB"],
            ),
            (
                Settings {
                    flash: None,
                    flash_size: Some(vec![ByteSize::gib(64)]),
                    flash_object_size: Some(ByteSize(280)),
                    memory_limit: Some(ByteSize::mib(64)),
                    ..base()
                },
                &["68719476736 B / 280 B", "64 MiB", "flash-object-size"],
            ),
            (
                Settings { tls: Tls { tls_key: Some("/k".into()), ..Tls::default() }, ..base() },
                &["tls-key '/k'", "tls-certificate"],
            ),
            (
                Settings {
                    live_page: LivePage { http: Some("nowhere".into()), ..LivePage::default() },
                    ..base()
                },
                &["http 'nowhere'", "off"],
            ),
            (Settings { unix_mask: "9".into(), ..base() }, &["unix-mask '9'", "octal"]),
            (
                drive(DriveLife {
                    endurance_tbw: Some(1.0),
                    endurance_dwpd: Some(1.0),
                    ..DriveLife::default()
                }),
                &["not both"],
            ),
            (Settings { io: "aio".into(), ..base() }, &["io 'aio'", "uring"]),
            (
                Settings { watcher_logbuf_size: ByteSize(5), ..base() },
                &["watcher-logbuf-size '5 B'", "4 KiB"],
            ),
            (
                drive(DriveLife { burst_hours: 0.0, ..DriveLife::default() }),
                &["burst-hours '0'", "720"],
            ),
            (
                drive(DriveLife { device_write_amplification: f64::NAN, ..DriveLife::default() }),
                &["device-write-amplification 'NaN'", "between 1"],
            ),
            (
                Settings { admission: Some(AdmissionSetting::Name("lru".into())), ..base() },
                &["admission 'lru'", "ghost"],
            ),
        ];
        for (settings, words) in cases {
            let e = Config::resolve(settings, &machine()).unwrap_err().to_string();
            for word in words {
                assert!(e.contains(word), "{e} lacks {word}");
            }
            assert!(!e.contains('\n'));
        }
    }
}
