//! Starts that are refused.

use super::hanging::{Hanging, State};
use super::*;
use larder_runtime::record::RecordConfig;

/// A volume whose store may refuse to flush, and one in a file of which lines are cached.
fn both(dir: &TempDir, state: &Arc<State>) -> Arc<Volumes> {
    let volumes = Arc::new(Volumes::default());
    let uri: Uri = format!("file:{}", dir.path().join("disk1").display()).parse().unwrap();
    let options = OpenOptions { watch: false, ..OpenOptions::default() };
    let file = backing::open_with(&uri, &options).unwrap();
    volumes.add(Volume::new("blind", Box::new(Hanging(state.clone())), 4096, true)).unwrap();
    volumes.add(Volume::new("disk1", file, 4096, true)).unwrap();
    volumes
}

/// By a store that cannot be made durable, by a share that cannot be, by a record that cannot be written: the device is as it was found, and the
/// next start is as warm as this one would have been.
#[test]
fn a_start_that_is_refused_leaves_the_device_as_it_was() {
    let shape = Shape { volumes: 2, ..SHAPE };
    let dir = bench(&[4096, 8 << 20], 32 << 20, shape).dir.clone();
    let state = Arc::new(State::default());
    let mut first = serve(dir.clone(), shape, both(&dir, &state)).unwrap();
    let client = first.client(1);
    let mut session = client.session().unwrap();
    one(&mut *session, write(0, 1 << 20, 5)).outcome.unwrap();
    drop((session, client));
    first.settle();
    let lines = first.cache.count_lines();
    assert!(lines > 0);
    first.server.take().unwrap().stop();
    first.handle.take().unwrap().stop();
    drop(first);

    let bytes = || std::fs::read(dir.path().join("cache")).unwrap();
    let before = bytes();
    let refuse = |shape: Shape, record: Option<RecordConfig>| {
        let config = CacheConfig { record, ..config_of(&dir, shape) };
        let opened = open::open(&dir.path().join("cache"), config, &both(&dir, &state).all());
        let why = opened.map(|_| ()).unwrap_err().to_string();
        assert!(bytes() == before, "the device has changed: {why}");
        why
    };
    state.fails.store(true, Ordering::SeqCst);
    let why = refuse(shape, None);
    assert!(why.contains("'blind': its store cannot make durable"), "{why}");
    state.fails.store(false, Ordering::SeqCst);
    let too_much = || {
        let (floor, ceiling) = (Portion::Bytes(ByteSize(16 << 20)), Portion::Percent(1.0));
        let share = Share { floor: Some(floor), ceiling: Some(ceiling) };
        RulesConfig { shares: vec![("disk1".to_owned(), share)], ..RulesConfig::default() }
    };
    let why = refuse(Shape { rules: too_much, ..shape }, None);
    assert!(why.contains("the floor is above the ceiling"), "{why}");
    let file = dir.path().join("record");
    let why = refuse(shape, Some(RecordConfig { file: file.clone(), limit: 1 << 20 }));
    assert!(why.contains("is not empty") && !file.exists(), "{why}");

    let again = serve(dir.clone(), shape, both(&dir, &state)).unwrap();
    let warmth = &again.handle.as_ref().unwrap().warmth;
    assert!(matches!(warmth, Warmth::Log(_)), "{warmth:?}");
    assert_eq!(again.cache.count_lines(), lines);
}

/// Of an empty cache too, and no file of a record is left that the next start would stumble over.
#[test]
fn a_start_that_is_refused_leaves_no_record() {
    let dir = bench(&[4096, 8 << 20], 32 << 20, Shape { volumes: 2, ..SHAPE }).dir.clone();
    let state = Arc::new(State::default());
    let path = dir.path().join("other");
    let shape = Shape { volumes: 2, ..SHAPE };
    let format = FormatConfig { path: path.clone(), ..format_config(&dir, shape, 32 << 20) };
    let mut seed = [7; 32];
    seed[..8].copy_from_slice(&(Arc::as_ptr(&dir) as u64).to_le_bytes());
    open::format(&format, seed, UnixSecs(1)).unwrap();
    let before = std::fs::read(&path).unwrap();
    let file = dir.path().join("record");
    let record = Some(RecordConfig { file: file.clone(), limit: 1 << 20 });
    let begin = || {
        let config = CacheConfig { record: record.clone(), ..config_of(&dir, shape) };
        open::open(&path, config, &both(&dir, &state).all())
    };
    state.fails.store(true, Ordering::SeqCst);
    let why = begin().map(|_| ()).unwrap_err().to_string();
    assert!(why.contains("cannot make durable"), "{why}");
    assert!(std::fs::read(&path).unwrap() == before, "the device has changed");
    assert!(!file.exists(), "the record is there");
    state.fails.store(false, Ordering::SeqCst);
    begin().unwrap().stop();
    assert!(file.exists());
}
