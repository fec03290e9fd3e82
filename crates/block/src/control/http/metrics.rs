//! `/metrics` in the OpenMetrics text format. Names carry their units; counters end in `_total`.

use std::fmt;

use larder_net::metrics::{
    self, ConstCounter, ConstGauge, Counters, Gauges, Registry, Unit, bytes_counter, counter,
    gauge, number,
};

use super::super::counters;
use super::super::status::{BackVolume, FaceStatus, Status, VolumeStatus};

/// The status as text.
///
/// # Errors
/// Never in practice: formatting into a string does not fail.
pub(super) fn encode(s: &Status) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("larder_block");
    let r = &mut registry;
    let cpu = (s.cpu_seconds.user, s.cpu_seconds.system);
    metrics::process(r, &s.version, s.uptime_seconds as f64, s.resident_bytes, cpu);
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
    for (name, &count) in &s.counters {
        // (One that has no name here is another version's.)
        let Some(help) = counters::help(name) else { continue };
        if name == counters::LONGEST_WAIT {
            let help = "The longest time that a part of a request waited for another";
            gauge(r, "longest_wait", help, Unit::Seconds, count as f64 / 1e6);
        } else {
            r.register(format!("engine_{name}"), help, ConstCounter::new(count));
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
        (
            "write_budget_bytes_per_second",
            "Bytes a second that the write budget grants",
            f.budget_bytes_per_second,
        ),
        (
            "flash_expected_life_years",
            "Years that the flash lasts at the rate since the start",
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

    let latencies = [("hit", s.latency.hit), ("miss", s.latency.miss), ("write", s.latency.write)];
    metrics::latency(r, "Latency from taking a request to its answer", "result", &latencies);
    let verdicts: Counters = (s.verdicts.iter())
        .map(|(verdict, &count)| (vec![("verdict", verdict.clone())], ConstCounter::new(count)))
        .collect();
    r.register(
        "admission_verdicts",
        "Verdicts on parts of requests: admitted, if_free (a free slot or none), or the reason of a rejection",
        verdicts,
    );

    let c = &s.connections;
    number(r, "connections", "Connections open", c.open as f64);
    counter(r, "connections_accepted", "Connections accepted", c.accepted);
    counter(r, "connections_refused", "Connections refused over the limit", c.refused);
    counter(
        r,
        "connections_made_way",
        "Connections closed because there were too many and they had never asked anything",
        c.made_way,
    );
    counter(
        r,
        "requests_abandoned",
        "Requests not begun because nobody was there any more to be answered",
        c.abandoned,
    );
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
    counter(r, "requests", "Requests taken from connections", c.requests);
    metrics::recording(r, s.recording.as_ref().map(|r| (r.records, r.bytes, r.ended.is_some())));
    number(
        r,
        "volumes_put_aside",
        "Volumes that are known and not attached",
        s.put_aside.len() as f64,
    );
    // Nobody knows before they were counted.
    if let Some(lines) = s.put_aside.iter().map(|v| v.lines).sum::<Option<u64>>() {
        number(
            r,
            "put_aside_lines",
            "Lines in the cache of volumes that are not attached",
            lines as f64,
        );
    }
    let kept: Vec<u64> = s.put_aside.iter().filter_map(|v| v.carried_bytes).collect();
    if !kept.is_empty() {
        gauge(
            r,
            "put_aside_dirty",
            "Bytes that the write log has of volumes that are not attached, and their stores lack",
            Unit::Bytes,
            kept.iter().sum::<u64>() as f64,
        );
    }
    volumes(r, &s.volumes);
    write_back(r, &s.volumes);
    faces(r, &s.faces);

    metrics::text(&registry)
}

fn volumes(r: &mut Registry, volumes: &[VolumeStatus]) {
    let labels = |v: &VolumeStatus| vec![("volume", v.name.clone())];
    let by = |pick: fn(&VolumeStatus) -> u64| -> Counters {
        volumes.iter().map(|v| (labels(v), ConstCounter::new(pick(v)))).collect()
    };
    let now = |pick: fn(&VolumeStatus) -> f64| -> Gauges {
        volumes.iter().map(|v| (labels(v), ConstGauge::new(pick(v)))).collect()
    };
    r.register_with_unit("volume_size", "Size of a volume", Unit::Bytes, now(|v| v.bytes as f64));
    r.register("volume_lines", "Lines of a volume in the cache", now(|v| v.lines as f64));
    r.register(
        "volume_clients",
        "Connections of clients that have asked something of a volume and are still there",
        now(|v| v.clients as f64),
    );
    let mut reads = Counters::default();
    for v in volumes {
        let with = |result: &str| vec![("volume", v.name.clone()), ("result", result.to_owned())];
        let misses = v.reads.saturating_sub(v.read_hits);
        reads.add(with("hit"), ConstCounter::new(v.read_hits));
        reads.add(with("miss"), ConstCounter::new(misses));
    }
    r.register(
        "volume_reads",
        "Reads of a volume: a hit is one that is answered without asking the store or waiting for it",
        reads,
    );
    r.register("volume_writes", "Writes, zeroes and trims of a volume", by(|v| v.writes));
    r.register_with_unit(
        "volume_read",
        "Bytes of a volume that clients read",
        Unit::Bytes,
        by(|v| v.read_bytes),
    );
    r.register_with_unit(
        "volume_written",
        "Bytes of a volume that clients wrote",
        Unit::Bytes,
        by(|v| v.write_bytes),
    );
    r.register("volume_failed", "Requests of a volume that failed", by(|v| v.failed));
    let usable = |v: &VolumeStatus| {
        f64::from(u8::from(v.store.trouble.is_none() || v.store.state == "changed"))
    };
    r.register(
        "volume_store_usable",
        "0 while a volume's store is not reached or was cut short",
        now(usable),
    );
    r.register(
        "volume_store_losses",
        "Times that a volume's store may have lost writes that it had answered and not made durable",
        by(|v| v.store.losses),
    );
    r.register(
        "volume_store_failures",
        "Operations of a volume's store that failed",
        by(|v| v.store.failures),
    );
    r.register(
        "volume_store_foreign_changes",
        "Times that a volume's store was found changed by something else, and its lines dropped",
        by(|v| v.store.foreign_changes),
    );
    r.register("volume_filled", "Lines of a volume that began to be filled", by(|v| v.filled));
    r.register(
        "volume_metadata_reads",
        "Reads of a volume's metadata, as far as recognised",
        by(|v| v.metadata_reads),
    );
    r.register(
        "volume_metadata_hits",
        "Reads of a volume's metadata that were answered without asking the store or waiting for it",
        by(|v| v.metadata_hits),
    );
}

/// Volumes that write back; nothing of others.
fn write_back(r: &mut Registry, volumes: &[VolumeStatus]) {
    let labels = |name: &str| vec![("volume", name.to_owned())];
    // One that waits for its store has what a run before has left.
    let dirty = |v: &VolumeStatus| {
        let bytes = v.write_back.as_ref().map(|b| b.dirty_bytes).or(v.kept_dirty_bytes)?;
        Some((labels(&v.name), ConstGauge::new(bytes as f64)))
    };
    let dirty: Vec<_> = volumes.iter().filter_map(dirty).collect();
    if dirty.is_empty() {
        return;
    }
    r.register_with_unit(
        "volume_dirty",
        "Bytes of a volume that its store lacks, each counted once",
        Unit::Bytes,
        dirty.into_iter().collect::<Gauges>(),
    );
    let back: Vec<(&str, &BackVolume)> =
        volumes.iter().filter_map(|v| Some((v.name.as_str(), v.write_back.as_ref()?))).collect();
    let labels = |name: &str| vec![("volume", name.to_owned())];
    let saving: Vec<&VolumeStatus> = volumes
        .iter()
        .filter(|v| v.write_back.is_some() || v.through_for_budget.is_some())
        .collect();
    if !saving.is_empty() {
        let through = |v: &VolumeStatus| f64::from(u8::from(v.through_for_budget.is_some()));
        r.register(
            "volume_through_for_budget",
            "1 while a volume that writes back is written through for want of write budget",
            saving
                .iter()
                .map(|v| (labels(&v.name), ConstGauge::new(through(v))))
                .collect::<Gauges>(),
        );
    }
    if back.is_empty() {
        return;
    }
    let now = |pick: fn(&BackVolume) -> f64| -> Gauges {
        back.iter().map(|(name, b)| (labels(name), ConstGauge::new(pick(b)))).collect()
    };
    r.register_with_unit(
        "volume_write_log_held",
        "Bytes of the write log that a volume holds, headers and overwritten bytes among them",
        Unit::Bytes,
        now(|b| b.held_bytes as f64),
    );
    r.register_with_unit(
        "volume_write_log_bound",
        "Bytes of the write log that a volume may hold",
        Unit::Bytes,
        now(|b| b.bound_bytes as f64),
    );
    r.register_with_unit(
        "volume_dirty_age",
        "Age of the oldest write of a volume that its store lacks, 0 if it lacks none",
        Unit::Seconds,
        now(|b| b.oldest_seconds.unwrap_or(0.0)),
    );
    r.register(
        "volume_destage_bytes_per_second",
        "Bytes of the write log of a volume that come to its store in a second; 0 where that has been next to nothing for 10 s",
        now(|b| b.destage_bytes_per_second),
    );
    r.register(
        "volume_destage_failures",
        "Failures of a volume's store or its flush since destaging worked last",
        now(|b| b.failures as f64),
    );
    r.register(
        "volume_slowed_for_budget",
        "1 while clients of a volume are answered no faster than its store for want of write budget",
        now(|b| f64::from(u8::from(b.slowed_for_budget))),
    );
    r.register(
        "volume_write_log_closed",
        "1 while nothing of a volume is logged any more because the log has failed",
        now(|b| f64::from(u8::from(b.closed.is_some()))),
    );
    r.register(
        "volume_generation",
        "Generation of a volume that writes back: it rises with each attach",
        now(|b| b.generation as f64),
    );
    r.register(
        "volume_unfenced",
        "1 where nothing but a look at the marker keeps a second holder of a volume's store out",
        now(|b| f64::from(u8::from(!b.fenced))),
    );
    r.register_with_unit(
        "volume_write_log_stated",
        "Bytes of the write log that a volume is to hold at most, as stated; 0 where nothing is",
        Unit::Bytes,
        now(|b| b.stated_bytes.unwrap_or(0) as f64),
    );
    r.register(
        "volume_frontier",
        "Number of the last write of a volume up to which all are durable in its store",
        now(|b| b.frontier as f64),
    );
    r.register(
        "volume_acknowledged",
        "Number of the last write of a volume up to which all are answered",
        now(|b| b.acknowledged as f64),
    );
    r.register_with_unit(
        "volume_unreadable",
        "Bytes of a volume that cannot be read from the write log any more",
        Unit::Bytes,
        now(|b| b.unreadable_bytes as f64),
    );
    r.register(
        "volume_unreadable_stops",
        "1 while nothing of a volume is destaged for what cannot be read",
        now(|b| f64::from(u8::from(b.unreadable_stops))),
    );
    r.register(
        "volume_dirty_over_age",
        "1 while the oldest write of a volume that its store lacks is older than it may be",
        now(|b| f64::from(u8::from(b.age_over))),
    );
    r.register(
        "volume_off_mark",
        "1 while what the store of a volume has is no mark though epochs are to end at marks",
        now(|b| f64::from(u8::from(b.off_mark))),
    );
    r.register(
        "volume_waits_for_mark",
        "1 while nothing of a volume is destaged before a mark comes",
        now(|b| f64::from(u8::from(b.waits_for_mark))),
    );
    let missed: Counters =
        back.iter().map(|(name, b)| (labels(name), ConstCounter::new(b.missed_marks))).collect();
    r.register(
        "volume_missed_marks",
        "Epochs of a volume that ended at no mark though they were to, since the start",
        missed,
    );
    // Only of volumes that have them.
    let some = |pick: fn(&BackVolume) -> Option<f64>| -> Gauges {
        let of = |(name, b): &(&str, &BackVolume)| Some((labels(name), ConstGauge::new(pick(b)?)));
        back.iter().filter_map(of).collect()
    };
    if back.iter().any(|(_, b)| b.age_max_seconds.is_some()) {
        r.register_with_unit(
            "volume_dirty_age_limit",
            "How old the oldest write of a volume that its store lacks may become",
            Unit::Seconds,
            some(|b| b.age_max_seconds),
        );
    }
    if back.iter().any(|(_, b)| b.epoch.is_some()) {
        r.register(
            "volume_epoch",
            "The last epoch of a volume's journal that was begun",
            some(|b| b.epoch.map(|epoch| epoch as f64)),
        );
    }
    let destaged: Counters =
        back.iter().map(|(name, b)| (labels(name), ConstCounter::new(b.destaged_bytes))).collect();
    r.register_with_unit(
        "volume_destaged",
        "Bytes of the write log of a volume that have come to its store",
        Unit::Bytes,
        destaged,
    );
}

fn faces(r: &mut Registry, faces: &[FaceStatus]) {
    let labels = |f: &FaceStatus| {
        vec![("face", f.face.clone()), ("address", f.address.clone()), ("volume", f.volume.clone())]
    };
    let by = |pick: fn(&FaceStatus) -> u64| -> Counters {
        faces.iter().map(|f| (labels(f), ConstCounter::new(pick(f)))).collect()
    };
    let connected: Gauges = (faces.iter())
        .map(|f| (labels(f), ConstGauge::new(f64::from(u8::from(f.connected)))))
        .collect();
    r.register("face_connected", "1 while a guest's or this host's disk is there", connected);
    r.register("face_requests", "Requests taken by a disk", by(|f| f.requests));
    r.register("face_failed", "Requests of a disk that the store failed", by(|f| f.failed));
    r.register("face_refused", "Requests of a disk that were refused", by(|f| f.refused));
}

#[cfg(test)]
mod tests {
    use super::super::super::status::{AsideVolume, RecordingStatus};
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
            verdicts: [("admitted".into(), 7), ("budget".into(), 2)].into(),
            faces: vec![FaceStatus {
                face: "ublk".into(),
                address: "ublk:0".into(),
                volume: "v".into(),
                connected: true,
                requests: 9,
                ..Default::default()
            }],
            recording: Some(RecordingStatus {
                records: 4,
                bytes: 99,
                ended: Some("the file reached its limit".into()),
            }),
            put_aside: vec![AsideVolume {
                name: "b".into(),
                bytes: 1,
                lines: Some(6),
                carried_bytes: None,
            }],
            ..Status::default()
        };
        let text = encode(&status).unwrap();
        for line in [
            "larder_block_recording_ended 1.0",
            "larder_block_recording_written_bytes_total 99",
            "larder_block_put_aside_lines 6.0",
            r#"larder_block_volume_reads_total{volume="a\"b",result="miss"} 2"#,
            r#"larder_block_admission_verdicts_total{verdict="budget"} 2"#,
            r#"larder_block_face_requests_total{face="ublk",address="ublk:0",volume="v"} 9"#,
            r#"larder_block_face_connected{face="ublk",address="ublk:0",volume="v"} 1"#,
            "# EOF",
        ] {
            assert!(text.contains(line), "no {line} in {text}");
        }
    }

    #[test]
    fn lines_that_were_not_counted_yet_are_not_none() {
        let of = |put_aside| encode(&Status { put_aside, ..Status::default() }).unwrap();
        assert!(of(Vec::new()).contains("larder_block_put_aside_lines 0.0"));
        let aside = |lines| AsideVolume { name: "b".into(), bytes: 1, lines, carried_bytes: None };
        let kept = AsideVolume { carried_bytes: Some(4096), ..aside(Some(1)) };
        let text = of(vec![kept.clone(), aside(Some(1)), kept]);
        assert!(text.contains("larder_block_put_aside_dirty_bytes 8192.0"), "{text}");
        let text = of(vec![aside(Some(3)), aside(None)]);
        assert!(!text.contains("put_aside_dirty"), "{text}");
        assert!(text.contains("larder_block_volumes_put_aside 2.0"), "{text}");
        assert!(!text.contains("put_aside_lines"), "{text}");
    }

    #[test]
    fn volumes_that_write_back_say_how_they_do_and_others_nothing() {
        let volume = |name: &str, write_back| VolumeStatus {
            name: name.into(),
            write_back,
            ..VolumeStatus::default()
        };
        let through = volume("a", None);
        let back = volume(
            "b",
            Some(BackVolume {
                dirty_bytes: 4096,
                held_bytes: 8192,
                bound_bytes: 1 << 20,
                oldest_seconds: Some(1.5),
                destage_bytes_per_second: 500.0,
                destaged_bytes: 77,
                generation: 3,
                failures: 2,
                slowed_for_budget: true,
                stated_bytes: Some(2 << 20),
                epoch: Some(6),
                frontier: 11,
                acknowledged: 14,
                unreadable_bytes: 512,
                unreadable_stops: true,
                age_max_seconds: Some(60.0),
                age_over: true,
                missed_marks: 5,
                off_mark: true,
                waits_for_mark: true,
                closed: Some("the device failed".into()),
                ..BackVolume::default()
            }),
        );
        let of = |volumes| encode(&Status { volumes, ..Status::default() }).unwrap();
        assert!(!of(vec![through.clone()]).contains("dirty"));
        let text = of(vec![through, back]);
        for line in [
            "volume_dirty_bytes{volume=\"b\"} 4096.0",
            "volume_write_log_held_bytes{volume=\"b\"} 8192.0",
            "volume_write_log_bound_bytes{volume=\"b\"} 1048576.0",
            "volume_dirty_age_seconds{volume=\"b\"} 1.5",
            "volume_destage_bytes_per_second{volume=\"b\"} 500.0",
            "volume_destaged_bytes_total{volume=\"b\"} 77",
            "volume_destage_failures{volume=\"b\"} 2.0",
            "volume_write_log_closed{volume=\"b\"} 1.0",
            "volume_slowed_for_budget{volume=\"b\"} 1.0",
            "volume_through_for_budget{volume=\"b\"} 0.0",
            "volume_generation{volume=\"b\"} 3.0",
            "volume_unfenced{volume=\"b\"} 1.0",
            "volume_write_log_stated_bytes{volume=\"b\"} 2097152.0",
            "volume_frontier{volume=\"b\"} 11.0",
            "volume_acknowledged{volume=\"b\"} 14.0",
            "volume_unreadable_bytes{volume=\"b\"} 512.0",
            "volume_unreadable_stops{volume=\"b\"} 1.0",
            "volume_dirty_age_limit_seconds{volume=\"b\"} 60.0",
            "volume_dirty_over_age{volume=\"b\"} 1.0",
            "volume_missed_marks_total{volume=\"b\"} 5",
            "volume_off_mark{volume=\"b\"} 1.0",
            "volume_waits_for_mark{volume=\"b\"} 1.0",
            "volume_epoch{volume=\"b\"} 6.0",
        ] {
            let line = format!("\nlarder_block_{line}\n");
            assert!(text.contains(&line), "no {line} in {text}");
            let name = line.trim().split('{').next().unwrap().trim_end_matches("_total");
            assert!(text.contains(&format!("# HELP {name} ")), "no help of {name}");
        }
        assert!(!text.contains("volume_dirty_bytes{volume=\"a\"}"), "{text}");
    }

    /// What every counter counts is said, and in what unit; and the quantiles of a latency ascend.
    #[test]
    fn helps_and_quantiles() {
        let (engine, log) = Default::default();
        let all = counters::counters(&engine, &log, 3);
        let status = Status {
            counters: all.map(|(name, count)| (name.to_owned(), count)).collect(),
            ..Status::default()
        };
        assert_eq!((status.counters.len(), status.counters["fill_rests"]), (27, 3));
        let text = encode(&status).unwrap();
        let units = [
            "Lines",
            "Regions",
            "Segments",
            "Reads",
            "Times",
            "Parts",
            "Records",
            "Batches",
            "Snapshots",
            "Bytes",
        ];
        for name in status.counters.keys().filter(|n| *n != counters::LONGEST_WAIT) {
            let begins = format!("# HELP larder_block_engine_{name} ");
            let help = text.lines().find_map(|l| l.strip_prefix(&begins)).unwrap_or(name);
            assert!(help.len() > 20 && !help.contains("counter"), "{name}: {help}");
            assert!(units.iter().any(|unit| help.starts_with(unit)), "{name}: {help}");
        }
        assert!(text.contains("\nlarder_block_longest_wait_seconds 0.0\n"), "{text}");
        let quantiles: Vec<&str> = (text.lines())
            .filter_map(|l| l.strip_prefix("larder_block_request_latency_seconds{"))
            .map(|l| l.split('}').next().unwrap())
            .collect();
        let wanted: Vec<String> = ["hit", "miss", "write"]
            .iter()
            .flat_map(|r| ["0.5", "0.9", "0.99", "0.999"].map(|q| (r, q)))
            .map(|(r, q)| format!("result=\"{r}\",quantile=\"{q}\""))
            .collect();
        assert_eq!(quantiles, wanted);
    }
}
