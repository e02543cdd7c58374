//! Intrusive doubly linked lists: the links of all members lie in one array, a list is two
//! ends and a length, and linking or unlinking allocates nothing.

use super::reserved;
use crate::error::Result;

/// No index.
pub(super) const NIL: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
}

const UNLINKED: Link = Link {
    prev: NIL,
    next: NIL,
};

/// The ends and the length of one list over some [`Links`].
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    head: u32,
    tail: u32,
    len: u32,
}

impl Default for List {
    fn default() -> Self {
        Self {
            head: NIL,
            tail: NIL,
            len: 0,
        }
    }
}

impl List {
    pub(super) fn len(&self) -> usize {
        self.len as usize
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first member, or [`NIL`].
    pub(super) fn head(&self) -> u32 {
        self.head
    }

    /// The last member, or [`NIL`].
    pub(super) fn tail(&self) -> u32 {
        self.tail
    }
}

/// The links of every index that can be a member; each index is in at most one list.
#[derive(Debug)]
pub(super) struct Links(Vec<Link>);

impl Links {
    /// Room for `capacity` indices, none yet.
    pub(super) fn with_capacity(capacity: usize) -> Result<Self> {
        Ok(Self(reserved(capacity)?))
    }

    /// One more index, in no list.
    pub(super) fn grow(&mut self) {
        self.0.push(UNLINKED);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn prev(&self, i: u32) -> u32 {
        self.0[i as usize].prev
    }

    pub(super) fn next(&self, i: u32) -> u32 {
        self.0[i as usize].next
    }

    pub(super) fn push_back(&mut self, list: &mut List, i: u32) {
        self.insert_after(list, list.tail, i);
    }

    pub(super) fn push_front(&mut self, list: &mut List, i: u32) {
        self.insert_after(list, NIL, i);
    }

    /// Links `i` behind `at`, or at the front when `at` is [`NIL`].
    pub(super) fn insert_after(&mut self, list: &mut List, at: u32, i: u32) {
        let next = if at == NIL { list.head } else { self.next(at) };
        self.0[i as usize] = Link { prev: at, next };
        self.join(list, at, i);
        self.join(list, i, next);
        list.len += 1;
    }

    pub(super) fn unlink(&mut self, list: &mut List, i: u32) {
        let Link { prev, next } = self.0[i as usize];
        self.join(list, prev, next);
        self.0[i as usize] = UNLINKED;
        list.len -= 1;
    }

    /// Makes `b` the successor of `a`; [`NIL`] stands for the list itself on either side.
    fn join(&mut self, list: &mut List, a: u32, b: u32) {
        match a {
            NIL => list.head = b,
            a => self.0[a as usize].next = b,
        }
        match b {
            NIL => list.tail = a,
            b => self.0[b as usize].prev = a,
        }
    }

    /// The members from head to tail.
    pub(super) fn iter(&self, list: &List) -> impl Iterator<Item = u32> + '_ {
        // The length bounds the walk, so that a broken list ends a check instead of hanging it.
        let mut at = list.head;
        (0..list.len).map_while(move |_| {
            let i = at;
            at = self.0.get(i as usize)?.next;
            Some(i)
        })
    }

    /// Whether links, ends and length agree.
    pub(super) fn is_sound(&self, list: &List) -> bool {
        let (mut prev, mut count) = (NIL, 0);
        for i in self.iter(list) {
            if self.prev(i) != prev {
                return false;
            }
            (prev, count) = (i, count + 1);
        }
        count == list.len && prev == list.tail && (prev == NIL || self.next(prev) == NIL)
    }
}
