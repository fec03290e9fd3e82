//! `/metrics` in the OpenMetrics text format. Names carry their units; counters end in `_total`.

use std::fmt;

use larder_net::metrics::{
    self, ConstCounter, ConstGauge, Counters, Gauges, Registry, Unit, WholeGauges, bytes_counter,
    counter, gauge, number,
};

use crate::server::view::Sample;

/// The sample as text.
///
/// # Errors
/// Never in practice: formatting into a string does not fail.
pub(super) fn encode(sample: &Sample) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("larder_kv");
    let r = &mut registry;
    let t = &sample.requests;
    let s = &sample.store;

    let cpu = (sample.cpu.0 as f64 / 1e6, sample.cpu.1 as f64 / 1e6);
    let uptime = sample.uptime.as_secs_f64();
    metrics::process(r, sample.version, uptime, sample.resident_bytes, cpu);

    family(
        r,
        "requests",
        "Requests by command",
        "command",
        &[
            ("get", t.cmd_get),
            ("set", t.cmd_set),
            ("delete", t.delete_hits + t.delete_misses),
            ("incr", t.incr_hits + t.incr_misses),
            ("decr", t.decr_hits + t.decr_misses),
            ("touch", t.cmd_touch),
            ("flush_all", t.cmd_flush),
            ("meta_debug", t.cmd_meta),
        ],
    );
    family(
        r,
        "get_results",
        "Reads by where they were answered",
        "result",
        &[
            ("dram", t.get_hits.saturating_sub(t.get_flash_hits)),
            ("flash", t.get_flash_hits),
            ("miss", t.get_misses),
        ],
    );
    family(
        r,
        "cas_results",
        "Compare-and-set by outcome",
        "result",
        &[("stored", t.cas_hits), ("exists", t.cas_badval), ("not_found", t.cas_misses)],
    );
    counter(r, "store_too_large", "Stores refused because of the object's size", t.store_too_large);
    counter(
        r,
        "store_no_memory",
        "Stores refused because no room could be made",
        t.store_no_memory,
    );
    counter(r, "malformed_commands", "Lines that were no valid command", t.malformed);
    counter(r, "auth_errors", "Failed attempts to authenticate", t.auth_errors);
    counter(
        r,
        "big_buffer_waits",
        "Waits for the shared budget of large values",
        t.big_buffer_waits,
    );
    counter(
        r,
        "room_waits",
        "Large stores that were put off until there was room for them",
        t.room_waits,
    );
    counter(
        r,
        "big_buffer_stalls",
        "Connections closed for holding large buffers without progress",
        t.big_buffer_stalls,
    );
    bytes_counter(r, "network_received", "Bytes received from clients", t.bytes_read);
    bytes_counter(r, "network_sent", "Bytes sent to clients", t.bytes_written);

    number(r, "connections", "Connections open", sample.connections as f64);
    number(r, "connections_limit", "Most connections at a time", sample.max_connections as f64);
    counter(r, "connections_accepted", "Connections accepted", sample.total_connections);
    counter(
        r,
        "connections_rejected",
        "Connections refused over the limit",
        sample.rejected_connections,
    );
    counter(r, "connections_idle_closed", "Connections closed for being idle", sample.idle_kicks);

    metrics::latency(
        r,
        "Latency of sampled requests from their read to their last byte sent, by tier that answered",
        "tier",
        &[("dram", sample.latency.dram()), ("flash", sample.latency.flash())],
    );

    number(r, "items", "Objects held, in DRAM and on flash", s.items as f64);
    number(r, "dram_items", "Objects in DRAM", s.dram_items as f64);
    gauge(r, "dram_objects", "Bytes that objects in DRAM take", Unit::Bytes, s.dram_bytes as f64);
    gauge(r, "memory_limit", "DRAM for objects and indexes", Unit::Bytes, s.memory_limit as f64);
    let mut memory = WholeGauges::default();
    for (component, bytes) in &s.memory {
        let labels = vec![("component", (*component).into())];
        memory.add(labels, ConstGauge::new(*bytes as i64));
    }
    r.register_with_unit("memory", "DRAM by what it is used for", Unit::Bytes, memory);
    counter(r, "items_stored", "Objects stored", s.total_items);
    bytes_counter(r, "client_stored", "Bytes of keys and values stored by clients", s.client_bytes);
    counter(r, "evictions", "Objects evicted from DRAM that did not go to flash", s.evictions);
    counter(
        r,
        "evicted_unjudged",
        "Of these, though admission wanted them on flash, or without asking it: a write needed the room before the cleaner came",
        s.evicted_unjudged,
    );
    counter(r, "expired", "Objects removed because they had expired", s.reclaimed);
    counter(r, "lock_waits", "Waits for a shard's lock", s.lock_waits);
    metrics::recording(r, s.record.as_ref().map(|r| (r.records, r.bytes, r.ended.is_some())));
    number(r, "alarms", "Conditions that an operator should look at", s.alarms.len() as f64);

    if let Some(f) = &s.flash {
        gauge(r, "flash_capacity", "Flash for segments", Unit::Bytes, f.capacity_bytes as f64);
        gauge(r, "flash_used", "Bytes of records in segments", Unit::Bytes, f.used_bytes as f64);
        number(r, "flash_items", "Objects on flash", f.items as f64);
        number(r, "flash_ghosts", "Objects on flash that CLOCK has given up", f.ghosts as f64);
        number(r, "flash_segments", "Segments", f.segments as f64);
        number(r, "flash_segments_used", "Segments filled", f.segments_used as f64);
        counter(r, "flash_segments_written", "Segments written", f.segments_written);
        counter(r, "flash_segments_reclaimed", "Segments reclaimed", f.segments_reclaimed);
        counter(r, "flash_objects_written", "Objects written to flash", f.objects_written);
        counter(
            r,
            "flash_objects_dropped",
            "Objects dropped with their segment",
            f.objects_dropped,
        );
        counter(
            r,
            "flash_objects_dropped_unread",
            "Of these, never read on flash",
            f.objects_dropped_unread,
        );
        counter(
            r,
            "flash_forced_evictions",
            "Objects whose place in the index was taken",
            f.forced_evictions,
        );
        counter(r, "flash_index_grown", "Steps by which the flash index has grown", s.index_grown);
        counter(
            r,
            "flash_index_shrunk",
            "Steps by which the flash index has shrunk",
            s.index_shrunk,
        );
        bytes_counter(r, "flash_written", "Bytes written to flash", f.bytes_written);
        bytes_counter(
            r,
            "flash_rewritten",
            "Bytes of reclaimed objects written again",
            f.bytes_rewritten,
        );
        bytes_counter(r, "flash_read", "Bytes read from flash", f.bytes_read);
        counter(r, "flash_reads", "Reads of flash for requests", f.reads);
        counter(
            r,
            "flash_false_reads",
            "Reads that found another key or an older segment",
            f.false_reads,
        );
        family(
            r,
            "flash_errors",
            "Errors of the flash",
            "kind",
            &[("read", f.read_errors), ("write", f.write_errors), ("checksum", f.checksum_errors)],
        );
        family(
            r,
            "admission_rejected",
            "Times that an object was kept from flash, by reason",
            "reason",
            &f.rejected,
        );
        counter(
            r,
            "admission_first_filled",
            "Objects that admission turned away and that went to flash because it was being filled for the first time",
            f.first_filled,
        );
        if let Some(t) = &f.tuning {
            number(
                r,
                "admission_thrift",
                "What admission asks of a write is multiplied by this",
                t.thrift,
            );
            number(
                r,
                "admission_thrift_misses",
                "Part of the reads that miniature caches with this setting miss",
                t.misses,
            );
            number(
                r,
                "admission_thrift_gain",
                "Part of the reads that the best of the settings beside it would miss less",
                t.gain,
            );
        }
        number(
            r,
            "flash_degraded",
            "1 when flash is out of use",
            f64::from(u8::from(f.degraded.is_some())),
        );
        if let Some(rate) = f.budget_bytes_per_second {
            number(r, "write_budget_bytes_per_second", "The write budget", rate);
        }
        if let Some(bytes) = f.budget_available_bytes {
            gauge(
                r,
                "write_budget_available",
                "What the write budget would grant now",
                Unit::Bytes,
                bytes as f64,
            );
        }
        if let Some(bytes) = f.drive_host_bytes {
            bytes_counter(
                r,
                "drive_host_written",
                "Bytes that hosts have written to the drive in its life, as it reports",
                bytes,
            );
        }
        if let Some(bytes) = f.drive_nand_bytes {
            bytes_counter(
                r,
                "drive_nand_written",
                "Bytes that the drive has written to NAND in its life, as it reports",
                bytes,
            );
        }
        if let Some(percent) = f.drive_used_percent {
            number(
                r,
                "drive_used_ratio",
                "Share of the drive's rated life that is used, as it reports",
                percent as f64 / 100.0,
            );
        }
        if let Some(dlwa) = f.dlwa() {
            number(
                r,
                "device_level_write_amplification_ratio",
                "NAND bytes for each byte that hosts wrote, over the drive's life",
                dlwa,
            );
        }
        if let Some(years) = f.expected_life_years {
            number(r, "flash_expected_life_years", "Life of the flash at the rate observed", years);
        }
    }
    if let Some(clwa) = s.clwa() {
        number(
            r,
            "cache_level_write_amplification_ratio",
            "Bytes written to flash for each byte stored by clients",
            clwa,
        );
    }
    drives(r, s);
    applications(r, sample);

    metrics::text(&registry)
}

