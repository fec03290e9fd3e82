//! Whatever a server may say to the NBD client's side: no panic, no standstill, every operation given back once. The
//! first byte says how the stream is cut.
#![no_main]

use larder_nbd::client::{Client, Event, Request};
use larder_runtime::{AlignedBuf, Payload};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((cut, mut stream)) = data.split_first() else { return };
    let piece = usize::from(*cut) + 1;
    let mut client = Client::new("disk");
    let (mut given, mut back) = (0, 0);
    for turn in 0.. {
        assert!(turn < 16 + 4 * data.len(), "no progress");
        match client.poll() {
            Event::NeedInput if stream.is_empty() => break,
            Event::NeedInput => {
                let space = client.space();
                let n = piece.min(stream.len()).min(space.len());
                assert!(n > 0);
                space[..n].copy_from_slice(&stream[..n]);
                client.received(n);
                stream = &stream[n..];
            }
            Event::Ready(_) => {
                client.submit(1, Request::Read { offset: 0, buf: AlignedBuf::zeroed(5000) });
                client.submit(2, Request::Status { offset: 0, len: 1 << 20, one: false });
                let data = Payload::new(AlignedBuf::zeroed(5000));
                client.submit(3, Request::Write { offset: 0, data, fua: true });
                client.submit(4, Request::Read { offset: 4096, buf: AlignedBuf::zeroed(4096) });
                client.submit(5, Request::Flush);
                given = 5;
            }
            Event::Done(_) => back += 1,
            Event::Close(_) => break,
        }
    }
    assert_eq!(back + client.abandon().len(), given);
});
