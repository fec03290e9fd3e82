//! The flags of `larder kv`: memcached's own letters and long names, and Larder's.

use std::path::PathBuf;

use clap::{ArgAction, Args as ClapArgs};
use larder_base::ByteSize;
use larder_kv::config::{AdmissionSetting, ConfigError, Settings, extended_options};
use larder_policy::admission::Objective;

use crate::error::CliError;

/// Shown under the flags.
const EXAMPLES: &str = "\
Examples:
  # Sizes that suit the machine, flash in a file of the data directory:
  larder kv
  # A whole drive, written no faster than it lasts five years:
  larder kv -m 4g --flash /dev/nvme1n1 --endurance-tbw 1200
  # DRAM alone, open to the network:
  larder kv -m 1g --flash none -l 0.0.0.0
  # Every setting with its description; admission's parameters and
  # applications' shares have no flag:
  larder kv --print-config > larder.toml
  larder kv --config larder.toml

SIZE is a number of bytes, or one with a unit: k, m, g, t (powers of 1024).";

/// Serve a memcached-compatible cache in DRAM and flash.
#[derive(Debug, ClapArgs)]
#[command(
    disable_version_flag = true,
    override_usage = "larder kv [OPTIONS]",
    after_help = EXAMPLES
)]
pub(crate) struct Args {
    /// TCP port to listen on (0: none, -1: any free one) [default: 11211]
    #[arg(
        short = 'p',
        long,
        value_name = "NUM",
        help_heading = "Network",
        allow_negative_numbers = true
    )]
    port: Option<i32>,
    /// Address to listen on: host, host:port or [v6]:port, comma separated; before it notls: for a plain port beside
    /// TLS ones, btls: for TLS without clients' certificates, mtls: for TLS that requires them, app=NAME: for requests that all belong to one application [default: 127.0.0.1,::1]
    #[arg(short = 'l', long, value_name = "ADDR", help_heading = "Network", value_delimiter = ',')]
    listen: Option<Vec<String>>,
    /// Unix socket to listen on (instead of TCP, unless a port is given too)
    #[arg(short = 's', long, value_name = "PATH", help_heading = "Network")]
    unix_socket: Option<PathBuf>,
    /// Permissions of the Unix socket, octal [default: 0700]
    #[arg(short = 'a', long, value_name = "MASK", help_heading = "Network")]
    unix_mask: Option<String>,
    /// UDP port to serve too (0: none, -1: any free one) [default: 0]
    #[arg(
        short = 'U',
        long,
        value_name = "NUM",
        help_heading = "Network",
        allow_negative_numbers = true
    )]
    udp_port: Option<i32>,
    /// Most connections at a time [default: 1024]
    #[arg(short = 'c', long, value_name = "NUM", help_heading = "Network")]
    conn_limit: Option<u32>,
    /// Connections that may wait to be accepted [default: 1024]
    #[arg(short = 'b', long, value_name = "NUM", help_heading = "Network")]
    listen_backlog: Option<u32>,
    /// Leave connections over the limit waiting instead of refusing them with an error
    #[arg(long, help_heading = "Network")]
    no_maxconns_fast: bool,
    /// Close connections that are silent for this many seconds (0: never) [default: 0]
    #[arg(long, value_name = "SECONDS", help_heading = "Network")]
    idle_timeout: Option<u32>,
    /// Protocol: ascii or auto; binary, which is not spoken, tells every client so and closes
    #[arg(short = 'B', long, value_name = "NAME", help_heading = "Network")]
    protocol: Option<String>,
    /// Enable TLS on TCP (needs --tls-certificate and --tls-key, or -o ssl_chain_cert=FILE,ssl_key=FILE)
    #[arg(short = 'Z', long, help_heading = "Network")]
    enable_ssl: bool,
    /// Certificate chain, PEM: turns TLS on for TCP
    #[arg(long, value_name = "FILE", help_heading = "Network")]
    tls_certificate: Option<PathBuf>,
    /// Private key of the certificate, PEM
    #[arg(long, value_name = "FILE", help_heading = "Network")]
    tls_key: Option<PathBuf>,
    /// CA certificates, PEM: clients must show a certificate signed by one of them
    #[arg(long, value_name = "FILE", help_heading = "Network")]
    tls_client_ca: Option<PathBuf>,
    /// Whether clients must show such a certificate: none, request (whoever shows one must show a good one), require
    /// [default: require with --tls-client-ca, else none]
    #[arg(long, value_name = "WHO", help_heading = "Network")]
    tls_verify: Option<String>,
    /// Lowest version of TLS: 1.2 or 1.3 [default: 1.2]
    #[arg(long, value_name = "VERSION", help_heading = "Network")]
    tls_min_version: Option<String>,
    /// Cipher suites of TLS 1.2, by OpenSSL's names, separated by colons; those of TLS 1.3 are always on [default: all six]
    #[arg(long, value_name = "LIST", help_heading = "Network")]
    tls_ciphers: Option<String>,
    /// Let TLS clients resume their sessions
    #[arg(long, help_heading = "Network")]
    tls_session_cache: bool,
    /// Bytes that TLS may hold for a connection that does not take its answers [default: 16k]
    #[arg(long, value_name = "SIZE", help_heading = "Network")]
    tls_buffer: Option<ByteSize>,
    /// Clients must authenticate: a file of user:password lines
    #[arg(short = 'Y', long, value_name = "FILE", help_heading = "Network")]
    auth_file: Option<PathBuf>,

    /// DRAM for objects and the flash index: MiB, or a size such as 4g [default: an eighth of the memory]
    #[arg(short = 'm', long, value_name = "SIZE", help_heading = "Cache")]
    memory_limit: Option<String>,
    /// Largest object: bytes, or a size such as 2m [default: 1m, at least 1k, at most 128m]
    #[arg(short = 'I', long, value_name = "SIZE", help_heading = "Cache")]
    max_item_size: Option<ByteSize>,
    /// DRAM for large requests being received and large replies being sent, each, beyond 16 KiB per connection
    /// [default: 32m, at least two of the largest objects]
    #[arg(long, value_name = "SIZE", help_heading = "Cache")]
    buffer_limit: Option<ByteSize>,
    /// Answer an error when memory is full instead of evicting
    #[arg(short = 'M', long, help_heading = "Cache")]
    disable_evictions: bool,
    /// Keep what is in DRAM over a restart: a stop in good order writes FILE and FILE.meta, the next start on the same data
    /// directory reads them (what is on flash is kept without it)
    #[arg(short = 'e', long, value_name = "FILE", help_heading = "Cache")]
    memory_file: Option<PathBuf>,
    /// Disable the flush_all command
    #[arg(short = 'F', long, help_heading = "Cache")]
    disable_flush_all: bool,
    /// Disable the listing of keys (lru_crawler metadump, mgdump) and stats detail
    #[arg(short = 'X', long, help_heading = "Cache")]
    disable_dumping: bool,
    /// Enable the shutdown command
    #[arg(short = 'A', long, help_heading = "Cache")]
    enable_shutdown: bool,
    /// Character that ends the prefix of a key, for `stats detail` (turned on by this flag) and applications [default: :]
    #[arg(
        short = 'D',
        long,
        value_name = "CHAR",
        help_heading = "Cache",
        visible_alias = "app-delimiter"
    )]
    prefix_delimiter: Option<String>,
    /// Moves the clock on command: for test suites.
    #[arg(long, hide = true)]
    enable_debugtime: bool,

    /// Where state is kept [default: $STATE_DIRECTORY, /var/lib/larder as root, else ~/.local/state/larder]
    #[arg(long, value_name = "DIR", help_heading = "Flash")]
    data_dir: Option<PathBuf>,
    /// File or block device used as flash; none for DRAM alone [default: DATA-DIR/flash]
    #[arg(long, value_name = "PATH", help_heading = "Flash")]
    flash: Option<PathBuf>,
    /// Bytes of flash to use [default: all of what exists, else a quarter of the free space, at most 64g]
    #[arg(long, value_name = "SIZE", help_heading = "Flash")]
    flash_size: Option<ByteSize>,
    /// Format the flash whatever it holds, a file with another --flash-size too: everything on it is lost
    #[arg(long, help_heading = "Flash")]
    format_flash: bool,
    /// Mean size of an object on flash, for which the index is sized [default: 280]
    #[arg(long, value_name = "SIZE", help_heading = "Flash")]
    flash_object_size: Option<ByteSize>,
    /// Which objects go to flash: flashiness, flashiness_paper, ghost, reject_first, probability, write_rate or all; their
    /// parameters are in the configuration file [default: flashiness]
    #[arg(long, value_name = "POLICY", help_heading = "Flash")]
    admission: Option<String>,
    /// Which hits flashiness seeks where a write budget is held: requests or bytes [default: requests]
    #[arg(long, value_name = "WHICH", help_heading = "Flash", value_parser = super::parse_objective)]
    admission_objective: Option<Objective>,
    /// How many bits of rank each object has: 1 or 2 [default: 2]
    #[arg(long, value_name = "N", help_heading = "Flash")]
    clock_bits: Option<u8>,
    /// What a read does to an object's rank: set-max (LRU-like) or increment (MFU-like) [default: set-max]
    #[arg(long, value_name = "HOW", help_heading = "Flash")]
    clock_mode: Option<String>,
    /// How flash is read: auto, uring or threads [default: auto]
    #[arg(long, value_name = "HOW", help_heading = "Flash")]
    io: Option<String>,

    /// Rated endurance of the flash in terabytes written: sets the write budget [default: none, writes are not limited]
    #[arg(long, value_name = "TB", help_heading = "Drive life", allow_negative_numbers = true)]
    endurance_tbw: Option<f64>,
    /// Rated endurance in drive writes per day over the warranty, instead of terabytes written
    #[arg(
        long,
        value_name = "N",
        help_heading = "Drive life",
        visible_alias = "dwpd",
        allow_negative_numbers = true
    )]
    endurance_dwpd: Option<f64>,
    /// Years of warranty that --endurance-dwpd is stated for [default: 5]
    #[arg(long, value_name = "N", help_heading = "Drive life", allow_negative_numbers = true)]
    endurance_warranty_years: Option<f64>,
    /// Capacity of the whole drive, to which --endurance-dwpd refers [default: the flash given to the cache]
    #[arg(long, value_name = "SIZE", help_heading = "Drive life")]
    drive_capacity: Option<ByteSize>,
    /// Years that the flash should last [default: 5]
    #[arg(
        long,
        value_name = "N",
        help_heading = "Drive life",
        visible_alias = "years",
        allow_negative_numbers = true
    )]
    endurance_years: Option<f64>,
    /// Bytes that the drive is expected to program for each byte written to it [default: 1.1]
    #[arg(long, value_name = "RATIO", help_heading = "Drive life", allow_negative_numbers = true)]
    device_write_amplification: Option<f64>,
    /// Hours of write budget that may be saved up for a burst [default: 6]
    #[arg(long, value_name = "HOURS", help_heading = "Drive life", allow_negative_numbers = true)]
    burst_hours: Option<f64>,
    /// Hold an empty cache to the write budget and to admission too, instead of letting it fill once ahead of them
    #[arg(long, help_heading = "Drive life")]
    no_first_fill: bool,

    /// Worker threads [default: the number of processors, at most 4]
    #[arg(short = 't', long, value_name = "NUM", help_heading = "Process")]
    threads: Option<usize>,
    /// Most requests taken from one connection at a time [default: 1000]
    #[arg(short = 'R', long, value_name = "NUM", help_heading = "Process")]
    max_reqs_per_event: Option<u32>,
    /// Run as a daemon; its log goes on in larder.log in the data directory, which is made if need be
    #[arg(short = 'd', long, help_heading = "Process")]
    pub(crate) daemon: bool,
    /// User to run as when started by root
    #[arg(short = 'u', long, value_name = "USER", help_heading = "Process")]
    user: Option<String>,
    /// Write the process id to a file
    #[arg(short = 'P', long, value_name = "FILE", help_heading = "Process")]
    pidfile: Option<PathBuf>,
    /// Lock all memory
    #[arg(short = 'k', long, help_heading = "Process")]
    lock_memory: bool,
    /// Raise the limit on core dumps
    #[arg(short = 'r', long, help_heading = "Process")]
    enable_coredumps: bool,
    /// Record all inputs and decisions, from an empty cache on, in a new file for larder sim replay (it holds keys)
    #[arg(long, value_name = "FILE", help_heading = "Process")]
    record: Option<PathBuf>,
    /// Bytes at which recording ends [default: 8g]
    #[arg(long, value_name = "SIZE", help_heading = "Process")]
    record_limit: Option<ByteSize>,
    /// Capture the requests of a sample of the keys, hashed, in a new file: a trace for larder trace and larder sim
    #[arg(long, value_name = "FILE", help_heading = "Process")]
    capture: Option<PathBuf>,
    /// Share of the keys whose requests are captured [default: 0.01]
    #[arg(long, value_name = "SHARE", help_heading = "Process")]
    capture_share: Option<f64>,
    /// Address of the live page and /metrics, or off [default: 127.0.0.1:11280]
    #[arg(long, value_name = "ADDR", help_heading = "Process")]
    http: Option<String>,
    /// Name by which the live page may be asked for, beside localhost and addresses; * for any. May be given several times
    #[arg(long, value_name = "NAME", help_heading = "Operation")]
    http_host: Option<Vec<String>>,
    /// More log: -v connections and what clients do wrong, -vv each request to the store, -vvv what libraries say too. Wins over RUST_LOG in
    /// the environment (a level, or levels by module), which wins over a file's log-level
    #[arg(short = 'v', long, action = ArgAction::Count, help_heading = "Process")]
    pub(crate) verbose: u8,
    /// Log format: text or json [default: text]
    #[arg(long, value_name = "FORMAT", help_heading = "Process")]
    log_format: Option<String>,
    /// Configuration file, TOML; flags win over it
    #[arg(long, value_name = "FILE", help_heading = "Process")]
    config: Option<PathBuf>,
    /// Print the effective configuration as a commented file, and exit
    #[arg(long, help_heading = "Process")]
    pub(crate) print_config: bool,
    /// Print the version and exit
    #[arg(short = 'V', long, action = ArgAction::Version, help_heading = "Process")]
    version: Option<bool>,

    /// memcached's extended options, comma separated: maxconns_fast, idle_timeout, ext_path=FILE:SIZE, ssl_chain_cert,
    /// ssl_key, ssl_ca_cert, ssl_verify_mode, ssl_min_version, ssl_ciphers, ssl_session_cache, ssl_wbuf_size,
    /// watcher_logbuf_size, worker_logbuf_size; those that tune slabs, LRU lists and the hash table are accepted without effect
    #[arg(short = 'o', long, value_name = "OPT,…", help_heading = "memcached's options")]
    extended: Vec<String>,
    /// Accepted without effect: there are no slabs
    #[arg(short = 'f', long, value_name = "NUM", help_heading = "memcached's options")]
    slab_growth_factor: Option<f64>,
    /// Accepted without effect: there are no slabs
    #[arg(short = 'n', long, value_name = "BYTES", help_heading = "memcached's options")]
    slab_min_size: Option<u32>,
    /// Accepted without effect
    #[arg(short = 'L', long, help_heading = "memcached's options")]
    enable_largepages: bool,
    /// Give objects no CAS: gets shows 0, and cas finds no match
    #[arg(short = 'C', long, help_heading = "memcached's options")]
    disable_cas: bool,
    /// Disable the watch command
    #[arg(short = 'W', long, help_heading = "memcached's options")]
    disable_watch: bool,
}

