//! What a way to manage KV memory has to answer.

use super::trace::Request;

/// A memory of so many rows, each for the K/V of one token.
pub trait Memory {
    /// What a running request holds.
    type Held;

    /// Room for a request that has `tokens` tokens now, beside `running` others; `None`, and
    /// nothing has changed, if there is none.
    fn admit(&mut self, request: &Request, tokens: usize, running: usize) -> Option<Self::Held>;

    /// One row more than a request holds; whether there was one.
    fn grow(&mut self, held: &mut Self::Held) -> bool;

    fn release(&mut self, held: Self::Held);

    /// Rows that a request holds, with those it shares.
    fn rows(&self, held: &Self::Held) -> usize;

    /// Rows that are taken, shared ones counted once.
    fn taken(&self) -> usize;

    /// Free rows that are of no use to a request that was not admitted, though together they
    /// would be enough for it.
    fn scattered(&self, waiting: &Request) -> usize;

    /// Prompt tokens that were found and need not be computed, so far.
    fn found(&self) -> u64;
}
