use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use larder_runtime::{AlignedBuf, Payload};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result,
};

use super::manifest::Manifest;
use super::*;
use crate::op::{Done, FailureKind, Op};
use crate::testing::{against_a_model, one};
use crate::{OpenOptions, Timeouts};

const MIB: u64 = 1 << 20;

/// What goes wrong.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// Every n-th request fails before it is carried out; 0: none.
    pub(crate) before: AtomicU32,
    /// Every n-th write is carried out and its answer lost.
    pub(crate) after: AtomicU32,
    /// No request is answered.
    pub(crate) hang: AtomicBool,
    /// PUTs are carried out whatever they are to follow.
    pub(crate) unconditional: AtomicBool,
    requests: AtomicU64,
}

/// A store in memory, with faults.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    pub(crate) store: Arc<InMemory>,
    pub(crate) faults: Arc<Faults>,
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("memory")
    }
}

fn broken() -> Error {
    Error::Generic { store: "memory", source: "503 Slow Down".into() }
}

impl Memory {
    async fn ask(&self) -> Result<u64> {
        let number = self.faults.requests.fetch_add(1, Ordering::SeqCst) + 1;
        while self.faults.hang.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let every = u64::from(self.faults.before.load(Ordering::SeqCst));
        if every > 0 && number.is_multiple_of(every) { Err(broken()) } else { Ok(number) }
    }
}

#[async_trait::async_trait]
impl ObjectStore for Memory {
    async fn put_opts(
        &self,
        at: &Path,
        bytes: PutPayload,
        mut options: PutOptions,
    ) -> Result<PutResult> {
        let number = self.ask().await?;
        if self.faults.unconditional.load(Ordering::SeqCst) {
            options.mode = PutMode::Overwrite;
        }
        let result = self.store.put_opts(at, bytes, options).await?;
        let every = u64::from(self.faults.after.load(Ordering::SeqCst));
        if every > 0 && number.is_multiple_of(every) { Err(broken()) } else { Ok(result) }
    }
    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        unreachable!("not used")
    }
    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.ask().await?;
        self.store.get_opts(at, options).await
    }
    fn delete_stream(
        &self,
        at: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.store.delete_stream(at)
    }
    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.list(prefix)
    }
    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.store.list_with_delimiter(prefix).await
    }
    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        unreachable!("not used")
    }
}

fn run<T>(work: impl Future<Output = T>) -> T {
    session::runtime().unwrap().block_on(work)
}

fn timeout() -> Timeouts {
    Timeouts {
        connect: Duration::from_secs(5),
        silence: Duration::from_secs(5),
        give_up: Some(Duration::from_secs(20)),
    }
}

fn volume(size: u64, chunk: u32) -> Memory {
    let store = Memory::default();
    let manifest = Manifest::new([7; 16], size, Some(chunk)).unwrap();
    let requests = Requests::new("s3://test/a".into(), Box::new(store.clone()), timeout());
    run(make(&requests, &Path::from("a"), &manifest)).unwrap();
    store
}

fn setup() -> Setup {
    let options = OpenOptions { timeout: timeout(), ..OpenOptions::default() };
    Setup { options, nonce: 1, lease_lasts: Duration::from_secs(2) }
}

fn attach_with(store: &Memory, setup: Setup) -> std::result::Result<ObjectBacking, String> {
    let name = "s3://test/a".to_owned();
    ObjectBacking::with_store(name, Box::new(store.clone()), Path::from("a"), setup)
        .map_err(|e| e.to_string())
}

fn attached(store: &Memory) -> ObjectBacking {
    attach_with(store, setup()).unwrap()
}

fn write(session: &mut dyn Session, offset: u64, len: usize, fill: u8) -> Done {
    let mut buf = AlignedBuf::zeroed(len);
    buf.fill(fill);
    one(session, Op::Write { offset, data: Payload::new(buf), fua: false })
}

fn read(session: &mut dyn Session, offset: u64, len: usize) -> Vec<u8> {
    let done = one(session, Op::Read { offset, buf: AlignedBuf::zeroed(len) });
    done.outcome.unwrap();
    let Op::Read { buf, .. } = done.op else { panic!() };
    buf.to_vec()
}

