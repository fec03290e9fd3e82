//! memcached's `-o` options: those that mean something here become [`Settings`](super::Settings), those that tune memcached's own
//! machinery are accepted with a note, and unknown ones are refused as memcached refuses them.

use std::path::PathBuf;

use larder_base::ByteSize;

use super::ConfigError;

/// Options about memcached's slabs, LRU lists, hash table and extstore threads: Larder has none of these.
const ACCEPTED: &[&str] = &[
    "ext_compact_under",
    "ext_drop_under",
    "ext_drop_unread",
    "ext_io_depth",
    "ext_item_age",
    "ext_low_ttl",
    "ext_max_frag",
    "ext_max_sleep",
    "ext_page_size",
    "ext_recache_rate",
    "ext_threads",
    "ext_wbuf_size",
    "ext_item_size",
    "hash_algorithm",
    "hashpower",
    "hot_lru_pct",
    "hot_max_factor",
    "inline_ascii_resp",
    "lru_crawler_sleep",
    "lru_crawler_tocrawl",
    "lru_maintainer",
    "no_chunked_items",
    "no_drop_privileges",
    "no_hashexpand",
    "no_inline_ascii_resp",
    "no_lru_maintainer",
    "no_slab_automove",
    "no_slab_reassign",
    "read_buf_mem_limit",
    "relaxed_privileges",
    "resp_obj_mem_limit",
    "slab_automove",
    "slab_automove_freeratio",
    "slab_automove_ratio",
    "slab_automove_window",
    "slab_chunk_max",
    "slab_reassign",
    "slab_sizes",
    "sock_cookie_id",
    "ssl_kernel_tls",
    "tail_repair_time",
    "temporary_ttl",
    "track_sizes",
    "warm_lru_pct",
    "warm_max_factor",
];

