//! What an operator may set, in one list: each setting is a key of the configuration file and a long flag of the same
//! name. [`Settings`] holds what one source (flags, `-o`, file) said; sources are laid over each other with
//! [`Settings::or`] and completed into a [`Config`](super::Config).

use std::path::{Path, PathBuf};

use larder_base::ByteSize;
use larder_policy::admission::Objective;
use serde::{Deserialize, Serialize};

use super::ConfigError;
use super::tables::{self, AdmissionSetting, ApplicationsTable};

macro_rules! settings {
    ($( $(#[doc = $doc:literal])+ $name:ident : $ty:ty ),* $(,)?) => {
        /// What one source of configuration says; `None` where it is silent.
        #[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
        #[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
        pub struct Settings {
            $( $(#[doc = $doc])+ #[serde(skip_serializing_if = "Option::is_none")] pub $name: Option<$ty>, )*
        }

        impl Settings {
            fn fill(self, lower: Settings) -> Settings {
                Settings { $( $name: self.$name.or(lower.$name), )* }
            }

            /// Every key (as the file spells it) with its description, in the order of the list.
            pub const KEYS: &'static [(&'static str, &'static [&'static str])] =
                &[ $( (stringify!($name), &[$($doc),+]), )* ];
        }
    };
}

settings! {
    /// Addresses to listen on: host, host:port or [v6]:port; notls: before it for a plain port beside TLS ones, btls: for TLS
    /// that asks clients for no certificate, mtls: for TLS that requires one. After app=NAME: all that comes in there belongs to the application NAME, whatever the keys' prefixes say.
    listen: Vec<String>,
    /// TCP port; 0 for no TCP, -1 for one that the system chooses.
    port: i32,
    /// UDP port; 0 for no UDP, -1 for one that the system chooses. Without an explicit port it is also the TCP port.
    udp_port: i32,
    /// Protocol: ascii or auto; binary is accepted and its clients are told that it is not spoken.
    protocol: String,
    /// Path of a Unix socket. Without an explicit port it takes the place of TCP.
    unix_socket: PathBuf,
    /// Permissions of the Unix socket, octal.
    unix_mask: String,
    /// Connections that may wait to be accepted.
    listen_backlog: u32,
    /// Most connections at a time.
    conn_limit: u32,
    /// Refuse a connection over the limit with an error, instead of leaving it to wait.
    maxconns_fast: bool,
    /// Close a connection that has been silent for this many seconds; 0 for never.
    idle_timeout: u32,
    /// Worker threads.
    threads: usize,
    /// Requests taken from one connection before their answers are sent and the others have their turn (16 KiB of
    /// answers end a turn as well).
    max_reqs_per_event: u32,
    /// DRAM for objects and the flash index.
    memory_limit: ByteSize,
    /// Largest object.
    max_item_size: ByteSize,
    /// DRAM for requests being received and replies being sent, each, beyond 16 KiB per connection.
    buffer_limit: ByteSize,
    /// Answer an error when DRAM is full, instead of evicting.
    disable_evictions: bool,
    /// Refuse flush_all.
    disable_flush_all: bool,
    /// Refuse to list keys (lru_crawler metadump and mgdump) and to count by prefix (stats detail).
    disable_dumping: bool,
    /// Give objects no CAS: it is 0, and what compares it finds no match.
    disable_cas: bool,
    /// Refuse the watch command.
    disable_watch: bool,
    /// Log lines that are held for each connection that watches; beyond, they are skipped and counted.
    watcher_logbuf_size: ByteSize,
    /// Log lines that are held for each worker thread until its turn ends; beyond, they are dropped and counted.
    worker_logbuf_size: ByteSize,
    /// Remove expired objects from DRAM in the background (lru_crawler enable and disable change it while serving).
    lru_crawler: bool,
    /// Accept the shutdown command.
    enable_shutdown: bool,
    /// Accept the debugtime command, which moves the clock (for test suites only).
    enable_debugtime: bool,
    /// What ends the prefix of a key: for `stats detail`, and for telling applications apart.
    prefix_delimiter: String,
    /// Count requests by prefix from the start (`stats detail on` turns it on later).
    stats_detail: bool,
    /// File of user:password lines; clients must authenticate by a first set.
    auth_file: PathBuf,
    /// Certificate chain, PEM: turns TLS on for TCP.
    tls_certificate: PathBuf,
    /// Private key of the certificate, PEM.
    tls_key: PathBuf,
    /// CA certificates, PEM: clients must show a certificate that one of them signed.
    tls_client_ca: PathBuf,
    /// Whether clients must show a certificate that tls-client-ca signed: none, request (whoever shows one must show a good
    /// one) or require. Without it: require where there is a tls-client-ca.
    tls_verify: String,
    /// The lowest version of TLS: 1.2 or 1.3.
    tls_min_version: String,
    /// Cipher suites of TLS 1.2, by OpenSSL's names, separated by colons (those of TLS 1.3 are always on).
    tls_ciphers: String,
    /// Let TLS clients resume their sessions.
    tls_session_cache: bool,
    /// Bytes that TLS may hold for a connection that does not take its answers.
    tls_buffer: ByteSize,
    /// Where Larder keeps its state: lock file, checkpoint, and the flash file unless `flash` names another.
    data_dir: PathBuf,
    /// File that keeps what is in DRAM over a restart, with FILE.meta beside it: both are written by a stop in good order. (What is
    /// on flash is kept without it.)
    memory_file: PathBuf,
    /// File or block device that is the flash; "none" for DRAM alone.
    flash: PathBuf,
    /// Bytes of flash to use (a file is created at this size; a device is used whole unless told otherwise).
    flash_size: ByteSize,
    /// Format the flash whatever it holds: what is on it is lost.
    format_flash: bool,
    /// Mean size of an object on flash (key, value, header), for which the flash index is sized.
    flash_object_size: ByteSize,
    /// Which objects go to flash: flashiness, flashiness_paper, ghost, reject_first, probability, write_rate, all; or a
    /// table that has the policy's parameters too.
    admission: AdmissionSetting,
    /// Which hits flashiness seeks where a write budget or a rate is held: requests or bytes.
    admission_objective: Objective,
    /// Shares of the cache by application (the prefix of a key; "default" for keys without one, "other" beyond 255):
    /// [applications.shares.NAME] with floor, below which others cannot evict it, and ceiling, above which it does not
    /// grow, as fractions of the cache.
    applications: ApplicationsTable,
    /// Rated endurance of the flash in terabytes written.
    endurance_tbw: f64,
    /// Rated endurance of the flash in drive writes per day over its warranty, instead of terabytes written.
    endurance_dwpd: f64,
    /// Years that the flash should last.
    endurance_years: f64,
    /// Years of warranty that endurance-dwpd is stated for.
    endurance_warranty_years: f64,
    /// Capacity of the whole drive, to which endurance-dwpd refers; without it, the flash given to the cache.
    drive_capacity: ByteSize,
    /// Bytes that the drive is expected to program on NAND for each byte written to it.
    device_write_amplification: f64,
    /// Hours of write budget that may be saved up for a burst.
    burst_hours: f64,
    /// Let an empty cache be filled once, ahead of the write budget and with what admission would turn away.
    first_fill: bool,
    /// Bits of CLOCK per object: how many reads deep an object's rank may grow (1 or 2).
    clock_bits: u8,
    /// What a read does to an object's rank: set-max (to the highest, as LRU) or increment (one up, as MFU).
    clock_mode: String,
    /// How flash is read: auto, uring, threads.
    io: String,
    /// File to record the run in, for `larder sim replay`; it must not be there yet, and the cache must be empty.
    record: PathBuf,
    /// Bytes at which recording ends.
    record_limit: ByteSize,
    /// File to capture a sample of the requests in, as a trace; it must not be there yet.
    capture: PathBuf,
    /// Share of the keys whose requests are captured.
    capture_share: f64,
    /// Address of the live page and of /metrics; "off" for none.
    http: String,
    /// Names by which the live page is asked for, beside localhost and addresses; "*" for any.
    http_host: Vec<String>,
    /// User to run as when started by root.
    user: String,
    /// File to write the process id to.
    pidfile: PathBuf,
    /// Keep all memory from being swapped out.
    lock_memory: bool,
    /// Raise the limit on core dumps.
    enable_coredumps: bool,
    /// Log level: error, warn, info, debug, trace, or all (what libraries say too). RUST_LOG and -v win over it.
    log_level: String,
    /// Log format: text, json.
    log_format: String,
}

impl Settings {
    /// These settings, and where they are silent those of `lower`. A policy's name alone keeps the parameters that
    /// `lower` has for it.
    #[must_use]
    pub fn or(mut self, lower: Settings) -> Settings {
        self.admission = self.admission.map(|a| a.over(lower.admission.as_ref()));
        self.fill(lower)
    }

    /// Reads a configuration file.
    ///
    /// # Errors
    /// [`ConfigError::Read`] when it cannot be read, [`ConfigError::Parse`] naming key and line when it says something
    /// that is not a setting.
    pub fn read(path: &Path) -> Result<Settings, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Settings::parse(&text, path)
    }

    /// Reads the text of a configuration file; `path` is for the message.
    ///
    /// # Errors
    /// [`ConfigError::Parse`].
    pub fn parse(text: &str, path: &Path) -> Result<Settings, ConfigError> {
        let settings: Settings = toml::from_str(text).map_err(|e| {
            let line =
                e.span().map_or(1, |s| 1 + text[..s.start.min(text.len())].matches('\n').count());
            // The parser's message is one line for an unknown key (it lists every key); only its first clause is kept.
            let message = e.message().lines().next().unwrap_or("cannot be read").to_owned();
            let message = message.split(", expected one of").next().unwrap_or("").to_owned();
            let key = text
                .lines()
                .nth(line - 1)
                .unwrap_or("")
                .split('=')
                .next()
                .unwrap_or("")
                .trim()
                .to_owned();
            let message = match nearest(&key, e.message()) {
                Some(near) => format!("is no setting; there is '{near}'"),
                None => message,
            };
            ConfigError::Parse { path: path.to_owned(), line, key, message }
        })?;
        // What the tables say is checked here, where the line is known.
        let refused = |(table, key): (String, String), message: String| ConfigError::Parse {
            path: path.to_owned(),
            line: tables::line_of(text, &table, &key),
            key,
            message,
        };
        if let Some((table, key, instead)) = tables::stands_elsewhere(text) {
            let message =
                format!("is said by '{instead}', above all tables: write '{instead} =' there");
            return Err(refused((table.to_owned(), key.to_owned()), message));
        }
        if let Some(table @ AdmissionSetting::Table(_)) = &settings.admission {
            table.resolve().map_err(|e| refused(tables::place_of_admission(&e), e.to_string()))?;
        }
        if let Some(table) = &settings.applications {
            let delimiter = settings.prefix_delimiter.as_deref().unwrap_or(":");
            let delimiter = delimiter.bytes().next().unwrap_or(b':');
            table
                .resolve(delimiter)
                .map_err(|e| refused(tables::place_of_share(&e), e.to_string()))?;
        }
        Ok(settings)
    }

    /// The settings as a configuration file, each under its description; keys without a value are commented out.
    pub fn print(&self) -> String {
        let table = toml::Table::try_from(self).unwrap_or_default();
        let mut out = String::from(
            "# The effective configuration of `larder kv`, as --config FILE reads it. `larder kv --help` shows the flags.\n",
        );
        // TOML wants tables after all else.
        let is_table = |name: &str| matches!(name, "admission" | "applications");
        let (last, first): (Vec<_>, Vec<_>) =
            Settings::KEYS.iter().partition(|(name, _)| is_table(name));
        for (name, doc) in first.into_iter().chain(last) {
            let key = name.replace('_', "-");
            out.push('\n');
            for line in doc.iter() {
                out.push('#');
                out.push_str(line);
                out.push('\n');
            }
            match table.get(&key) {
                Some(toml::Value::Table(below)) => tables::print(&mut out, &key, below),
                Some(value) => out.push_str(&format!("{key} = {value}\n")),
                None => out.push_str(&format!("# {key} =\n")),
            }
        }
        out
    }
}

