//! The golden example, whose answers are fractions anyone can check: scores 0, ln 2, 0, ln 3,
//! so weights 1, 2, 1, 3; values 1, 2, 3, 4. The one dimension is the first of eight.

use candle_core::{DType, Tensor};
use candle_paged_attn::ops::{
    AttentionOptions, AttnState, PageTable, merge_states, paged_attention, paged_attention_state,
    portable,
};

use crate::common::device;
use crate::common::paged::{bits, floats, tensor};

const DIM: usize = 8;

/// `rows` queries of 1 over `len` keys that repeat the golden four; one sequence, blocks of
/// `block_size`, pages in descending order, every other slot holding `poison`.
pub struct Golden {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub table: PageTable,
}

pub fn golden(len: usize, rows: usize, block_size: usize, poison: f64) -> Golden {
    let blocks = len.div_ceil(block_size) + 1;
    let mut k = vec![poison; blocks * block_size * DIM];
    let mut v = k.clone();
    let pages: Vec<u32> = (0..len.div_ceil(block_size) as u32).rev().collect();
    for t in 0..len {
        let slot = pages[t / block_size] as usize * block_size + t % block_size;
        let row = |x: f64| [x, 0., 0., 0., 0., 0., 0., 0.];
        k[slot * DIM..][..DIM].copy_from_slice(&row([0., 2f64.ln(), 0., 3f64.ln()][t % 4]));
        v[slot * DIM..][..DIM].copy_from_slice(&row([1., 2., 3., 4.][t % 4]));
    }
    let mut table = PageTable::new(block_size).unwrap();
    table.push(&pages, 0, len, &vec![-1; rows]).unwrap();
    Golden {
        q: tensor(&vec![1.0; rows * DIM], &[rows, 1, DIM], DType::F32),
        k: tensor(&k, &[blocks, block_size, 1, DIM], DType::F32),
        v: tensor(&v, &[blocks, block_size, 1, DIM], DType::F32),
        table,
    }
}

impl Golden {
    pub fn kernel(&self, options: &AttentionOptions) -> Tensor {
        paged_attention(&self.q, &self.k, &self.v, &self.table, options).unwrap()
    }

    pub fn portable(&self, options: &AttentionOptions) -> Tensor {
        portable::paged_attention(&self.q, &self.k, &self.v, &self.table, options).unwrap()
    }

    pub fn states(&self, options: &AttentionOptions) -> [AttnState; 2] {
        [
            paged_attention_state(&self.q, &self.k, &self.v, &self.table, options).unwrap(),
            portable::paged_attention_state(&self.q, &self.k, &self.v, &self.table, options)
                .unwrap(),
        ]
    }

    /// Output of the last row, by both implementations, must be `want`: to the last digits
    /// written here, or within the tolerance of f32 where thousands of keys are summed.
    pub fn last_is(&self, options: &AttentionOptions, want: f64) {
        for (out, who) in [
            (self.kernel(options), "kernel"),
            (self.portable(options), "portable"),
        ] {
            let out = floats(&out);
            let got = out[out.len() - DIM];
            let tolerance = if self.table.seq_lens()[0] < 1000 {
                1e-6
            } else {
                1e-5 * want
            };
            assert!(
                (got - want).abs() < tolerance,
                "{who}: got {got}, want {want}"
            );
        }
    }

    fn lse_is(&self, options: &AttentionOptions, want: f64) {
        for state in self.states(options) {
            let lse = floats(&state.lse);
            let got = lse[lse.len() - 1];
            assert!((got - want).abs() < 1e-6, "got {got}, want {want}");
        }
    }
}

fn plain() -> AttentionOptions {
    AttentionOptions::new(1.0)
}

