//! memcached's `-o` options: those that mean something here become [`Settings`], those that tune memcached's own
//! machinery are accepted with a note, and unknown ones are refused as memcached refuses them.

use larder_base::ByteSize;

use super::{ConfigError, Settings};

/// Options about memcached's slabs, LRU lists, hash table, logger and extstore threads: Larder has none of these.
const ACCEPTED: &[&str] = &[
    "drop_privileges",
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
    "lru_crawler",
    "lru_crawler_sleep",
    "lru_crawler_tocrawl",
    "lru_maintainer",
    "modern",
    "no_chunked_items",
    "no_drop_privileges",
    "no_hashexpand",
    "no_inline_ascii_resp",
    "no_lru_crawler",
    "no_lru_maintainer",
    "no_modern",
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
    "ssl_keyformat",
    "ssl_session_cache",
    "ssl_wbuf_size",
    "tail_repair_time",
    "temporary_ttl",
    "track_sizes",
    "warm_lru_pct",
    "warm_max_factor",
    "watcher_logbuf_size",
    "worker_logbuf_size",
];

/// Takes the arguments of `-o`. Returns what they set and the names of those that were accepted without effect.
///
/// # Errors
/// [`ConfigError::Option`] for an unknown option or a value that cannot be meant.
pub fn extended_options(arguments: &[String]) -> Result<(Settings, Vec<String>), ConfigError> {
    let mut settings = Settings::default();
    let mut ignored = Vec::new();
    for option in arguments.iter().flat_map(|a| a.split(',')).filter(|o| !o.is_empty()) {
        let (name, value) = match option.split_once('=') {
            Some((n, v)) => (n, Some(v)),
            None => (option, None),
        };
        let bad = |reason: &str| ConfigError::Option {
            option: option.to_owned(),
            reason: reason.to_owned(),
        };
        let need = || value.filter(|v| !v.is_empty()).ok_or_else(|| bad("needs a value"));
        match name {
            "maxconns_fast" => settings.maxconns_fast = Some(true),
            "no_maxconns_fast" => settings.maxconns_fast = Some(false),
            "idle_timeout" => {
                settings.idle_timeout =
                    Some(need()?.parse().map_err(|_| bad("needs a number of seconds"))?);
            }
            "ssl_chain_cert" => settings.tls_certificate = Some(need()?.into()),
            "ssl_key" => settings.tls_key = Some(need()?.into()),
            "ssl_ca_cert" => settings.tls_client_ca = Some(need()?.into()),
            "ssl_verify_mode" => match need()? {
                "0" => settings.tls_client_ca = None,
                "1" | "2" | "3" => {}
                _ => {
                    return Err(bad(
                        "must be 0 to 3; clients are verified when ssl_ca_cert is given",
                    ));
                }
            },
            "ssl_min_version" => match need()? {
                "tlsv1.2" | "tlsv1.3" => {}
                _ => return Err(bad("must be tlsv1.2 or tlsv1.3")),
            },
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
                settings.flash = Some(path.into());
                settings.flash_size = Some(size);
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
    Ok((settings, ignored))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(text: &str) -> Result<(Settings, Vec<String>), String> {
        extended_options(&[text.to_owned()]).map_err(|e| e.to_string())
    }

    #[test]
    fn options_map_or_are_noted() {
        let (s, ignored) =
            run("idle_timeout=3,no_maxconns_fast,slab_automove=0,ext_path=/x/y:64m").unwrap();
        assert_eq!((s.idle_timeout, s.maxconns_fast), (Some(3), Some(false)));
        assert_eq!(s.flash_size, Some(ByteSize::mib(64)));
        assert_eq!(s.flash.unwrap().to_str(), Some("/x/y"));
        assert_eq!(ignored, ["slab_automove"]);
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
        ] {
            let e = run(text).unwrap_err();
            assert!(e.contains(word) && e.contains(text), "{text}: {e}");
        }
    }
}