#[test]
fn against_the_model() {
    let size = 3 * MIB as usize + 12_800;
    let store = volume(size as u64, 128 << 10);
    let backing = attached(&store);
    let mut session = backing.session().unwrap();
    let model = against_a_model(&mut *session, size, 1, 12);
    assert_eq!(read(&mut *session, 0, size), model);
    drop(session);
    drop(backing);
    // Another attachment finds the same.
    let backing = attached(&store);
    let mut session = backing.session().unwrap();
    assert_eq!(read(&mut *session, 0, size), model);
}

/// What is added is zeroes, also behind the bytes of a last chunk that was short; what was there is as it was.
#[test]
fn a_volume_that_grows() {
    let size = MIB + 12_800;
    let chunk = 128 << 10;
    let store = volume(size, chunk);
    let backing = attached(&store);
    let mut session = backing.session().unwrap();
    assert!(write(&mut *session, size - 4096, 4096, 5).outcome.is_ok());
    assert_eq!(backing.resize(None).unwrap(), size);
    let more = 2 * MIB + 512;
    assert_eq!(backing.resize(Some(more)).unwrap(), more);
    assert_eq!(backing.capabilities().size, more);
    assert!(matches!(backing.identity().unwrap(), Identity::Objects { size, .. } if size == more));
    assert!(read(&mut *session, size - 4096, 4096).iter().all(|&b| b == 5));
    assert!(read(&mut *session, size, 300_000).iter().all(|&b| b == 0));
    assert!(write(&mut *session, size - 2048, 200_000, 7).outcome.is_ok());
    let refused = |bytes| backing.resize(Some(bytes)).unwrap_err().to_string();
    assert!(refused(MIB).contains("more than 1048576"));
    assert!(refused(more + 1).contains("a multiple of 512"));
    assert!(refused(1 << 40).contains("larger chunks"));
    // The answer to the write of the manifest is lost: it is looked up.
    store.faults.after.store(1, Ordering::SeqCst);
    assert_eq!(backing.resize(Some(3 * MIB)).unwrap(), 3 * MIB);
    store.faults.after.store(0, Ordering::SeqCst);
    assert!(write(&mut *session, 3 * MIB - 512, 512, 8).outcome.is_ok());
    let let_go = backing.identity().unwrap();
    drop((session, backing));
    let backing = attached(&store);
    assert_eq!(backing.capabilities().size, 3 * MIB);
    assert!(backing.identity().unwrap().proves(&let_go.encode(), true, false).is_ok());
    let mut session = backing.session().unwrap();
    let bytes = read(&mut *session, 0, 3 * MIB as usize);
    let from = |at: u64, len: usize| &bytes[at as usize..at as usize + len];
    assert!(from(size - 4096, 2048).iter().all(|&b| b == 5));
    assert!(from(size - 2048, 200_000).iter().all(|&b| b == 7));
    assert!(from(size + 197_952, 500_000).iter().all(|&b| b == 0));
    assert!(from(3 * MIB - 512, 512).iter().all(|&b| b == 8));
    // Who only reads looks, and does not change it.
    let mut reading = setup();
    (reading.options.read_only, reading.nonce) = (true, 9);
    let reader = attach_with(&store, reading).unwrap();
    assert_eq!(reader.resize(None).unwrap(), 3 * MIB);
    assert!(reader.resize(Some(4 * MIB)).unwrap_err().to_string().contains("read only"));
    // It reads on as long as nobody makes it larger; then it is another volume than it knows.
    assert_eq!(backing.resize(Some(4 * MIB)).unwrap(), 4 * MIB);
    assert!(reader.resize(None).is_err() && reader.is_lost());
}

/// The same objects in a local directory, by the crate's own store: they are read as they are anywhere; but it cannot write an
/// object only if it is still the one that was read, and without that two writers could not be told apart.
#[test]
fn a_local_directory_is_for_reading() {
    let size = MIB + 12_800;
    let memory = volume(size, 128 << 10);
    let backing = attached(&memory);
    let mut session = backing.session().unwrap();
    let model = against_a_model(&mut *session, size as usize, 3, 6);
    drop((session, backing));
    let dir = tempfile::tempdir().unwrap();
    let local = || LocalFileSystem::new_with_prefix(dir.path()).unwrap();
    run(async {
        let mut objects = memory.store.list(None);
        while let Some(Ok(object)) = objects.next().await {
            let bytes = memory.store.get(&object.location).await.unwrap().bytes().await.unwrap();
            local().put(&object.location, bytes.into()).await.unwrap();
        }
    });
    let attach = |read_only| {
        let mut setup = setup();
        setup.options.read_only = read_only;
        let name = "s3://test/a".to_owned();
        ObjectBacking::with_store(name, Box::new(local()), Path::from("a"), setup)
    };
    let reader = attach(true).unwrap();
    assert!(read(&mut *reader.session().unwrap(), 0, size as usize) == model);
    let error = attach(false).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("conditional"), "{error}");
}