#[test]
fn every_variant_of_the_golden_example() {
    for block_size in [1, 2, 16] {
        let golden = golden(4, 1, block_size, f64::NAN);
        let ln2 = 2f32.ln();
        golden.last_is(&plain(), 20.0 / 7.0);
        golden.lse_is(&plain(), 7f64.ln());
        golden.last_is(&plain().with_window(1), 4.0);
        golden.last_is(&plain().with_window(2), 3.75);
        golden.last_is(&plain().with_window(3), 19.0 / 6.0);
        golden.last_is(&plain().with_window(4), 20.0 / 7.0);
        golden.last_is(&plain().with_sinks(vec![0.0]), 2.5);
        golden.last_is(&plain().with_softcap(1.0), 2.736_001);
        let alibi = plain().with_alibi_slopes(vec![ln2]);
        golden.last_is(&alibi, 3.545_455);
        golden.lse_is(&alibi, 1.417_066);
        golden.last_is(&alibi.with_sinks(vec![0.0]), 2.853_659);
    }
}

#[test]
fn sinks_beyond_the_range_of_exp() {
    let golden = golden(4, 1, 4, f64::NAN);
    golden.last_is(&plain().with_sinks(vec![1e4]), 0.0);
    golden.last_is(&plain().with_sinks(vec![-1e4]), 20.0 / 7.0);
    golden.last_is(&plain().with_sinks(vec![f32::NEG_INFINITY]), 20.0 / 7.0);
}

#[test]
fn c1_slots_past_the_length_do_not_matter() {
    for len in 1..=17 {
        let clean = golden(len, 1, 16, 0.0);
        for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let dirty = golden(len, 1, 16, poison);
            assert_eq!(
                bits(&dirty.kernel(&plain())),
                bits(&clean.kernel(&plain())),
                "length {len}"
            );
            assert_eq!(
                bits(&dirty.portable(&plain())),
                bits(&clean.portable(&plain())),
                "length {len}"
            );
            if len % 4 == 0 {
                dirty.last_is(&plain(), 20.0 / 7.0);
            }
        }
    }
}

#[test]
fn c2_an_empty_sequence_between_two_others() {
    let base = golden(4, 1, 4, f64::NAN);
    let mut table = PageTable::new(4).unwrap();
    table.push(&[0], 0, 4, &[-1]).unwrap();
    table.push(&[], 0, 0, &[-1]).unwrap();
    table.push(&[0], 0, 4, &[-1]).unwrap();
    let batch = Golden {
        q: tensor(&[1.0; 3 * DIM], &[3, 1, DIM], DType::F32),
        table,
        ..base
    };
    for sinks in [None, Some(vec![0.0])] {
        let mut options = plain();
        let mut want = 20.0 / 7.0;
        if let Some(sinks) = sinks {
            options = options.with_sinks(sinks);
            want = 2.5;
        }
        for out in [batch.kernel(&options), batch.portable(&options)] {
            let out = floats(&out);
            assert!((out[0] - want).abs() < 1e-6);
            assert_eq!(out[DIM..2 * DIM], [0.0; DIM]);
            assert!((out[2 * DIM] - want).abs() < 1e-6);
        }
    }
    for state in batch.states(&plain()) {
        assert_eq!(floats(&state.lse)[1], f64::NEG_INFINITY);
    }
}