/// What `-o` says.
#[derive(Debug, Default)]
pub struct Options {
    /// What it sets: names of settings, and their values as they would be typed.
    pub settings: Vec<(&'static str, String)>,
    /// Names of options that were accepted without effect.
    pub ignored: Vec<String>,
    /// The files or devices of `ext_path`.
    pub flash: Vec<PathBuf>,
}

/// Takes the arguments of `-o`.
///
/// # Errors
/// [`ConfigError::Option`] for an unknown option or a value that cannot be meant.
pub fn extended_options(arguments: &[String]) -> Result<Options, ConfigError> {
    let Options { mut settings, mut ignored, mut flash } = Options::default();
    // White space is no part of an option: a chart may join options with ", ".
    let options = arguments.iter().flat_map(|a| a.split(',')).map(str::trim);
    for option in options.filter(|o| !o.is_empty()) {
        let (name, value) = match option.split_once('=') {
            Some((n, v)) => (n.trim_end(), Some(v.trim_start())),
            None => (option, None),
        };
        let bad = |reason: &str| ConfigError::Option {
            option: option.to_owned(),
            reason: reason.to_owned(),
        };
        let kib = |text: &str| {
            text.parse::<u32>().map(|n| format!("{n}k")).map_err(|_| bad("needs a number of KiB"))
        };
        let need = || value.filter(|v| !v.is_empty()).ok_or_else(|| bad("needs a value"));
        let mut set = |key, value: &str| settings.push((key, value.to_owned()));
        match name {
            "maxconns_fast" => set("maxconns-fast", "true"),
            "no_maxconns_fast" => set("maxconns-fast", "false"),
            "idle_timeout" => {
                let seconds: u32 = need()?.parse().map_err(|_| bad("needs a number of seconds"))?;
                set("idle-timeout", &seconds.to_string());
            }
            "lru_crawler" | "modern" => set("lru-crawler", "true"),
            "no_lru_crawler" | "no_modern" => set("lru-crawler", "false"),
            "ssl_chain_cert" => set("tls-certificate", need()?),
            "ssl_key" => set("tls-key", need()?),
            "ssl_ca_cert" => set("tls-client-ca", need()?),
            // memcached takes 3, "once", for clients that negotiate again, which no TLS library of today lets them.
            "ssl_verify_mode" => {
                let who = match need()? {
                    "0" => "none",
                    "1" => "request",
                    "2" | "3" => "require",
                    _ => return Err(bad("must be 0 (none), 1 (request), 2 (require) or 3 (once)")),
                };
                set("tls-verify", who);
            }
            "ssl_min_version" => {
                let version = match need()? {
                    "2" | "tlsv1.2" => "1.2",
                    "3" | "tlsv1.3" => "1.3",
                    "0" | "1" | "tlsv1.0" | "tlsv1.1" => {
                        return Err(bad(
                            "TLS 1.0 and 1.1 are not spoken: give 2 (tlsv1.2) or 3 (tlsv1.3)",
                        ));
                    }
                    _ => return Err(bad("must be 2 (tlsv1.2) or 3 (tlsv1.3)")),
                };
                set("tls-min-version", version);
            }
            "ssl_ciphers" => set("tls-ciphers", need()?),
            "ssl_session_cache" => set("tls-session-cache", "true"),
            "ssl_wbuf_size" => set("tls-buffer", &kib(need()?)?),
            "watcher_logbuf_size" => set("watcher-logbuf-size", &kib(need()?)?),
            "worker_logbuf_size" => set("worker-logbuf-size", &kib(need()?)?),
            "ssl_keyformat" => match need()? {
                "1" => {}
                _ => {
                    return Err(bad(
                        "must be 1: keys are read as PEM; `openssl pkey` converts others",
                    ));
                }
            },
            "proxy_config" | "proxy_arg" | "proxy_uring" | "proxy_memprofile" => {
                return Err(bad(
                    "the built-in proxy is not here: run memcached as the proxy in front",
                ));
            }
            "drop_privileges" => {
                return Err(bad(
                    "there is no filter of system calls: run as another user (-u), or under systemd's SystemCallFilter=",
                ));
            }
            "ext_path" => {
                let text = need()?;
                let (path, size) = text
                    .rsplit_once(':')
                    .ok_or_else(|| bad("needs PATH:SIZE, as in ext_path=/mnt/flash/file:64g"))?;
                // memcached knows one-letter units only, and its users' scripts rely on "1GB" being an error.
                if size.len() < 2 || !size[..size.len() - 1].bytes().all(|b| b.is_ascii_digit()) {
                    return Err(bad("needs a size such as 64m, 64g or 1t after the colon"));
                }
                let size: ByteSize =
                    size.parse().map_err(|e: larder_base::ParseSizeError| bad(&e.to_string()))?;
                if size.0 == 0 {
                    return Err(bad("needs a size above zero"));
                }
                // For --flash this word is none at all.
                let path = if path == "none" { "./none" } else { path };
                flash.push(PathBuf::from(path));
                set("flash", path);
                set("flash-size", &size.0.to_string());
            }
            known if ACCEPTED.contains(&known) => ignored.push(known.to_owned()),
            _ => {
                return Err(ConfigError::Option {
                    option: option.to_owned(),
                    reason: "is unknown".to_owned(),
                });
            }
        }
    }
    Ok(Options { settings, ignored, flash })
}

#[cfg(test)]
mod tests {
    use super::super::Settings;
    use super::*;

    fn run(text: &str) -> Result<(Settings, Vec<String>), String> {
        let options = extended_options(&[text.to_owned()]).map_err(|e| e.to_string())?;
        let said: Vec<_> = options.settings.iter().map(|(key, v)| (*key, v.as_str())).collect();
        let settings = larder_settings::of_sources(&[&said]).map_err(|e| e.to_string())?;
        Ok((settings, options.ignored))
    }

    #[test]
    fn options_map_or_are_noted() {
        let (s, ignored) =
            run("idle_timeout=3,no_maxconns_fast,slab_automove=0,ext_path=/x/y:64m").unwrap();
        assert_eq!((s.idle_timeout, s.maxconns_fast), (3, false));
        assert_eq!(s.flash_size, Some(vec![ByteSize::mib(64)]));
        assert_eq!(s.flash.unwrap()[0].to_str(), Some("/x/y"));
        assert_eq!(ignored, ["slab_automove"]);
    }

