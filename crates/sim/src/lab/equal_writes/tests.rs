//! The list that is committed, and the table over small cells.

use larder_trace::Op;

use super::*;

const LIST: &str = include_str!("../../../../../experiments/equal-writes.toml");

#[test]
fn the_committed_list_is_whole() {
    let table = Table::parse(LIST, "equal-writes.toml").unwrap();
    let cells = table.cells();
    assert_eq!(cells.len(), table.traces.len() * 6);
    let tuned = table.traces.iter().filter(|t| t.role == Role::Tuned).map(|t| t.name.as_str());
    let tuned: Vec<&str> = tuned.collect();
    assert_eq!(tuned, ["scarab", "oltp", "p3", "adaptsize", "cloudphysics", "memcachier"]);
    assert_eq!(
        (&table.flash[..], &table.budgets[..]),
        (&[0.1, 0.3][..], &[0.03, 0.1, 0.3, 1.0][..])
    );
    assert_eq!(table.memory, [0.001, 0.01, 0.125]);
    let names: std::collections::BTreeSet<String> = cells.iter().map(Cell::name).collect();
    assert!(names.len() == cells.len() && names.contains("scarab:10:12.5"), "{names:?}");
    // Generators can be made, whatever is shared.
    for t in table.traces.iter().filter(|t| t.needs(Path::new("")).is_none()) {
        let small = TraceSpec { limit: Some(2000), ..t.clone() };
        assert_eq!(small.requests(Path::new(""), 2).unwrap().len(), 2000, "{}", t.name);
    }
    let chosen = |patterns: &[&str]| {
        let patterns: Vec<String> = patterns.iter().map(|p| (*p).to_owned()).collect();
        table.chosen(&patterns).map(|cells| cells.len())
    };
    assert_eq!(chosen(&[]), Ok(cells.len()));
    assert_eq!(chosen(&["scarab", "churn:30"]), Ok(9));
    assert_eq!(chosen(&["churn:30:12.5"]), Ok(1));
    let e = chosen(&["scar"]).unwrap_err().to_string();
    assert!(e.contains("'scar' names no cell") && e.contains(":10:"), "{e}");
}

#[test]
fn what_cannot_be_meant_is_named() {
    for (from, to, words) in [
        ("budgets = [0.03", "budgets = [3", "budgets is [3.0"),
        ("role = \"tuned\"", "role = \"both\"", "both"),
        ("source = \"workload:churn\"", "source = \"workload:chum\"", "trace churn source is"),
        ("name = \"w106\"", "name = \"scarab\"", "trace scarab name is scarab"),
        ("lognormal:300", "lognormal:0", "'lognormal:0' is no distribution of sizes"),
        ("rate = 10000.0", "rate = 0.0", "trace scarab rate is 0"),
        ("format = \"i64be\"", "format = \"i63be\"", "trace scarab format is i63be"),
        ("title", "titel", "titel"),
    ] {
        let text = LIST.replacen(from, to, 1);
        assert_ne!(text, LIST);
        let e = Table::parse(&text, "list.toml").unwrap_err().to_string();
        assert!(e.contains("'list.toml'") && e.contains(words), "{e}");
    }
}

#[test]
fn sizes_are_drawn_by_key() {
    let table = Table::parse(LIST, "").unwrap();
    let spec = TraceSpec {
        source: "gen:uniform?objects=20000&requests=60000".to_owned(),
        value_sizes: Some("lognormal:300".parse().unwrap()),
        ..table.trace("scarab").unwrap().clone()
    };
    let spec = TraceSpec { format: None, ..spec };
    let requests = spec.requests(Path::new(""), 1).unwrap();
    let mean = requests.iter().map(|r| r.size as f64).sum::<f64>() / requests.len() as f64;
    assert!((mean - 300.0).abs() < 15.0, "{mean}");
    let mut sizes = std::collections::BTreeMap::new();
    assert!(requests.iter().all(|r| *sizes.entry(r.id).or_insert(r.size) == r.size));
    assert!(requests.iter().all(|r| r.op == Op::Get && r.time.is_some()));
}

fn small(memory: f64) -> Table {
    let text = format!(
        "title = 't'\nflash = [0.3]\nmemory = [{memory}]\nbudgets = [0.1, 1.0]\n[[trace]]\nname = 'z'\nrole = 'tuned'\n\
         source = 'gen:zipf?objects=60000&requests=120000&skew=0.8&value=2000&rate=2000'"
    );
    Table::parse(&text, "small.toml").unwrap()
}

#[test]
fn a_cell_has_ours_the_rivals_and_the_oracle_at_each_budget() {
    let table = small(0.5);
    let mut steps = 0;
    let cell = &table.cells()[0];
    let outcome = table.measure(cell, Path::new(""), 1, &mut |_| steps += 1).unwrap();
    assert_eq!(outcome.does_not_start, None);
    assert_eq!((steps, outcome.budgets.len()), (table.steps(), 2));
    let all = outcome.all.unwrap();
    for at in &outcome.budgets {
        assert_eq!(at.budget, (all.written as f64 * at.level) as u64);
        assert_eq!(at.rivals.len(), 10, "{:?}", at.rivals);
        let (name, best) = at.best().unwrap();
        // Who knows the future is before all who do not, and keeps to the budget.
        assert!(at.oracle.requests <= best, "{name} {best} {:?}", at.oracle);
        assert!(at.oracle.written as f64 <= 1.02 * at.budget as f64);
        assert!(at.ours.requests > at.oracle.requests && at.ours.requests < 1.0);
    }
    // More may be written: no rival misses more.
    for (few, many) in outcome.budgets[0].rivals.iter().zip(&outcome.budgets[1].rivals) {
        assert!(few.name == many.name && few.requests.unwrap_or(1.0) >= many.requests.unwrap());
    }
}

#[test]
fn who_does_not_start_is_named_so() {
    let table = small(0.001);
    let outcome = table.measure(&table.cells()[0], Path::new(""), 1, &mut |_| {}).unwrap();
    let why = outcome.does_not_start.unwrap();
    assert!(why.contains("memory") && outcome.budgets.is_empty(), "{why}");
    let (least, max_item) = (outcome.least_memory.unwrap(), 1 << 20);
    let starts = |memory| {
        let server = Server { memory, flash: outcome.flash, object: outcome.object, max_item };
        server.divide(&AdmissionConfig::default(), 0).is_ok()
    };
    assert!(starts(least) && !starts(least - (64 << 10)), "{least}");
    // No memory makes up for a flash that cannot be divided.
    let server = Server { memory: 0, flash: 1 << 20, object: outcome.object, max_item };
    assert_eq!(least_memory(server), None);
}

#[test]
fn a_budget_that_is_not_kept_is_no_result() {
    let misses = |requests, written| Misses { requests, bytes: requests, written };
    let rivals = vec![
        Rival { name: "a", requests: Some(0.4), bytes: None },
        Rival { name: "b", requests: None, bytes: None },
        Rival { name: "c", requests: Some(0.3), bytes: None },
    ];
    let mut at = AtBudget {
        level: 0.1,
        budget: 100,
        ours: misses(0.35, 102),
        rivals,
        oracle: misses(0.2, 100),
    };
    assert_eq!(at.best(), Some(("c", 0.3)));
    assert!((at.behind().unwrap() - 0.05).abs() < 1e-12);
    at.ours.written = 103;
    assert_eq!(at.behind(), None);
}
