//! One range of rows per request, as large as the request might become: memory without paging.

use std::collections::BTreeMap;
use std::ops::Range;

use super::memory::Memory;
use super::trace::Request;

/// How much is reserved for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reservation {
    /// So many rows, whatever it asks for.
    Max(usize),
    /// The prompt and the next power of two of the output.
    PowerOfTwo,
    /// What it will need, as if that were known.
    Exact,
}

impl Reservation {
    pub fn rows(self, request: &Request) -> usize {
        match self {
            Self::Max(rows) => rows,
            Self::PowerOfTwo => request.prompt + request.output.next_power_of_two(),
            Self::Exact => request.total(),
        }
    }
}

/// Ranges by first-fit: the first hole that is large enough, from its start.
#[derive(Debug)]
pub struct Contiguous {
    reservation: Reservation,
    /// Start and length of every hole; two never touch.
    holes: BTreeMap<usize, usize>,
    free: usize,
    rows: usize,
}

impl Contiguous {
    pub fn new(rows: usize, reservation: Reservation) -> Self {
        Self {
            reservation,
            holes: BTreeMap::from([(0, rows)]),
            free: rows,
            rows,
        }
    }
}

impl Memory for Contiguous {
    type Held = Range<usize>;

    fn admit(&mut self, request: &Request, _: usize, _: usize) -> Option<Range<usize>> {
        let needed = self.reservation.rows(request);
        if needed > self.free {
            return None;
        }
        let mut holes = self.holes.iter();
        let (&start, &len) = holes.find(|&(_, &len)| len >= needed)?;
        self.holes.remove(&start);
        if len > needed {
            self.holes.insert(start + needed, len - needed);
        }
        self.free -= needed;
        Some(start..start + needed)
    }

    fn grow(&mut self, _: &mut Range<usize>) -> bool {
        false
    }

    fn release(&mut self, held: Range<usize>) {
        self.free += held.len();
        let Range { mut start, mut end } = held;
        if let Some((&before, &len)) = self.holes.range(..start).next_back()
            && before + len == start
        {
            self.holes.remove(&before);
            start = before;
        }
        if let Some(len) = self.holes.remove(&end) {
            end += len;
        }
        self.holes.insert(start, end - start);
    }

    fn rows(&self, held: &Range<usize>) -> usize {
        held.len()
    }

    fn taken(&self) -> usize {
        self.rows - self.free
    }

    fn scattered(&self, waiting: &Request) -> usize {
        match self.reservation.rows(waiting) <= self.free {
            true => self.free,
            false => 0,
        }
    }

    fn found(&self) -> u64 {
        0
    }
}
