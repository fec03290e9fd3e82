//! What an operator may set, in one list: the flags of `larder kv`, the keys of its file, and what `--print-config` and
//! docs/kv-settings.md show. [`Config::resolve`](super::Config::resolve) completes and checks it.

use std::path::PathBuf;

use clap::ArgAction::SetFalse;
use larder_base::ByteSize;
use larder_engine::kv::ClockMode;
use larder_engine::kv::node::defaults;
use larder_policy::admission::{AdmissionConfig, Objective};
use larder_settings::{
    DriveLife, LivePage, Log, Misplaced, Recording, SettingsList, Table, Tls, default_is,
};
use serde::Serialize;

use super::ApplicationsTable;
use super::tables::{self, AdmissionSetting};
use super::{BUFFER_LIMIT, CaptureConfig, DEFAULT_HTTP, DEFAULT_PORT};

/// What a read does to a rank unless it is stated.
const CLOCK_MODE: &str = match defaults::CLOCK_MODE {
    ClockMode::SetMax => "set-max",
    ClockMode::Increment => "increment",
};
/// Bits of rank that the engine's largest rank takes.
const CLOCK_BITS: u8 = defaults::CLOCK_MAX.ilog2() as u8 + 1;

/// What an operator says. What is `None` is made from the machine, or from other settings.
#[derive(Clone, Debug, PartialEq, clap::Args, Serialize)]
#[command(
    mut_arg("http", |arg| default_is(arg, DEFAULT_HTTP)),
    mut_arg("port", |arg| default_is(arg, &format!("{DEFAULT_PORT}, none beside a Unix socket"))),
    mut_arg("flash_object_size", |arg| {
        let usual = ByteSize(defaults::OBJECT_SIZE.into());
        default_is(arg, &format!("{usual}; if that index does not fit the memory, the least that does"))
    }),
    mut_arg("admission", |arg| default_is(arg, AdmissionConfig::default().policy.as_str())),
    mut_arg("admission_objective", |arg| default_is(arg, Objective::default().as_str())),
    mut_arg("buffer_limit", |arg| {
        default_is(arg, &format!("{BUFFER_LIMIT}, at least two of the largest objects"))
    })
)]
#[serde(rename_all = "kebab-case")]
pub struct Settings {
    /// TCP port to listen on (0: none, -1: any free one)
    #[arg(
        short = 'p',
        long,
        value_name = "NUM",
        help_heading = "Network",
        allow_negative_numbers = true
    )]
    pub port: Option<i32>,
    /// Address to listen on: host, host:port or [v6]:port, comma separated; before it notls: for a plain port beside
    /// TLS ones, btls: for TLS without clients' certificates, mtls: for TLS that requires them, app=NAME: for requests that all belong to the application NAME, whatever the keys' prefixes say [default: $LARDER_LISTEN, all
    /// addresses in a pod of Kubernetes, else 127.0.0.1,::1]
    #[arg(short = 'l', long, value_name = "ADDR", help_heading = "Network", value_delimiter = ',')]
    pub listen: Option<Vec<String>>,
    /// Unix socket to listen on (instead of TCP, unless a port is given too)
    #[arg(short = 's', long, value_name = "PATH", help_heading = "Network")]
    pub unix_socket: Option<PathBuf>,
    /// Permissions of the Unix socket, octal
    #[arg(
        short = 'a',
        long,
        value_name = "MASK",
        help_heading = "Network",
        default_value = "0700"
    )]
    pub unix_mask: String,
    /// UDP port to serve too (0: none, -1: any free one); without a TCP port it is that one too
    #[arg(
        short = 'U',
        long,
        value_name = "NUM",
        help_heading = "Network",
        default_value_t = 0,
        allow_negative_numbers = true
    )]
    pub udp_port: i32,
    /// Most connections at a time
    #[arg(short = 'c', long, value_name = "NUM", help_heading = "Network", default_value_t = 1024)]
    pub conn_limit: u32,
    /// Connections that may wait to be accepted
    #[arg(short = 'b', long, value_name = "NUM", help_heading = "Network", default_value_t = 1024)]
    pub listen_backlog: u32,
    /// Leave connections over the limit waiting instead of refusing them with an error
    #[arg(long = "no-maxconns-fast", help_heading = "Network", action = SetFalse)]
    pub maxconns_fast: bool,
    /// Close connections that are silent for this many seconds (0: never)
    #[arg(long, value_name = "SECONDS", help_heading = "Network", default_value_t = 0)]
    pub idle_timeout: u32,
    /// Protocol: ascii or auto; binary, which is not spoken, tells every client so and closes
    #[arg(
        short = 'B',
        long,
        value_name = "NAME",
        help_heading = "Network",
        default_value = "auto"
    )]
    pub protocol: String,
    /// Clients must authenticate by a first set: a file of user:password lines
    #[arg(short = 'Y', long, value_name = "FILE", help_heading = "Network")]
    pub auth_file: Option<PathBuf>,

    /// Certificate, key and authorities.
    #[command(flatten)]
    #[serde(flatten)]
    pub tls: Tls,
    /// Whether clients must show a certificate that --tls-client-ca signed: none, request (whoever shows one must show a good
    /// one), require [default: require with --tls-client-ca, else none]
    #[arg(long, value_name = "WHO", help_heading = "TLS")]
    pub tls_verify: Option<String>,
    /// Lowest version of TLS: 1.2 or 1.3 [default: 1.2]
    #[arg(long, value_name = "VERSION", help_heading = "TLS")]
    pub tls_min_version: Option<String>,
    /// Cipher suites of TLS 1.2, by OpenSSL's names, separated by colons; those of TLS 1.3 are always on [default: all six]
    #[arg(long, value_name = "LIST", help_heading = "TLS")]
    pub tls_ciphers: Option<String>,
    /// Let TLS clients resume their sessions
    #[arg(long, help_heading = "TLS")]
    pub tls_session_cache: bool,
    /// Bytes that TLS may hold for a connection that does not take its answers
    #[arg(long, value_name = "SIZE", help_heading = "TLS", default_value = "16k")]
    pub tls_buffer: ByteSize,

    /// DRAM for objects and the flash index: MiB, or a size such as 4g; a file's number counts bytes [default: an eighth of
    /// the memory]
    #[arg(
        short = 'm',
        long,
        value_name = "SIZE",
        help_heading = "Cache",
        value_parser = megabytes,
        allow_negative_numbers = true
    )]
    pub memory_limit: Option<ByteSize>,
    /// Largest object: bytes, or a size such as 2m, from 1k to 128m
    #[arg(
        short = 'I',
        long,
        value_name = "SIZE",
        help_heading = "Cache",
        default_value_t = ByteSize(defaults::MAX_ITEM.into())
    )]
    pub max_item_size: ByteSize,
    /// DRAM for large requests being received and large replies being sent, each, beyond 16 KiB per connection
    #[arg(long, value_name = "SIZE", help_heading = "Cache")]
    pub buffer_limit: Option<ByteSize>,
    /// Answer an error when memory is full instead of evicting
    #[arg(short = 'M', long, help_heading = "Cache")]
    pub disable_evictions: bool,
    /// Keep what is in DRAM over a restart: a stop in good order writes FILE and FILE.meta, the next start on the same data
    /// directory reads them (what is on flash is kept without it)
    #[arg(short = 'e', long, value_name = "FILE", help_heading = "Cache")]
    pub memory_file: Option<PathBuf>,
    /// Leave expired objects in DRAM until they are asked for or evicted, instead of removing them in the background (clients'
    /// lru_crawler enable and disable change it)
    #[arg(long = "no-lru-crawler", help_heading = "Cache", action = SetFalse)]
    pub lru_crawler: bool,
    /// Disable the flush_all command
    #[arg(short = 'F', long, help_heading = "Cache")]
    pub disable_flush_all: bool,
    /// Disable the listing of keys (lru_crawler metadump, mgdump) and stats detail
    #[arg(short = 'X', long, help_heading = "Cache")]
    pub disable_dumping: bool,
    /// Disable the watch command
    #[arg(short = 'W', long, help_heading = "Cache")]
    pub disable_watch: bool,
    /// Log lines that are held for each connection that watches; beyond, they are skipped and counted
    #[arg(long, value_name = "SIZE", help_heading = "Cache", default_value = "256k")]
    pub watcher_logbuf_size: ByteSize,
    /// Log lines that are held for each worker thread until its turn ends; beyond, they are dropped and counted
    #[arg(long, value_name = "SIZE", help_heading = "Cache", default_value = "64k")]
    pub worker_logbuf_size: ByteSize,
    /// Give objects no CAS: gets shows 0, and cas finds no match
    #[arg(short = 'C', long, help_heading = "Cache")]
    pub disable_cas: bool,
    /// Enable the shutdown command
    #[arg(short = 'A', long, help_heading = "Cache")]
    pub enable_shutdown: bool,
    /// Character that ends the prefix of a key, for `stats detail` (turned on by this flag, not by a file) and applications
    #[arg(
        short = 'D',
        long,
        value_name = "CHAR",
        help_heading = "Cache",
        visible_alias = "app-delimiter",
        default_value = ":"
    )]
    pub prefix_delimiter: String,
    /// Count requests by prefix from the start (a client's `stats detail on` turns it on later)
    #[arg(long, help_heading = "Cache")]
    pub stats_detail: bool,
    /// Accept the debugtime command, which moves the clock: for test suites
    #[arg(long, hide = true)]
    pub enable_debugtime: bool,

    /// Where state is kept: lock file, checkpoint, and the flash file unless --flash names another [default:
    /// the folder of -o ext_path's file, $STATE_DIRECTORY, /var/lib/larder as root, else ~/.local/state/larder]
    #[arg(long, value_name = "DIR", help_heading = "Flash")]
    pub data_dir: Option<PathBuf>,
    /// File or block device used as flash; none for DRAM alone; given again, a further drive [default: DATA-DIR/flash; none if no directory is named and the usual one cannot be written]
    #[arg(long, value_name = "PATH", help_heading = "Flash")]
    pub flash: Option<Vec<PathBuf>>,
    /// Bytes of flash to use, of each drive in their order [default: all of what exists, else a quarter of the free space, at most 64g]
    #[arg(long, value_name = "SIZE", help_heading = "Flash")]
    pub flash_size: Option<Vec<ByteSize>>,
    /// Format the flash whatever it holds, a file with another --flash-size too: everything on it is lost
    #[arg(long, help_heading = "Flash")]
    pub format_flash: bool,
    /// Mean size of an object on flash (key, value, header), for which the index is sized at first: a hint, since the index follows the
    /// objects that come
    #[arg(long, value_name = "SIZE", help_heading = "Flash")]
    pub flash_object_size: Option<ByteSize>,
    /// Which objects go to flash: flashiness, flashiness_paper, expected_reads, ghost, reject_first, probability, write_rate or all;
    /// a file may have a table instead, with the policy's parameters
    #[arg(long, value_name = "POLICY", help_heading = "Flash")]
    pub admission: Option<AdmissionSetting>,
    /// Which hits are sought, by expected_reads, and by flashiness where a write budget is held: requests or bytes
    #[arg(long, value_name = "WHICH", help_heading = "Flash")]
    pub admission_objective: Option<Objective>,
    /// How many bits of rank each object has: 1 or 2
    #[arg(long, value_name = "N", help_heading = "Flash", default_value_t = CLOCK_BITS)]
    pub clock_bits: u8,
    /// What a read does to an object's rank: set-max (LRU-like) or increment (MFU-like)
    #[arg(long, value_name = "HOW", help_heading = "Flash", default_value = CLOCK_MODE)]
    pub clock_mode: String,
    /// How flash is read: auto, uring or threads
    #[arg(long, value_name = "HOW", help_heading = "Flash", default_value = "auto")]
    pub io: String,

    /// The drive's life.
    #[command(flatten)]
    #[serde(flatten)]
    pub drive: DriveLife,

    /// Worker threads [default: the number of processors, at most 4]
    #[arg(short = 't', long, value_name = "NUM", help_heading = "Process")]
    pub threads: Option<usize>,
    /// Most requests taken from one connection before their answers are sent and others have their turn (16 KiB of answers end
    /// a turn as well)
    #[arg(short = 'R', long, value_name = "NUM", help_heading = "Process", default_value_t = 1000)]
    pub max_reqs_per_event: u32,
    /// User to run as when started by root
    #[arg(short = 'u', long, value_name = "USER", help_heading = "Process")]
    pub user: Option<String>,
    /// Write the process id to a file
    #[arg(short = 'P', long, value_name = "FILE", help_heading = "Process")]
    pub pidfile: Option<PathBuf>,
    /// Keep all memory from being swapped out
    #[arg(short = 'k', long, help_heading = "Process")]
    pub lock_memory: bool,
    /// Raise the limit on core dumps
    #[arg(short = 'r', long, help_heading = "Process")]
    pub enable_coredumps: bool,

    /// The live page.
    #[command(flatten)]
    #[serde(flatten)]
    pub live_page: LivePage,
    /// The log.
    #[command(flatten)]
    #[serde(flatten)]
    pub log: Log,
    /// Recording.
    #[command(flatten)]
    #[serde(flatten)]
    pub recording: Recording,
    /// Capture the requests of a sample of the keys, hashed, in a new file: a trace for larder trace and larder sim
    #[arg(long, value_name = "FILE", help_heading = "Recording")]
    pub capture: Option<PathBuf>,
    /// Share of the keys whose requests are captured
    #[arg(long, value_name = "SHARE", help_heading = "Recording", default_value_t = 0.01)]
    pub capture_share: f64,

    /// Applications' shares, which a file alone can say.
    #[arg(skip)]
    pub applications: ApplicationsTable,
}