/// What lies where a volume would grow to is never taken for a part of it.
#[test]
fn a_volume_does_not_grow_over_what_it_does_not_know() {
    let store = volume(MIB, 128 << 10);
    let at = Path::from(format!("a/{}", manifest::chunk_name(12)));
    run(store.store.put(&at, PutPayload::from_static(&[7; 5000]))).unwrap();
    let backing = attached(&store);
    assert_eq!(backing.resize(Some(12 * (128 << 10))).unwrap(), 12 * (128 << 10));
    let error = backing.resize(Some(2 * MIB)).unwrap_err().to_string();
    assert!(error.contains("none of its chunks") && error.contains("00000c"), "{error}");
    // Another writer has attached it: nothing is changed, and it is not used any more.
    let mut careless = setup();
    (careless.options.lease, careless.nonce) = (false, 2);
    let other = attach_with(&store, careless).unwrap();
    let error = backing.resize(Some(MIB + MIB / 2 + 512)).unwrap_err().to_string();
    assert!(error.contains("another writer") || error.contains("none of its chunks"), "{error}");
    let error = backing.resize(None).unwrap_err().to_string();
    assert!(error.contains("writer has attached") && backing.is_lost(), "{error}");
    assert_eq!(other.capabilities().size, 12 * (128 << 10));
}

/// Requests that fail, and writes whose answers are lost, are made up for: no byte differs, and nobody is taken for
/// another writer.
#[test]
fn failing_requests_are_repeated() {
    for (before, after) in [(5, 0), (0, 3), (7, 4)] {
        let size = MIB as usize;
        let store = volume(size as u64, 64 << 10);
        let backing = attached(&store);
        store.faults.before.store(before, Ordering::SeqCst);
        store.faults.after.store(after, Ordering::SeqCst);
        let mut session = backing.session().unwrap();
        let model = against_a_model(&mut *session, size, 2, 4);
        assert_eq!(read(&mut *session, 0, size), model);
    }
}

/// A store that answers every other request: one line says so, and one that it answers again, however many are repeated.
#[test]
fn requests_that_are_repeated_are_not_said_one_by_one() {
    let store = Memory::default();
    let requests = Requests::new("s3://test/a".into(), Box::new(store.clone()), timeout());
    let at = Path::from("a");
    run(requests.put(&at, "x".into(), None, || Some(Duration::from_secs(5)))).unwrap();
    store.faults.before.store(2, Ordering::SeqCst);
    run(async {
        for _ in 0..10 {
            assert_eq!(requests.get(&at, None, None).await.unwrap().bytes, "x");
        }
    });
    assert!(store.faults.requests.load(Ordering::SeqCst) >= 20);
    assert_eq!(requests.lines(), crate::rate_limited::Lines { wrong: 1, well: 1 });
}

#[test]
fn small_writes_share_requests_and_whole_chunks_are_not_read() {
    let store = volume(8 * MIB, 1 << 20);
    let backing = attached(&store);
    let mut session = backing.session().unwrap();
    write(&mut *session, 0, 4096, 1).outcome.unwrap();
    let before = store.faults.requests.load(Ordering::SeqCst);
    for i in 1..=64u64 {
        let mut buf = AlignedBuf::zeroed(4096);
        buf.fill(i as u8);
        session.submit(i, Op::Write { offset: i * 4096, data: Payload::new(buf), fua: false });
    }
    for done in crate::testing::run(&mut *session, 64) {
        done.outcome.unwrap();
    }
    let spent = store.faults.requests.load(Ordering::SeqCst) - before;
    assert!(spent <= 8, "{spent} requests for 64 writes to one chunk");
    for i in 1..=64u64 {
        assert!(read(&mut *session, i * 4096, 4096).iter().all(|&b| b == i as u8));
    }
    let before = store.faults.requests.load(Ordering::SeqCst);
    write(&mut *session, 4 * MIB, 2 << 20, 9).outcome.unwrap();
    assert_eq!(store.faults.requests.load(Ordering::SeqCst) - before, 2);
}

