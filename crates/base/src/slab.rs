//! Doubly linked lists through a slab: nodes live in one array and are named by 32-bit indices, so that a list costs
//! 8 bytes of links a node, no allocation per node, and no unsafe code.

/// The index that names no node.
pub const NIL: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Node<T> {
    prev: u32,
    next: u32,
    item: T,
}

/// The nodes of any number of [`List`]s. A node is in at most one list at a time; which one is for the owner to know.
#[derive(Clone, Debug)]
pub struct Slab<T> {
    nodes: Vec<Node<T>>,
    /// Head of the chain of free nodes (through `next`).
    free: u32,
    live: u32,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab { nodes: Vec::new(), free: NIL, live: 0 }
    }
}

impl<T> Slab<T> {
    /// An empty slab.
    pub fn new() -> Slab<T> {
        Slab::default()
    }

    /// Nodes in use.
    pub fn len(&self) -> usize {
        self.live as usize
    }

    /// Whether no node is in use.
    pub fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// Bytes of memory held, free nodes included.
    pub fn memory_bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node<T>>()
    }

    /// Takes a node that is in no list. The index stays valid until [`Slab::free`]; freed indices are used again.
    ///
    /// # Panics
    /// When 2^32 − 1 nodes are in use.
    pub fn take(&mut self, item: T) -> u32 {
        self.live += 1;
        if self.free != NIL {
            let at = self.free;
            let node = &mut self.nodes[at as usize];
            self.free = node.next;
            *node = Node { prev: NIL, next: NIL, item };
            return at;
        }
        let at = self.nodes.len();
        assert!(at < NIL as usize, "a slab holds at most 2^32 - 1 nodes");
        if at == self.nodes.capacity() {
            // A quarter more instead of twice as much: slabs are most of the simulator's memory.
            self.nodes.reserve_exact(at / 4 + 64);
        }
        self.nodes.push(Node { prev: NIL, next: NIL, item });
        at as u32
    }

    /// Gives a node back. It must be in no list.
    pub fn free(&mut self, at: u32) {
        let free = self.free;
        let node = &mut self.nodes[at as usize];
        node.next = free;
        node.prev = NIL;
        self.free = at;
        self.live -= 1;
    }

    /// The item of node `at`.
    #[inline]
    pub fn get(&self, at: u32) -> &T {
        &self.nodes[at as usize].item
    }

    /// The item of node `at`.
    #[inline]
    pub fn get_mut(&mut self, at: u32) -> &mut T {
        &mut self.nodes[at as usize].item
    }

    /// The neighbour towards the front, or [`NIL`].
    #[inline]
    pub fn before(&self, at: u32) -> u32 {
        self.nodes[at as usize].prev
    }

    /// The neighbour towards the back, or [`NIL`].
    #[inline]
    pub fn after(&self, at: u32) -> u32 {
        self.nodes[at as usize].next
    }

    /// Asks the processor to load node `at` into its cache.
    #[inline]
    pub fn prefetch(&self, at: u32) {
        crate::prefetch(&self.nodes, at as usize);
    }
}

/// A doubly linked list of nodes of one [`Slab`], which every call takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct List {
    front: u32,
    back: u32,
    len: u32,
}

impl Default for List {
    fn default() -> Self {
        List { front: NIL, back: NIL, len: 0 }
    }
}

impl List {
    /// An empty list.
    pub fn new() -> List {
        List::default()
    }

    /// The first node, or [`NIL`].
    #[inline]
    pub fn front(&self) -> u32 {
        self.front
    }

    /// The last node, or [`NIL`].
    #[inline]
    pub fn back(&self) -> u32 {
        self.back
    }

    /// Number of nodes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether the list has no node.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Puts `at`, which is in no list, at the front.
    #[inline]
    pub fn push_front<T>(&mut self, slab: &mut Slab<T>, at: u32) {
        let node = &mut slab.nodes[at as usize];
        node.prev = NIL;
        node.next = self.front;
        if self.front == NIL {
            self.back = at;
        } else {
            slab.nodes[self.front as usize].prev = at;
        }
        self.front = at;
        self.len += 1;
    }

    /// Puts `at`, which is in no list, at the back.
    #[inline]
    pub fn push_back<T>(&mut self, slab: &mut Slab<T>, at: u32) {
        let node = &mut slab.nodes[at as usize];
        node.next = NIL;
        node.prev = self.back;
        if self.back == NIL {
            self.front = at;
        } else {
            slab.nodes[self.back as usize].next = at;
        }
        self.back = at;
        self.len += 1;
    }

