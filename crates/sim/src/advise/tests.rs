use super::*;
use larder_trace::generate;

fn model(spec: &str, most: usize) -> Model {
    let mut sample = Sample::new(most, 1);
    for r in generate::parse(spec).unwrap() {
        sample.push(&r.unwrap());
    }
    Model::new(sample).unwrap()
}

fn question(target: f64) -> Question {
    Question {
        target_hit_ratio: target,
        dram_cost: 5.0,
        flash_cost: 0.2,
        endurance_bytes: 1 << 50,
        years: 5.0,
        device_write_amplification: 1.1,
        most_flash: None,
        admission_objective: Objective::default(),
        price: 0.0,
        seed: 1,
    }
}

const POLICIES: [PolicyName; 2] = [PolicyName::RejectFirst, PolicyName::All];
const ZIPF: &str = "zipf?objects=10000&requests=30000&skew=0.9&writes=0.03&rate=1000&value=4000";

fn search(model: &Model, q: &Question) -> Search {
    let mut search = Search::new(model, q, &[], &[], &POLICIES).unwrap();
    loop {
        let wave = search.next_wave();
        if wave.is_empty() {
            return search;
        }
        let measured: Vec<Measured> =
            wave.into_iter().flat_map(|c| model.measure(q, c).unwrap()).collect();
        search.take(measured);
    }
}

#[test]
fn the_answer_meets_the_target_and_nothing_tried_does_for_less() {
    let model = model(ZIPF, 1 << 20);
    assert_eq!(model.sample().rate(), 1.0);
    let q = question(0.55);
    let search = search(&model, &q);
    let answer = search.answer().unwrap();
    assert!(answer.hit_ratio >= 0.55 && answer.meets && answer.hit_ratio_error == 0.0);
    assert!((answer.hit_ratio_margin - (answer.hit_ratio - 0.55)).abs() < 1e-12);
    for m in search.measured() {
        assert!(!m.meets || m.cost >= answer.cost);
        let dollars = (m.dram as f64 * 5.0 + m.flash as f64 * 0.2) / 1e9;
        assert!((m.cost - dollars).abs() < 1e-12);
        assert_eq!(m.meets, m.hit_ratio >= 0.55);
    }
    // DRAM at 25 times the price of flash: flash takes part.
    assert!(answer.flash > answer.dram, "{answer:?}");
    assert!(answer.life_years.unwrap() >= 5.0);
    let other = search.runner_up().unwrap();
    assert_ne!(other.policy, answer.policy);
    // Again, and it is the same.
    let again = self::search(&model, &q);
    assert_eq!(again.measured(), search.measured());
}

#[test]
fn dear_flash_is_not_bought_and_what_cannot_be_met_is_not_claimed() {
    let model = model(ZIPF, 1 << 20);
    let mut q = question(0.4);
    q.flash_cost = 50.0;
    let found = search(&model, &q);
    let answer = found.answer().unwrap();
    assert_eq!((answer.flash, answer.policy, answer.life_years), (0, "none", None));
    let q = question(0.99);
    let found = search(&model, &q);
    assert!(found.answer().is_none() && found.runner_up().is_none());
    assert!(found.nearest().unwrap().hit_ratio < 0.99);
}

#[test]
fn little_endurance_binds() {
    // Long enough for the budget's first burst not to count.
    let spec = "zipf?objects=20000&requests=60000&skew=0.9&writes=0.03&rate=1000&value=4000";
    let model = model(spec, 1 << 20);
    let c = Candidate { dram: 2560 << 10, flash: 20 << 20, policy: PolicyName::All };
    let one = |q: &Question| model.measure(q, c).unwrap().remove(0);
    let rich = one(&question(0.5));
    let mut q = question(0.5);
    // Ten thousand bytes a second for five years.
    q.endurance_bytes = (10_000.0 * 5.0 * YEAR_SECONDS) as u64;
    let poor = one(&q);
    assert!(!rich.budget_binds && rich.flash_bytes_per_second > 100_000.0, "{rich:?}");
    assert!(poor.flash_bytes_per_second < rich.flash_bytes_per_second / 10.0, "{poor:?}");
    assert!(poor.life_years.is_none_or(|years| years >= 5.0 - 1e-9));
    assert_ne!(poor.hit_ratio, rich.hit_ratio);
}

