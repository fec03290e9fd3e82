use larder_base::{HashKey, Rng};

use super::*;
use crate::kv::record::What;

fn hasher() -> KeyHasher {
    KeyHasher::new(HashKey([7; 16]))
}

fn location(rng: &mut Rng) -> Location {
    Location {
        segment: 1 + rng.below(4095) as u16,
        generation: rng.next_u64() >> 8,
        offset: rng.below(1 << 22) as u32 * 64,
        len: 4096 * (1 + rng.below(9) as u32),
        extent: rng.below(2) == 0,
    }
}

fn read_of(rng: &mut Rng, hash: ObjectHash) -> (FlashRead, Got) {
    let mut tried = [None; 4];
    for place in tried.iter_mut().take(rng.below(5) as usize) {
        *place = Some(location(rng));
    }
    let got = [Got::Bytes, Got::Nothing, Got::Corrupt][rng.below(3) as usize];
    (FlashRead { at: location(rng), hash, tried }, got)
}

fn some<T>(rng: &mut Rng, value: impl FnOnce(&mut Rng) -> T) -> Option<T> {
    (rng.below(2) == 0).then(|| value(rng))
}

fn expiry_of(rng: &mut Rng) -> Expiry {
    Expiry(rng.next_u64() as u32)
}

fn any_model(rng: &mut Rng) -> Model {
    let mut float = || (rng.next_u64() as i32) as f32 / 1e6;
    let mut weights = [0.0; DIMENSIONS];
    weights.iter_mut().for_each(|w| *w = float());
    let (bias, slope, offset, share) = (float(), float(), float(), float());
    Model {
        app: rng.below(257) as u16,
        weights,
        bias,
        slope,
        offset,
        samples: rng.next_u64() as u32,
        positive_share: share,
        precision: some(rng, |_| 0.25),
        recall: some(rng, |_| 0.5),
    }
}

/// Any input; values come from `pool`, whose bytes are the filler's beyond the first 24.
fn any<'a>(rng: &mut Rng, pool: &'a [u8], filler: &'a [u8]) -> Input<'a> {
    match rng.below(16) {
        0 => {
            let hash = ObjectHash(u128::from(rng.next_u64()) << 64 | u128::from(rng.next_u64()));
            let (read, got) = read_of(rng, hash);
            Input::Verify { read, got }
        }
        1 => Input::Flush { at: some(rng, |r| UnixSecs(r.next_u64() as u32)) },
        2 => Input::FreeRoom,
        3 => Input::LogCall,
        4 => Input::TrainingDue,
        5 => Input::TrainingSet { app: AppId(rng.below(257) as u16) },
        6 => Input::Install { app: AppId(rng.below(257) as u16), model: Box::new(any_model(rng)) },
        9 => Input::Await {
            key_len: rng.below(251) as usize,
            value_len: rng.below(1 << 31) as usize,
        },
        8 => Input::Expire { all: rng.below(2) == 0 },
        7 => Input::Step { io: [Io::None, Io::Ok, Io::Failed][rng.below(3) as usize] },
        _ => {
            let key = &pool[..1 + rng.below(250) as usize];
            let hash = hasher().hash(key);
            let op = match rng.below(6) {
                0 => KvOp::Get(Get {
                    touch: some(rng, expiry_of),
                    vivify: some(rng, expiry_of),
                    recache_below: some(rng, |r| r.next_u64() as u32),
                    new_cas: some(rng, Rng::next_u64),
                    meta: rng.below(2) == 0,
                }),
                1 => {
                    let len = rng.below(60) as usize;
                    let value = if len <= MAX_KEPT_VALUE { &pool[..len] } else { &filler[..len] };
                    let modes = [
                        StoreMode::Set,
                        StoreMode::Add,
                        StoreMode::Replace,
                        StoreMode::Append,
                        StoreMode::Prepend,
                    ];
                    KvOp::Store(Store {
                        mode: modes[rng.below(5) as usize],
                        value,
                        flags: rng.next_u64() as u32,
                        expiry: expiry_of(rng),
                        compare_cas: some(rng, Rng::next_u64),
                        new_cas: some(rng, Rng::next_u64),
                        invalidate: rng.below(2) == 0,
                        vivify: some(rng, expiry_of),
                    })
                }
                2 => KvOp::Delete(Delete {
                    compare_cas: some(rng, Rng::next_u64),
                    new_cas: some(rng, Rng::next_u64),
                    mark_stale: rng.below(2) == 0,
                    touch: some(rng, expiry_of),
                    drop_value: rng.below(2) == 0,
                }),
                3 => KvOp::Arith(Arith {
                    decrement: rng.below(2) == 0,
                    delta: rng.next_u64(),
                    compare_cas: some(rng, Rng::next_u64),
                    new_cas: some(rng, Rng::next_u64),
                    vivify: some(rng, |r| (expiry_of(r), r.next_u64())),
                    touch: some(rng, expiry_of),
                    meta: rng.below(2) == 0,
                }),
                4 => KvOp::Touch(expiry_of(rng)),
                _ => KvOp::Peek,
            };
            let app = if rng.below(2) == 0 { AppId::DEFAULT } else { AppId(rng.below(257) as u16) };
            let fetched = some(rng, |r| read_of(r, hash));
            Input::Execute { request: Request { key, hash, app, op }, fetched }
        }
    }
}

