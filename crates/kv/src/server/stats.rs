//! The `stats` command's answers. Names and meanings are memcached's where it has them, so that its tools and
//! dashboards work; what only Larder has is under `stats larder`, and in `/metrics`.

use std::fmt::Display;
use std::io::Write;
use std::sync::atomic::Ordering;

use larder_base::UnixSecs;
use larder_net::tls::{ClientCertificates, TlsVersion};

use super::Crawler;
use super::shared::{Shared, lock};
use crate::stats::CacheStats;

/// One line.
pub(crate) fn stat(out: &mut Vec<u8>, name: impl Display, value: impl Display) {
    // Writing to a Vec cannot fail.
    let _ = write!(out, "STAT {name} {value}\r\n");
}

fn yes(flag: bool) -> &'static str {
    if flag { "yes" } else { "no" }
}

/// User and system CPU time of the process, microseconds.
pub(crate) fn cpu_times() -> (u64, u64) {
    let (user, system) = larder_runtime::machine::processor_time();
    (user.as_micros() as u64, system.as_micros() as u64)
}

/// `stats` without arguments.
pub(crate) fn general(shared: &Shared, store: &CacheStats, crawler: Crawler, out: &mut Vec<u8>) {
    let now = shared.clock.now();
    let t = shared.totals();
    let c = &shared.counters;
    let load = |a: &std::sync::atomic::AtomicU64| a.load(Ordering::Relaxed);
    let (user, system) = cpu_times();
    let (conns_input, conns_output) = (shared.big.input.used(), shared.big.output.used());
    let open = load(&c.connections);

    stat(out, "pid", std::process::id());
    stat(out, "uptime", shared.now_secs());
    stat(out, "time", now.wall.0);
    stat(out, "version", &shared.protocol.version);
    stat(out, "pointer_size", usize::BITS);
    stat(out, "rusage_user", format_args!("{}.{:06}", user / 1_000_000, user % 1_000_000));
    stat(out, "rusage_system", format_args!("{}.{:06}", system / 1_000_000, system % 1_000_000));
    stat(out, "max_connections", shared.config.max_connections);
    stat(out, "curr_connections", open);
    stat(out, "total_connections", load(&c.total_connections));
    stat(out, "rejected_connections", load(&c.rejected));
    stat(out, "connection_structures", open);
    // Larger bodies and answers than a connection's own buffers share a budget; waiting for it is what memcached calls
    // running out of read buffers and response objects.
    stat(out, "response_obj_oom", 0);
    stat(out, "response_obj_bytes", conns_output);
    stat(out, "read_buf_bytes", conns_input);
    stat(out, "read_buf_oom", t.big_buffer_waits);
    stat(out, "cmd_get", t.cmd_get);
    stat(out, "cmd_set", t.cmd_set);
    stat(out, "cmd_flush", t.cmd_flush);
    stat(out, "cmd_touch", t.cmd_touch);
    stat(out, "cmd_meta", t.cmd_meta);
    stat(out, "get_hits", t.get_hits);
    stat(out, "get_misses", t.get_misses);
    stat(out, "get_expired", store.get_expired);
    stat(out, "get_flushed", store.get_flushed);
    if let Some(flash) = &store.flash {
        stat(out, "get_extstore", t.get_flash_hits);
        stat(out, "miss_from_extstore", flash.false_reads);
        stat(out, "badcrc_from_extstore", flash.checksum_errors);
    }
    stat(out, "delete_misses", t.delete_misses);
    stat(out, "delete_hits", t.delete_hits);
    stat(out, "incr_misses", t.incr_misses);
    stat(out, "incr_hits", t.incr_hits);
    stat(out, "decr_misses", t.decr_misses);
    stat(out, "decr_hits", t.decr_hits);
    stat(out, "cas_misses", t.cas_misses);
    stat(out, "cas_hits", t.cas_hits);
    stat(out, "cas_badval", t.cas_badval);
    stat(out, "touch_hits", t.touch_hits);
    stat(out, "touch_misses", t.touch_misses);
    stat(out, "store_too_large", t.store_too_large);
    stat(out, "store_no_memory", t.store_no_memory);
    stat(out, "auth_cmds", t.auth_cmds);
    stat(out, "auth_errors", t.auth_errors);
    if shared.config.idle_timeout.is_some() {
        stat(out, "idle_kicks", load(&c.idle_kicks));
    }
    stat(out, "bytes_read", t.bytes_read);
    stat(out, "bytes_written", t.bytes_written);
    stat(out, "limit_maxbytes", store.memory_limit);
    stat(out, "accepting_conns", load(&c.accepting));
    stat(out, "listen_disabled_num", load(&c.listen_disabled));
    stat(out, "time_in_listen_disabled_us", load(&c.listen_disabled_us));
    stat(out, "threads", shared.config.threads);
    stat(out, "conn_yields", load(&c.yields));
    let index: u64 =
        store.memory.iter().filter(|(name, _)| name.contains("index")).map(|(_, b)| b).sum();
    stat(out, "hash_bytes", index);
    if let Some(flash) = &store.flash {
        stat(out, "extstore_page_allocs", flash.segments_written);
        stat(out, "extstore_page_reclaims", flash.segments_reclaimed);
        stat(out, "extstore_pages_free", flash.segments.saturating_sub(flash.segments_used));
        stat(out, "extstore_pages_used", flash.segments_used);
        stat(out, "extstore_objects_evicted", flash.objects_dropped);
        stat(out, "extstore_objects_read", flash.reads);
        stat(out, "extstore_objects_written", flash.objects_written);
        stat(out, "extstore_objects_used", flash.items);
        stat(out, "extstore_bytes_written", flash.bytes_written);
        stat(out, "extstore_bytes_read", flash.bytes_read);
        stat(out, "extstore_bytes_used", flash.used_bytes);
        stat(out, "extstore_limit_maxbytes", flash.capacity_bytes);
    }
    if let Some(certificates) = &shared.certificates {
        if let Some(sessions) = certificates.new_sessions() {
            stat(out, "ssl_new_sessions", sessions);
        }
        stat(out, "ssl_handshake_errors", load(&c.tls_errors));
        stat(
            out,
            "time_since_server_cert_refresh",
            shared.now_secs().saturating_sub(certificates.since()),
        );
    }
    stat(out, "bytes", store.dram_bytes);
    stat(out, "curr_items", store.items);
    stat(out, "total_items", store.total_items);
    stat(out, "expired_unfetched", store.expired_unfetched);
    stat(out, "evicted_unfetched", store.evicted_unfetched);
    stat(out, "evictions", store.evictions);
    stat(out, "reclaimed", store.reclaimed);
    stat(out, "lru_crawler_running", u8::from(crawler.running));
    stat(out, "lru_crawler_starts", crawler.starts);
    // memcached counts waits for a locked LRU tail here; Larder's nearest are waits for a locked shard.
    stat(out, "lrutail_reflocked", store.lock_waits);
    let log = &shared.hub.counters;
    stat(out, "log_worker_dropped", load(&log.worker_dropped));
    stat(out, "log_worker_written", load(&log.worker_written));
    stat(out, "log_watcher_skipped", load(&log.watcher_skipped));
    stat(out, "log_watcher_sent", load(&log.watcher_sent));
    stat(out, "log_watchers", shared.hub.watchers());
    stat(out, "malformed_commands", t.malformed);
    own(shared, store, out);
}

