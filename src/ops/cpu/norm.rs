//! Root mean square norm of a row.

use super::element::Element;
use super::scores::to_array;
use super::simd::{Isa, Simd, Task};

/// Elements that are widened together.
const CHUNK: usize = 256;

/// `out = x / √(mean(x²) + eps) · weight`, of equal lengths, in f32 whatever the dtype of x. The
/// order of the sum depends on the length alone.
pub(crate) fn rms_norm_row<T: Element>(x: &[T], weight: &[f32], eps: f32, out: &mut [T]) {
    Isa::best().run(Row {
        x,
        weight,
        eps,
        out,
    });
}

struct Row<'a, T> {
    x: &'a [T],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [T],
}

impl<T: Element> Task for Row<'_, T> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mean = squares(simd, self.x) / self.x.len() as f32;
        let factor = 1.0 / (mean + self.eps).sqrt();
        let mut wide = [0.0; CHUNK];
        let chunks = self.x.chunks(CHUNK).zip(self.weight.chunks(CHUNK));
        for ((x, weight), out) in chunks.zip(self.out.chunks_mut(CHUNK)) {
            let wide = &mut wide[..x.len()];
            T::widen(x, wide);
            for (x, weight) in wide.iter_mut().zip(weight) {
                *x = *x * factor * weight;
            }
            T::narrow(wide, out);
        }
    }
}

/// The sum of squares, in four registers.
#[inline(always)]
fn squares<S: Simd, T: Element>(simd: S, x: &[T]) -> f32 {
    let mut sums = [simd.splat(0.0); 4];
    let mut quads = x.chunks_exact(4 * S::LANES);
    for quad in &mut quads {
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the chunk has 4 * LANES elements.
            let x = unsafe { T::load(simd, quad.as_ptr().add(i * S::LANES)) };
            *sum = simd.mul_add(x, x, *sum);
        }
    }
    let [a, b, c, d] = sums;
    let lanes = to_array(simd, simd.add(simd.add(a, b), simd.add(c, d)));
    let rest: f32 = quads.remainder().iter().map(|x| square(x.to_f32())).sum();
    lanes[..S::LANES].iter().sum::<f32>() + rest
}

#[inline(always)]
fn square(x: f32) -> f32 {
    x * x
}