    /// Every option of memcached 1.6.45: taken with its meaning, accepted without effect, or refused with what to do instead.
    #[test]
    fn every_option_of_memcacheds_is_known() {
        let all = "maxconns_fast hashpower no_hashexpand slab_reassign slab_automove slab_automove_ratio slab_automove_window \
            tail_repair_time hash_algorithm lru_crawler lru_crawler_sleep lru_crawler_tocrawl lru_maintainer hot_lru_pct \
            warm_lru_pct hot_max_factor warm_max_factor temporary_ttl idle_timeout watcher_logbuf_size worker_logbuf_size \
            slab_sizes slab_chunk_max track_sizes no_inline_ascii_resp modern no_modern no_chunked_items no_slab_reassign \
            no_slab_automove no_maxconns_fast inline_ascii_resp no_lru_crawler no_lru_maintainer no_drop_privileges \
            drop_privileges resp_obj_mem_limit read_buf_mem_limit ssl_chain_cert ssl_key ssl_verify_mode ssl_keyformat \
            ssl_ciphers ssl_ca_cert ssl_wbuf_size ssl_session_cache ssl_kernel_tls ssl_min_version proxy_config proxy_arg \
            proxy_uring proxy_memprofile relaxed_privileges sock_cookie_id ext_compact_under ext_drop_under ext_drop_unread \
            ext_io_depth ext_item_age ext_item_size ext_low_ttl ext_max_frag ext_max_sleep ext_page_size ext_path \
            ext_recache_rate ext_threads ext_wbuf_size";
        for name in all.split_whitespace() {
            for option in [name.to_owned(), format!("{name}=1")] {
                if let Err(e) = run(&option) {
                    assert!(!e.contains("is unknown"), "{option}: {e}");
                }
            }
        }
    }

    #[test]
    fn white_space_is_no_part_of_an_option() {
        let (s, ignored) =
            run(" modern, track_sizes,idle_timeout = 3 ,ext_path= /x/y:64m ").unwrap();
        assert_eq!((s.idle_timeout, s.flash_size), (3, Some(vec![ByteSize::mib(64)])));
        assert_eq!(
            (s.flash.unwrap()[0].to_str(), ignored),
            (Some("/x/y"), vec!["track_sizes".into()])
        );
        assert_eq!(run("ext_path=none:64m").unwrap().0.flash.unwrap()[0].to_str(), Some("./none"));
    }

    /// memcached's help of 1.6.45: "valid values are 0(None), 1(Request), 2(Require) or 3(Once)", "2(tlsv1.2), or 3(tlsv1.3)".
    #[test]
    fn options_of_tls_have_memcached_s_numbers() {
        for (mode, wanted) in [("0", "none"), ("1", "request"), ("2", "require"), ("3", "require")]
        {
            let (s, ignored) = run(&format!("ssl_verify_mode={mode}")).unwrap();
            assert_eq!((s.tls_verify.as_deref(), ignored.len()), (Some(wanted), 0));
        }
        for (given, wanted) in [("2", "1.2"), ("3", "1.3"), ("tlsv1.3", "1.3")] {
            let (s, _) = run(&format!("ssl_min_version={given}")).unwrap();
            assert_eq!(s.tls_min_version.as_deref(), Some(wanted));
        }
        let (s, ignored) = run("watcher_logbuf_size=8,worker_logbuf_size=16").unwrap();
        assert_eq!(s.watcher_logbuf_size, ByteSize::kib(8));
        assert_eq!((s.worker_logbuf_size, ignored.len()), (ByteSize::kib(16), 0));
        let (s, _) = run("ssl_wbuf_size=64,ssl_session_cache").unwrap();
        assert_eq!((s.tls_buffer, s.tls_session_cache), (ByteSize::kib(64), true));
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (text, word) in [
            ("nope", "nope"),
            ("idle_timeout", "needs a value"),
            ("idle_timeout=x", "seconds"),
            ("ext_path=/x:0m", "above zero"),
            ("ext_path=/x:1GB", "size"),
            ("ext_path=/x", "PATH:SIZE"),
            ("ssl_verify_mode=4", "0 (none)"),
            ("ssl_min_version=1", "not spoken"),
            ("ssl_min_version=4", "tlsv1.3"),
            ("ssl_keyformat=2", "PEM"),
            ("ssl_wbuf_size=x", "KiB"),
            ("watcher_logbuf_size=x", "KiB"),
            ("worker_logbuf_size", "needs a value"),
            ("ssl_ciphers", "needs a value"),
            ("drop_privileges", "SystemCallFilter"),
            ("proxy_config=routelib", "in front"),
            ("ext_path=/x:64m,ext_path=/y:64m:compact", "needs a size"),
        ] {
            let e = run(text).unwrap_err();
            let last = text.rsplit(',').next().unwrap();
            assert!(e.contains(word) && e.contains(last), "{text}: {e}");
        }
    }
}