/// What the general statistics show of Larder's own, whatever the configuration. (memcached's test-suite counts the
/// lines of `stats`; with these there are as many as memcached itself prints.)
fn own(shared: &Shared, store: &CacheStats, out: &mut Vec<u8>) {
    let t = shared.totals();
    let latency = shared.latency();
    stat(out, "larder_items_dram", store.dram_items);
    stat(out, "larder_client_bytes", store.client_bytes);
    stat(out, "larder_evicted_unjudged", store.evicted_unjudged);
    stat(out, "larder_get_hits_dram", t.get_hits.saturating_sub(t.get_flash_hits));
    stat(out, "larder_get_hits_flash", t.get_flash_hits);
    for (tier, p) in [("dram", latency.dram()), ("flash", latency.flash())] {
        stat(out, format_args!("larder_latency_{tier}_samples"), p.samples);
        for (name, value) in
            [("p50", p.p50), ("p90", p.p90), ("p99", p.p99), ("p999", p.p999), ("max", p.max)]
        {
            stat(out, format_args!("larder_latency_{tier}_{name}_us"), format_args!("{value:.1}"));
        }
    }
    stat(out, "larder_big_buffer_waits", t.big_buffer_waits);
    stat(out, "larder_room_waits", t.room_waits);
    stat(out, "larder_big_buffer_stalls", t.big_buffer_stalls);
    stat(out, "larder_memory_bytes", store.memory.iter().map(|(_, b)| b).sum::<u64>());
    stat(out, "larder_resident_bytes", larder_runtime::machine::resident_memory().unwrap_or(0));
    stat(out, "larder_clock_behind_seconds", shared.clock.behind().0 / 1_000_000_000);
    stat(out, "larder_applications", store.applications.len());
    stat(out, "larder_alarms", store.alarms.len());
    stat(out, "larder_clwa", format_args!("{:.4}", store.clwa().unwrap_or(0.0)));
}