#[test]
fn c3_merging_states() {
    let state = |out: f32, lse: f32| {
        let mut row = [0f32; DIM];
        row[0] = out;
        AttnState {
            out: Tensor::from_slice(&row, (1, 1, DIM), device()).unwrap(),
            lse: Tensor::from_slice(&[lse], (1, 1), device()).unwrap(),
        }
    };
    let merged = |a: &AttnState, b: &AttnState| {
        let merged = merge_states(a, b).unwrap();
        (floats(&merged.out)[0], floats(&merged.lse)[0])
    };
    let none = state(0.0, f32::NEG_INFINITY);
    let (seven, two, three) = (7f32.ln(), 4f32.ln(), 3f32.ln());
    let whole = state(20.0 / 7.0, seven);
    assert_eq!(merged(&none, &none), (0.0, f64::NEG_INFINITY));
    let exact = (f64::from(20f32 / 7.0), f64::from(seven));
    assert_eq!(merged(&whole, &none), exact);
    assert_eq!(merged(&none, &whole), exact);
    let (front, back) = (state(5.0 / 3.0, three), state(3.75, two));
    let (out, lse) = merged(&front, &back);
    assert!((out - 20.0 / 7.0).abs() < 1e-6 && (lse - 7f64.ln()).abs() < 1e-6);
    assert_eq!(merged(&front, &back), merged(&back, &front));
    // Far apart, and far from 0: nothing overflows.
    let (out, lse) = merged(&state(1.0, 500.0), &state(3.0, 500.0));
    assert!((out - 2.0).abs() < 1e-6 && (lse - (500.0 + 2f64.ln())).abs() < 1e-4);
    assert_eq!(
        merged(&state(1.0, 500.0), &state(3.0, -500.0)),
        (1.0, 500.0)
    );
}

#[test]
fn c4_more_queries_than_keys() {
    for group in [1, 16] {
        // 16 heads take the matrix kernel.
        let mut table = PageTable::new(16).unwrap();
        table.push(&[0], 0, 3, &[-1; 5]).unwrap();
        let base = golden(3, 1, 16, f64::NAN);
        let batch = Golden {
            q: tensor(&vec![1.0; 5 * group * DIM], &[5, group, DIM], DType::F32),
            table,
            ..base
        };
        for state in batch.states(&plain()) {
            let (out, lse) = (floats(&state.out), floats(&state.lse));
            let row = |i: usize| (out[i * group * DIM], lse[i * group]);
            assert_eq!(row(0), (0.0, f64::NEG_INFINITY));
            assert_eq!(row(1), (0.0, f64::NEG_INFINITY));
            assert_eq!(row(2), (1.0, 0.0));
            assert!((row(3).0 - 5.0 / 3.0).abs() < 1e-6);
            assert!((row(4).0 - 2.0).abs() < 1e-6);
        }
    }
}

#[test]
fn c8_softcap_on_every_path() {
    let options = plain().with_softcap(1.0);
    // One tile; several chunks of the streaming kernel; the matrix kernel in one tile with a
    // split context; and in several tiles.
    for (len, rows) in [(4, 1), (3000, 1), (3000, 40), (1200, 1200)] {
        let golden = golden(len, rows, 16, f64::NAN);
        golden.last_is(&options, 2.736_001);
        golden.last_is(&plain(), 20.0 / 7.0);
    }
}

#[test]
fn c8_logits_of_a_hundred_thousand_in_f16() {
    for rows in [1, 40] {
        let row = |x: f64| [x, 0., 0., 0., 0., 0., 0., 0.];
        let q: Vec<f64> = (0..rows).flat_map(|_| row(316.0)).collect();
        // Scores 99,856 for the even keys, -99,856 for the odd ones.
        let k: Vec<f64> = (0..64)
            .flat_map(|t| row(if t % 2 == 0 { 316.0 } else { -316.0 }))
            .collect();
        let v: Vec<f64> = (0..64)
            .flat_map(|t| row((t % 2 * 100 + 1) as f64))
            .collect();
        let mut table = PageTable::new(16).unwrap();
        table.push(&[0, 1, 2, 3], 0, 64, &vec![-1; rows]).unwrap();
        let cache = |x: &[f64]| tensor(x, &[4, 16, 1, DIM], DType::F16);
        let batch = Golden {
            q: tensor(&q, &[rows, 1, DIM], DType::F16),
            k: cache(&k),
            v: cache(&v),
            table,
        };
        for options in [plain(), plain().with_softcap(30.0)] {
            for out in [batch.kernel(&options), batch.portable(&options)] {
                assert_eq!(out.dtype(), DType::F16);
                assert!(floats(&out).chunks(DIM).all(|row| row[0] == 1.0));
            }
        }
    }
}
