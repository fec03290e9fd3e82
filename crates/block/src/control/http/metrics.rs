//! `/metrics` in the OpenMetrics text format. Names carry their units; counters end in `_total`.

use std::fmt;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode as encode_text;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use super::super::status::{FaceStatus, Status, VolumeStatus};

type Labels = Vec<(&'static str, String)>;
type Decimal = Gauge<f64, AtomicU64>;

/// The status as text.
///
/// # Errors
/// Never in practice: formatting into a string does not fail.
pub(super) fn encode(s: &Status) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("larder_block");
    let r = &mut registry;
    r.register("build", "The version of Larder", Info::new(vec![("version", s.version.clone())]));
    gauge(r, "uptime", "Time since the start", Unit::Seconds, s.uptime_seconds as f64);
    gauge(
        r,
        "resident_memory",
        "Resident memory of the process",
        Unit::Bytes,
        s.resident_bytes as f64,
    );
    let cpu = Family::<Labels, Counter<f64, AtomicU64>>::default();
    for (mode, seconds) in [("user", s.cpu_seconds.0), ("system", s.cpu_seconds.1)] {
        cpu.get_or_create(&vec![("mode", mode.into())]).inc_by(seconds);
    }
    r.register_with_unit("cpu", "Processor time used", Unit::Seconds, cpu);
    number(r, "alarms", "Conditions that an operator should look at", s.alarms.len() as f64);

    number(
        r,
        "cache_in_use",
        "1 while the cache is used, 0 in pass-through",
        f64::from(u8::from(s.cache.given_up.is_none())),
    );
    number(r, "cache_slots", "Lines that fit in the cache", s.cache.slots as f64);
    number(r, "cache_lines", "Lines in the cache", s.cache.lines as f64);
    gauge(r, "cache_line", "Size of a line", Unit::Bytes, f64::from(s.cache.line_bytes));
    gauge(r, "map", "DRAM of the map", Unit::Bytes, s.cache.map_bytes as f64);
    number(
        r,
        "regions_marked",
        "Regions marked as being written to",
        s.cache.regions_marked as f64,
    );
    for (name, count) in &s.counters {
        // The units of these are lines and operations.
        if name != "regions_marked" && name != "longest_wait_microseconds" {
            let help = format!("The engine's counter {name}");
            r.register(format!("engine_{name}"), help, ConstCounter::new(*count));
        }
    }

    let f = &s.flash;
    bytes_counter(r, "flash_written", "Bytes written to the cache device", f.bytes_written);
    bytes_counter(r, "client_written", "Bytes written by clients", f.client_bytes);
    bytes_counter(r, "read_filled", "Bytes filled because a read missed", f.read_fill_bytes);
    let optional = [
        (
            "cache_level_write_amplification_ratio",
            "Bytes written to flash for each byte written to the cache by clients or misses",
            f.clwa,
        ),
        (
            "device_level_write_amplification_ratio",
            "NAND bytes for each byte that hosts wrote, over the drive's life",
            f.dlwa(),
        ),
        ("write_budget_bytes_per_second", "The write budget", f.budget_bytes_per_second),
        (
            "flash_expected_life_years",
            "Life of the flash at the rate since the start",
            f.expected_life_years,
        ),
        (
            "drive_used_ratio",
            "Share of the drive's rated life that is used, as it reports",
            f.drive_used_percent.map(|p| p as f64 / 100.0),
        ),
    ];
    for (name, help, value) in optional {
        if let Some(value) = value {
            number(r, name, help, value);
        }
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

    let latency = Family::<Labels, Decimal>::default();
    for (result, p) in
        [("hit", s.latency.hit), ("miss", s.latency.miss), ("write", s.latency.write)]
    {
        for (quantile, micros) in
            [("0.5", p.p50), ("0.9", p.p90), ("0.99", p.p99), ("0.999", p.p999)]
        {
            let labels = vec![("result", result.to_owned()), ("quantile", quantile.to_owned())];
            latency.get_or_create(&labels).set(micros / 1e6);
        }
    }
    r.register_with_unit(
        "request_latency",
        "Latency from taking a request to its answer",
        Unit::Seconds,
        latency,
    );
    let verdicts = Family::<Labels, Counter>::default();
    for (verdict, count) in &s.verdicts {
        verdicts.get_or_create(&vec![("verdict", verdict.clone())]).inc_by(*count);
    }
    r.register(
        "admission_verdicts",
        "Verdicts on parts of requests: admitted, or the reason of a rejection",
        verdicts,
    );

    let c = &s.connections;
    number(r, "connections", "Connections open", c.open as f64);
    counter(r, "connections_accepted", "Connections accepted", c.accepted);
    counter(r, "connections_refused", "Connections refused over the limit", c.refused);
    counter(
        r,
        "connections_broken",
        "Connections closed because the client broke the protocol",
        c.broken,
    );
    counter(
        r,
        "connections_tls_refused",
        "Connections closed because TLS was required and not begun, or did not come about",
        c.tls_refused,
    );
    counter(r, "requests", "Requests taken", c.requests);
    volumes(r, &s.volumes);
    faces(r, &s.faces);

    let mut text = String::new();
    encode_text(&mut text, &registry)?;
    Ok(text)
}

fn volumes(r: &mut Registry, volumes: &[VolumeStatus]) {
    let by = |pick: fn(&VolumeStatus) -> u64| {
        let family = Family::<Labels, Counter>::default();
        for v in volumes {
            family.get_or_create(&vec![("volume", v.name.clone())]).inc_by(pick(v));
        }
        family
    };
    let now = |pick: fn(&VolumeStatus) -> f64| {
        let family = Family::<Labels, Decimal>::default();
        for v in volumes {
            family.get_or_create(&vec![("volume", v.name.clone())]).set(pick(v));
        }
        family
    };
    r.register_with_unit("volume_size", "Size of a volume", Unit::Bytes, now(|v| v.bytes as f64));
    r.register("volume_lines", "Lines of a volume in the cache", now(|v| v.lines as f64));
    r.register("volume_clients", "Clients of a volume", now(|v| v.clients as f64));
    let reads = Family::<Labels, Counter>::default();
    for v in volumes {
        let with = |result: &str| vec![("volume", v.name.clone()), ("result", result.to_owned())];
        reads.get_or_create(&with("hit")).inc_by(v.read_hits);
        reads.get_or_create(&with("miss")).inc_by(v.reads.saturating_sub(v.read_hits));
    }
    r.register(
        "volume_reads",
        "Reads of a volume: a hit is one that is answered without asking the store or waiting for it",
        reads,
    );
    r.register("volume_writes", "Writes, zeroes and trims of a volume", by(|v| v.writes));
    r.register_with_unit("volume_read", "Bytes read", Unit::Bytes, by(|v| v.read_bytes));
    r.register_with_unit("volume_written", "Bytes written", Unit::Bytes, by(|v| v.write_bytes));
    r.register("volume_failed", "Requests that failed", by(|v| v.failed));
    let usable = |v: &VolumeStatus| f64::from(u8::from(v.store.trouble.is_none()));
    r.register(
        "volume_store_usable",
        "0 while a volume's store is not reached or was cut short",
        now(usable),
    );
    r.register(
        "volume_store_failures",
        "Operations of a volume's store that failed",
        by(|v| v.store.failures),
    );
    r.register("volume_filled", "Lines that began to be filled", by(|v| v.filled));
    r.register(
        "volume_metadata_reads",
        "Reads of metadata, as far as recognised",
        by(|v| v.metadata_reads),
    );
    r.register(
        "volume_metadata_hits",
        "Reads of metadata that were answered without asking the store or waiting for it",
        by(|v| v.metadata_hits),
    );
}

fn faces(r: &mut Registry, faces: &[FaceStatus]) {
    let labels = |f: &FaceStatus| {
        vec![("face", f.face.clone()), ("address", f.address.clone()), ("volume", f.volume.clone())]
    };
    let by = |pick: fn(&FaceStatus) -> u64| {
        let family = Family::<Labels, Counter>::default();
        for f in faces {
            family.get_or_create(&labels(f)).inc_by(pick(f));
        }
        family
    };
    let connected = Family::<Labels, Decimal>::default();
    for f in faces {
        connected.get_or_create(&labels(f)).set(f64::from(u8::from(f.connected)));
    }
    r.register("face_connected", "1 while a guest's or this host's disk is there", connected);
    r.register("face_requests", "Requests taken by a disk", by(|f| f.requests));
    r.register("face_failed", "Requests of a disk that the store failed", by(|f| f.failed));
    r.register("face_refused", "Requests of a disk that were refused", by(|f| f.refused));
}

fn counter(r: &mut Registry, name: &str, help: &str, value: u64) {
    r.register(name, help, ConstCounter::new(value));
}

fn bytes_counter(r: &mut Registry, name: &str, help: &str, value: u64) {
    r.register_with_unit(name, help, Unit::Bytes, ConstCounter::new(value));
}

fn gauge(r: &mut Registry, name: &str, help: &str, unit: Unit, value: f64) {
    r.register_with_unit(name, help, unit, ConstGauge::new(value));
}

fn number(r: &mut Registry, name: &str, help: &str, value: f64) {
    r.register(name, help, ConstGauge::new(value));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_volume_and_verdict_is_there() {
        let status = Status {
            volumes: vec![VolumeStatus {
                name: "a\"b".into(),
                reads: 5,
                read_hits: 3,
                ..Default::default()
            }],
            verdicts: vec![("admitted".into(), 7), ("budget".into(), 2)],
            faces: vec![FaceStatus {
                face: "ublk".into(),
                address: "ublk:0".into(),
                volume: "v".into(),
                connected: true,
                requests: 9,
                ..Default::default()
            }],
            ..Status::default()
        };
        let text = encode(&status).unwrap();
        for line in [
            r#"larder_block_volume_reads_total{volume="a\"b",result="miss"} 2"#,
            r#"larder_block_admission_verdicts_total{verdict="budget"} 2"#,
            r#"larder_block_face_requests_total{face="ublk",address="ublk:0",volume="v"} 9"#,
            r#"larder_block_face_connected{face="ublk",address="ublk:0",volume="v"} 1"#,
            "# EOF",
        ] {
            assert!(text.contains(line), "no {line} in {text}");
        }
    }
}
