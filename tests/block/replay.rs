//! Case A23: hits of a real trace, against counts made by an independent program (an ordered
//! dictionary in Python).

use candle_paged_attn::block::{BlockAllocator, BlockId, Namespace};

const TRACE: &[u8] = include_bytes!("../data/mooncake_conversation.bin");

/// The ids of each request; the format is described in `tests/data/README.md`.
fn requests() -> Vec<Vec<u32>> {
    let mut bytes = TRACE.iter().copied();
    let mut varint = move || {
        let (mut value, mut shift) = (0u64, 0);
        loop {
            let byte = bytes.next()?;
            value |= u64::from(byte & 127) << shift;
            shift += 7;
            if byte < 128 {
                return Some(value);
            }
        }
    };
    let mut requests = Vec::new();
    let mut expected = 0i64;
    while let Some(runs) = varint() {
        let mut ids = Vec::new();
        for _ in 0..runs {
            let zigzag = varint().unwrap() as i64;
            let start = expected + ((zigzag >> 1) ^ -(zigzag & 1));
            expected = start + varint().unwrap() as i64;
            ids.extend(start as u32..expected as u32);
        }
        requests.push(ids);
    }
    requests
}

/// Hits of a sequential replay with room for `capacity` ids after each request.
///
/// The pool is larger than the capacity by the longest request, so that nothing is evicted
/// while a request runs; afterwards as many idle blocks as exceed the capacity are allocated
/// (behind all the free ones) and given back without content.
fn replay(requests: &[Vec<u32>], capacity: usize, cap_hits: bool) -> usize {
    let longest = requests.iter().map(Vec::len).max().unwrap();
    let mut blocks = BlockAllocator::new(capacity + longest, 1).unwrap();
    let ns = Namespace::default();
    let (mut total, mut fresh, mut trash) = (0, Vec::new(), Vec::new());
    for ids in requests {
        let max = if cap_hits { ids.len() - 1 } else { ids.len() };
        let hits = blocks.lookup(&ns, ids, max);
        total += hits.len();
        let mut parent = hits.last().map(|hit| hit.node);
        let mut table: Vec<BlockId> = hits.iter().map(|hit| hit.block).collect();
        fresh.clear();
        blocks
            .acquire(&table, ids.len() - table.len(), &mut fresh)
            .unwrap();
        for (id, &block) in ids[table.len()..].iter().zip(&fresh) {
            // The last id of a fully cached request is computed again: keep one copy.
            let (node, block) = match blocks.child(&ns, parent, &[*id]) {
                Some(equal) => {
                    blocks.retain(equal.block).unwrap();
                    blocks.release(block).unwrap();
                    (Some(equal.node), equal.block)
                }
                None => (blocks.register(&ns, parent, &[*id], block).unwrap(), block),
            };
            parent = node;
            table.push(block);
        }
        for &block in table.iter().rev() {
            blocks.release(block).unwrap();
        }
        let counts = blocks.counts();
        assert_eq!(counts.referenced, 0);
        let excess = counts.idle.saturating_sub(capacity);
        if excess > 0 {
            trash.clear();
            blocks.allocate(counts.free + excess, &mut trash).unwrap();
            for &block in &trash {
                blocks.release(block).unwrap();
            }
        }
        assert!(blocks.counts().idle <= capacity);
    }
    blocks.check_invariants().unwrap();
    total
}

#[test]
fn a23_mooncake_replay() {
    let requests = requests();
    assert_eq!(requests.len(), 12_031);
    assert_eq!(requests.iter().map(Vec::len).sum::<usize>(), 288_500);
    for (capacity, hits, capped) in [
        (1_000, 12_847, 12_837),
        (3_000, 18_850, 18_817),
        (10_000, 61_046, 60_972),
        (30_000, 93_978, 93_869),
        (50_000, 102_290, 102_172),
        (288_500, 105_710, 105_592),
    ] {
        assert_eq!(replay(&requests, capacity, false), hits, "{capacity}");
        assert_eq!(
            replay(&requests, capacity, true),
            capped,
            "{capacity} capped"
        );
    }
}
