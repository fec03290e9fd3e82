//! A binary heap of slots whose keys can change.

/// The largest key is on top. The owner keeps each slot's position and is told when it changes.
#[derive(Debug)]
pub(super) struct Heap<K> {
    nodes: Vec<(K, u32)>,
    /// Position of each slot in `nodes`.
    position: Vec<u32>,
}

impl<K: Copy + PartialOrd> Heap<K> {
    pub(super) fn new() -> Heap<K> {
        Heap { nodes: Vec::new(), position: Vec::new() }
    }

    pub(super) fn top(&self) -> Option<(K, u32)> {
        self.nodes.first().copied()
    }

    pub(super) fn push(&mut self, key: K, slot: u32) {
        let at = self.nodes.len();
        if self.position.len() <= slot as usize {
            self.position.resize(slot as usize + 1, u32::MAX);
        }
        self.nodes.push((key, slot));
        self.position[slot as usize] = at as u32;
        self.up(at);
    }

    pub(super) fn change(&mut self, slot: u32, key: K) {
        let at = self.position[slot as usize] as usize;
        let old = self.nodes[at].0;
        self.nodes[at].0 = key;
        if old < key {
            self.up(at);
        } else {
            self.down(at);
        }
    }

    pub(super) fn remove(&mut self, slot: u32) {
        let at = self.position[slot as usize] as usize;
        let old = self.nodes[at].0;
        self.nodes.swap_remove(at);
        self.position[slot as usize] = u32::MAX;
        if at < self.nodes.len() {
            self.position[self.nodes[at].1 as usize] = at as u32;
            if old < self.nodes[at].0 {
                self.up(at);
            } else {
                self.down(at);
            }
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<(K, u32)>() + self.position.capacity() * 4
    }

    fn up(&mut self, mut at: usize) {
        let moving = self.nodes[at];
        while at > 0 {
            let parent = (at - 1) / 2;
            if self.nodes[parent].0 < moving.0 {
                self.place(at, self.nodes[parent]);
                at = parent;
            } else {
                break;
            }
        }
        self.place(at, moving);
    }

    fn down(&mut self, mut at: usize) {
        let moving = self.nodes[at];
        loop {
            let mut child = at * 2 + 1;
            if child >= self.nodes.len() {
                break;
            }
            if child + 1 < self.nodes.len() && self.nodes[child].0 < self.nodes[child + 1].0 {
                child += 1;
            }
            if moving.0 < self.nodes[child].0 {
                self.place(at, self.nodes[child]);
                at = child;
            } else {
                break;
            }
        }
        self.place(at, moving);
    }

    fn place(&mut self, at: usize, node: (K, u32)) {
        self.nodes[at] = node;
        self.position[node.1 as usize] = at as u32;
    }
}