    /// Puts `at`, which is in no list, behind `anchor`, which is in this one.
    #[inline]
    pub fn insert_after<T>(&mut self, slab: &mut Slab<T>, anchor: u32, at: u32) {
        let next = slab.nodes[anchor as usize].next;
        if next == NIL {
            self.push_back(slab, at);
            return;
        }
        slab.nodes[anchor as usize].next = at;
        slab.nodes[next as usize].prev = at;
        let node = &mut slab.nodes[at as usize];
        node.prev = anchor;
        node.next = next;
        self.len += 1;
    }

    /// Takes `at` out of this list, which it must be in.
    #[inline]
    pub fn unlink<T>(&mut self, slab: &mut Slab<T>, at: u32) {
        let node = &mut slab.nodes[at as usize];
        let (prev, next) = (node.prev, node.next);
        node.prev = NIL;
        node.next = NIL;
        if prev == NIL {
            debug_assert_eq!(self.front, at);
            self.front = next;
        } else {
            slab.nodes[prev as usize].next = next;
        }
        if next == NIL {
            debug_assert_eq!(self.back, at);
            self.back = prev;
        } else {
            slab.nodes[next as usize].prev = prev;
        }
        self.len -= 1;
    }

    /// Takes the last node out.
    #[inline]
    pub fn pop_back<T>(&mut self, slab: &mut Slab<T>) -> Option<u32> {
        let at = self.back;
        if at == NIL {
            return None;
        }
        self.unlink(slab, at);
        Some(at)
    }

    /// Moves `at`, which must be in this list, to the front.
    #[inline]
    pub fn move_to_front<T>(&mut self, slab: &mut Slab<T>, at: u32) {
        if self.front != at {
            self.unlink(slab, at);
            self.push_front(slab, at);
        }
    }

    /// The nodes from front to back.
    pub fn iter<'a, T>(&self, slab: &'a Slab<T>) -> impl Iterator<Item = u32> + 'a {
        let mut at = self.front;
        std::iter::from_fn(move || {
            let here = at;
            (here != NIL).then(|| {
                at = slab.after(here);
                here
            })
        })
    }

    /// Checks the links both ways and the length.
    ///
    /// # Panics
    /// When the list is broken.
    pub fn validate<T>(&self, slab: &Slab<T>) {
        let (mut count, mut last) = (0, NIL);
        for at in self.iter(slab) {
            assert_eq!(slab.before(at), last);
            last = at;
            count += 1;
            assert!(count <= self.len, "a cycle, or a wrong length");
        }
        assert_eq!(self.back, last);
        assert_eq!(count, self.len);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::Rng;

    #[test]
    fn agrees_with_deques() {
        let mut rng = Rng::new(3);
        let mut slab = Slab::new();
        let mut lists = [List::new(), List::new()];
        let mut model: [VecDeque<u32>; 2] = Default::default();
        for step in 0..20_000u32 {
            let which = rng.below(2) as usize;
            match rng.below(6) {
                0 | 1 => {
                    let at = slab.take(step);
                    lists[which].push_front(&mut slab, at);
                    model[which].push_front(at);
                }
                2 => {
                    let at = slab.take(step);
                    if model[which].is_empty() {
                        lists[which].push_back(&mut slab, at);
                        model[which].push_back(at);
                    } else {
                        let i = rng.below(model[which].len() as u64) as usize;
                        lists[which].insert_after(&mut slab, model[which][i], at);
                        model[which].insert(i + 1, at);
                    }
                }
                3 => {
                    let popped = lists[which].pop_back(&mut slab);
                    assert_eq!(popped, model[which].pop_back());
                    if let Some(at) = popped {
                        slab.free(at);
                    }
                }
                kind => {
                    if !model[which].is_empty() {
                        let i = rng.below(model[which].len() as u64) as usize;
                        let at = model[which].remove(i).unwrap();
                        if kind == 4 {
                            lists[which].move_to_front(&mut slab, at);
                            model[which].push_front(at);
                        } else {
                            lists[which].unlink(&mut slab, at);
                            slab.free(at);
                        }
                    }
                }
            }
            if step % 500 == 0 {
                for (list, deque) in lists.iter().zip(&model) {
                    list.validate(&slab);
                    assert!(list.iter(&slab).eq(deque.iter().copied()));
                }
                assert_eq!(slab.len(), model[0].len() + model[1].len());
            }
        }
    }
}
