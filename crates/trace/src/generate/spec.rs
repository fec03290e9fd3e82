//! `KIND?name=value&name=value`, checked: no unknown names, no values out of range.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::error::TraceError;

pub(crate) struct Spec {
    text: String,
    kind: String,
    values: BTreeMap<String, String>,
    asked: Vec<String>,
}

impl Spec {
    pub(crate) fn parse(text: &str) -> Result<Spec, TraceError> {
        let (kind, rest) = text.split_once('?').unwrap_or((text, ""));
        let mut spec = Spec {
            text: format!("gen:{text}"),
            kind: kind.to_owned(),
            values: BTreeMap::new(),
            asked: Vec::new(),
        };
        for part in rest.split('&').filter(|p| !p.is_empty()) {
            let Some((name, value)) = part.split_once('=') else {
                return Err(spec.error(format!(
                    "'{part}' is not NAME=VALUE (write gen:zipf?objects=1000&skew=0.9)"
                )));
            };
            if spec.values.insert(name.to_owned(), value.to_owned()).is_some() {
                return Err(spec.error(format!("'{name}' is given twice")));
            }
        }
        Ok(spec)
    }

    pub(crate) fn kind(&self) -> &str {
        &self.kind
    }

    pub(crate) fn error(&self, problem: impl Into<String>) -> TraceError {
        TraceError::spec(&self.text, problem)
    }

    /// Whether an option is given.
    pub(crate) fn given(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    pub(crate) fn text(&mut self, name: &str) -> Option<String> {
        self.asked.push(name.to_owned());
        self.values.get(name).cloned()
    }

    /// A whole number; `1000000`, `1e6`, `10m` (a million) and `4k` (a thousand) are all understood.
    pub(crate) fn number(
        &mut self,
        name: &str,
        default: u64,
        range: RangeInclusive<u64>,
    ) -> Result<u64, TraceError> {
        let Some(text) = self.text(name) else { return Ok(default) };
        let parsed = text.parse::<u64>().ok().or_else(|| {
            let lower = text.to_ascii_lowercase();
            let (digits, scale) = match lower.chars().last()? {
                'k' => (&lower[..lower.len() - 1], 1e3),
                'm' => (&lower[..lower.len() - 1], 1e6),
                'g' => (&lower[..lower.len() - 1], 1e9),
                _ => (&lower[..], 1.0),
            };
            let value = digits.parse::<f64>().ok()? * scale;
            (0.0..1.8e19).contains(&value).then_some(value as u64)
        });
        match parsed {
            Some(n) if range.contains(&n) => Ok(n),
            _ => Err(self.error(format!(
                "{name}='{text}' is not a whole number from {} to {}",
                range.start(),
                range.end()
            ))),
        }
    }

    pub(crate) fn float(
        &mut self,
        name: &str,
        default: f64,
        range: RangeInclusive<f64>,
    ) -> Result<f64, TraceError> {
        let Some(text) = self.text(name) else { return Ok(default) };
        match text.parse::<f64>() {
            Ok(v) if range.contains(&v) => Ok(v),
            _ => Err(self.error(format!(
                "{name}='{text}' is not a number from {} to {}",
                range.start(),
                range.end()
            ))),
        }
    }

    /// Refuses names that no one asked for.
    pub(crate) fn finish(&self) -> Result<(), TraceError> {
        match self.values.keys().find(|name| !self.asked.contains(name)) {
            None => Ok(()),
            Some(name) => {
                let mut known = self.asked.clone();
                known.sort();
                known.dedup();
                Err(self.error(format!(
                    "unknown option '{name}'; {} takes {}",
                    self.kind,
                    known.join(", ")
                )))
            }
        }
    }
}
