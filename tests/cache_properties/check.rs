//! The cache beside the naive model: what must hold after every operation.

use std::collections::HashMap;

use candle_paged_attn::Error;
use candle_paged_attn::block::Event;
use candle_paged_attn::cache::GroupUsage;

use super::World;
use super::common::toy::{Toy, stored_rows};

impl World {
    pub(super) fn check(&mut self) {
        self.cache.check_invariants().unwrap();
        let removed = |event: &(usize, _)| matches!(event.1, Event::Removed { .. });
        self.evicted |= self.cache.take_events().iter().any(removed);
        assert_eq!(self.cache.num_sequences(), self.live.len());
        for id in &self.gone {
            assert!(matches!(
                self.cache.len(*id),
                Err(Error::StaleHandle { .. })
            ));
        }
        assert_eq!(self.cache.num_swapped(), self.swapped.len());
        for swap in &self.spent {
            assert!(matches!(
                self.cache.swap_in(*swap),
                Err(Error::StaleHandle { .. })
            ));
        }
        if self.swapped.is_empty() {
            let used = |usage: &GroupUsage| usage.host_blocks_used;
            assert!(self.cache.usage().iter().all(|usage| used(usage) == 0));
        }
        self.check_deduplicated();
        for naive in &self.live {
            assert_eq!(self.cache.sequence_tokens(naive.id).unwrap(), naive.tokens);
            for layer in 0..self.windows.len() {
                let (first, table) = self.cache.block_table(naive.id, self.group(layer)).unwrap();
                let len = naive.tokens.len();
                assert_eq!(first + table.len(), len.div_ceil(self.block_size));
                let visible = self.windows[layer].map_or(0, |w| (len + 1).saturating_sub(w));
                assert!(
                    first <= visible / self.block_size,
                    "a visible block is gone"
                );
                let toy = Toy {
                    seed: naive.namespace,
                    tokens: naive.tokens.clone(),
                    new: 0,
                };
                assert_eq!(
                    stored_rows(&self.cache, naive.id, layer),
                    toy.rows(layer, first * self.block_size)
                );
            }
        }
    }

    /// With deduplication equal full blocks are one, as long as all that was registered can
    /// be found.
    fn check_deduplicated(&self) {
        if !self.switches.deduplicate || self.evicted || self.swapped_in {
            return;
        }
        for g in 0..self.cache.spec().groups.len() {
            let mut blocks = HashMap::new();
            for naive in self.live.iter().filter(|naive| naive.indexed) {
                let (first, table) = self.cache.block_table(naive.id, g).unwrap();
                for (logical, block) in (first..).zip(table) {
                    let end = (logical + 1) * self.block_size;
                    if let Some(content) = naive.tokens.get(..end) {
                        let content = (naive.namespace, content);
                        assert_eq!(*blocks.entry(content).or_insert(block), block);
                    }
                }
            }
        }
    }
}