#[test]
fn flashiness_is_tried_below_an_ample_budget() {
    let spec = "zipf?objects=20000&requests=60000&skew=0.9&writes=0.03&rate=1000&value=4000";
    let model = model(spec, 1 << 20);
    let mut q = question(0.3);
    q.endurance_bytes = 1 << 54;
    let at = |policy| {
        model.measure(&q, Candidate { dram: 2560 << 10, flash: 20 << 20, policy }).unwrap()
    };
    let flashiness = at(PolicyName::Flashiness);
    let limits: Vec<WriteLimit> = flashiness.iter().filter_map(|m| m.write_limit).collect();
    let [WriteLimit::Budget, WriteLimit::Rate(quarter), WriteLimit::Rate(less), last] = limits[..]
    else {
        panic!("{limits:?}")
    };
    assert_eq!(last, WriteLimit::Threshold);
    assert!((4 * less).abs_diff(quarter) <= 4, "{quarter} {less}");
    // A budget that never binds says nothing to the policy: it takes most, or all.
    let all = at(PolicyName::All);
    assert_eq!(all.len(), 1);
    let (spent, most) = (flashiness[0].flash_bytes_per_second, all[0].flash_bytes_per_second);
    assert!(!flashiness[0].budget_binds && spent > 0.6 * most, "{flashiness:?} {all:?}");
    assert!(flashiness[1..].iter().all(|m| !m.equals(&all[0])), "{flashiness:?} {all:?}");
    // With room for every object there is nothing to choose at all. What the policy takes of the memory leaves less for objects
    // in DRAM, so that a little more goes to flash.
    let room = |policy| Candidate { dram: 10 << 20, flash: 160 << 20, policy };
    let ample = model.measure(&q, room(PolicyName::Flashiness)).unwrap();
    let takes_all = model.measure(&q, room(PolicyName::All)).unwrap();
    let (spent, most) = (ample[0].flash_bytes_per_second, takes_all[0].flash_bytes_per_second);
    assert_eq!(ample[0].hit_ratio, takes_all[0].hit_ratio);
    assert!((most..1.01 * most).contains(&spent), "{ample:?} {takes_all:?}");
    // Rates are held, and the threshold writes less than everything for no fewer hits.
    let written: Vec<f64> = flashiness.iter().map(|m| m.flash_bytes_per_second).collect();
    assert!(written[1] < written[0] * 0.35 && written[2] < written[1] * 0.5, "{written:?}");
    assert!(written[3] < written[0] * 0.8, "{written:?}");
    assert!(flashiness[3].hit_ratio > all[0].hit_ratio, "{flashiness:?} {all:?}");
    // Nothing holds the life under the threshold: one that is too short does not meet the target.
    let mut poor = question(0.1);
    poor.endurance_bytes = (written[3] / 10.0 * 5.0 * YEAR_SECONDS) as u64;
    let c = Candidate { dram: 2560 << 10, flash: 20 << 20, policy: PolicyName::Flashiness };
    let short = model.measure(&poor, c).unwrap().pop().unwrap();
    assert!(short.hit_ratio_margin > 0.0 && short.life_years.unwrap() < 1.0, "{short:?}");
    assert!(!short.meets && !short.budget_binds, "{short:?}");
}

#[test]
fn a_sample_tells_what_the_whole_does() {
    let spec = "zipf?objects=200000&requests=400000&skew=0.7&rate=1000&value=4000";
    let whole = model(spec, 1 << 20);
    let part = model(spec, 120_000);
    assert!(part.sample().rate() < 0.5);
    let ratio = part.footprint() as f64 / whole.footprint() as f64;
    assert!((ratio - 1.0).abs() < 0.05, "{ratio}");
    let c = Candidate { dram: 20 << 20, flash: 140 << 20, policy: PolicyName::All };
    let q = question(0.3);
    let one = |m: &Model| m.measure(&q, c).unwrap().remove(0);
    let (a, b) = (one(&whole), one(&part));
    assert!(b.hit_ratio_error > 0.0 && b.hit_ratio_error < 0.05, "{b:?}");
    let off = (a.hit_ratio - b.hit_ratio).abs();
    assert!(off < 4.0 * b.hit_ratio_error + 0.02, "{a:?} {b:?}");
    let writes = b.flash_bytes_per_second / a.flash_bytes_per_second;
    assert!((0.8..1.25).contains(&writes), "{writes}");
}

#[test]
fn what_cannot_be_answered_says_why() {
    let mut sample = Sample::new(100_000, 1);
    (0..2000).for_each(|i| sample.push(&Request::get(i, 10)));
    assert!(Model::new(sample).unwrap_err().to_string().contains("--rate"));
    assert!(Model::new(Sample::new(9, 1)).unwrap_err().to_string().contains("1000"));
    let model = model(ZIPF, 1 << 20);
    let e = Search::new(&model, &question(0.5), &[1000], &[], &POLICIES).unwrap_err().to_string();
    assert!(e.contains("--dram 1000 B") && e.contains("2 MiB"), "{e}");
}

#[test]
fn sizes_that_no_server_takes_are_left_out_and_told() {
    let model = model(ZIPF, 1 << 20);
    let q = question(0.5);
    // The flash's index would take more than half of the memory: beside 40 MiB there is room.
    let flash = [0, 8 << 30, 100 << 30];
    let search = Search::new(&model, &q, &[4 << 20, 40 << 20], &flash, &POLICIES).unwrap();
    let (refused, why) = search.refused().unwrap();
    assert!(refused == 3 && why.to_string().contains("memory"), "{refused}: {why}");
    let e = Search::new(&model, &q, &[4 << 20], &flash[2..], &POLICIES).unwrap_err().to_string();
    assert!(e.contains("--dram 4 MiB") && e.contains("half of the memory, which is 4 MiB"), "{e}");
}
