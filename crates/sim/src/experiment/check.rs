//! Whether what came out is what was expected.

use std::borrow::Cow;

use super::applications::AppFigures;
use super::error::{ExperimentError, value};
use super::outcome::{CacheOutcome, Checked, figures_of};
use super::spec::{Bound, CacheKind, Expectations, Orders};

/// A cache that something may be expected of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named<'a> {
    pub(super) name: &'a str,
    pub(super) kind: CacheKind,
    /// Whether it tells what each application has had.
    pub(super) applications: bool,
}

/// Checks the names in the expectations, before anything is run: each is of a cache, and of a figure that its kind has.
pub(super) fn validate(expect: &Expectations, caches: &[Named<'_>]) -> Result<(), ExperimentError> {
    let named = |key: &str, name: &str| match caches.iter().find(|c| c.name == name) {
        Some(&cache) => Ok(cache),
        None => {
            let names: Vec<&str> = caches.iter().map(|c| c.name).collect();
            Err(value(key, format!("'{name}'"), format!("name a cache: {}", names.join(", "))))
        }
    };
    let known_figure = |key: &str, metric: &str, cache: Named<'_>| {
        let has = figures_of(cache.kind);
        let of_an_application = cache.applications && AppFigures::has(metric);
        if of_an_application || has.iter().any(|known| known == metric) {
            return Ok(());
        }
        let inside = format!("_{metric}");
        let meant: Vec<&str> =
            has.iter().map(String::as_str).filter(|name| name.ends_with(&inside)).collect();
        Err(ExperimentError::NoFigure {
            key: key.to_owned(),
            figure: metric.to_owned(),
            cache: cache.name.to_owned(),
            kind: cache.kind.name(),
            has: match meant.len() {
                0 => format!(" It has {}", has.join(", ")),
                _ => format!(" Perhaps {} is meant. It has {}", meant.join(" or "), has.join(", ")),
            },
        })
    };
    for (metric, orders) in &expect.order {
        let key = format!("expect.order.{metric}");
        for name in orders.lists().iter().flatten() {
            known_figure("expect.order", metric, named(&key, name)?)?;
        }
        let short = |order: &&Vec<String>| order.len() < 2;
        if let Some(order) = orders.lists().iter().find(short) {
            return Err(value(key, format!("{order:?}"), "an order is of two caches at least"));
        }
    }
    for (cache, bounds) in &expect.bounds {
        let of = named("expect", cache)?;
        for (metric, bound) in bounds {
            known_figure(&format!("expect.{cache}"), metric, of)?;
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

/// The name of a cache in a list of them.
fn quoted(name: &str) -> Cow<'_, str> {
    match name.contains(',') {
        true => Cow::Owned(format!("'{name}'")),
        false => Cow::Borrowed(name),
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
    let of = |(metric, orders)| Orders::lists(orders).iter().map(move |order| (metric, order));
    for (metric, order) in expect.order.iter().flat_map(of) {
        let figures: Vec<Option<f64>> = order.iter().map(|name| figure(name, metric)).collect();
        let met = figures.windows(2).all(|pair| matches!(pair, [Some(a), Some(b)] if a < b));
        let names: Vec<_> = order.iter().map(|name| quoted(name)).collect();
        let found: Vec<String> = order
            .iter()
            .zip(&figures)
            .map(|(name, figure)| format!("{} {}", quoted(name), shown(*figure)))
            .collect();
        all.push(Checked {
            expected: format!("{metric}: {}", names.join(" < ")),
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

    fn named(name: &str, kind: CacheKind) -> Named<'_> {
        Named { name, kind, applications: false }
    }

    fn expect(text: &str) -> Expectations {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn bounds_and_orders_are_met_or_not() {
        let caches = [outcome("a", 0.25), outcome("b", 0.5), outcome("c", 0.5)];
        let met = |text: &str| {
            let expect = expect(text);
            validate(&expect, &["a", "b", "c"].map(|name| named(name, CacheKind::Ripq))).unwrap();
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
    fn caches_that_are_not_all_in_one_order_are_in_several() {
        let caches = [outcome("a", 0.25), outcome("b", 0.5), outcome("c", 0.5)];
        let expect = expect("[order]\nhit_ratio = [['a', 'b'], ['a', 'c'], ['c', 'b']]");
        validate(&expect, &["a", "b", "c"].map(|name| named(name, CacheKind::Ripq))).unwrap();
        let met: Vec<bool> = check(&expect, &caches).iter().map(|checked| checked.met).collect();
        assert_eq!(met, [true, true, false]);
    }

    #[test]
    fn unknown_names_are_refused() {
        for (text, words) in [
            ("[z]\nhit_ratio = { min = 0 }", "expect is 'z': name a cache: a, b"),
            (
                "[a]\nhits = { min = 0 }",
                "expect.a names 'hits', which cache 'a' of kind hybrid does not have. It has backend_utilisation, ",
            ),
            (
                "[a]\nread_p99_us = { min = 0 }",
                "does not have. Perhaps latency_read_p99_us is meant. It has ",
            ),
            ("[a]\nline_hit_ratio = { min = 0 }", "cache 'a' of kind hybrid does not have"),
            ("[b]\nflash_reads = { min = 0 }", "'flash_reads', which cache 'b' of kind block"),
            ("[b]\nlatency_hit_dram_p50_us = { min = 0 }", "cache 'b' of kind block"),
            (
                "[order]\nmetadata_hit_ratio = ['b', 'a']",
                "expect.order names 'metadata_hit_ratio', which cache 'a' of kind hybrid",
            ),
            ("[a]\nhit_ratio = {}", "expect.a.hit_ratio is no bound"),
            ("[a]\nhit_ratio = { min = 2, max = 1 }", "min at most max"),
            ("[order]\nhit_ratio = ['a', 'z']", "expect.order.hit_ratio is 'z'"),
            ("[order]\nhit_ratio = ['a']", "two caches"),
            ("[order]\nhit_ratio = [['a', 'b'], ['a']]", "two caches"),
            ("[order]\nhit_ratio = [['a', 'z']]", "expect.order.hit_ratio is 'z'"),
        ] {
            let caches = [named("a", CacheKind::Hybrid), named("b", CacheKind::Block)];
            let e = validate(&expect(text), &caches).unwrap_err().to_string();
            assert!(e.contains(words), "{text}: {e}");
        }
    }

    #[test]
    fn applications_have_figures_where_they_are_told() {
        let sound = expect("[a]\napplications_web_hit_ratio = { min = 0.5 }");
        let told = Named { applications: true, ..named("a", CacheKind::Hybrid) };
        validate(&sound, &[told]).unwrap();
        validate(&sound, &[named("a", CacheKind::Hybrid)]).unwrap_err();
        for metric in ["applications_hit_ratio", "applications_web_dlwa", "applications__reads"] {
            let text = format!("[a]\n{metric} = {{ min = 0.5 }}");
            let e = validate(&expect(&text), &[told]).unwrap_err().to_string();
            assert!(e.contains(metric), "{e}");
        }
    }
}