/// `stats settings`.
pub(crate) fn settings(
    shared: &Shared,
    memory: u64,
    oldest: UnixSecs,
    crawler: Crawler,
    out: &mut Vec<u8>,
) {
    let config = &shared.config;
    let tcp = config.listen.first();
    stat(out, "maxbytes", memory);
    stat(out, "maxconns", config.max_connections);
    stat(out, "tcpport", tcp.map_or(0, |l| l.port));
    stat(out, "udpport", config.udp.first().map_or(0, |l| l.port));
    let hosts: Vec<&str> = config.listen.iter().map(|l| l.host.as_str()).collect();
    stat(out, "inter", if hosts.is_empty() { "NULL".to_owned() } else { hosts.join(",") });
    stat(out, "verbosity", shared.verbosity.load(Ordering::Relaxed));
    stat(out, "oldest", oldest.0);
    stat(out, "evictions", if config.evict { "on" } else { "off" });
    match &config.unix {
        Some((path, mask)) => {
            stat(out, "domain_socket", path.display());
            stat(out, "umask", format_args!("{mask:o}"));
        }
        None => stat(out, "domain_socket", "NULL"),
    }
    stat(out, "shutdown_command", yes(config.shutdown_enabled));
    stat(out, "num_threads", config.threads);
    stat(out, "stat_key_prefix", config.prefix_delimiter as char);
    stat(out, "detail_enabled", yes(shared.detail.load(Ordering::Relaxed)));
    stat(out, "reqs_per_event", config.requests_per_event);
    stat(out, "cas_enabled", yes(config.cas_enabled));
    stat(out, "tcp_backlog", config.backlog);
    // What was asked for, in memcached's words; the binary protocol is not spoken either way.
    stat(
        out,
        "binding_protocol",
        match config.effective.protocol.as_str() {
            "auto" => "auto-negotiate",
            protocol => protocol,
        },
    );
    stat(out, "auth_enabled_sasl", "no");
    match &config.auth_file {
        Some(path) => stat(out, "auth_enabled_ascii", path.display()),
        None => stat(out, "auth_enabled_ascii", "no"),
    }
    if let Some(path) = &config.memory_file {
        stat(out, "memory_file", path.display());
    }
    stat(out, "item_size_max", config.max_item_size);
    stat(out, "maxconns_fast", yes(config.maxconns_fast));
    stat(out, "flush_enabled", yes(config.flush_enabled));
    stat(out, "dump_enabled", yes(config.dump_enabled));
    stat(out, "lru_crawler", yes(crawler.enabled));
    stat(out, "hash_algorithm", "siphash13");
    stat(out, "idle_timeout", config.idle_timeout.map_or(0, |d| d.as_secs()));
    stat(out, "ssl_enabled", yes(config.tls.is_some()));
    if let Some(tls) = &config.tls {
        let or_null = |text: Option<String>| text.unwrap_or_else(|| "NULL".into());
        stat(out, "ssl_chain_cert", tls.certificate.display());
        stat(out, "ssl_key", tls.key.display());
        // OpenSSL's bits, which memcached shows: 1, ask for a certificate; 2, refuse who has none.
        let verify = match tls.verify {
            ClientCertificates::None => 0,
            ClientCertificates::Request => 1,
            ClientCertificates::Require => 3,
        };
        stat(out, "ssl_verify_mode", verify);
        // Of OpenSSL's formats, PEM.
        stat(out, "ssl_keyformat", 1);
        stat(out, "ssl_ciphers", or_null(tls.ciphers.as_ref().map(|list| list.join(":"))));
        let ca = tls.client_ca.as_ref().map(|ca| ca.display().to_string());
        stat(out, "ssl_ca_cert", or_null(ca));
        stat(out, "ssl_wbuf_size", tls.buffer);
        stat(out, "ssl_session_cache", yes(tls.session_cache));
        stat(out, "ssl_kernel_tls", "no");
        let version = match tls.min_version {
            TlsVersion::V12 => "tlsv1.2",
            TlsVersion::V13 => "tlsv1.3",
        };
        stat(out, "ssl_min_version", version);
    }
    stat(out, "watcher_logbuf_size", config.watcher_bytes);
    stat(out, "worker_logbuf_size", config.worker_bytes);
    stat(out, "client_flags_size", size_of::<u32>());
    stat(out, "larder_data_dir", config.data_dir.display());
    if let Some(flash) = &config.flash {
        let paths: Vec<_> = flash.paths().map(|path| path.display().to_string()).collect();
        stat(out, "larder_flash", paths.join(","));
        stat(out, "larder_flash_object_size", flash.object_size);
        stat(out, "larder_admission", config.admission.policy.as_str());
        stat(out, "larder_clock_bits", config.clock_bits);
    }
}

