//! The marker beside a store, the cache's superblock and a copy of it: every state that attach, detach, carrying, taking up, epochs, recovering
//! and somebody without Larder can bring about, with a crash behind each step. It follows `marker_states` and `setback_states` of
//! `models/write_back.py`. Versions stand for data: each answered write makes the next.

use std::collections::BTreeSet;

use larder_engine::block::writeback::Fault;
use larder_engine::block::writeback::marker::{
    Cache, Holds, Mark, Marker, Read, Step, Verdict, Why, attach, carry, detach, judge, recover,
    take_up,
};
use larder_format::Uuid;

const MINE: Uuid = Uuid([1; 16]);
const OTHER: Uuid = Uuid([2; 16]);

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct State {
    mark: Mark,
    generation: u64,
    /// Number of the marker, and the run that wrote it.
    number: u64,
    marked_by: u64,
    holds: Holds,
    /// The version that the cache holds, if it holds dirty data.
    version: Option<u64>,
    /// The marker's number that the cache knows, and its run.
    known: u64,
    run: u64,
    store: u64,
    newest: u64,
    /// A copy of the carried cache: its generation and version.
    copy: Option<(u64, Option<u64>)>,
    /// An epoch that is committed and not applied: its generation and version.
    journal: Option<(u64, u64)>,
    up: bool,
    /// What somebody has kept: a marker, or a cache.
    kept: Option<Kept>,
    back: bool,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Kept {
    Marker(Mark, u64, u64, u64),
    Cache(Holds, Option<u64>, u64, u64),
}

impl State {
    fn first() -> State {
        State {
            mark: Mark::Clean,
            generation: 0,
            number: 0,
            marked_by: 0,
            holds: Holds::Nothing,
            version: None,
            known: 0,
            run: 0,
            store: 0,
            newest: 0,
            copy: None,
            journal: None,
            up: false,
            kept: None,
            back: false,
        }
    }

    fn read(&self) -> Read {
        let (generation, number, run) = (self.generation, self.number, self.marked_by);
        Read::There(Marker { mark: self.mark, generation, number, run })
    }

    fn cache(&self) -> Cache {
        Cache { uuid: MINE, run: self.run, holds: self.holds, known: self.known }
    }

    /// A step; `anew`: what the cache held of the volume is void.
    fn step(&mut self, step: Step, anew: bool) {
        match step {
            Step::Destage => self.store = self.store.max(self.version.unwrap_or(0)),
            Step::FlushLog | Step::FlushStore => {}
            Step::Replay => {
                if let Some((_, version)) = self.journal.take() {
                    self.store = version;
                }
            }
            Step::Holds(holds) => {
                self.holds = holds;
                if anew || matches!(holds, Holds::Clean(_)) {
                    self.version = None;
                }
            }
            Step::Mark(mark, generation) => {
                (self.mark, self.generation) = (mark, generation);
                (self.number, self.marked_by) = (self.number + 1, self.run);
            }
            Step::Answer => {
                self.newest += 1;
                self.version = Some(self.newest);
            }
            Step::EmptyJournal => self.journal = None,
        }
    }
}

/// States to go on from.
struct Walk {
    todo: Vec<(State, Vec<String>)>,
}

impl Walk {
    fn go(&mut self, from: &State, how: &[String], name: &str, steps: &[Step], anew: bool) {
        let mut state = from.clone();
        for (i, &step) in steps.iter().enumerate() {
            state.step(step, anew && matches!(step, Step::Holds(_)));
            self.push(state.clone(), how, format!("{name}.{}", i + 1));
        }
    }

    fn push(&mut self, state: State, how: &[String], name: String) {
        let mut how = how.to_vec();
        how.push(name);
        self.todo.push((state, how));
    }
}

/// Walks through all states; how many there are.
pub(super) fn markers(fault: Fault) -> Result<usize, String> {
    let mut walk = Walk { todo: vec![(State::first(), Vec::new())] };
    let mut seen = BTreeSet::new();
    while let Some((state, how)) = walk.todo.pop() {
        // Numbers and runs are the other walk's.
        let state = State { number: 0, marked_by: 0, ..state };
        if state.newest > 3 || state.generation > 4 || !seen.insert(state.clone()) {
            continue;
        }
        let broken = |what: &str| Err(format!("{what}: {how:?}"));
        let g = state.generation;
        let verdict = judge(state.read(), &state.cache(), fault);
        match verdict {
            Verdict::GoOn => {
                if state.version.is_some_and(|v| v < state.store) {
                    return broken("older dirty data over newer");
                }
                if state.version.unwrap_or(state.store) < state.newest {
                    return broken("serves an image that lacks acknowledged writes");
                }
                if state.mark == Mark::Dirty(MINE) {
                    if state.journal.is_some_and(|(of, _)| of == g) {
                        walk.go(&state, &how, "replay", &[Step::Replay], false);
                    }
                    let drains = detach(g, fault).first() == Some(&Step::Destage);
                    if state.journal.is_none() || !drains {
                        walk.go(&state, &how, "detach", &detach(g, fault), false);
                    }
                    if let Some(version) = state.version.filter(|v| *v > state.store)
                        && state.journal.is_none()
                    {
                        let committed = State { journal: Some((g, version)), ..state.clone() };
                        walk.push(committed.clone(), &how, "epoch.1".to_owned());
                        walk.go(&committed, &how, "epoch.2", &[Step::Replay], false);
                    }
                    walk.go(&state, &how, "carry", &carry(MINE, g), false);
                }
            }
            Verdict::TakeUp { generation } => {
                walk.go(&state, &how, "take", &take_up(MINE, generation, fault), false);
                if let (Holds::Carried(of), None) = (state.holds, state.copy) {
                    let copied = State { copy: Some((of, state.version)), ..state.clone() };
                    walk.push(copied, &how, "copy".to_owned());
                }
            }
            Verdict::Tidy => walk.go(&state, &how, "tidy", &[Step::Mark(Mark::Clean, g)], false),
            Verdict::Attach { generation, .. } => {
                walk.go(&state, &how, "attach", &attach(MINE, generation, fault), true);
            }
            Verdict::Refuse(Why::Lost) => {
                return broken("this cache is named and does not hold what the marker speaks of");
            }
            Verdict::Drain | Verdict::Wait | Verdict::Refuse(_) => {
                return broken("nothing of the kind was done");
            }
        }
        if let Some((of, version)) = state.copy {
            let copy = Cache { holds: Holds::Carried(of), ..state.cache() };
            let serves = judge(state.read(), &copy, fault) == Verdict::GoOn;
            if serves && version.unwrap_or(0).max(state.store) < state.newest {
                return broken("a copy of the cache serves old data");
            }
        }
        // Another host, with another cache.
        let theirs = Cache { uuid: OTHER, run: 0, holds: Holds::Nothing, known: 0 };
        if let Verdict::Attach { generation, .. } = judge(state.read(), &theirs, fault) {
            if state.store < state.newest {
                return broken("served around its cache");
            }
            let newest = state.newest + 1;
            let elsewhere =
                State { mark: Mark::Clean, generation, store: newest, newest, ..state.clone() };
            walk.push(elsewhere, &how, "elsewhere".to_owned());
        }
        if state.mark == Mark::Clean {
            let newest = state.newest + 1;
            let raw = State { store: newest, newest, ..state.clone() };
            walk.push(raw, &how, "without Larder".to_owned());
        } else {
            // The operator gives the cache up: what it had is forgiven.
            if state.journal.is_some_and(|(of, _)| of != g) {
                return broken("the store holds a part of an epoch whose journal counts no more");
            }
            let mut given_up = state.clone();
            for (i, step) in recover(g).into_iter().enumerate() {
                given_up.step(step, false);
                if given_up.mark == Mark::Clean {
                    given_up.newest = given_up.store;
                }
                walk.push(given_up.clone(), &how, format!("recover.{}", i + 1));
            }
        }
    }
    Ok(seen.len())
}

/// Walks through what an older marker, or an older image of the cache, can bring about that is put back while the daemon is down. Only where it
/// can be seen: what both sides agree on looks like what was.
pub(super) fn set_back(fault: Fault) -> Result<usize, String> {
    let mut walk = Walk { todo: vec![(State::first(), Vec::new())] };
    let mut seen = BTreeSet::new();
    while let Some((state, how)) = walk.todo.pop() {
        let far = state.newest > 2 || state.generation > 2 || state.run > 3 || state.number > 6;
        if far || !seen.insert(state.clone()) {
            continue;
        }
        let broken = |what: &str| Err(format!("{what}: {how:?}"));
        let (g, mut now) = (state.generation, state.clone());
        if state.up {
            now.step(Step::Answer, false);
            walk.push(now, &how, "write".to_owned());
            walk.push(State { up: false, ..state.clone() }, &how, "kill".to_owned());
            let mut now = State { up: false, ..state.clone() };
            for step in detach(g, fault) {
                now.step(step, false);
                walk.push(now.clone(), &how, format!("detach: {step:?}"));
            }
            now.known = now.number;
            walk.push(now, &how, "detach".to_owned());
            continue;
        }
        match &state.kept {
            None => {
                let marker = Kept::Marker(state.mark, g, state.number, state.marked_by);
                let cache = Kept::Cache(state.holds, state.version, state.known, state.run);
                for kept in [marker, cache] {
                    let kept = State { kept: Some(kept), ..state.clone() };
                    walk.push(kept, &how, "keep".to_owned());
                }
            }
            Some(kept) if !state.back => {
                let mut back = State { back: true, ..state.clone() };
                match *kept {
                    Kept::Marker(mark, generation, number, by) => {
                        (back.mark, back.generation) = (mark, generation);
                        (back.number, back.marked_by) = (number, by);
                    }
                    Kept::Cache(holds, version, known, run) => {
                        (back.holds, back.version) = (holds, version);
                        (back.known, back.run) = (known, run);
                    }
                }
                if back.number < back.known || back.marked_by > back.run {
                    walk.push(back, &how, "put back".to_owned());
                }
            }
            Some(_) => {}
        }
        // A start raises the cache's run before the marker has it [runfirst].
        let mut now = State { run: state.run + 1, ..state.clone() };
        match judge(state.read(), &state.cache(), fault) {
            Verdict::Refuse(Why::SetBack) if !state.back => {
                return broken("refused, and nobody put anything back");
            }
            Verdict::Attach { generation, .. } => {
                if state.store < state.newest {
                    return broken("serves a store that lacks acknowledged writes");
                }
                walk.push(now.clone(), &how, "attach.1".to_owned());
                now.step(Step::Holds(Holds::Open(generation)), true);
                walk.push(now.clone(), &how, "attach.2".to_owned());
                now.step(Step::Mark(Mark::Dirty(MINE), generation), false);
                walk.push(now.clone(), &how, "attach.3".to_owned());
                now.known = now.number;
                walk.push(now.clone(), &how, "attach.4".to_owned());
                walk.push(State { up: true, ..now }, &how, "attach".to_owned());
            }
            Verdict::GoOn => {
                if state.version.unwrap_or(0).max(state.store) < state.newest {
                    return broken("serves an image that lacks acknowledged writes");
                }
                walk.push(now.clone(), &how, "start.1".to_owned());
                now.step(Step::Mark(Mark::Dirty(MINE), g), false);
                walk.push(now.clone(), &how, "start.2".to_owned());
                now.known = now.number;
                walk.push(State { up: true, ..now }, &how, "start".to_owned());
            }
            Verdict::Tidy => {
                now.step(Step::Mark(Mark::Clean, g), false);
                walk.push(now.clone(), &how, "tidy.1".to_owned());
                now.known = now.number;
                walk.push(now, &how, "tidy".to_owned());
            }
            // The operator decides.
            _ => {}
        }
    }
    Ok(seen.len())
}
