//! Operators' work that fails, is given up, or goes on beside other such work.

use std::sync::mpsc;

use super::ends::give_up;
use super::hanging::{BYTES, GoesOn, Hanging, State, beside_another};
use super::*;

/// So long at most until something is seen. (It takes that long only if it never is.)
const PATIENCE: Duration = Duration::from_secs(120);

/// Detaches the only volume of a cache whose log ends as soon as the last client has gone.
#[test]
fn a_detach_that_fails_leaves_its_volume_in_use() {
    let bench = bench(&[8 << 20], 64 << 20, SHAPE);
    let volume = bench.server.as_ref().unwrap().volumes().find("disk0").unwrap();
    let mut last = Some(Client::new(&volume));
    let failed = bench.cache.detach("disk0", false, &mut |_| {
        locked(&bench.cache.log_inbox).stopped = true;
        drop(last.take());
        true
    });
    let failed = failed.unwrap_err().to_string();
    assert!(failed.contains("the cache is stopping"), "{failed}");
    assert!(!volume.is_closed() && !volume.is_closing());
    locked(&bench.cache.log_inbox).stopped = false;
    assert!(bench.cache.volume("disk0").is_some());
    {
        let client = bench.client(0);
        let mut session = client.session().unwrap();
        one(&mut *session, write(0, 4096, 7)).outcome.unwrap();
        assert_eq!(bytes(one(&mut *session, read(0, 1)))[0], 7);
    }
    assert!(bench.cache.detach("disk0", true, &mut |_| true).unwrap().is_some());
}

#[test]
fn after_the_end_an_operator_hears_that_the_cache_stops() {
    let mut bench = bench(&[8 << 20], 64 << 20, SHAPE);
    bench.server.take().unwrap().stop();
    bench.handle.take().unwrap().stop();
    for failed in [
        bench.cache.settle(PATIENCE).map(drop),
        bench.cache.grow("disk0", 9 << 20).map(drop),
        bench.cache.detach("disk0", false, &mut |_| true).map(drop),
    ] {
        let failed = failed.unwrap_err().to_string();
        assert!(failed.contains("the cache is stopping"), "{failed}");
    }
}

/// Whoever asked was told that it failed, and has acted on that.
#[test]
fn what_was_given_up_is_not_carried_out_later() {
    let bench = bench(&[8 << 20], 64 << 20, SHAPE);
    let (holds, held) = mpsc::channel();
    let (go, goes) = mpsc::channel::<()>();
    let cache = bench.cache.clone();
    let other = std::thread::spawn(move || {
        cache.on_log(move |_| {
            holds.send(()).unwrap();
            let _ = goes.recv();
        })
    });
    held.recv_timeout(PATIENCE).unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let does = done.clone();
    let job = move |_: &mut log::LogThread| does.store(true, Ordering::SeqCst);
    let failed = bench.cache.on_log_within(Duration::from_millis(1), job);
    let failed = failed.unwrap_err().to_string();
    assert!(failed.contains("does not answer"), "{failed}");
    drop(go);
    other.join().unwrap().unwrap();
    // What was asked before is over by then.
    bench.cache.on_log(|_| ()).unwrap();
    assert!(!done.load(Ordering::SeqCst), "it was carried out");
}

/// Another volume gets the stretch that was planned for it, while its store keeps it waiting.
#[test]
fn a_volume_that_comes_beside_another_is_planned_for_again() {
    let bench = bench(&[8 << 20], 64 << 20, SHAPE);
    let state = Arc::new(State::default());
    let _goes_on = GoesOn(state.clone());
    state.hangs.store(true, Ordering::SeqCst);
    let first = Arc::new(Volume::new("first", Box::new(Hanging(state.clone())), 4096, true));
    let (cache, comes) = (bench.cache.clone(), first.clone());
    let attaches = std::thread::spawn(move || cache.attach(&comes, false));
    State::seen(&state.waits);
    let path = bench.dir.path().join("second");
    File::create(&path).unwrap().set_len(8 << 20).unwrap();
    let uri: Uri = format!("file:{}", path.display()).parse().unwrap();
    let store = backing::open_with(&uri, &OpenOptions::default()).unwrap();
    let second = Arc::new(Volume::new("second", store, 4096, true));
    bench.cache.attach(&second, false).unwrap().unwrap_err();
    state.hangs.store(false, Ordering::SeqCst);
    let cold = attaches.join().unwrap().unwrap();
    cold.unwrap_err();
    let base = |name: &str| bench.cache.attached(name).unwrap().base();
    assert_ne!(base("first"), base("second"));
    for name in ["disk0", "first", "second"] {
        let at = bench.cache.node_limits.volume_at(base(name)).unwrap();
        assert_eq!(at.name, name);
    }
}