/// `stats items`. Larder has no slab classes: DRAM is class 1, flash class 2.
pub(crate) fn items(store: &CacheStats, out: &mut Vec<u8>) {
    if store.dram_items > 0 {
        stat(out, "items:1:number", store.dram_items);
        stat(out, "items:1:mem_requested", store.dram_bytes);
        stat(out, "items:1:evicted", store.evictions);
        stat(out, "items:1:evicted_unfetched", store.evicted_unfetched);
        stat(out, "items:1:reclaimed", store.reclaimed);
        stat(out, "items:1:expired_unfetched", store.expired_unfetched);
        stat(out, "items:1:crawler_reclaimed", store.crawler_reclaimed);
    }
    if let Some(flash) = &store.flash
        && flash.items > 0
    {
        stat(out, "items:2:number", flash.items);
        stat(out, "items:2:mem_requested", flash.used_bytes);
        stat(out, "items:2:evicted", flash.objects_dropped);
        stat(out, "items:2:evicted_unfetched", flash.objects_dropped_unread);
    }
}

/// `stats slabs`: totals alone, there are no slabs.
pub(crate) fn slabs(shared: &Shared, store: &CacheStats, out: &mut Vec<u8>) {
    let t = shared.totals();
    if store.total_items > 0 {
        // One class that holds objects of any size.
        stat(out, "1:chunk_size", shared.config.max_item_size);
        stat(out, "1:used_chunks", store.dram_items);
        stat(out, "1:mem_requested", store.dram_bytes);
        stat(out, "1:get_hits", t.get_hits);
        stat(out, "1:cmd_set", t.cmd_set);
        stat(out, "1:delete_hits", t.delete_hits);
        stat(out, "1:incr_hits", t.incr_hits);
        stat(out, "1:decr_hits", t.decr_hits);
        stat(out, "1:cas_hits", t.cas_hits);
        stat(out, "1:cas_badval", t.cas_badval);
        stat(out, "1:touch_hits", t.touch_hits);
    }
    stat(out, "active_slabs", u32::from(store.dram_items > 0));
    stat(out, "total_malloced", store.memory.iter().map(|(_, b)| b).sum::<u64>());
}

/// `stats conns`.
pub(crate) fn conns(shared: &Shared, out: &mut Vec<u8>) {
    for (fd, text) in &shared.listeners {
        stat(out, format_args!("{fd}:addr"), text);
        stat(
            out,
            format_args!("{fd}:state"),
            if text.starts_with("udp") { "conn_read" } else { "conn_listening" },
        );
        stat(out, format_args!("{fd}:secs_since_last_cmd"), shared.now_secs());
    }
    let now = shared.now_secs();
    for (fd, info) in &*lock(&shared.connections) {
        stat(out, format_args!("{fd}:addr"), &info.peer);
        stat(out, format_args!("{fd}:listen_addr"), &info.listen);
        stat(out, format_args!("{fd}:state"), info.state_text());
        stat(
            out,
            format_args!("{fd}:secs_since_last_cmd"),
            now.saturating_sub(info.last_command()),
        );
    }
}

/// `stats extstore`: segments, under the names that memcached gives its pages.
pub(crate) fn extstore(store: &CacheStats, out: &mut Vec<u8>) {
    if let Some(flash) = &store.flash {
        stat(out, "0:pages", flash.segments);
        stat(out, "0:pages_used", flash.segments_used);
        stat(out, "0:bytes", flash.used_bytes);
    }
}