/// Drive by drive, where there are several.
fn drives(r: &mut Registry, s: &larder_cache::kv::CacheStats) {
    let all = s.flash.as_ref().map_or(&[][..], |flash| &flash.drives);
    if all.is_empty() {
        return;
    }
    let (mut written, mut errors) = (Counters::default(), Counters::default());
    let (mut capacity, mut used) = (WholeGauges::default(), WholeGauges::default());
    let (mut degraded, mut rate, mut life) =
        (Gauges::default(), Gauges::default(), Gauges::default());
    for d in all {
        let label = || vec![("drive", d.path.clone())];
        written.add(label(), ConstCounter::new(d.bytes_written));
        for (kind, count) in [("read", d.read_errors), ("write", d.write_errors)] {
            let labels = vec![("drive", d.path.clone()), ("kind", kind.to_owned())];
            errors.add(labels, ConstCounter::new(count));
        }
        capacity.add(label(), ConstGauge::new(d.capacity_bytes as i64));
        used.add(label(), ConstGauge::new(d.used_bytes as i64));
        degraded.add(label(), ConstGauge::new(f64::from(u8::from(d.degraded))));
        if let Some(bytes) = d.budget_bytes_per_second {
            rate.add(label(), ConstGauge::new(bytes));
        }
        if let Some(percent) = d.used_percent {
            life.add(label(), ConstGauge::new(percent as f64 / 100.0));
        }
    }
    let help = "Flash for segments, by drive";
    r.register_with_unit("flash_drive_capacity", help, Unit::Bytes, capacity);
    r.register_with_unit("flash_drive_used", "Segments filled, by drive", Unit::Bytes, used);
    let help = "Bytes written to flash, by drive";
    r.register_with_unit("flash_drive_written", help, Unit::Bytes, written);
    r.register("flash_drive_errors", "Errors of a drive", errors);
    r.register("flash_drive_degraded", "1 when a drive is out of use", degraded);
    r.register("flash_drive_write_budget_bytes_per_second", "The write budget of a drive", rate);
    let help = "Share of a drive's rated life that is used, as it reports";
    r.register("flash_drive_life_used_ratio", help, life);
}