/// Of whatever comes and goes at once: each volume that is attached is found by its lines.
#[test]
fn volumes_that_come_and_go_side_by_side_are_found_by_their_lines() {
    let bench = bench(&[8 << 20], 64 << 20, SHAPE);
    for round in 0..24 {
        std::thread::scope(|scope| {
            for who in ["a", "b", "c"] {
                let cache = bench.cache.clone();
                scope.spawn(move || {
                    if cache.volume(who).is_some() {
                        cache.detach(who, true, &mut |_| true).unwrap();
                    }
                    // One of them has gone, the others come again.
                    if round % 3 != who.as_bytes()[0] % 3 {
                        let store = Box::new(Hanging(Arc::default()));
                        let volume = Arc::new(Volume::new(who, store, 4096, true));
                        let _ = cache.attach(&volume, false).unwrap();
                    }
                });
            }
        });
        let all = bench.cache.volumes();
        assert_eq!(all.len(), 3, "{all:?}");
        for volume in all {
            let at = bench.cache.node_limits.volume_at(volume.base()).unwrap();
            assert!(Arc::ptr_eq(&at, &volume), "{} is not found", volume.name);
        }
    }
}

/// What is selected of a volume that is there is not touched by another that comes.
#[test]
fn a_volume_that_comes_brings_back_what_was_selected_of_itself_alone() {
    let bench = bench(&[8 << 20], 64 << 20, SHAPE);
    let attached = bench.cache.attached("disk0").unwrap();
    bench.cache.select("disk0", Some(Rule::Always), Some(&[(0, 4096)]), "").unwrap();
    assert_eq!(bench.cache.selected_of(&attached).1, 1);
    // It is unselected, and the file says so a moment later.
    bench.cache.node_limits.select(|selection| selection.remove_volume(attached.id));
    let store = Box::new(Hanging(Arc::default()));
    let comes = Arc::new(Volume::new("comes", store, 4096, true));
    bench.cache.attach(&comes, false).unwrap().unwrap_err();
    assert_eq!(bench.cache.selected_of(&attached).1, 0);
    // Its own comes back with it.
    bench.cache.select("comes", Some(Rule::Always), Some(&[(0, 4096)]), "").unwrap();
    assert!(bench.cache.detach("comes", true, &mut |_| true).unwrap().is_some());
    comes.reopen();
    let _ = bench.cache.attach(&comes, false).unwrap();
    let again = bench.cache.attached("comes").unwrap();
    assert_eq!(bench.cache.selected_of(&again).1, 1);
}