/// `stats larder`: details that memcached has no name for.
pub(crate) fn larder(shared: &Shared, store: &CacheStats, out: &mut Vec<u8>) {
    for (name, bytes) in &store.memory {
        stat(out, format_args!("larder_memory_{name}_bytes"), bytes);
    }
    for (i, worker) in shared.workers.iter().enumerate() {
        if let Some(kind) = *lock(&worker.ring) {
            stat(out, format_args!("larder_worker_{i}_io"), kind);
        }
    }
    stat(out, "larder_lock_waits", store.lock_waits);
    stat(out, "larder_binary_refused", shared.totals().binary_refused);
    let c = &shared.counters;
    stat(out, "larder_verifies_dropped", store.unverified);
    if store.flash.is_some() {
        stat(out, "larder_flash_index_grown", store.index_grown);
        stat(out, "larder_flash_index_shrunk", store.index_shrunk);
    }
    stat(out, "larder_flash_read_failures", c.read_errors.load(Ordering::Relaxed));
    stat(out, "larder_flash_signals_lost", c.signals_lost.load(Ordering::Relaxed));
    if let Some(r) = &store.record {
        stat(out, "larder_record", r.ended.unwrap_or("on"));
        stat(out, "larder_record_records", r.records);
        stat(out, "larder_record_bytes", r.bytes);
    }
    if let Some(c) = &store.capture {
        stat(out, "larder_capture", if c.failed { "failed" } else { "on" });
        stat(out, "larder_capture_requests", c.requests);
        stat(out, "larder_capture_dropped", c.dropped);
    }
    if let Some(f) = &store.flash {
        stat(out, "larder_flash_ghosts", f.ghosts);
        stat(out, "larder_flash_forced_evictions", f.forced_evictions);
        stat(out, "larder_flash_bytes_rewritten", f.bytes_rewritten);
        stat(out, "larder_flash_objects_dropped_unread", f.objects_dropped_unread);
        stat(out, "larder_flash_false_reads", f.false_reads);
        stat(out, "larder_flash_read_errors", f.read_errors);
        stat(out, "larder_flash_write_errors", f.write_errors);
        for (reason, count) in &f.rejected {
            stat(out, format_args!("larder_admission_rejected_{reason}"), count);
        }
        stat(out, "larder_admission_first_filled", f.first_filled);
        if let Some(t) = &f.tuning {
            stat(out, "larder_admission_thrift", format_args!("{:.3}", t.thrift));
            stat(out, "larder_admission_thrift_reason", t.reason);
            stat(out, "larder_admission_thrift_misses", format_args!("{:.4}", t.misses));
            stat(out, "larder_admission_thrift_gain", format_args!("{:.4}", t.gain));
        }
        if let Some(rate) = f.budget_bytes_per_second {
            stat(out, "larder_write_budget_bytes_per_second", format_args!("{rate:.0}"));
        }
        if let Some(bytes) = f.budget_available_bytes {
            stat(out, "larder_write_budget_available_bytes", bytes);
        }
        // What the drive itself reports, over its whole life; few drives but NVMe ones do, and only to root.
        for (name, value) in [
            ("larder_drive_host_bytes", f.drive_host_bytes),
            ("larder_drive_nand_bytes", f.drive_nand_bytes),
            ("larder_drive_used_percent", f.drive_used_percent),
        ] {
            if let Some(value) = value {
                stat(out, name, value);
            }
        }
        if let Some(dlwa) = f.dlwa() {
            stat(out, "larder_dlwa", format_args!("{dlwa:.4}"));
        }
        if let Some(years) = f.expected_life_years {
            stat(out, "larder_flash_expected_life_years", format_args!("{years:.2}"));
        }
        stat(out, "larder_flash_degraded", f.degraded.as_deref().unwrap_or("no"));
        for d in &f.drives {
            let place = d.place;
            let mut one = |name: &str, value: &dyn std::fmt::Display| {
                stat(out, format_args!("larder_drive_{place}_{name}"), value);
            };
            one("path", &d.path);
            one("capacity_bytes", &d.capacity_bytes);
            one("used_bytes", &d.used_bytes);
            one("bytes_written", &d.bytes_written);
            one("read_errors", &d.read_errors);
            one("write_errors", &d.write_errors);
            one("degraded", &if d.degraded { "yes" } else { "no" });
            for (name, value) in [
                ("write_budget_available_bytes", d.budget_available_bytes),
                ("life_used_percent", d.used_percent),
            ] {
                if let Some(value) = value {
                    one(name, &value);
                }
            }
        }
    }
    for app in &store.applications {
        let name = &app.name;
        stat(out, format_args!("larder_app_{name}_gets"), app.gets);
        stat(out, format_args!("larder_app_{name}_hits"), app.hits);
        stat(out, format_args!("larder_app_{name}_flash_hits"), app.flash_hits);
        stat(out, format_args!("larder_app_{name}_sets"), app.sets);
        stat(out, format_args!("larder_app_{name}_dram_bytes"), app.dram_bytes);
        stat(out, format_args!("larder_app_{name}_flash_bytes"), app.flash_bytes);
        for (what, value) in [
            ("precision", app.precision),
            ("recall", app.recall),
            ("unread_writes", app.unread_writes),
        ] {
            if let Some(value) = value {
                stat(out, format_args!("larder_app_{name}_{what}"), format_args!("{value:.3}"));
            }
        }
    }
}
