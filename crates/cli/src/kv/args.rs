//! The flags of `larder kv`: its settings, which a file may give too, and what only a command line can mean.

use std::path::{Path, PathBuf};

use clap::{ArgAction, Args as ClapArgs};
use larder_kv::config::{Settings, extended_options};
use larder_settings::WithFile;

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
  # As a chart of Kubernetes starts memcached (docs/charts.md):
  larder kv '-m 8192' -o modern,ext_path=/data/file:9G '-I 5m' '-c 16384'
  # Every setting with its description; admission's parameters and
  # applications' shares have no flag:
  larder kv --print-config > larder.toml
  larder kv --config larder.toml

SIZE is a number of bytes, or one with a unit: k, m, g, t (powers of 1024).";

/// Serve a memcached-compatible cache in DRAM and flash.
#[derive(Debug, ClapArgs)]
#[command(
    disable_version_flag = true,
    // As with getopt, what is said last holds: a chart's own arguments come after those that it makes.
    args_override_self = true,
    override_usage = "larder kv [OPTIONS]",
    after_help = EXAMPLES
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) list: WithFile<Settings>,
    /// Enable TLS on TCP (needs --tls-certificate and --tls-key, or -o ssl_chain_cert=FILE,ssl_key=FILE)
    #[arg(short = 'Z', long, help_heading = "TLS")]
    enable_ssl: bool,
    /// Run as a daemon; its log goes on in larder.log in the data directory, which is made if need be
    #[arg(short = 'd', long, help_heading = "Process")]
    pub(crate) daemon: bool,
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
    /// Accepted without effect: connections go to the worker threads in turn
    #[arg(short = 'N', long, value_name = "NUM", help_heading = "memcached's options")]
    napi_ids: Option<u32>,
    /// Refused. Hidden, since test suites look for the word in the help to learn whether there is SASL.
    #[arg(short = 'S', long, hide = true)]
    enable_sasl: bool,
}

/// What the flags and the file said.
pub(crate) struct Given {
    pub(crate) settings: Settings,
    /// memcached options that were accepted without effect.
    pub(crate) ignored: Vec<String>,
    /// The folder of the file that memcached's `ext_path` names as the flash.
    pub(crate) flash_folder: Option<PathBuf>,
}

/// The folder of a flash file: of what may become one. A device is in no folder where anything could be kept.
fn folder_of(flash: &Path) -> Option<PathBuf> {
    if flash.starts_with("/dev") || flash.metadata().is_ok_and(|found| !found.is_file()) {
        return None;
    }
    let folder = flash.parent()?;
    Some(if folder.as_os_str().is_empty() { ".".into() } else { folder.to_owned() })
}

impl Args {
    /// Flags over `-o` over the file.
    pub(crate) fn settings(&self) -> Result<Given, CliError> {
        if self.enable_sasl {
            return Err(CliError::Usage(
                "enable-sasl: SASL is of the binary protocol, which is not spoken; give --auth-file FILE with lines of \
                 user:password, or --tls-client-ca FILE"
                    .into(),
            ));
        }
        let extended =
            extended_options(&self.extended).map_err(|e| CliError::Usage(e.to_string()))?;
        let mut ignored = extended.ignored;
        for (given, name) in [
            (self.slab_growth_factor.is_some(), "slab-growth-factor"),
            (self.slab_min_size.is_some(), "slab-min-size"),
            (self.enable_largepages, "enable-largepages"),
            (self.napi_ids.is_some(), "napi-ids"),
        ] {
            if given {
                ignored.push(name.to_owned());
            }
        }
        let options = &extended.settings;
        let mut between: Vec<_> = options.iter().map(|(key, v)| (*key, v.as_str())).collect();
        // memcached's -D means both.
        if self.list.is_given("prefix-delimiter") {
            between.push(("stats-detail", "true"));
        }
        let mut settings =
            self.list.settings(&between).map_err(|e| CliError::Usage(e.to_string()))?;
        if let Some(level) = crate::log::of_flags(settings.log.verbose) {
            settings.log.log_level = level.to_owned();
        }
        let tls = &settings.tls;
        if self.enable_ssl && (tls.tls_certificate.is_none() || tls.tls_key.is_none()) {
            return Err(CliError::Usage(
                "enable-ssl: needs a certificate and its key; give --tls-certificate FILE --tls-key FILE, or \
                 -o ssl_chain_cert=FILE,ssl_key=FILE"
                    .into(),
            ));
        }
        // Unless a flag names another.
        let named = settings.flash.as_ref() == Some(&extended.flash);
        if !named && !extended.flash.is_empty() {
            ignored.push("ext_path (--flash names the drives)".to_owned());
        }
        let flash = named.then_some(extended.flash);
        let flash_folder =
            flash.iter().flatten().next().and_then(|first| folder_of(first.as_path()));
        Ok(Given { settings, ignored, flash_folder })
    }
}
