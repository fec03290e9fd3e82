//! Bounded memory: slow readers, large values, stalled holders.

use std::sync::Arc;

use larder_base::Nanos;

use super::harness::{Client, Delayed, at};
use crate::connection::*;
use crate::model::ModelEngine;

fn budgets(bytes: u64) -> Arc<BigBuffers> {
    Arc::new(BigBuffers {
        input: Budget::new(bytes),
        output: Budget::new(bytes),
        stall: Nanos::from_secs(5),
        input_stall: Nanos::from_secs(2),
    })
}

fn client(big: &Arc<BigBuffers>) -> Client<ModelEngine> {
    Client::with(ProtocolConfig::default(), big.clone())
}

fn set(key: &str, len: usize) -> Vec<u8> {
    format!("set {key} 0 0 {len}\r\n{}\r\n", "v".repeat(len)).into_bytes()
}

/// Feeds until the connection wants no more, and tells how much it took.
fn push(client: &mut Client<ModelEngine>, engine: &ModelEngine, input: &[u8]) -> (usize, Progress) {
    let mut taken = 0;
    loop {
        let progress = client.process(engine);
        if progress != Progress::NeedInput || taken == input.len() {
            return (taken, progress);
        }
        taken += client.conn.feed(&input[taken..], client.now);
    }
}

#[test]
fn a_million_gets_whose_answers_are_never_read() {
    let engine = ModelEngine::default();
    let big = budgets(1 << 20);
    let mut client = client(&big);
    let _ = client.run(&engine, &set("a", 1000));
    let gets = b"get a\r\n".repeat(1_000_000);
    let (taken, progress) = push(&mut client, &engine, &gets);
    assert_eq!(progress, Progress::OutputFull);
    assert!(!client.conn.wants_input());
    assert!(
        taken < 2 * SMALL && client.conn.memory() < 5 * SMALL,
        "{taken} {}",
        client.conn.memory()
    );
    // A reader that takes a byte at a time keeps the buffer from ever being empty; it must not grow for that.
    for _ in 0..200_000 {
        client.conn.sent(1, client.now);
        let _ = client.process(&engine);
        assert!(client.conn.memory() < 8 * SMALL);
    }
}

#[test]
fn large_bodies_share_the_input_budget() {
    let engine = ModelEngine::default();
    let big = budgets(300_000);
    let (mut a, mut b) = (client(&big), client(&big));
    let body = set("a", 200_000);
    let (taken, progress) = push(&mut a, &engine, &body[..100_000]);
    assert_eq!((taken, progress), (100_000, Progress::NeedInput));
    let (taken, progress) = push(&mut b, &engine, &body);
    assert_eq!(progress, Progress::WaitingForMemory);
    assert!(taken <= SMALL);
    assert_eq!((big.input.waiting(), b.stats.big_buffer_waits), (1, 1));
    // Asking again does not count again.
    let _ = b.process(&engine);
    assert_eq!((big.input.waiting(), b.stats.big_buffer_waits), (1, 1));
    let (_, progress) = push(&mut a, &engine, &body[100_000..]);
    assert_eq!(progress, Progress::NeedInput);
    assert_eq!(big.input.used(), 0, "a's body is stored");
    let (rest, progress) = push(&mut b, &engine, &body[taken..]);
    assert_eq!((rest + taken, progress), (body.len(), Progress::NeedInput));
    b.drain();
    assert_eq!(b.received, b"STORED\r\n");
    assert_eq!((big.input.used(), big.input.waiting()), (0, 0));
    assert!(b.conn.memory() <= 2 * SMALL);
}

#[test]
fn large_values_share_the_output_budget() {
    let engine = ModelEngine::default();
    let big = budgets(300_000);
    let (mut a, mut b) = (client(&big), client(&big));
    let _ = a.run(&engine, &set("a", 200_000));
    a.conn.feed(b"get a\r\n", a.now);
    b.conn.feed(b"get a\r\nmn\r\n", b.now);
    assert_eq!(a.process(&engine), Progress::OutputFull);
    assert_eq!(b.process(&engine), Progress::WaitingForMemory);
    assert_eq!((big.output.used(), big.output.waiting()), (200_000, 1));
    assert!(b.conn.output().is_empty() && b.conn.memory() <= 2 * SMALL);
    a.drain();
    assert_eq!(big.output.used(), 0);
    let (got, progress) = b.run(&engine, b"");
    assert_eq!(
        (got.len(), progress),
        (200_000 + "VALUE a 0 200000\r\n\r\nEND\r\nMN\r\n".len(), Progress::NeedInput)
    );
    assert_eq!((big.output.used(), big.output.waiting()), (0, 0));
    assert_eq!((a.stats.get_hits, b.stats.get_hits), (1, 1));
}

#[test]
fn a_value_larger_than_the_budget_passes_alone() {
    let engine = ModelEngine::default();
    let big = budgets(50_000);
    let mut a = client(&big);
    let (got, _) = a.run(&engine, &set("a", 900_000));
    assert_eq!(got, b"STORED\r\n");
    assert_eq!(a.run(&engine, b"mg a v\r\n").0.len(), 900_000 + "VA 900000\r\n\r\n".len());
    assert_eq!((big.input.used(), big.output.used()), (0, 0));
}