impl Default for Settings {
    fn default() -> Settings {
        larder_settings::defaults()
    }
}

impl SettingsList for Settings {
    const COMMAND: &'static str = "larder kv";
    const TABLES: &'static [Table] = tables::TABLES;

    fn read_tables(&mut self, text: &str) -> Result<(), Misplaced> {
        let found = tables::Tables::read(text)?;
        if let Some(table) = found.admission {
            let named = self.admission.take();
            self.admission = Some(match named {
                Some(named) => named.over(&table),
                None => table,
            });
        }
        if let Some(table) = found.applications {
            let delimiter = self.prefix_delimiter.bytes().next().unwrap_or(b':');
            tables::check_shares(text, &table, delimiter)?;
            self.applications = table;
        }
        Ok(())
    }

    /// memcached's flag counts MiB, the file bytes.
    fn number(key: &str, number: i64) -> String {
        if key == "memory-limit" { format!("{number} B") } else { number.to_string() }
    }

    fn print_table(out: &mut String, key: &str, table: &toml::Table) {
        tables::print(out, key, table);
    }
}

impl Settings {
    /// The settings as a configuration file, each under its description; keys without a value are commented out.
    pub fn print(&self) -> String {
        larder_settings::print::<Settings>(&toml::Table::try_from(self).unwrap_or_default())
    }

