//! Making full blocks findable: the only place where a sequence's blocks enter the prefix
//! index, so that nothing enters it whose K/V do not exist.

use super::sequence::{Chain, GroupState};
use super::state::Group;
use crate::block::Namespace;
use crate::error::Result;

impl Group {
    /// Makes the full blocks of `tokens` findable, from the end of the chain of `held` on, and
    /// moves the chain along. Where content can be found already the block becomes a further
    /// copy of it; with `deduplicate` the sequence takes the block that is there instead and
    /// gives its own back. Answers how many were given back.
    ///
    /// The chain ends where content could not be reached: behind an ancestor that was evicted.
    pub(super) fn register_full(
        &mut self,
        namespace: &Namespace,
        tokens: &[u32],
        held: &mut GroupState,
        deduplicate: bool,
    ) -> Result<u64> {
        let size = self.allocator.block_size();
        let mut given_back = 0;
        while let Some(chain) = held
            .chain
            .filter(|chain| chain.blocks < tokens.len() / size)
        {
            let content = &tokens[chain.blocks * size..][..size];
            let node = match held.table.get(chain.blocks) {
                // Behind the window: not held, but it may be findable.
                None => {
                    let known = self.allocator.child(namespace, chain.last, content);
                    known.map(|known| known.node)
                }
                // Swapped in, and findable all the time.
                Some(block) if self.allocator.is_keyed(block) => self.allocator.node_of(block),
                Some(block) => {
                    let known = deduplicate
                        .then(|| self.allocator.child(namespace, chain.last, content))
                        .flatten();
                    if let Some(known) = known {
                        self.allocator.retain(known.block)?;
                        held.table.replace(chain.blocks, known.block);
                        self.allocator.release(block)?;
                        given_back += 1;
                        Some(known.node)
                    } else {
                        self.allocator
                            .register(namespace, chain.last, content, block)?
                    }
                }
            };
            held.chain = node.map(|node| Chain {
                blocks: chain.blocks + 1,
                last: Some(node),
            });
        }
        Ok(given_back)
    }
}
