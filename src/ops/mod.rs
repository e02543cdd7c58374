//! The custom ops. Ops see tensors and index arrays and know nothing of sequences, models or
//! text, so that any of them can be compared with a peer's kernel call by call.

mod page_table;

pub use page_table::PageTable;
mod stub {
    #![allow(missing_docs)]
    use super::PageTable;
    use crate::Result;
    use candle_core::Tensor;
    #[derive(Clone, Debug)]
    pub struct AttentionOptions {
        pub mask: Mask,
    }
    impl AttentionOptions {
        pub fn new(_: f32) -> Self {
            Self { mask: Mask::Causal }
        }
    }
    #[derive(Clone, Debug)]
    pub enum Mask {
        Causal,
        CausalWindow(usize),
    }
    pub fn write_kv(kc: &Tensor, vc: &Tensor, k: &Tensor, v: &Tensor, t: &PageTable) -> Result<()> {
        for (c, x) in [(kc, k), (vc, v)] {
            let c = c.flatten(0, 1)?;
            for (i, &s) in t.slots().iter().enumerate() {
                if s >= 0 {
                    c.slice_set(&x.narrow(0, i, 1)?.contiguous()?, 0, s as usize)?;
                }
            }
        }
        Ok(())
    }
    pub fn paged_attention(
        q: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &PageTable,
        _: &AttentionOptions,
    ) -> Result<Tensor> {
        Ok(q.clone())
    }
    pub fn copy_blocks(c: &[&Tensor], p: &[(u32, u32)]) -> Result<()> {
        for c in c {
            let o: Vec<_> = p
                .iter()
                .map(|p| c.narrow(0, p.0 as usize, 1).unwrap().copy().unwrap())
                .collect();
            for (o, p) in o.iter().zip(p) {
                c.slice_set(o, 0, p.1 as usize)?;
            }
        }
        Ok(())
    }
    pub fn gather_kv(k: &Tensor, v: &Tensor, t: &PageTable, s: usize) -> Result<(Tensor, Tensor)> {
        let (p, f) = t.pages(s);
        let n = t.seq_lens()[s] as usize - f * t.block_size();
        let i = Tensor::new(p, k.device())?;
        Ok((
            k.index_select(&i, 0)?.flatten(0, 1)?.narrow(0, 0, n)?,
            v.index_select(&i, 0)?.flatten(0, 1)?.narrow(0, 0, n)?,
        ))
    }
}
pub use stub::*;
