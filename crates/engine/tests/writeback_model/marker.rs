//! The marker beside a store, the cache's superblock and a copy of it: every state that attach, detach, carrying, taking up, changing over, epochs,
//! recovering and somebody without Larder can bring about, with a crash behind each step, and with a marker that cannot be written, or seems so.
//! Which step comes next says the machine that hosts use. It follows `marker_states` and `setback_states` of
//! `models/write_back.py`. Versions stand for data: each answered write makes the next.

use std::collections::BTreeSet;

use larder_engine::block::writeback::Fault;
use larder_engine::block::writeback::holder::{Comer, Held, Holder, Refused, cache_of};
use larder_engine::block::writeback::marker::{
    Cache, Holds, Mark, Marker, Read, Step, Verdict, Why, judge, recover,
};
use larder_format::Uuid;
use larder_format::block::marker::Order;
use larder_format::block::superblock::{HoldsState, WrittenBack};

const MINE: Uuid = Uuid([1; 16]);
const OTHER: Uuid = Uuid([2; 16]);
const VOLUME: Uuid = Uuid([3; 16]);
const ANOTHER: Uuid = Uuid([4; 16]);

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
    /// The marker's number that the cache knows, the run that had the volume last, and the cache's.
    known: u64,
    had: u64,
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
    Cache(Holds, Option<u64>, (u64, u64), u64),
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
            had: 0,
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
        let of = Some((VOLUME, 1));
        Read::There(Marker { mark: self.mark, generation, number, run, of, moved: false })
    }

    fn cache(&self, fault: Fault) -> Cache {
        cache_of((MINE, self.run), self.record().as_ref(), 0, fault)
    }

    fn record(&self) -> Option<WrittenBack> {
        Some(self.entry()).filter(|entry| entry.holds != HoldsState::Nothing)
    }

    /// The superblock's entry of the volume.
    fn entry(&self) -> WrittenBack {
        let (holds, generation) = match self.holds {
            Holds::Nothing => (HoldsState::Nothing, 0),
            Holds::Clean(g) => (HoldsState::Clean, g),
            Holds::Open(g) => (HoldsState::Open, g),
            Holds::TakingUp(g) => (HoldsState::TakingUp, g),
            Holds::Carried(g) => (HoldsState::Carried, g),
        };
        let (volume, order) = (VOLUME, Order::Journaled);
        let (marker, run) = (self.known, self.had);
        let cut = None;
        WrittenBack { volume, attachment: 1, began: 0, holds, generation, marker, run, order, cut }
    }

    fn comes(&self, served: bool, fault: Fault) -> Holder {
        let comer = Comer {
            cache: MINE,
            former: self.run,
            run: self.run + 1,
            record: self.record(),
            logged: None,
            order: Some(Order::Journaled),
            marked: true,
            served,
            drains: false,
            later: false,
            shrunk: false,
            fresh: VOLUME,
        };
        Holder::comes(comer, fault)
    }

    fn held(&self) -> Held {
        let (entry, number) = (self.entry(), self.number);
        Held { cache: MINE, entry, number, durable: number, marked: true, frontier: 0 }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Destage | Step::DestageMost => {
                self.store = self.store.max(self.version.unwrap_or(0));
            }
            Step::Replay(of) => {
                if let Some((_, version)) = self.journal.take_if(|(by, _)| *by == of) {
                    self.store = version;
                }
            }
            Step::Holds(holds) => {
                self.holds = holds;
                if matches!(holds, Holds::Clean(_)) {
                    self.version = None;
                }
            }
            Step::Mark(mark, generation) => {
                (self.mark, self.generation) = (mark, generation);
                (self.number, self.marked_by) = (self.number + 1, self.had);
            }
            Step::Answer => {
                self.newest += 1;
                self.version = Some(self.newest);
            }
            // What is written from here on the store has.
            Step::Through => {
                self.newest += 1;
                self.store = self.newest;
            }
            Step::EmptyJournal => self.journal = None,
            Step::Read
            | Step::Hold
            | Step::Release
            | Step::DropLines
            | Step::Settle
            | Step::FlushLog
            | Step::FlushStore
            | Step::Aside
            | Step::Resume
            | Step::Show
            | Step::CloseLog
            | Step::Refuse
            | Step::Accept => {}
        }
    }

    /// What the machine asks for is done, and it is told.
    fn carry_out(&mut self, holder: &mut Holder, step: Step) -> Result<(), Refused> {
        // What the log had before is void.
        if let Step::Holds(holds) = step {
            let mut entry = holder.entry(holds);
            self.step(step);
            if entry.attachment == 0 {
                (self.version, entry.attachment) = (None, 1);
            }
            (self.known, self.had) = (entry.marker, entry.run);
            holder.recorded(entry);
            return Ok(());
        }
        // A log that has failed takes no writes.
        if step != Step::Answer || !holder.drains() {
            self.step(step);
        }
        match step {
            Step::Read => holder.read(self.read(), None)?,
            Step::Replay(_) => holder.replayed(None),
            _ => holder.done(),
        }
        Ok(())
    }
}

