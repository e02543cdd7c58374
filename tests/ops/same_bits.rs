//! What must not change a single bit: company, placement, threads.

use candle_core::DType;

use crate::common::paged::{Batch, Setup, bits};

const SEQS: &[(usize, usize)] = &[
    (1, 1),
    (37, 1),
    (70, 3),
    (90, 40),
    (300, 300),
    (1500, 1),
    (2100, 20),
    (64, 2),
];

fn setup(dtype: DType) -> Setup {
    let mut setup = Setup::new(6, 2, 24, SEQS);
    setup.cache_dtype = dtype;
    setup.q_dtype = dtype;
    setup
}

#[test]
fn c16_batch_mates_and_blocks_do_not_matter() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let setup = setup(dtype);
        let batch = setup.build();
        for options in [batch.options(), batch.options().with_window(50)] {
            let together = bits(&batch.attention(&options));
            let shuffled = Batch::place(&setup, batch.seqs.clone(), 77);
            assert_eq!(bits(&shuffled.attention(&options)), together);
            let mut start = 0;
            for (i, seq) in batch.seqs.iter().enumerate() {
                let alone = Batch::place(&setup, vec![seq.clone()], i as u64);
                let alone = bits(&alone.attention(&options));
                assert_eq!(
                    alone,
                    together[start..start + alone.len()],
                    "sequence {i} in {dtype:?}"
                );
                start += alone.len();
            }
        }
    }
}

/// A row of the matrix kernel has the same bits whichever rows of its prompt come with it.
#[test]
fn the_rows_beside_it_do_not_matter() {
    for dtype in [DType::F32, DType::BF16] {
        let mut setup = Setup::new(6, 2, 24, &[(300, 300)]);
        (setup.cache_dtype, setup.q_dtype) = (dtype, dtype);
        let whole = setup.build();
        for options in [
            whole.options(),
            whole.options().with_window(50),
            whole.options().with_window(150),
        ] {
            let want = bits(&whole.attention(&options));
            for rows in [200, 113, 64, 37, 12] {
                let mut seq = whole.seqs[0].clone();
                seq.q.drain(..(300 - rows) * 6 * 24);
                seq.shape.rows = rows;
                let part = bits(&Batch::place(&setup, vec![seq], rows as u64).attention(&options));
                let last = &want[want.len() - part.len()..];
                assert!(part == last, "the last {rows} rows, {options:?}, {dtype:?}");
            }
        }
    }
}

#[test]
fn the_number_of_threads_does_not_matter() {
    let batch = setup(DType::F32).build();
    let options = batch.options();
    let want = bits(&batch.attention(&options));
    for threads in [1, 2, 5] {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let got = pool.install(|| bits(&batch.attention(&options)));
        assert!(got == want, "{threads} threads");
    }
}

/// Pages that a window has left behind may be listed or not.
#[test]
fn listing_hidden_pages_does_not_matter() {
    let mut setup = Setup::new(2, 1, 16, &[(300, 1), (300, 60)]);
    let batch = setup.build();
    let options = batch.options().with_window(33);
    setup.release_behind = Some(33);
    let short = Batch::place(&setup, batch.seqs.clone(), 5);
    assert!(short.table.indices().len() < batch.table.indices().len());
    assert_eq!(
        bits(&short.attention(&options)),
        bits(&batch.attention(&options))
    );
}
