// Attention without tensor cores: f32 caches, f32 queries over 16-bit caches, dims above 256, and
// rows that do not start at multiples of 16 bytes. Dims up to `D`, products and sums in f32.
//
// A block takes G pairs; its four warps take keys in turns. A key is read by D / VEC lanes, 16
// bytes each, once for all G pairs.
#pragma once
#include "problem.cuh"

namespace paged {

template <typename C, int D, int G>
__device__ __forceinline__ void attend_simt(const Args& a) {
  constexpr int VEC = Vector<C>::LEN, WARPS = 4;
  constexpr int LANES = D / VEC < 32 ? D / VEC : 32;  // lanes of a key
  constexpr int VECS = D / VEC / LANES;               // vectors of a lane
  constexpr int KEYS = 32 / LANES;                    // keys of a warp at a time
  STATIC_SHARED(float, parts, WARPS * G * D);
  STATIC_SHARED(float, part_sums, WARPS * G * 2);

  Work w;
  if (!w.locate(a, G)) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, of_key = lane / LANES, li = lane % LANES;
  const C *k = static_cast<const C*>(a.k), *v = static_cast<const C*>(a.v);
  const bool k_aligned = aligned16(k) && a.k_block_stride % VEC == 0;
  const bool v_aligned = aligned16(v) && a.v_block_stride % VEC == 0;

  Query query[G];
  float q[G][VECS * VEC], values[G][VECS * VEC], top[G], sum[G];
  UNROLL
  for (int g = 0; g < G; g++) {
    uint32_t pair = w.first_pair + g;
    query[g] = Query(a, w, pair);
    top[g] = NO_SCORE;
    sum[g] = 0.f;
    UNROLL
    for (int i = 0; i < VECS * VEC; i++) {
      int d = (i / VEC * LANES + li) * VEC + i % VEC;
      bool inside = pair < w.pairs && d < int(a.k_dim);
      q[g][i] = inside ? load_element(a.q, w.query_offset(a, pair) + d, a.q_code) : 0.f;
      values[g][i] = 0.f;
    }
  }

  for (int32_t first = w.begin + warp * KEYS; first < w.end; first += WARPS * KEYS) {
    const int32_t key = first + of_key;
    const bool inside = key < w.end;
    Vector<C> kx[VECS], vx[VECS];
    UNROLL
    for (int i = 0; i < VECS; i++) kx[i].bits = vx[i].bits = make_uint4(0, 0, 0, 0);
    if (inside) {
      const C* k_row = k + w.cache_offset(a, key, a.k_block_stride, a.k_dim);
      const C* v_row = v + w.cache_offset(a, key, a.v_block_stride, a.v_dim);
      UNROLL
      for (int i = 0; i < VECS; i++) {
        int d = (i * LANES + li) * VEC;
        if (d < int(a.k_dim)) kx[i] = load_vector(k_row + d, k_aligned);
        if (d < int(a.v_dim)) vx[i] = load_vector(v_row + d, v_aligned);
      }
    }
    float s[G];
    UNROLL
    for (int g = 0; g < G; g++) s[g] = 0.f;
    UNROLL
    for (int i = 0; i < VECS * VEC; i++) {
      float x = widen(kx[i / VEC].at[i % VEC]);
      UNROLL
      for (int g = 0; g < G; g++) s[g] += q[g][i] * x;
    }
    UNROLL
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
      UNROLL
      for (int g = 0; g < G; g++) s[g] += __shfl_xor_sync(0xffffffffu, s[g], offset);
    }
    UNROLL
    for (int g = 0; g < G; g++) {
      float score = s[g] * a.scale;
      if (a.softcap > 0.f) score = capped(a, score);
      if (a.slopes) score += query[g].bias(key);
      if (!inside || !query[g].sees(key)) score = NO_SCORE;
      float largest = fmaxf(top[g], score), base = finite_base(largest);
      float shrink = weight(top[g], base), p = weight(score, base);
      top[g] = largest;
      sum[g] = sum[g] * shrink + p;
      UNROLL
      for (int i = 0; i < VECS * VEC; i++)
        values[g][i] = values[g][i] * shrink + p * widen(vx[i / VEC].at[i % VEC]);
    }
  }

  // The keys of a warp that different lanes took.
  UNROLL
  for (int offset = LANES; offset < 32; offset *= 2) {
    UNROLL
    for (int g = 0; g < G; g++) {
      float other_top = __shfl_xor_sync(0xffffffffu, top[g], offset);
      float other_sum = __shfl_xor_sync(0xffffffffu, sum[g], offset);
      float largest = fmaxf(top[g], other_top), base = finite_base(largest);
      float mine = weight(top[g], base), others = weight(other_top, base);
      top[g] = largest;
      sum[g] = sum[g] * mine + other_sum * others;
      UNROLL
      for (int i = 0; i < VECS * VEC; i++)
        values[g][i] = values[g][i] * mine + __shfl_xor_sync(0xffffffffu, values[g][i], offset) * others;
    }
  }
  if (of_key == 0) {
    UNROLL
    for (int g = 0; g < G; g++) {
      int p = warp * G + g;
      UNROLL
      for (int i = 0; i < VECS * VEC; i++)
        parts[p * D + (i / VEC * LANES + li) * VEC + i % VEC] = values[g][i];
      if (li == 0) {
        part_sums[2 * p] = top[g];
        part_sums[2 * p + 1] = sum[g];
      }
    }
  }
  __syncthreads();
  merge_parts<WARPS, G, D>(a, w, parts, part_sums);
}

}  // namespace paged