/// A volume whose marker could not be written says again that it writes back.
const AGAIN: &str = "again";

/// States to go on from.
struct Walk {
    todo: Vec<(State, Vec<String>)>,
}

impl Walk {
    /// Whatever can come of an operation: a crash behind each step, and markers that cannot be written, or are though nobody hears of it.
    fn go(&mut self, from: &State, how: &[String], name: &str, holder: Holder) {
        let again = name == AGAIN;
        let mut all = vec![(from.clone(), holder, name.to_owned(), again)];
        while let Some((mut state, mut holder, name, mut refuses)) = all.pop() {
            let mut i = 0;
            while let Some(step) = holder.next() {
                i += 1;
                if let Step::Mark(..) = step {
                    for written in [false, true] {
                        let (mut state, mut holder) = (state.clone(), holder.clone());
                        if written {
                            state.step(step);
                        }
                        holder.failed();
                        let name =
                            format!("{name}.{i} {}", if written { "unheard" } else { "fails" });
                        all.push((state, holder, name, refuses));
                    }
                }
                refuses = matches!(step, Step::Refuse) || refuses && !matches!(step, Step::Accept);
                if state.carry_out(&mut holder, step).is_err() {
                    break;
                }
                self.push(state.clone(), how, format!("{name}.{i}"));
            }
            // A volume that stays after all is written again, once its marker says so.
            let stays = (again || holder.has_failed()) && matches!(state.holds, Holds::Open(_));
            if refuses && !again {
                let holder = Holder::again(state.held(), Fault::default());
                self.go(&state, how, AGAIN, holder);
            } else if stays && !refuses {
                state.step(Step::Answer);
                self.push(state, how, format!("{name}, and goes on"));
            }
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
        let state = State { number: 0, marked_by: 0, known: 0, had: 0, ..state };
        if state.newest > 3 || state.generation > 4 || !seen.insert(state.clone()) {
            continue;
        }
        let broken = |what: &str| Err(format!("{what}: {how:?}"));
        let g = state.generation;
        let verdict = judge(state.read(), &state.cache(fault), fault);
        match verdict {
            Verdict::GoOn => {
                if state.version.is_some_and(|v| v < state.store) {
                    return broken("older dirty data over newer");
                }
                if state.version.unwrap_or(state.store) < state.newest {
                    return broken("serves an image that lacks acknowledged writes");
                }
                walk.go(&state, &how, "start", state.comes(false, fault));
                if state.mark == Mark::Dirty(MINE) && matches!(state.holds, Holds::Open(_)) {
                    let mut closing = state.clone();
                    closing.step(Step::Mark(Mark::Closing(MINE), g));
                    walk.push(closing, &how, "the log fails".to_owned());
                }
                if state.mark == Mark::Dirty(MINE) && matches!(state.holds, Holds::Open(_)) {
                    // It is up, and goes.
                    let drains = Holder::goes(state.held(), fault).next() == Some(Step::Destage);
                    if state.journal.is_none() || !drains {
                        walk.go(&state, &how, "detach", Holder::goes(state.held(), fault));
                        let through = Holder::goes_through(state.held(), fault);
                        walk.go(&state, &how, "through", through);
                    }
                    if let Some(version) = state.version.filter(|v| *v > state.store)
                        && state.journal.is_none()
                    {
                        let committed = State { journal: Some((g, version)), ..state.clone() };
                        walk.push(committed.clone(), &how, "epoch.1".to_owned());
                        let mut applied = committed;
                        applied.step(Step::Replay(g));
                        walk.push(applied, &how, "epoch.2".to_owned());
                    }
                    walk.go(&state, &how, "carry", Holder::carried(state.held(), fault));
                }
            }
            Verdict::Drain => {
                if state.version.unwrap_or(0).max(state.store) < state.newest {
                    return broken("drains what lacks acknowledged writes");
                }
                let mut planned = state.comes(false, fault);
                let _ = state.clone().carry_out(&mut planned, Step::Read);
                if planned.next() != Some(Step::DropLines) {
                    return broken("believes lines of a log that has failed");
                }
                walk.go(&state, &how, "start", state.comes(false, fault));
                // It is up, and all that is dirty comes to the store, and the marker says so.
                let mut drained = state.clone();
                if state.journal.is_none() {
                    drained.step(Step::Destage);
                    walk.push(drained.clone(), &how, "drained".to_owned());
                    for (mark, name) in [(Mark::Closed(MINE), "closed"), (Mark::Clean, "clean")] {
                        drained.step(Step::Mark(mark, g));
                        walk.push(drained.clone(), &how, name.to_owned());
                    }
                }
            }
            Verdict::TakeUp { .. } => {
                walk.go(&state, &how, "take", state.comes(false, fault));
                if let (Holds::Carried(of), None) = (state.holds, state.copy) {
                    let copied = State { copy: Some((of, state.version)), ..state.clone() };
                    walk.push(copied, &how, "copy".to_owned());
                }
            }
            Verdict::Tidy => walk.go(&state, &how, "tidy", state.comes(false, fault)),
            Verdict::Attach { .. } => {
                if state.store < state.newest {
                    return broken("serves a store that lacks acknowledged writes");
                }
                walk.go(&state, &how, "attach", state.comes(false, fault));
                walk.go(&state, &how, "back", state.comes(true, fault));
            }
            Verdict::Refuse(Why::Lost) => {
                return broken("this cache is named and does not hold what the marker speaks of");
            }
            Verdict::Wait | Verdict::Refuse(_) => {
                return broken("nothing of the kind was done");
            }
        }
        if let Some((of, version)) = state.copy {
            let copy = Cache { holds: Holds::Carried(of), ..state.cache(fault) };
            let serves =
                matches!(judge(state.read(), &copy, fault), Verdict::GoOn | Verdict::Drain);
            if serves && version.unwrap_or(0).max(state.store) < state.newest {
                return broken("a copy of the cache serves old data");
            }
        }
        // Another host, with another cache.
        let theirs = Cache { uuid: OTHER, run: 0, holds: Holds::Nothing, known: 0, of: None };
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
                given_up.step(step);
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
            now.step(Step::Answer);
            walk.push(now, &how, "write".to_owned());
            walk.push(State { up: false, ..state.clone() }, &how, "kill".to_owned());
            let mut now = State { up: false, ..state.clone() };
            let mut holder = Holder::goes(now.held(), fault);
            while let Some(step) = holder.next().filter(|step| *step != Step::Through) {
                let _ = now.carry_out(&mut holder, step);
                walk.push(now.clone(), &how, format!("detach: {step:?}"));
            }
            now.known = now.number;
            walk.push(now, &how, "detach".to_owned());
            continue;
        }
        match &state.kept {
            None => {
                let marker = Kept::Marker(state.mark, g, state.number, state.marked_by);
                let known = (state.known, state.had);
                let cache = Kept::Cache(state.holds, state.version, known, state.run);
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
                        ((back.known, back.had), back.run) = (known, run);
                    }
                }
                if back.number < back.known || back.marked_by > back.cache(Fault::default()).run {
                    walk.push(back, &how, "put back".to_owned());
                }
            }
            Some(_) => {}
        }
        // Its store is away at a start, which raises the cache's run [runkept].
        let away = State { run: state.run + 1, ..state.clone() };
        walk.push(away, &how, "away".to_owned());
        // A start raises the cache's run before the marker has it [runfirst].
        let mut now = State { run: state.run + 1, ..state.clone() };
        match judge(state.read(), &state.cache(fault), fault) {
            Verdict::Refuse(Why::SetBack) if !state.back => {
                return broken("refused, and nobody put anything back");
            }
            Verdict::Attach { .. } if state.store < state.newest => {
                return broken("serves a store that lacks acknowledged writes");
            }
            Verdict::GoOn if state.version.unwrap_or(0).max(state.store) < state.newest => {
                return broken("serves an image that lacks acknowledged writes");
            }
            Verdict::Attach { .. } | Verdict::GoOn | Verdict::Tidy => {
                let mut holder = state.comes(false, fault);
                walk.push(now.clone(), &how, "run".to_owned());
                while let Some(step) = holder.next().filter(|step| *step != Step::Answer) {
                    let _ = now.carry_out(&mut holder, step);
                    walk.push(now.clone(), &how, format!("start: {step:?}"));
                }
                // What the log notes of the marker is durable with the first batch.
                now.known = now.number;
                walk.push(State { up: true, ..now }, &how, "start".to_owned());
            }
            // The operator decides.
            _ => {}
        }
    }
    Ok(seen.len())
}