/// A file that is damaged, or of a later version, has what is selected of other volumes: nobody writes over it.
#[test]
fn a_selection_that_cannot_be_read_is_not_written_over() {
    let bench = bench(&[8 << 20, 8 << 20], 64 << 20, SHAPE);
    bench.cache.select("disk0", Some(Rule::Never), None, "").unwrap();
    let file = bench.cache.selection_file();
    let mut text = std::fs::read_to_string(&file).unwrap();
    text.insert_str(1, "\"later\": {\"share\": 1},");
    std::fs::write(&file, &text).unwrap();
    let why = bench.cache.select("disk1", Some(Rule::Always), None, "").unwrap_err().to_string();
    assert!(why.contains("cannot be read") && why.contains("mend or remove it"), "{why}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
    // It is in force all the same, and kept once the file is out of the way.
    let selected = |name| bench.cache.selected_of(&bench.cache.attached(name).unwrap()).0;
    assert_eq!((selected("disk0"), selected("disk1")), (Rule::Never, Rule::Always));
    std::fs::remove_file(&file).unwrap();
    bench.cache.select("disk1", Some(Rule::Always), None, "").unwrap();
    assert!(std::fs::read_to_string(&file).unwrap().contains("disk1"));
}

/// What is never to be cached is dropped, which waits for requests of its store: meanwhile others are selected.
#[test]
fn a_store_that_hangs_does_not_hold_up_what_is_selected_of_others() {
    let (bench, state) = beside_another();
    let _goes_on = GoesOn(state.clone());
    state.hangs.store(true, Ordering::SeqCst);
    let client = bench.server.as_ref().unwrap().client("hanging");
    let mut session = client.session().unwrap();
    session.submit(1, read(0, 4096));
    session.flush(Instant::now());
    State::seen(&state.waits);
    let (first, second) = (bench.cache.clone(), bench.cache.clone());
    let never = std::thread::spawn(move || first.select("hanging", Some(Rule::Never), None, ""));
    let hanging = bench.cache.attached("hanging").unwrap();
    let until = Instant::now() + PATIENCE;
    while bench.cache.selected_of(&hanging).0 != Rule::Never {
        assert!(Instant::now() < until, "the rule is not in force");
        std::thread::sleep(Duration::from_millis(1));
    }
    let (tell, told) = mpsc::channel();
    let other = std::thread::spawn(move || {
        let selected = second.select("disk1", Some(Rule::Always), Some(&[(0, 4096)]), "x");
        let _ = tell.send((selected, second.unselect_label("disk1", "x")));
    });
    // (Where it is held up it ends when the store goes on.)
    let said = told.recv_timeout(Duration::from_secs(60));
    assert!(!never.is_finished(), "the store hangs still");
    state.hangs.store(false, Ordering::SeqCst);
    other.join().unwrap();
    never.join().unwrap().unwrap();
    run(&mut *session, 1);
    let (selected, unselected) = said.expect("others wait for a store that is not their own");
    assert_eq!((selected.unwrap(), unselected.unwrap()), ((1, 0), 1));
}

/// Who wants to have in the file what is selected waits for the file, and nobody else does.
#[test]
fn a_file_that_hangs_holds_up_nobody_but_who_waits_for_it() {
    let bench = bench(&[8 << 20, 8 << 20], 64 << 20, SHAPE);
    // Whoever reads it waits until somebody writes to it.
    let uuid = &bench.cache.node_limits.uuid;
    let state = bench.dir.path().join("state");
    std::fs::create_dir_all(&state).unwrap();
    let file = state.join(format!("block-selection-{uuid}.json"));
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, &file, mode).unwrap();
    let first = bench.cache.clone();
    let selects =
        std::thread::spawn(move || first.select("disk0", Some(Rule::Always), None, "kept"));
    // It can be opened like this when somebody reads.
    let until = Instant::now() + PATIENCE;
    let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::NONBLOCK;
    let writes = loop {
        match rustix::fs::open(&file, flags, mode) {
            Ok(writes) => break writes,
            Err(_) => assert!(Instant::now() < until, "nobody reads the file"),
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let disk0 = bench.cache.attached("disk0").unwrap();
    assert_eq!(bench.cache.selected_of(&disk0).0, Rule::Always, "it is in force");
    let (tell, told) = mpsc::channel();
    let second = bench.cache.clone();
    let detaches = std::thread::spawn(move || {
        let dropped = second.drop_lines("disk0", None, &mut || true);
        let _ = tell.send((dropped, second.detach("disk1", true, &mut |_| true)));
    });
    // (Where it is held up it ends when the file is read.)
    let said = told.recv_timeout(Duration::from_secs(60));
    assert!(!selects.is_finished(), "the file hangs still");
    rustix::io::write(&writes, b"{}").unwrap();
    drop(writes);
    detaches.join().unwrap();
    assert_eq!(selects.join().unwrap().unwrap(), (0, 0));
    let (dropped, detached) = said.expect("a detach waits for a file that it does not need");
    assert_eq!((dropped.unwrap(), detached.unwrap().is_some()), (Some(0), true));
    let kept = std::fs::read_to_string(&file).unwrap();
    assert!(kept.contains("disk0") && kept.contains("always"), "{kept}");
}

/// Lines where a volume was are not its own: what it may have lost lies elsewhere.
#[test]
fn losses_are_not_settled_where_the_volume_was() {
    let (bench, state) = beside_another();
    let (cache, volume) = (&bench.cache, bench.cache.attached("hanging").unwrap());
    let base = volume.base();
    let space = cache.layout().space_lines() * u64::from(cache.layout().line);
    let settles = std::thread::scope(|scope| {
        cache
            .with_lines(cache.lines_of(base, BYTES), &mut || true, || {
                state.losses.store(1, Ordering::SeqCst);
                let (tell, told) = mpsc::channel();
                let volume = &volume;
                let settles = scope.spawn(move || {
                    cache.settle_losses(volume, &mut || {
                        let _ = tell.send(());
                        true
                    })
                });
                // It waits for these lines.
                told.recv_timeout(PATIENCE).unwrap();
                cache.node_limits.moved(volume, space - (64 << 20));
                settles
            })
            .unwrap()
            .join()
            .unwrap()
    });
    assert!(!settles, "its old lines say nothing of its losses");
    cache.node_limits.moved(&volume, base);
}

/// It was attached when the cache was given up, and has no place there.
#[test]
fn a_volume_that_has_no_place_in_a_cache_that_was_given_up_goes_as_others_do() {
    let dir = TempDir::new().unwrap();
    let store = |name: &str, bytes: u64| {
        let path = dir.path().join(name);
        File::create(&path).unwrap().set_len(bytes).unwrap();
        let uri: Uri = format!("file:{}", path.display()).parse().unwrap();
        backing::open_with(&uri, &OpenOptions::default()).unwrap()
    };
    let uri = format!("file:{}", dir.path().join("disk").display());
    File::create(dir.path().join("disk")).unwrap().set_len(8 << 20).unwrap();
    let cache = Cache::builder(dir.path().join("cache")).create(ByteSize(64 << 20));
    let cache = cache.state_dir(dir.path().join("state")).volume("disk", &uri).unwrap();
    let cache = cache.open().unwrap();
    drop(cache.attach("late", store("large", 8 << 20)).unwrap());
    assert!(cache.detach("late", &mut |_| true).unwrap());
    give_up(cache.core());
    // Smaller than it was: with a cache it would be refused.
    let late = cache.attach("late", store("small", 4 << 20)).unwrap();
    assert!(cache.core().volume("late").is_none(), "it has a place");
    late.write(0, [7; 4096]).wait().unwrap();
    let mut clients = Vec::new();
    let stays = cache.detach("late", &mut |how| {
        clients.push(how);
        false
    });
    assert!(!stays.unwrap() && clients == [Detaching::Clients(1)], "{clients:?}");
    assert_eq!(late.read(0, 1).wait().unwrap()[0], 7);
    drop(late);
    assert!(cache.detach("late", &mut |_| true).unwrap());
    assert!(cache.volume("late").is_none());
}
