//! A gated activation, a row at a time. Plain loops, vectorised for each instruction set: the
//! exponential of the C library, one element a call, would take most of the time.

use super::element::Element;
use super::scores::exp;
use super::simd::{Isa, Simd, Task};
use crate::ops::Gate;

/// Elements that are widened together.
const CHUNK: usize = 256;

/// `out = activation(gate) · up`, of equal lengths, in f32 whatever the dtype. An element does
/// not depend on where it stands.
pub(crate) fn gate_row<T: Element>(activation: Gate, gate: &[T], up: &[T], out: &mut [T]) {
    match activation {
        Gate::Silu => Row::run(|gate, up| gate * sigmoid(gate) * up, gate, up, out),
        Gate::GeluTanh => Row::run(|gate, up| gelu_tanh(gate) * up, gate, up, out),
        Gate::ClampedSwiglu { alpha, limit } => Row::run(
            move |gate, up| {
                let gate = least(gate, limit);
                let up = -least(-least(up, limit), limit);
                gate * sigmoid(alpha * gate) * (up + 1.0)
            },
            gate,
            up,
            out,
        ),
    }
}

struct Row<'a, T, F> {
    f: F,
    gate: &'a [T],
    up: &'a [T],
    out: &'a mut [T],
}

impl<'a, T: Element, F: Fn(f32, f32) -> f32> Row<'a, T, F> {
    fn run(f: F, gate: &'a [T], up: &'a [T], out: &'a mut [T]) {
        Isa::best().run(Self { f, gate, up, out });
    }
}

impl<T: Element, F: Fn(f32, f32) -> f32> Task for Row<'_, T, F> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (mut a, mut b) = ([0.0; CHUNK], [0.0; CHUNK]);
        let chunks = self.gate.chunks(CHUNK).zip(self.up.chunks(CHUNK));
        for ((gate, up), out) in chunks.zip(self.out.chunks_mut(CHUNK)) {
            T::widen(gate, &mut a[..gate.len()]);
            T::widen(up, &mut b[..up.len()]);
            // All of a chunk, also of the last one: what is left of the one before costs little.
            for (a, &b) in a.iter_mut().zip(&b) {
                *a = (self.f)(*a, b);
            }
            T::narrow(&a[..out.len()], out);
        }
    }
}

/// The smaller one; NaN stays NaN.
#[inline(always)]
fn least(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    let e = exp(-x.abs());
    let numerator = if x < 0.0 { e } else { 1.0 };
    numerator / (1.0 + e)
}

/// `x / 2 · (1 + tanh y)` is `x · sigmoid(2 y)`, in which nothing cancels where x is negative.
#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    const ROOT: f32 = 0.797_884_6; // √(2 / π)
    x * sigmoid(2.0 * ROOT * (x + 0.044_715 * x * x * x))
}