    /// What is to be captured.
    pub(super) fn capture(&self) -> Option<CaptureConfig> {
        let share = self.capture_share;
        self.capture.clone().map(|file| CaptureConfig { file, share })
    }
}

/// memcached's `-m` counts MiB; a number with a unit is a size.
fn megabytes(text: &str) -> Result<ByteSize, String> {
    let text = text.trim();
    let plain = text.bytes().all(|b| b.is_ascii_digit());
    let size = if plain { format!("{text}m").parse() } else { text.parse::<ByteSize>() };
    size.map_err(|_| "write a number of MiB (64) or a size with a unit (4g)".to_owned())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use larder_settings::SettingsError;

    use super::*;

    fn parse(text: &str) -> Result<Settings, SettingsError> {
        larder_settings::of_file(text, Path::new("x"))
    }

    #[test]
    fn a_misspelt_key_is_told_the_nearest() {
        let said = |text| parse(text).unwrap_err().to_string();
        let text = said("port = 1\nmemory-limt = '1g'\n");
        assert!(
            text.contains("line 2: 'memory-limt': is no setting; there is 'memory-limit'"),
            "{text}"
        );
        let text = said("nothing-of-the-kind = 1\n");
        assert!(text.contains("nothing-of-the-kind") && !text.contains("there is"), "{text}");
    }

    #[test]
    fn what_is_printed_reads_back() {
        let settings = Settings {
            listen: Some(vec!["127.0.0.1".into(), "[::1]:11212".into()]),
            memory_limit: Some(ByteSize::mib(64)),
            drive: DriveLife { endurance_years: 7.0, ..DriveLife::default() },
            unix_mask: "0770".into(),
            enable_shutdown: true,
            maxconns_fast: false,
            ..Settings::default()
        };
        let text = settings.print();
        assert_eq!(parse(&text).unwrap(), settings, "{text}");
        assert!(text.contains("# tls-key =\n"), "{text}");
    }

    #[test]
    fn errors_name_key_and_line() {
        let path = Path::new("/etc/l.toml");
        let read = larder_settings::of_file::<Settings>("port = 1\n\nprot = 2\n", path);
        let e = read.unwrap_err().to_string();
        assert!(e.contains("'/etc/l.toml' line 3") && e.contains("prot"), "{e}");
        assert!(!e.contains('\n'), "{e}");
        let e = parse("threads = 1\nport = \"x\"\n").unwrap_err().to_string();
        assert!(e.contains("line 2") && e.contains("port"), "{e}");
        let e = parse("memory-limit = \"12q\"\n").unwrap_err().to_string();
        assert!(e.contains("line 1"), "{e}");
    }

    #[test]
    fn tables_are_read_and_printed() {
        let text = "prefix-delimiter = \"/\"\n[admission]\npolicy = \"ghost\"\n[admission.ghost]\nreads = 3\n\
                    [admission.flashiness.training]\nclass_weights = { positive = 0.5 }\n\
                    [applications.shares.web]\nfloor = 0.2\nceiling = 0.5\n[applications.shares.\"a b:\"]\nfloor = 0.1\n";
        let settings = parse(text).unwrap();
        assert_eq!(settings.applications.shares["web"].ceiling, 0.5);
        let printed = settings.print();
        assert_eq!(parse(&printed).unwrap(), settings, "{printed}");
        assert!(printed.contains("holdout = 0.2\n"), "{printed}");
        let named = parse("admission = \"all\"\n").unwrap();
        assert_eq!(parse(&named.print()).unwrap(), named);
    }

    #[test]
    fn the_objective_is_a_setting_of_its_own() {
        let text = "admission-objective = \"bytes\"\n[admission.flashiness]\nprice = 0.5\n";
        let settings = parse(text).unwrap();
        assert_eq!(settings.admission_objective, Some(Objective::Bytes));
        assert_eq!(parse(&settings.print()).unwrap(), settings);
        let wrong = parse("admission-objective = \"hits\"\n");
        let e = wrong.unwrap_err().to_string();
        assert!(e.contains("line 1") && e.contains("hits"), "{e}");
    }

    /// What the admission table has too is said by one key alone, and printed once.
    #[test]
    fn one_setting_has_one_key() {
        for (text, line, instead) in [
            ("[admission]\npolicy = \"ghost\"\nfirst_fill = false\n", 3, "first-fill"),
            ("[admission.flashiness]\nobjective = \"bytes\"\n", 2, "admission-objective"),
            ("admission = { first_fill = true }\n", 1, "first-fill"),
            ("admission.flashiness.objective = \"bytes\"\n", 1, "admission-objective"),
        ] {
            let e = parse(text).unwrap_err().to_string();
            let said = format!("is said by '{instead}'");
            assert!(e.contains(&format!("line {line}")) && e.contains(&said), "{text}: {e}");
        }
        let text =
            "first-fill = false\nadmission-objective = \"bytes\"\n[admission]\nmin_ttl = 5\n";
        let printed = parse(text).unwrap().print();
        let keys = |key: &str| printed.lines().filter(|l| l.starts_with(key)).count();
        assert_eq!((keys("first-fill ="), keys("first_fill =")), (1, 0), "{printed}");
        assert_eq!((keys("admission-objective ="), keys("objective =")), (1, 0), "{printed}");
    }

    #[test]
    fn wrong_parameters_name_key_and_line() {
        for (text, line, words) in [
            ("[admission]\npolcy = \"all\"\n", 2, "polcy"),
            ("[admission.ghost]\n\nreads = 0\n", 3, "admission.ghost.reads is 0"),
            ("[admission.ghost]\nreads = -1\n", 2, "reads"),
            ("[admission.flashiness.training]\nlambda = 7\n", 2, "at most 1"),
            ("[applications.shares.web]\nflor = 0.2\n", 2, "flor"),
            ("[applications.shares.web]\nfloor = 0.5\nceiling = 0.2\n", 2, "above the ceiling"),
            ("[applications.shares.web]\nceiling = 1.5\n", 2, "between 0 and 1"),
            (
                "[applications.shares.a]\nfloor = 0.6\n[applications.shares.b]\nfloor = 0.6\n",
                1,
                "add up",
            ),
            ("port = 1\n[applications.shares.\"a:b\"]\nfloor = 0.1\n", 1, "a:b"),
        ] {
            let e = parse(text).unwrap_err().to_string();
            assert!(e.contains(&format!("line {line}")) && e.contains(words), "{text}: {e}");
            assert!(!e.contains('\n'), "{e}");
        }
    }

    #[test]
    fn upper_sources_win() {
        let upper = [("port", "1"), ("maxconns-fast", "true")];
        let lower =
            [("port", "2"), ("threads", "3"), ("maxconns-fast", "false"), ("stats-detail", "true")];
        let both: Settings = larder_settings::of_sources(&[&upper, &lower]).unwrap();
        assert_eq!((both.port, both.threads), (Some(1), Some(3)));
        assert_eq!((both.maxconns_fast, both.stats_detail), (true, true));
    }

    #[test]
    fn a_number_of_memory_counts_mib_as_a_flag_and_bytes_in_a_file() {
        let flags: Settings = larder_settings::of_sources(&[&[("memory-limit", "64")]]).unwrap();
        assert_eq!(flags.memory_limit, Some(ByteSize::mib(64)));
        let file = parse("memory-limit = 67108864\n").unwrap();
        assert_eq!(file.memory_limit, Some(ByteSize::mib(64)));
        // memcached reads numbers by strtol, which skips white space.
        for text in [" 64", "64 ", "\t64m", " 65536k"] {
            assert_eq!(megabytes(text), Ok(ByteSize::mib(64)), "'{text}'");
        }
    }
}