#[test]
fn zeroes_and_trims() {
    let store = volume(4 * MIB + 512, 1 << 20);
    let backing = attached(&store);
    let mut session = backing.session().unwrap();
    write(&mut *session, 0, 4 * MIB as usize + 512, 5).outcome.unwrap();
    let zero =
        |offset, len, fast| Op::WriteZeroes { offset, len, fua: true, may_punch: true, fast };
    let refused = one(&mut *session, zero(10, 100, true)).outcome.unwrap_err();
    assert_eq!(refused.kind, FailureKind::Unsupported);
    one(&mut *session, zero(10, 100, false)).outcome.unwrap();
    one(&mut *session, zero(MIB, MIB as u32, true)).outcome.unwrap();
    one(&mut *session, Op::Trim { offset: 2 * MIB - 1, len: 2 * MIB as u32 + 513, fua: false })
        .outcome
        .unwrap();
    let bytes = read(&mut *session, 0, 4 * MIB as usize + 512);
    let mib = MIB as usize;
    assert!(bytes[..10].iter().chain(&bytes[110..mib]).all(|&b| b == 5));
    assert!(bytes[10..110].iter().chain(&bytes[mib..2 * mib]).all(|&b| b == 0));
    assert!(bytes[2 * mib..].iter().all(|&b| b == 0), "trimmed chunks, the last one too");
    let status = one(&mut *session, Op::Status { offset: 0, len: 4 << 20, one: false });
    let extents = status.outcome.unwrap();
    assert_eq!(
        extents.iter().map(|e| (e.len, e.hole)).collect::<Vec<_>>(),
        [(1 << 20, false), (3 << 20, true)]
    );
    // What is zero takes no room, and is not asked for.
    let before = store.faults.requests.load(Ordering::SeqCst);
    read(&mut *session, MIB, 3 << 20);
    assert_eq!(store.faults.requests.load(Ordering::SeqCst), before);
    assert_eq!(run(store.head(&Path::from("a/chunks/01/000000000001"))).unwrap().size, 32);
}