#[test]
fn holders_without_progress_are_told_apart_while_others_wait() {
    // Asked once a second, as the worker does; a second's worth is 64 KiB.
    let engine = ModelEngine::default();
    let big = budgets(300_000);
    let (mut holder, mut waiter) = (client(&big), client(&big));
    let body = set("a", 200_000);
    let _ = push(&mut holder, &engine, &body[..50_000]);
    assert!(!holder.conn.stalled(at(2)), "nobody waits");
    let _ = push(&mut waiter, &engine, &body);
    // It was fast for the first stretch of two seconds or has just begun, and one byte in the next is not.
    holder.conn.feed(&body[50_000..50_001], at(3));
    assert!(holder.conn.stalled(at(4)));
    assert!(!waiter.conn.stalled(at(60)), "it holds nothing");
    drop(holder);
    assert_eq!(big.input.used(), 0);
    assert_eq!(waiter.process(&engine), Progress::NeedInput);
    drop(waiter);
    assert_eq!((big.input.used(), big.input.waiting()), (0, 0));
    // The same for readers.
    let (mut holder, mut waiter) = (client(&big), client(&big));
    let _ = holder.run(&engine, &body);
    holder.conn.feed(b"get a\r\n", at(0));
    waiter.conn.feed(b"get a\r\n", at(0));
    let _ = (holder.process(&engine), waiter.process(&engine));
    assert!(!holder.conn.stalled(at(0)) && !waiter.conn.stalled(at(0)));
    holder.conn.sent(1, at(4));
    assert!(holder.conn.stalled(at(5)) && !waiter.conn.stalled(at(5)));
    drop(holder);
    assert_eq!(waiter.process(&engine), Progress::OutputFull);
    drop(waiter);
    assert_eq!((big.output.used(), big.output.waiting()), (0, 0));
}

#[test]
fn an_announced_body_takes_no_share_before_it_comes() {
    let engine = ModelEngine::default();
    let big = budgets(300_000);
    let body = set("a", 200_000);
    let mut silent: Vec<_> = (0..100)
        .map(|i| {
            let mut c = client(&big);
            // From the command line alone to all that the connection's own buffer holds.
            let (_, progress) = push(&mut c, &engine, &body[..21 + i * (SMALL - 22) / 99]);
            assert_eq!((progress, big.input.used()), (Progress::NeedInput, 0), "{i}");
            c
        })
        .collect();
    let mut sender = client(&big);
    let (_, progress) = push(&mut sender, &engine, &body);
    assert_eq!((progress, big.input.used()), (Progress::NeedInput, 0));
    sender.drain();
    assert_eq!(sender.received, b"STORED\r\n");
    // One that goes on is served too.
    let last = silent.last_mut().unwrap();
    let (_, progress) = push(last, &engine, &body[SMALL - 1..]);
    last.drain();
    assert_eq!((progress, &last.received[..]), (Progress::NeedInput, &b"STORED\r\n"[..]));
}

#[test]
fn large_flash_reads_take_their_share_before_they_are_issued() {
    let big = budgets(300_000);
    let engine = Delayed { read_len: 140_000, ..Delayed::new(1000, 5) };
    let mut client: Client<Delayed> = Client::with(ProtocolConfig::default(), big.clone());
    client.conn.feed(b"get a b c\r\n", client.now);
    assert_eq!(client.process(&engine), Progress::WaitingForMemory);
    assert_eq!((client.waiting.len(), big.output.used()), (2, 280_000));
    while !client.waiting.is_empty() {
        client.flash_done(&engine, 0);
        let _ = client.process(&engine);
    }
    client.drain();
    assert_eq!(client.received, b"END\r\n");
    assert_eq!((big.output.used(), big.output.waiting()), (0, 0));
    // A connection that goes away gives everything back.
    client.conn.feed(b"get a b\r\nset a 0 0 1\r\nx\r\n", client.now);
    let _ = client.process(&engine);
    assert_eq!(big.output.used(), 280_000);
    drop(client);
    assert_eq!((big.output.used(), big.output.waiting()), (0, 0));
}

#[test]
fn idle_connections_keep_no_buffers() {
    let engine = ModelEngine::default();
    let big = budgets(1 << 20);
    let mut client = client(&big);
    let _ = client.run(&engine, &set("a", 500_000));
    let _ = client.run(&engine, &b"get a\r\n".repeat(3));
    client.conn.shrink();
    assert_eq!(client.conn.memory(), 0);
    assert_eq!(client.run(&engine, b"mn\r\n").0, b"MN\r\n");
    assert!(client.conn.memory() <= 4096, "{}", client.conn.memory());
}

/// A store that waits for room comes again as it came, and what was sent behind it stays behind it.
#[test]
fn a_store_that_waits_for_room_comes_again() {
    for meta in [false, true] {
        let engine = ModelEngine::default();
        engine.put_off(3);
        let mut client: Client<ModelEngine> = Client::new();
        let mut input = set("a", 100_000);
        if meta {
            input.splice(..input.iter().position(|b| *b == b'\r').unwrap(), *b"ms a 100000");
        }
        input.extend_from_slice(b"get b\r\nmn\r\n");
        let mut rest = &input[..];
        let mut waited = 0;
        loop {
            match client.process(&engine) {
                Progress::WaitingForRoom => {
                    waited += 1;
                    assert!(!client.conn.wants_input() && client.conn.output().is_empty());
                }
                Progress::NeedInput if rest.is_empty() => break,
                Progress::NeedInput => rest = &rest[client.conn.feed(rest, client.now)..],
                other => panic!("{other:?}"),
            }
        }
        client.drain();
        let stored = if meta { "HD" } else { "STORED" };
        let received = std::mem::take(&mut client.received);
        assert_eq!(received, format!("{stored}\r\nEND\r\nMN\r\n").into_bytes());
        assert_eq!((waited, client.stats.room_waits), (3, 1));
        let (got, _) = client.run(&engine, b"get a\r\n");
        assert_eq!(got.len(), 100_000 + "VALUE a 0 100000\r\n\r\nEND\r\n".len());
    }
}