fn any_decision(rng: &mut Rng) -> Decision {
    Decision {
        what: [What::HitDram, What::Read, What::Number, What::Samples][rng.below(4) as usize],
        detail: rng.next_u64() >> rng.below(64),
        woke: rng.below(2) == 0,
        verifies: rng.below(128) as u8,
        evicted: rng.below(1000),
        state: rng.next_u64() as u32,
    }
}

#[test]
fn whatever_is_written_reads_back() {
    let mut rng = Rng::new(11);
    let pool: Vec<u8> = (0..256).map(|_| rng.next_u64() as u8).collect();
    let filler = vec![0; 64];
    let mut bytes = Vec::new();
    let mut clocks = Clocks::default();
    let mut written = Vec::new();
    for _ in 0..5_000 {
        let now = Now { mono: Nanos(rng.next_u64() >> 1), wall: UnixSecs(rng.next_u64() as u32) };
        let (input, decision) = (any(&mut rng, &pool, &filler), any_decision(&mut rng));
        encode(&mut bytes, &mut clocks, now, &input);
        decision.encode(&mut bytes);
        written.push((now, input, decision));
    }
    let (mut cursor, mut clocks) = (Cursor::new(&bytes), Clocks::default());
    for (now, input, decision) in written {
        let read = decode(&mut cursor, &mut clocks, &hasher(), &filler).unwrap();
        if input != Input::LogCall {
            assert_eq!(read.0, now);
        }
        assert_eq!((read.1, read.2), (input, decision));
    }
    assert_eq!(cursor.position(), bytes.len());
}

/// Bytes turned over, cut off or drawn at random are read or refused, and nothing panics.
#[test]
fn damage_is_refused_or_read_as_something_else() {
    let mut rng = Rng::new(5);
    let pool: Vec<u8> = (0..256).map(|_| rng.next_u64() as u8).collect();
    let filler = vec![0; 64];
    let (mut refused, mut read) = (0, 0);
    for _ in 0..4_000 {
        let mut bytes = Vec::new();
        let mut clocks = Clocks::default();
        for _ in 0..4 {
            encode(&mut bytes, &mut clocks, Now::default(), &any(&mut rng, &pool, &filler));
            any_decision(&mut rng).encode(&mut bytes);
        }
        match rng.below(3) {
            0 => bytes.truncate(rng.below(bytes.len() as u64) as usize),
            1 => bytes.iter_mut().for_each(|b| *b = rng.next_u64() as u8),
            _ => {
                for _ in 0..1 + rng.below(4) {
                    let at = rng.below(bytes.len() as u64) as usize;
                    bytes[at] = rng.next_u64() as u8;
                }
            }
        }
        let (mut cursor, mut clocks) = (Cursor::new(&bytes), Clocks::default());
        while cursor.position() < bytes.len() {
            match decode(&mut cursor, &mut clocks, &hasher(), &filler) {
                Ok(_) => read += 1,
                Err(e) => {
                    assert!(!e.to_string().is_empty());
                    refused += 1;
                    break;
                }
            }
        }
    }
    assert!(refused > 1_000 && read > 1_000, "{refused} refused, {read} read");
}