/// What an operator's mistake brings about: what this cache says of a volume meets the marker, or the store, of another of the same cache, in any
/// state that either may be in.
pub(super) fn swapped(fault: Fault) -> Result<usize, String> {
    let all_marks = [
        Mark::Clean,
        Mark::Dirty(MINE),
        Mark::Carried(MINE),
        Mark::Closing(MINE),
        Mark::Closed(MINE),
    ];
    let all_holds = [
        Holds::Nothing,
        Holds::Clean(1),
        Holds::Open(1),
        Holds::Open(2),
        Holds::TakingUp(2),
        Holds::Carried(1),
    ];
    let mut judged = 0;
    for (mark, holds, generation) in all_marks.iter().flat_map(|mark| {
        all_holds.iter().flat_map(move |holds| [1, 2].map(|generation| (*mark, *holds, generation)))
    }) {
        // (Another volume's store; another store with the marker left behind; the marker of another attachment of the volume.)
        for (of, moved) in [((ANOTHER, 2), false), ((VOLUME, 1), true), ((VOLUME, 2), false)] {
            let state = State { mark, holds, generation, ..State::first() };
            let cache = Cache { of: Some((VOLUME, 1)), ..state.cache(fault) };
            let found = Marker { mark, generation, number: 1, run: 0, of: Some(of), moved };
            let verdict = judge(Read::There(found), &cache, fault);
            let dirty = holds.may_be_dirty();
            let is_own = mark != Mark::Clean;
            let holder_says = {
                let mut holder = state.comes(false, fault);
                holder.read(Read::There(found), None).is_ok()
            };
            let refused = matches!(verdict, Verdict::Refuse(_));
            if refused && holder_says && state.record().is_some() {
                return Err(format!("{mark:?}, {holds:?}: the steps know nothing of it"));
            }
            if (is_own || dirty && (of.1 == 1 || of.0 == ANOTHER)) && !refused {
                return Err(format!(
                    "{mark:?} of generation {generation} and {holds:?}: dirty data of one volume goes to another's store, or is given up for it: {verdict:?}"
                ));
            }
            if let Verdict::Attach { lines: true, .. } = verdict
                && of.0 == ANOTHER
            {
                return Err(format!("{mark:?}, {holds:?}: another volume's lines are believed"));
            }
            judged += 1;
        }
    }
    Ok(judged)
}
