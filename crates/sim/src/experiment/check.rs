//! Whether what came out is what was expected.

use super::error::{ExperimentError, value};
use super::outcome::{CacheOutcome, Checked, METRICS};
use super::spec::{Bound, Expectations};

/// Checks the names in the expectations, before anything is run.
pub(super) fn validate(expect: &Expectations, caches: &[&str]) -> Result<(), ExperimentError> {
    let known_cache = |key: &str, name: &str| {
        if caches.contains(&name) {
            return Ok(());
        }
        Err(value(key, format!("'{name}'"), format!("name a cache: {}", caches.join(", "))))
    };
    let known_metric = |key: &str, name: &str| {
        if METRICS.iter().any(|(known, _)| *known == name) {
            return Ok(());
        }
        let names: Vec<&str> = METRICS.iter().map(|m| m.0).collect();
        Err(value(key, format!("'{name}'"), format!("name a figure: {}", names.join(", "))))
    };
    for (metric, order) in &expect.order {
        known_metric("expect.order", metric)?;
        let key = format!("expect.order.{metric}");
        order.iter().try_for_each(|name| known_cache(&key, name))?;
        if order.len() < 2 {
            return Err(value(key, format!("{order:?}"), "an order is of two caches at least"));
        }
    }
    for (cache, bounds) in &expect.bounds {
        known_cache("expect", cache)?;
        for (metric, bound) in bounds {
            known_metric(&format!("expect.{cache}"), metric)?;
            let sane = match (bound.min, bound.max) {
                (None, None) => false,
                (Some(min), Some(max)) => min <= max,
                (Some(end), None) | (None, Some(end)) => !end.is_nan(),
            };
            if !sane {
                let must = "give min, max or both, min at most max";
                return Err(value(format!("expect.{cache}.{metric}"), show(bound), must));
            }
        }
    }
    Ok(())
}

fn show(bound: &Bound) -> String {
    match (bound.min, bound.max) {
        (Some(min), Some(max)) => format!("between {min} and {max}"),
        (Some(min), None) => format!("at least {min}"),
        (None, Some(max)) => format!("at most {max}"),
        (None, None) => "no bound".to_owned(),
    }
}

fn shown(figure: Option<f64>) -> String {
    figure.map_or("no value".to_owned(), |v| format!("{v:.6}"))
}

/// Holds the outcome of each cache against the expectations. A figure without a value meets none.
pub fn check(expect: &Expectations, caches: &[CacheOutcome]) -> Vec<Checked> {
    let figure = |cache: &str, metric: &str| {
        caches.iter().find(|c| c.name == cache).and_then(|c| c.metric(metric))
    };
    let mut all = Vec::new();
    for (metric, order) in &expect.order {
        let figures: Vec<Option<f64>> = order.iter().map(|name| figure(name, metric)).collect();
        let met = figures.windows(2).all(|pair| matches!(pair, [Some(a), Some(b)] if a < b));
        let found: Vec<String> = order
            .iter()
            .zip(&figures)
            .map(|(name, figure)| format!("{name} {}", shown(*figure)))
            .collect();
        all.push(Checked {
            expected: format!("{metric}: {}", order.join(" < ")),
            found: found.join(", "),
            met,
        });
    }
    for (cache, bounds) in &expect.bounds {
        for (metric, bound) in bounds {
            let found = figure(cache, metric);
            let met = found.is_some_and(|v| {
                bound.min.is_none_or(|min| v >= min) && bound.max.is_none_or(|max| v <= max)
            });
            let expected = format!("{cache}.{metric}: {}", show(bound));
            all.push(Checked { expected, found: shown(found), met });
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(name: &str, hit_ratio: f64) -> CacheOutcome {
        CacheOutcome { name: name.to_owned(), hit_ratio, ..CacheOutcome::default() }
    }

    fn expect(text: &str) -> Expectations {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn bounds_and_orders_are_met_or_not() {
        let caches = [outcome("a", 0.25), outcome("b", 0.5), outcome("c", 0.5)];
        let met = |text: &str| {
            let expect = expect(text);
            validate(&expect, &["a", "b", "c"]).unwrap();
            let all = check(&expect, &caches);
            assert_eq!(all.len(), 1);
            all[0].met
        };
        assert!(met("[a]\nhit_ratio = { min = 0.25, max = 0.25 }"));
        assert!(met("[a]\nhit_ratio = { max = 0.3 }"));
        assert!(!met("[a]\nhit_ratio = { min = 0.3 }"));
        assert!(!met("[a]\ndlwa = { min = 0 }"), "no value meets nothing");
        assert!(met("[order]\nhit_ratio = ['a', 'b']"));
        assert!(!met("[order]\nhit_ratio = ['b', 'a']"));
        assert!(!met("[order]\nhit_ratio = ['a', 'b', 'c']"), "equal is not below");
    }

    #[test]
    fn unknown_names_are_refused() {
        for (text, words) in [
            ("[z]\nhit_ratio = { min = 0 }", "expect is 'z': name a cache: a, b"),
            ("[a]\nhits = { min = 0 }", "expect.a is 'hits': name a figure: hit_ratio"),
            ("[a]\nhit_ratio = {}", "expect.a.hit_ratio is no bound"),
            ("[a]\nhit_ratio = { min = 2, max = 1 }", "min at most max"),
            ("[order]\nhit_ratio = ['a', 'z']", "expect.order.hit_ratio is 'z'"),
            ("[order]\nhit_ratio = ['a']", "two caches"),
        ] {
            let e = validate(&expect(text), &["a", "b"]).unwrap_err().to_string();
            assert!(e.contains(words), "{text}: {e}");
        }
    }
}