fn applications(r: &mut Registry, sample: &Sample) {
    let (mut results, mut sets) = (Counters::default(), Counters::default());
    let (mut bytes, mut model) = (WholeGauges::default(), Gauges::default());
    for app in &sample.store.applications {
        let with = |key: &'static str, value: &str| {
            vec![("application", app.name.clone()), (key, value.to_owned())]
        };
        for (result, count) in [
            ("dram", app.hits.saturating_sub(app.flash_hits)),
            ("flash", app.flash_hits),
            ("miss", app.gets.saturating_sub(app.hits)),
        ] {
            results.add(with("result", result), ConstCounter::new(count));
        }
        sets.add(vec![("application", app.name.clone())], ConstCounter::new(app.sets));
        for (tier, held) in [("dram", app.dram_bytes), ("flash", app.flash_bytes)] {
            bytes.add(with("tier", tier), ConstGauge::new(held as i64));
        }
        for (quality, value) in [
            ("precision", app.precision),
            ("recall", app.recall),
            ("unread_writes", app.unread_writes),
        ] {
            if let Some(value) = value {
                model.add(with("quality", quality), ConstGauge::new(value));
            }
        }
    }
    r.register(
        "application_get_results",
        "Reads of an application by where they were answered",
        results,
    );
    r.register("application_sets", "Stores of an application", sets);
    r.register_with_unit(
        "application_objects",
        "Bytes of an application's objects",
        Unit::Bytes,
        bytes,
    );
    r.register(
        "application_flashiness_ratio",
        "Quality of an application's model of flashiness",
        model,
    );
}

fn family(r: &mut Registry, name: &str, help: &str, label: &'static str, values: &[(&str, u64)]) {
    let family: Counters = (values.iter())
        .map(|(value, count)| (vec![(label, (*value).to_owned())], ConstCounter::new(*count)))
        .collect();
    r.register(name, help, family);
}