/// The setting whose name is next to `key`, of those that the parser says it knows there, if one is near: at most a third of
/// it is to be changed.
fn nearest(key: &str, message: &str) -> Option<String> {
    let (_, known) = message.strip_prefix("unknown field")?.split_once(", expected")?;
    let names = known.split('`').skip(1).step_by(2);
    let (far, name) = names.map(|name| (changes(key, name), name)).min()?;
    (far * 3 <= name.len()).then(|| name.to_owned())
}

/// Letters to add, remove or replace to make `b` of `a` (Levenshtein's distance, by Wagner and Fischer's table, row by row).
fn changes(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.chars().enumerate() {
            let replaced = corner + usize::from(x != y);
            corner = row[j + 1];
            row[j + 1] = replaced.min(corner + 1).min(row[j] + 1);
        }
    }
    row[b.chars().count()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_key_is_told_the_nearest() {
        let said = |text| Settings::parse(text, Path::new("x")).unwrap_err().to_string();
        let text = said("port = 1\nmemory-limt = '1g'\n");
        assert!(
            text.contains("line 2: 'memory-limt': is no setting; there is 'memory-limit'"),
            "{text}"
        );
        let text = said("nothing-of-the-kind = 1\n");
        assert!(text.contains("nothing-of-the-kind") && !text.contains("there is"), "{text}");
        assert_eq!(changes("kitten", "sitting"), 3);
    }

    #[test]
    fn what_is_printed_reads_back() {
        let settings = Settings {
            listen: Some(vec!["127.0.0.1".into(), "[::1]:11212".into()]),
            memory_limit: Some(ByteSize::mib(64)),
            endurance_years: Some(5.0),
            unix_mask: Some("0700".into()),
            enable_shutdown: Some(true),
            ..Settings::default()
        };
        let text = settings.print();
        assert_eq!(Settings::parse(&text, Path::new("x")).unwrap(), settings, "{text}");
        assert!(text.contains("# tls-key =\n"), "{text}");
    }

    #[test]
    fn errors_name_key_and_line() {
        let e = Settings::parse("port = 1\n\nprot = 2\n", Path::new("/etc/l.toml"))
            .unwrap_err()
            .to_string();
        assert!(e.contains("'/etc/l.toml' line 3") && e.contains("prot"), "{e}");
        assert!(!e.contains('\n'), "{e}");
        let e = Settings::parse("threads = 1\nport = \"x\"\n", Path::new("l.toml"))
            .unwrap_err()
            .to_string();
        assert!(e.contains("line 2") && e.contains("port"), "{e}");
        let e = Settings::parse("memory-limit = \"12q\"\n", Path::new("l.toml"))
            .unwrap_err()
            .to_string();
        assert!(e.contains("line 1"), "{e}");
    }

    #[test]
    fn tables_are_read_and_printed() {
        let text = "prefix-delimiter = \"/\"\n[admission]\npolicy = \"ghost\"\n[admission.ghost]\nreads = 3\n\
                    [admission.flashiness.training]\nclass_weights = { positive = 0.5 }\n\
                    [applications.shares.web]\nfloor = 0.2\nceiling = 0.5\n[applications.shares.\"a b:\"]\nfloor = 0.1\n";
        let settings = Settings::parse(text, Path::new("x")).unwrap();
        assert_eq!(settings.applications.as_ref().unwrap().shares["web"].ceiling, 0.5);
        let printed = settings.print();
        assert_eq!(Settings::parse(&printed, Path::new("x")).unwrap(), settings, "{printed}");
        assert!(printed.contains("holdout = 0.2\n"), "{printed}");
        let named = Settings::parse("admission = \"all\"\n", Path::new("x")).unwrap();
        assert_eq!(Settings::parse(&named.print(), Path::new("x")).unwrap(), named);
    }

    #[test]
    fn the_objective_is_a_setting_of_its_own() {
        let text = "admission-objective = \"bytes\"\n[admission.flashiness]\nprice = 0.5\n";
        let settings = Settings::parse(text, Path::new("x")).unwrap();
        assert_eq!(settings.admission_objective, Some(Objective::Bytes));
        assert_eq!(Settings::parse(&settings.print(), Path::new("x")).unwrap(), settings);
        let wrong = Settings::parse("admission-objective = \"hits\"\n", Path::new("x"));
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
            let e = Settings::parse(text, Path::new("x")).unwrap_err().to_string();
            let said = format!("is said by '{instead}'");
            assert!(e.contains(&format!("line {line}")) && e.contains(&said), "{text}: {e}");
        }
        let text =
            "first-fill = false\nadmission-objective = \"bytes\"\n[admission]\nmin_ttl = 5\n";
        let printed = Settings::parse(text, Path::new("x")).unwrap().print();
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
            let e = Settings::parse(text, Path::new("l.toml")).unwrap_err().to_string();
            assert!(e.contains(&format!("line {line}")) && e.contains(words), "{text}: {e}");
            assert!(!e.contains('\n'), "{e}");
        }
    }

    #[test]
    fn upper_sources_win() {
        let flags = Settings { port: Some(1), ..Settings::default() };
        let file = Settings { port: Some(2), threads: Some(3), ..Settings::default() };
        let both = flags.or(file);
        assert_eq!((both.port, both.threads), (Some(1), Some(3)));
    }
}
