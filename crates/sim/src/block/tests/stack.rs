//! The flash of `larder sim stack` is a model, and this is how far it is the server's: under `naive`, written through (`s`) or behind
//! the writer's back (`a`), each set of a cache in sets decides request by request as the model's list of as many frames does.
//!
//! What remains between them is that the model has one list over all frames, and a server's lines compete in sets of 16 at most.

use larder_engine::block::GROUP_LINES;
use larder_trace::{Options, open};

use super::*;
use crate::stack::{Architecture, Config as StackConfig, Policy, Source, Stack, Timing};

const WAYS: u32 = 16;

/// A working set of twice the cache with accesses outside, reads and writes of 4 KiB.
fn requests() -> Vec<Request> {
    let spec = "gen:fileserver?size=64m&set=6m&requests=30000&outside=0.2&writes=0.3";
    let options = Options { pages: Some(4096), ..Options::default() };
    let all: Vec<Request> = open(spec, &options).unwrap().reader.map(|r| r.unwrap()).collect();
    assert!(all.iter().all(|r| r.op.is_block() && r.size == 4096 && r.offset % 4096 == 0));
    all
}

fn stack(ram: Policy, flash: Policy, frames: u32) -> Stack {
    Stack::new(&StackConfig {
        architecture: Architecture::Naive,
        ram_blocks: 2,
        flash_blocks: frames,
        ram_policy: ram,
        flash_policy: flash,
        timing: Timing::default(),
        restart: None,
        seed: 1,
    })
}

/// The set in which the line at `offset` competes: of a group's set of groups, the lines of one place in their groups.
fn set_of(sim: &BlockSim, placing: &Placing, offset: u64) -> (u32, u32, u64) {
    let (at, _) = sim.node.space.borrow_mut().map(0, offset).unwrap();
    let line = at / 4096;
    let group = GroupId(line / u64::from(GROUP_LINES));
    (placing.shard(group), placing.place(group).group_set, line % u64::from(GROUP_LINES))
}

/// Whether each read was answered by the node without the store; requests are a second apart, so that each has found what
/// the ones before have left.
fn by_the_node(sim: &mut BlockSim, requests: &[Request]) -> Vec<bool> {
    let mut hits = Vec::new();
    let mut answered = Vec::new();
    for (number, request) in (0u64..).zip(requests) {
        let request = Request { time: Some(Nanos::from_secs(number + 1)), ..*request };
        sim.request(number, &request, &mut answered).unwrap();
    }
    sim.finish(&mut answered);
    hits.extend(answered.iter().filter(|a| a.kind == PartKind::Read).map(|a| a.hit));
    hits
}

fn by_the_model(stack: &mut Stack, now: Nanos, request: &Request) -> Option<bool> {
    if request.op.is_read() {
        return Some(stack.read(now, request.offset / 4096).1 != Source::Filer);
    }
    stack.write(now, request.offset / 4096);
    None
}

#[test]
fn the_flash_of_naive_decides_as_the_block_node_does_set_by_set() {
    let requests = requests();
    let mut sim = sim(&Block { flash: ByteSize::mib(4), ..spec("set:16", "hdd-ssd", "all") });
    let placing = Placing::of(&sim.node.layout, placement_key(7));
    let node = by_the_node(&mut sim, &requests);
    assert!(sim.sums().engine.evicted > 3000 && sim.sums().engine.fill_dropped == 0);
    let through = [Policy::Synchronous, Policy::Asynchronous];
    for (ram, flash) in through.iter().flat_map(|&r| through.map(|f| (r, f))) {
        let mut sets = BTreeMap::new();
        let mut reads = node.iter();
        for (number, request) in (0u64..).zip(&requests) {
            let set = set_of(&sim, &placing, request.offset);
            let list = sets.entry(set).or_insert_with(|| stack(ram, flash, WAYS));
            if let Some(hit) = by_the_model(list, Nanos::from_secs(number + 1), request) {
                assert_eq!(
                    Some(&hit),
                    reads.next(),
                    "{ram} {flash}, request {number}: {request:?}"
                );
            }
        }
        assert!(reads.next().is_none() && sets.len() > 16);
    }
    // One list of as many frames hits about as often: lines that follow each other fall into different sets.
    let mut list = stack(Policy::Asynchronous, Policy::Asynchronous, sim.slots() as u32);
    let times = (1..).map(Nanos::from_secs);
    let one: Vec<bool> =
        times.zip(&requests).filter_map(|(now, r)| by_the_model(&mut list, now, r)).collect();
    let ratio = |hits: &[bool]| hits.iter().filter(|hit| **hit).count() as f64 / hits.len() as f64;
    let (node, one) = (ratio(&node), ratio(&one));
    assert!(node > 0.15 && (one - node).abs() < 0.02, "{node} {one}");
}