/// What the flags and the file said.
pub(crate) struct Given {
    pub(crate) settings: Settings,
    /// memcached options that were accepted without effect.
    pub(crate) ignored: Vec<String>,
}

fn yes(flag: bool) -> Option<bool> {
    flag.then_some(true)
}

impl Args {
    /// Flags over `-o` over the file.
    pub(crate) fn settings(&self) -> Result<Given, CliError> {
        let usage = |e: ConfigError| CliError::Usage(e.to_string());
        let memory_limit = self.memory_limit.as_deref().map(megabytes).transpose()?;
        let flags = Settings {
            listen: self.listen.clone(),
            port: self.port,
            udp_port: self.udp_port,
            protocol: self.protocol.clone(),
            unix_socket: self.unix_socket.clone(),
            unix_mask: self.unix_mask.clone(),
            listen_backlog: self.listen_backlog,
            conn_limit: self.conn_limit,
            maxconns_fast: self.no_maxconns_fast.then_some(false),
            idle_timeout: self.idle_timeout,
            threads: self.threads,
            max_reqs_per_event: self.max_reqs_per_event,
            memory_limit,
            max_item_size: self.max_item_size,
            buffer_limit: self.buffer_limit,
            disable_evictions: yes(self.disable_evictions),
            disable_flush_all: yes(self.disable_flush_all),
            disable_dumping: yes(self.disable_dumping),
            disable_cas: yes(self.disable_cas),
            disable_watch: yes(self.disable_watch),
            watcher_logbuf_size: None,
            worker_logbuf_size: None,
            lru_crawler: None,
            enable_shutdown: yes(self.enable_shutdown),
            enable_debugtime: yes(self.enable_debugtime),
            prefix_delimiter: self.prefix_delimiter.clone(),
            stats_detail: yes(self.prefix_delimiter.is_some()),
            auth_file: self.auth_file.clone(),
            tls_certificate: self.tls_certificate.clone(),
            tls_key: self.tls_key.clone(),
            tls_client_ca: self.tls_client_ca.clone(),
            tls_verify: self.tls_verify.clone(),
            tls_min_version: self.tls_min_version.clone(),
            tls_ciphers: self.tls_ciphers.clone(),
            tls_session_cache: yes(self.tls_session_cache),
            tls_buffer: self.tls_buffer,
            data_dir: self.data_dir.clone(),
            memory_file: self.memory_file.clone(),
            flash: self.flash.clone(),
            flash_size: self.flash_size,
            format_flash: yes(self.format_flash),
            flash_object_size: self.flash_object_size,
            admission: self.admission.clone().map(AdmissionSetting::Name),
            admission_objective: self.admission_objective,
            applications: None,
            endurance_tbw: self.endurance_tbw,
            endurance_dwpd: self.endurance_dwpd,
            endurance_years: self.endurance_years,
            endurance_warranty_years: self.endurance_warranty_years,
            drive_capacity: self.drive_capacity,
            device_write_amplification: self.device_write_amplification,
            burst_hours: self.burst_hours,
            first_fill: self.no_first_fill.then_some(false),
            clock_bits: self.clock_bits,
            clock_mode: self.clock_mode.clone(),
            io: self.io.clone(),
            record: self.record.clone(),
            record_limit: self.record_limit,
            capture: self.capture.clone(),
            capture_share: self.capture_share,
            http: self.http.clone(),
            http_host: self.http_host.clone(),
            user: self.user.clone(),
            pidfile: self.pidfile.clone(),
            lock_memory: yes(self.lock_memory),
            enable_coredumps: yes(self.enable_coredumps),
            log_level: crate::log::of_flags(self.verbose).map(str::to_owned),
            log_format: self.log_format.clone(),
        };
        let (extended, mut ignored) = extended_options(&self.extended).map_err(usage)?;
        for (given, name) in [
            (self.slab_growth_factor.is_some(), "slab-growth-factor"),
            (self.slab_min_size.is_some(), "slab-min-size"),
            (self.enable_largepages, "enable-largepages"),
        ] {
            if given {
                ignored.push(name.to_owned());
            }
        }
        let file = match &self.config {
            Some(path) => Settings::read(path).map_err(usage)?,
            None => Settings::default(),
        };
        let settings = flags.or(extended).or(file);
        if self.enable_ssl && (settings.tls_certificate.is_none() || settings.tls_key.is_none()) {
            return Err(CliError::Usage(
                "enable-ssl: needs a certificate and its key; give --tls-certificate FILE --tls-key FILE, or \
                 -o ssl_chain_cert=FILE,ssl_key=FILE"
                    .into(),
            ));
        }
        Ok(Given { settings, ignored })
    }
}

/// memcached's `-m` counts MiB; a number with a unit is a size.
fn megabytes(text: &str) -> Result<ByteSize, CliError> {
    let plain = text.bytes().all(|b| b.is_ascii_digit());
    let size = if plain { format!("{text}m").parse() } else { text.parse::<ByteSize>() };
    size.map_err(|_| {
        CliError::Usage(format!(
            "memory-limit '{text}': write a number of MiB (64) or a size with a unit (4g)"
        ))
    })
}
