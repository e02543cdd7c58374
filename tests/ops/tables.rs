//! The rules of a page table.

use candle_paged_attn::Error;
use candle_paged_attn::ops::PageTable;

#[track_caller]
fn broken(result: Result<impl Sized, Error>, part: &str) {
    match result.map(drop).unwrap_err() {
        Error::PageTable { rule, got, .. } => {
            assert!(rule.contains(part), "{rule}: {got}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn parts_are_the_same_as_pushes() {
    let whole = PageTable::from_parts(
        4,
        &[0, 2, 2, 3],
        &[5, 1, 7],
        &[0, 0, 2],
        &[7, 0, 12],
        &[0, 2, 3, 4],
        &[5, 6, -1, 31],
    )
    .unwrap();
    let mut pushed = PageTable::new(4).unwrap();
    pushed.push(&[5, 1], 0, 7, &[5, 6]).unwrap();
    pushed.push(&[], 0, 0, &[-1]).unwrap();
    pushed.push(&[7], 2, 12, &[31]).unwrap();
    for table in [&whole, &pushed] {
        assert_eq!(table.indptr(), [0, 2, 2, 3]);
        assert_eq!(table.indices(), [5, 1, 7]);
        assert_eq!(table.first_page(), [0, 0, 2]);
        assert_eq!(table.seq_lens(), [7, 0, 12]);
        assert_eq!(table.query_offsets(), [0, 2, 3, 4]);
        assert_eq!(table.slots(), [5, 6, -1, 31]);
        assert_eq!((table.max_page(), table.max_slot()), (Some(7), 31));
        assert_eq!((table.num_seqs(), table.num_rows()), (3, 4));
        assert_eq!(table.pages(2), (&[7][..], 2));
        assert_eq!(table.pages(3), (&[][..], 0));
    }
}

#[test]
fn c12_last_page_lengths_and_indptr() {
    let parts = |indptr: &[u32], indices: &[u32], len: u32, offsets: &[u32]| {
        PageTable::from_parts(4, indptr, indices, &[], &[len], offsets, &[-1])
    };
    assert!(parts(&[0, 2], &[0, 1], 5, &[0, 1]).is_ok());
    assert!(parts(&[0, 2], &[0, 1], 8, &[0, 1]).is_ok());
    // A last page of 0 tokens, and of one more than fit.
    broken(parts(&[0, 2], &[0, 1], 4, &[0, 1]), "end at ceil");
    broken(parts(&[0, 2], &[0, 1], 9, &[0, 1]), "end at ceil");
    broken(parts(&[2, 0], &[0, 1], 5, &[0, 1]), "indptr");
    broken(parts(&[0, 3], &[0, 1], 5, &[0, 1]), "indptr");
    broken(parts(&[0, 1, 2], &[0, 1], 5, &[0, 1]), "indptr");
    broken(parts(&[], &[], 0, &[0, 1]), "indptr");
    broken(parts(&[0, 2], &[0, 1], 5, &[0, 2]), "query_offsets");
    let decreasing = PageTable::from_parts(
        4,
        &[0, 2, 1, 3],
        &[0, 1, 2],
        &[],
        &[8, 0, 4],
        &[0, 1, 1, 1],
        &[-1],
    );
    broken(decreasing, "indptr");
}

#[test]
fn a_refused_push_changes_nothing() {
    let mut table = PageTable::new(4).unwrap();
    table.push(&[5], 0, 3, &[20]).unwrap();
    broken(table.push(&[9], 0, 5, &[1]), "end at ceil");
    broken(table.push(&[9], 0, 4, &[1, -2]), "slot");
    assert_eq!((table.num_seqs(), table.num_rows()), (1, 1));
    assert_eq!(table.indices(), [5]);
    assert_eq!((table.max_page(), table.max_slot()), (Some(5), 20));
    table.clear();
    assert_eq!(
        (table.num_seqs(), table.max_page(), table.max_slot()),
        (0, None, -1)
    );
    table.push(&[9], 0, 4, &[1]).unwrap();
    assert_eq!(table.indptr(), [0, 1]);
}

#[test]
fn block_sizes() {
    for size in [0, 3, 12, 512] {
        let error = PageTable::new(size).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }
    let mut table = PageTable::default();
    assert_eq!(table.block_size(), 16);
    table.push(&[0], 0, 16, &[-1]).unwrap();
    assert_eq!(table.num_rows(), 1);
}