#[test]
fn a_second_writer_is_refused_and_a_dead_one_is_not_waited_for_for_ever() {
    let store = volume(MIB, 1 << 20);
    let first = attached(&store);
    let started = Instant::now();
    let error = attach_with(&store, Setup { nonce: 2, ..setup() }).unwrap_err();
    assert!(error.contains("has it for writing: stop that daemon first"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(60));
    // Whoever only reads is not kept away, and notices a writer.
    let mut reading = setup();
    reading.options.read_only = true;
    let reader = attach_with(&store, reading.clone()).unwrap();
    let mut session = reader.session().unwrap();
    assert!(write(&mut *session, 0, 512, 1).outcome.is_err());
    drop(session);
    drop(first);
    let second = attach_with(&store, Setup { nonce: 3, ..setup() }).unwrap();
    // A holder that has vanished: its lease is as it was, of another system.
    let at = Path::from("a/lease.json");
    let lease = run(async { store.get(&at).await.unwrap().bytes().await.unwrap() });
    let mut lease = manifest::Lease::decode(&lease).unwrap();
    assert!(!lease.free);
    drop(second);
    lease.system = "elsewhere".into();
    run(store.put(&at, lease.encode().into())).unwrap();
    let started = Instant::now();
    drop(attached(&store));
    assert!((2..120).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
}

#[test]
fn another_writer_ends_the_use_of_the_volume() {
    // Without a lease only versions tell.
    let mut careless = setup();
    careless.options.lease = false;
    let store = volume(2 * MIB, 1 << 20);
    let first = attach_with(&store, careless.clone()).unwrap();
    let mut a = first.session().unwrap();
    write(&mut *a, 0, 4096, 1).outcome.unwrap();
    let let_go = first.identity().unwrap().encode();
    let second = attach_with(&store, careless.clone()).unwrap();
    let found = second.identity().unwrap();
    assert!(found.proves(&let_go, true, false).is_ok(), "attached, and nothing written");
    let mut b = second.session().unwrap();
    write(&mut *b, 8192, 4096, 2).outcome.unwrap();
    let failure = write(&mut *a, 4096, 4096, 3).outcome.unwrap_err();
    assert!(
        failure.message.contains("by somebody else") || failure.message.contains("another writer"),
        "{failure}"
    );
    let failure = one(&mut *a, Op::Read { offset: MIB, buf: AlignedBuf::zeroed(512) }).outcome;
    assert!(failure.is_err(), "nothing is served any more");
    assert!(first.is_lost(), "not from the cache either");
    assert!(first.identity().is_err(), "and nothing cached of it is used again");
    assert_eq!(read(&mut *b, 4096, 1), [0]);
    drop((a, first, b));
    assert!(second.identity().unwrap().proves(&let_go, true, false).is_err());
    drop(second);
    // Something that is not Larder removes a chunk.
    let third = attach_with(&store, careless).unwrap();
    let let_go = third.identity().unwrap().encode();
    let mut session = third.session().unwrap();
    run(store.delete(&Path::from("a/chunks/00/000000000000"))).unwrap();
    let failure = one(&mut *session, Op::Read { offset: 0, buf: AlignedBuf::zeroed(512) }).outcome;
    assert!(failure.unwrap_err().message.contains("was removed by somebody else"));
    drop((session, third));
    assert!(attached(&store).identity().unwrap().proves(&let_go, true, false).is_err());
}

/// While the store is silent nothing is lost, and after the timeout the client hears of it.
#[test]
fn a_silent_store() {
    let store = volume(MIB, 1 << 20);
    // The lease outlives the silence, whatever the machine has to do besides.
    let mut short = Setup { lease_lasts: Duration::from_secs(60), ..setup() };
    short.options.timeout = Timeouts {
        silence: Duration::from_millis(1500),
        give_up: Some(Duration::from_secs(6)),
        ..timeout()
    };
    let backing = attach_with(&store, short).unwrap();
    let mut session = backing.session().unwrap();
    write(&mut *session, 0, 512, 1).outcome.unwrap();
    store.faults.hang.store(true, Ordering::SeqCst);
    let failure = write(&mut *session, 0, 512, 2).outcome.unwrap_err();
    assert!(failure.message.contains("no answer within 1.5 s"), "{failure}");
    let mut buf = AlignedBuf::zeroed(512);
    buf.fill(3);
    session.submit(9, Op::Write { offset: 0, data: Payload::new(buf), fua: false });
    session.flush(Instant::now());
    std::thread::sleep(Duration::from_millis(400));
    store.faults.hang.store(false, Ordering::SeqCst);
    let done = crate::testing::run(&mut *session, 1).pop().unwrap();
    done.outcome.unwrap();
    assert_eq!(read(&mut *session, 0, 1), [3]);
}

#[test]
fn what_is_refused() {
    let store = Memory::default();
    let error = attach_with(&store, setup()).unwrap_err();
    assert!(error.contains("larder block create"), "{error}");
    let at = Path::from("a/volume.json");
    for (bytes, what) in
        [(b"nonsense".to_vec(), "is not a volume's"), (vec![b' '; 100_000], "is not Larder's")]
    {
        run(store.put(&at, bytes.into())).unwrap();
        let error = attach_with(&store, setup()).unwrap_err();
        assert!(error.contains(what), "{error}");
    }
    let store = volume(MIB, 1 << 20);
    run(store.put(&Path::from("a/lease.json"), b"{}".to_vec().into())).unwrap();
    let error = attach_with(&store, setup()).unwrap_err();
    assert!(error.contains("lease.json is malformed"), "{error}");
    let requests = Requests::new("s3://test/a".into(), Box::new(store.clone()), timeout());
    let again = Manifest::new([8; 16], MIB, None).unwrap();
    let error = run(make(&requests, &Path::from("a"), &again)).unwrap_err();
    assert!(error.contains("there is a volume already"), "{error}");
}

/// A chunk whose bytes rotted is not merged into a new one that looks sound.
#[test]
fn damaged_chunks_are_not_carried_on() {
    let store = volume(MIB, 1 << 20);
    drop({
        let backing = attached(&store);
        let mut session = backing.session().unwrap();
        write(&mut *session, 0, 4096, 1).outcome.unwrap();
        backing
    });
    let at = Path::from("a/chunks/00/000000000000");
    let mut bytes = run(async { store.get(&at).await.unwrap().bytes().await.unwrap() }).to_vec();
    bytes[77] ^= 1;
    run(store.put(&at, bytes.into())).unwrap();
    let backing = attached(&store);
    let mut session = backing.session().unwrap();
    let failure = write(&mut *session, 8192, 4096, 1).outcome.unwrap_err();
    assert!(failure.message.contains("its checksum does not fit"), "{failure}");
    write(&mut *session, 0, 1 << 20, 2).outcome.unwrap();
    write(&mut *session, 0, 512, 3).outcome.unwrap();
}
