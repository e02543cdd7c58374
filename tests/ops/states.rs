//! Partial attention: states over parts of a context merge to the whole.

use candle_core::DType;
use candle_paged_attn::ops::{PageTable, merge_states, paged_attention_state};

use crate::common::paged::{Setup, close, close_lse};

/// One query over the first pages of its context, and over the others; merged, it has seen all.
/// A single row stands at the end of what its table lists, so it sees the whole part.
#[test]
fn split_contexts_merge_to_the_whole() {
    for dtype in [DType::F32, DType::BF16] {
        let mut setup = Setup::new(6, 2, 40, &[(96, 1)]);
        setup.cache_dtype = dtype;
        let batch = setup.build();
        let options = batch.options();
        let (pages, _) = batch.table.pages(0);
        let part = |pages: &[u32], len: usize| {
            let mut table = PageTable::new(16).unwrap();
            table.push(pages, 0, len, &[-1]).unwrap();
            paged_attention_state(&batch.q, &batch.k_cache, &batch.v_cache, &table, &options)
                .unwrap()
        };
        let want = batch.reference(&options);
        for cut in 1..6 {
            let a = part(&pages[..cut], cut * 16);
            let b = part(&pages[cut..], 96 - cut * 16);
            let merged = merge_states(&a, &b).unwrap();
            close(&merged.out, &want.out, 40, 1e-5, "merged");
            close_lse(&merged.lse, &want.lse, "merged");
        }
    }
}
