//! Block tables against a map from logical index to block.

use std::collections::BTreeMap;

use candle_paged_attn::block::{BlockAllocator, BlockId, BlockTable};
use proptest::prelude::*;

use super::take;

#[derive(Debug, Clone)]
enum Op {
    Push,
    Pop,
    Truncate(usize),
    ReleaseFront(usize),
    Replace(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => Just(Op::Push),
        1 => Just(Op::Pop),
        1 => (0..30usize).prop_map(Op::Truncate),
        2 => (0..30usize).prop_map(Op::ReleaseFront),
        1 => (0..30usize).prop_map(Op::Replace),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tables_agree_with_a_map(
        start in 0..5usize,
        ops in prop::collection::vec(op(), 1..100),
    ) {
        let mut ids = take(&mut BlockAllocator::new(100, 1).unwrap(), 100).into_iter();
        let mut table = BlockTable::starting_at(start);
        let mut map: BTreeMap<usize, BlockId> = BTreeMap::new();
        let mut end = start;
        for op in ops {
            match op {
                Op::Push => {
                    let block = ids.next().unwrap();
                    table.push(block);
                    map.insert(end, block);
                    end += 1;
                }
                Op::Pop => {
                    let last = map.pop_last();
                    prop_assert_eq!(table.pop(), last.map(|(_, block)| block));
                    end -= usize::from(last.is_some());
                }
                Op::Truncate(to) => {
                    let mut removed: Vec<BlockId> = map.split_off(&to).into_values().collect();
                    removed.reverse();
                    prop_assert_eq!(table.truncate_to(to).collect::<Vec<_>>(), removed);
                    end = end.min(to);
                }
                Op::ReleaseFront(upto) => {
                    let kept = map.split_off(&upto);
                    let removed: Vec<BlockId> = map.into_values().collect();
                    map = kept;
                    prop_assert_eq!(table.release_front(upto), removed);
                }
                Op::Replace(at) => {
                    let block = ids.next().unwrap();
                    let old = map.get_mut(&at).map(|b| std::mem::replace(b, block));
                    prop_assert_eq!(table.replace(at, block), old);
                }
            }
            prop_assert_eq!(table.end(), end);
            prop_assert_eq!(table.first_block(), end - map.len());
            prop_assert_eq!(table.len(), map.len());
            prop_assert_eq!(table.is_empty(), map.is_empty());
            let held: Vec<BlockId> = map.values().copied().collect();
            prop_assert_eq!(table.blocks(), held);
            for at in 0..35 {
                prop_assert_eq!(table.get(at), map.get(&at).copied());
            }
        }
    }
}
