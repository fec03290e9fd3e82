//! Metrics in the OpenMetrics text format, as all servers have them. Names carry their units; counters end in `_total`.

use std::fmt;

use larder_runtime::latency::Percentiles;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeMetric, MetricEncoder};
pub use prometheus_client::metrics::counter::ConstCounter;
pub use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::metrics::{MetricType, TypedMetric};
pub use prometheus_client::registry::{Registry, Unit};

/// Labels and their values.
pub type Labels = Vec<(&'static str, String)>;

/// The metrics of one name, in the order in which they came: quantiles ascend, and nothing changes places.
#[derive(Debug)]
pub struct Family<M>(Vec<(Labels, M)>);

/// Counters of one name.
pub type Counters = Family<ConstCounter<u64>>;
/// Counters of one name that have fractions.
pub type Seconds = Family<ConstCounter<f64>>;
/// Gauges of one name.
pub type Gauges = Family<ConstGauge<f64>>;
/// Gauges of one name that are whole numbers.
pub type WholeGauges = Family<ConstGauge<i64>>;

impl<M> Default for Family<M> {
    fn default() -> Family<M> {
        Family(Vec::new())
    }
}

impl<M> Family<M> {
    /// Adds one with these labels.
    pub fn add(&mut self, labels: Labels, metric: M) {
        self.0.push((labels, metric));
    }
}

impl<M> FromIterator<(Labels, M)> for Family<M> {
    fn from_iter<I: IntoIterator<Item = (Labels, M)>>(all: I) -> Family<M> {
        Family(all.into_iter().collect())
    }
}

impl<M: EncodeMetric + TypedMetric> EncodeMetric for Family<M> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        self.0.iter().try_for_each(|(labels, m)| m.encode(encoder.encode_family(labels)?))
    }

    fn metric_type(&self) -> MetricType {
        M::TYPE
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// All that is registered, as text.
///
/// # Errors
/// Never in practice: formatting into a string does not fail.
pub fn text(registry: &Registry) -> Result<String, fmt::Error> {
    let mut text = String::new();
    encode(&mut text, registry)?;
    Ok(text)
}

/// The process itself: version, seconds since the start, resident bytes, seconds of processor time (its own, the kernel's for it).
pub fn process(
    r: &mut Registry,
    version: impl Into<String>,
    uptime: f64,
    resident: u64,
    cpu: (f64, f64),
) {
    r.register("build", "The version of Larder", Info::new(vec![("version", version.into())]));
    gauge(r, "uptime", "Time since the start", Unit::Seconds, uptime);
    gauge(r, "resident_memory", "Resident memory of the process", Unit::Bytes, resident as f64);
    let cpu: Seconds = [("user", cpu.0), ("system", cpu.1)]
        .map(|(mode, seconds)| (vec![("mode", mode.to_owned())], ConstCounter::new(seconds)))
        .into_iter()
        .collect();
    r.register_with_unit("cpu", "Processor time used", Unit::Seconds, cpu);
}

/// Quantiles of latencies under `request_latency`, by the label `by`. Microseconds come in, seconds go out.
pub fn latency(r: &mut Registry, help: &str, by: &'static str, all: &[(&str, Percentiles)]) {
    let mut family = Gauges::default();
    for (value, p) in all {
        for (quantile, micros) in
            [("0.5", p.p50), ("0.9", p.p90), ("0.99", p.p99), ("0.999", p.p999)]
        {
            let labels = vec![(by, (*value).to_owned()), ("quantile", quantile.to_owned())];
            family.add(labels, ConstGauge::new(micros / 1e6));
        }
    }
    r.register_with_unit("request_latency", help, Unit::Seconds, family);
}

/// A recording under way, if there is one: records and bytes written, and whether it has ended before the server.
pub fn recording(r: &mut Registry, recording: Option<(u64, u64, bool)>) {
    let Some((records, bytes, ended)) = recording else { return };
    counter(r, "recording_records", "Records written to the recording", records);
    bytes_counter(r, "recording_written", "Bytes written to the recording", bytes);
    number(
        r,
        "recording_ended",
        "1 once the recording has ended though the server goes on: its limit was reached, or it could not be written",
        f64::from(u8::from(ended)),
    );
}

/// A count of things.
pub fn counter(r: &mut Registry, name: &str, help: &str, value: u64) {
    r.register(name, help, ConstCounter::new(value));
}

/// A count of bytes.
pub fn bytes_counter(r: &mut Registry, name: &str, help: &str, value: u64) {
    r.register_with_unit(name, help, Unit::Bytes, ConstCounter::new(value));
}

/// A quantity.
pub fn gauge(r: &mut Registry, name: &str, help: &str, unit: Unit, value: f64) {
    r.register_with_unit(name, help, unit, ConstGauge::new(value));
}

/// A number of things, or a ratio.
pub fn number(r: &mut Registry, name: &str, help: &str, value: f64) {
    r.register(name, help, ConstGauge::new(value));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Families keep their order, and numbers are written as what they are.
    #[test]
    fn text_of_a_registry() {
        let mut registry = Registry::with_prefix("larder");
        let r = &mut registry;
        process(r, "1.2", 3.5, 4096, (0.25, 1.0));
        let label = |value: &str| vec![("kind", value.to_owned())];
        let counters: Counters = [(label("z"), 2), (label("a\"b"), 1)]
            .map(|(labels, count)| (labels, ConstCounter::new(count)))
            .into_iter()
            .collect();
        r.register("things", "Things", counters);
        let mut whole = WholeGauges::default();
        whole.add(label("x"), ConstGauge::new(7));
        r.register("whole", "Whole numbers", whole);
        latency(
            r,
            "Latency",
            "tier",
            &[("dram", Percentiles { p50: 1500.0, ..Percentiles::default() })],
        );
        r.register("none", "Nothing", Gauges::default());
        let text = text(&registry).unwrap();
        for lines in [
            "larder_build_info{version=\"1.2\"} 1\n",
            "larder_uptime_seconds 3.5\n",
            "larder_resident_memory_bytes 4096.0\n",
            "larder_cpu_seconds_total{mode=\"user\"} 0.25\nlarder_cpu_seconds_total{mode=\"system\"} 1.0\n",
            "larder_things_total{kind=\"z\"} 2\nlarder_things_total{kind=\"a\\\"b\"} 1\n",
            "larder_whole{kind=\"x\"} 7\n",
            "larder_request_latency_seconds{tier=\"dram\",quantile=\"0.5\"} 0.0015\n",
            "# EOF\n",
        ] {
            assert!(text.contains(lines), "no {lines} in {text}");
        }
        assert!(!text.contains("larder_none"), "{text}");
    }
}
