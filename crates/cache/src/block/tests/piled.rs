//! Requests that ask something of a device or store are started a few at a time, writes to the log with the turn.

use std::os::fd::AsRawFd;

use larder_policy::block::BlockKind;
use larder_runtime::{AlignedBuf, Batch};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};

use super::super::lane::Lane;
use super::super::service::{Command, PassThrough, Service};
use super::*;

const LINE: u64 = 4096;

fn read(at: u64) -> Command {
    Command::Read { offset: at * LINE, buf: AlignedBuf::zeroed(LINE as usize) }
}

/// Whether something has ended of what nobody started by hand.
fn ended(lane: &Lane, wait: Duration) -> bool {
    let mut poll = Poll::new().unwrap();
    let mut events = Events::with_capacity(4);
    poll.registry()
        .register(&mut SourceFd(&lane.as_raw_fd()), Token(0), Interest::READABLE)
        .unwrap();
    poll.poll(&mut events, Some(wait)).unwrap();
    !events.is_empty()
}

#[test]
fn a_cache_starts_some_reads_before_the_others_are_submitted() {
    let bench = bench(&[1 << 20], least(SHAPE) * 64, SHAPE);
    let volume = bench.cache.volumes()[0].volume().clone();
    let mut lane =
        Lane::new(bench.cache.clone(), bench.cache.mailboxes.len() - 2, RingChoice::Auto).unwrap();
    let few = u64::from(Batch::BLOCKS.submit);
    for at in 0..few - 1 {
        lane.submit(&volume, at, read(at), BlockKind::Unknown);
    }
    assert!(!ended(&lane, Duration::from_millis(30)));
    lane.submit(&volume, few - 1, read(few - 1), BlockKind::Unknown);
    assert!(ended(&lane, Duration::from_secs(60)));
    let mut answers = 0;
    while answers < few {
        lane.turn(Duration::from_millis(100)).unwrap();
        while let Some(answer) = lane.pop() {
            assert!(answer.outcome.is_ok(), "{answer:?}");
            answers += 1;
        }
    }
}

#[test]
fn without_a_cache_some_requests_start_before_the_others_are_submitted() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("disk");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let uri: Uri = format!("file:{}", path.display()).parse().unwrap();
    let backing = backing::open_with(&uri, &OpenOptions::default()).unwrap();
    let volumes = Volumes::default();
    let volume = volumes.add(Volume::new("disk", backing, 4096, true)).unwrap();
    let mut poll = Poll::new().unwrap();
    let mut events = Events::with_capacity(16);
    let mut service = PassThrough::new(poll.registry().try_clone().unwrap(), 0);
    let few = u64::from(Batch::BLOCKS.submit);
    for at in 0..few - 1 {
        service.submit(&volume, at, read(at));
    }
    poll.poll(&mut events, Some(Duration::from_millis(30))).unwrap();
    assert!(events.is_empty());
    service.submit(&volume, few - 1, read(few - 1));
    poll.poll(&mut events, Some(Duration::from_secs(60))).unwrap();
    assert!(!events.is_empty());
}
