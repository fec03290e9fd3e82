//! The flags of `larder kv`: its settings, which a file may give too, and what only a command line can mean.

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
}

/// What the flags and the file said.
pub(crate) struct Given {
    pub(crate) settings: Settings,
    /// memcached options that were accepted without effect.
    pub(crate) ignored: Vec<String>,
}

impl Args {
    /// Flags over `-o` over the file.
    pub(crate) fn settings(&self) -> Result<Given, CliError> {
        let (extended, mut ignored) =
            extended_options(&self.extended).map_err(|e| CliError::Usage(e.to_string()))?;
        for (given, name) in [
            (self.slab_growth_factor.is_some(), "slab-growth-factor"),
            (self.slab_min_size.is_some(), "slab-min-size"),
            (self.enable_largepages, "enable-largepages"),
        ] {
            if given {
                ignored.push(name.to_owned());
            }
        }
        let mut between: Vec<_> = extended.iter().map(|(key, v)| (*key, v.as_str())).collect();
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
        Ok(Given { settings, ignored })
    }
}
