// Attention without tensor cores: f32 caches, f32 queries over 16-bit caches, dims above 256, and
// rows that do not start at multiples of 16 bytes. Dims up to `D`, products and sums in f32.
//
// A block takes up to 32 pairs and passes over its keys in tiles, two stages deep as on tensor
// cores, so that K and V are read once for all pairs. Its eight warps have G pairs each; with
// fewer pairs than that, several warps have the same ones and share the keys of a tile. A key is
// read from shared memory by D / VEC lanes, 16 bytes each.
#pragma once
#include "problem.cuh"

namespace paged {

template <typename C, int D>
__device__ __forceinline__ void attend_simt(const Args& a) {
  constexpr int VEC = Vector<C>::LEN, WARPS = 8, G = 4, M = WARPS * G;
  constexpr int BN = 32768 / (2 * D * sizeof(C));     // keys of a tile: 32 KB of K and V
  constexpr int LANES = D / VEC < 32 ? D / VEC : 32;  // lanes of a key
  constexpr int VECS = D / VEC / LANES;               // vectors of a lane
  constexpr int KEYS = 32 / LANES;                    // keys of a warp at a time
  static_assert(BN % (WARPS * KEYS) == 0, "warps that share keys have equally many");
  DYNAMIC_SHARED(shared);
  C* tiles = reinterpret_cast<C*>(shared);  // [stages][K, V][BN][D]

  Work w;
  if (!w.locate(a, M)) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, of_key = lane / LANES, li = lane % LANES;
  const int pairs = min(w.pairs - w.first_pair, uint32_t(M));
  const int warps_m = (pairs + G - 1) / G, parts = WARPS / warps_m;
  const int warp_m = warp % warps_m, part = warp / warps_m;
  const bool working = part < parts;
  const bool k_aligned = aligned16(a.k) && a.k_block_stride % VEC == 0;
  const bool v_aligned = aligned16(a.v) && a.v_block_stride % VEC == 0;
  auto load_keys = [&](int tile, int stage) {
    C* tile_k = tiles + stage * 2 * BN * D;
    load_tile<C, D, BN, WARPS * 32>(a, w, w.begin + tile * BN, tile_k, tile_k + BN * D, D, D, k_aligned, v_aligned,
                                    [](int row, int chunk) { return row * D + chunk * VEC; });
    copy_commit();
  };
  const int count = (w.end - w.begin + BN - 1) / BN;
  if (count > 0) load_keys(0, 0);

  Query query[G];
  float q[G][VECS * VEC], values[G][VECS * VEC], top[G], sum[G];
  UNROLL
  for (int g = 0; g < G; g++) {
    uint32_t pair = w.first_pair + warp_m * G + g;
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

  for (int tile = 0; tile < count; tile++) {
    if (tile + 1 < count) {
      load_keys(tile + 1, (tile + 1) & 1);
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    __syncthreads();
    const C *tile_k = tiles + (tile & 1) * 2 * BN * D, *tile_v = tile_k + BN * D;
    const int32_t first = w.begin + tile * BN;
    for (int k0 = part * KEYS; working && k0 < BN && first + k0 < w.end; k0 += parts * KEYS) {
      const int row = k0 + of_key;
      const int32_t key = first + row;
      auto load_row = [&](Vector<C>(&x)[VECS], const C* rows) {
        UNROLL
        for (int i = 0; i < VECS; i++)
          x[i].bits = *reinterpret_cast<const uint4*>(rows + row * D + (i * LANES + li) * VEC);
      };
      Vector<C> kx[VECS], vx[VECS];
      load_row(kx, tile_k);
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
      load_row(vx, tile_v);
      UNROLL
      for (int g = 0; g < G; g++) {
        float score = s[g] * a.scale;
        if (a.softcap > 0.f) score = capped(a, score);
        if (a.slopes) score += query[g].bias(key);
        if (!query[g].sees(w, key)) score = NO_SCORE;
        float largest = fmaxf(top[g], score), base = finite_base(largest);
        float shrink = weight(top[g], base), p = weight(score, base);
        top[g] = largest;
        sum[g] = sum[g] * shrink + p;
        UNROLL
        for (int i = 0; i < VECS * VEC; i++)
          values[g][i] = values[g][i] * shrink + p * widen(vx[i / VEC].at[i % VEC]);
      }
    }
    __syncthreads();
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
  // The tiles are done with: their memory takes the parts.
  float *values_of = reinterpret_cast<float*>(shared), *sums_of = values_of + M * D;
  if (working && of_key == 0) {
    UNROLL
    for (int g = 0; g < G; g++) {
      int p = (part * warps_m + warp_m) * G + g;
      UNROLL
      for (int i = 0; i < VECS * VEC; i += 4)
        *reinterpret_cast<float4*>(values_of + p * D + (i / VEC * LANES + li) * VEC + i % VEC) =
            make_float4(values[g][i], values[g][i + 1], values[g][i + 2], values[g][i + 3]);
      if (li == 0) {
        sums_of[2 * p] = top[g];
        sums_of[2 * p + 1] = sum[g];
      }
    }
  }
  __syncthreads();
  merge_parts(a, w, parts, warps_m * G, D, values_of, sums_of);
}

}  // namespace paged
