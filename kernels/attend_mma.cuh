// Attention on tensor cores: 16-bit queries and cache of one type, dims up to `D`.
//
// A block takes WM * MT * 16 pairs and passes over its keys in tiles of BN, two stages deep:
// while one tile is multiplied, the next is on its way to shared memory (cp.async). WM * WN warps:
// WM share the pairs, WN the keys of a tile. Prefill: WN = 1, all warps read all keys. Decode: WM = 1
// for groups up to 16, 2 up to 32; warps with keys of their own have their own softmax, merged at
// the end.
// FlashAttention's online softmax (Dao et al. 2022) in f32; heads of a group as rows of one
// product, as FlashInfer does.
#pragma once
#include "problem.cuh"

namespace paged {

template <typename T, int D, int WM, int WN, int MT, int BN>
__device__ __forceinline__ void attend_mma(const Args& a) {
  constexpr int THREADS = WM * WN * 32, M = WM * MT * 16, CHUNKS = D / 8, NW = BN / WN;
  static_assert(NW % 16 == 0, "a warp takes keys by 16");
  DYNAMIC_SHARED(shared);
  T* sq = reinterpret_cast<T*>(shared);
  T *sk = sq + M * D, *sv = sk + 2 * BN * D;

  Work w;
  if (!w.locate(a, M)) return;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, warp_m = warp / WN, warp_n = warp % WN;
  const int k_steps = (a.k_dim + 15) / 16, v_steps = (a.v_dim + 15) / 16;
  const T* q = static_cast<const T*>(a.q);

  // Element of a tile with rows of D elements. 16-byte chunks are permuted within 8 rows, so that
  // ldmatrix and cp.async meet no bank conflict. Two chunks on is `^ 16`, sixteen rows on `+ 16 * D`:
  // a lane keeps one offset per operand instead of one address per step.
  auto offset = [](int row, int chunk) { return row * D + ((chunk ^ (row & 7)) * 8); };
  auto load_keys = [&](int tile, int stage) {
    load_tile<T, D, BN, THREADS>(a, w, w.begin + tile * BN, sk + stage * BN * D, sv + stage * BN * D,
                                 16 * k_steps, 16 * v_steps, true, true, offset);
    copy_commit();
  };

  const int tiles = (w.end - w.begin + BN - 1) / BN;
  if (tiles > 0) {
    UNROLL_BY_2
    for (int i = tid; i < M * CHUNKS; i += THREADS) {
      int row = i / CHUNKS, chunk = i % CHUNKS;
      if (chunk >= 2 * k_steps) continue;
      uint32_t pair = w.first_pair + row;
      bool inside = pair < w.pairs && chunk * 8 < int(a.k_dim);
      const T* from = inside ? q + w.query_offset(a, pair) + chunk * 8 : q;
      copy16_async(sq + offset(row, chunk), from, inside);
    }
    load_keys(0, 0);
  }

  // Lane l holds rows l / 4 and l / 4 + 8 of each 16-row tile, columns 2 (l % 4) and the next.
  Query query[MT][2];
  float values[MT][D / 8][4], top[MT][2], sum[MT][2];
  UNROLL
  for (int t = 0; t < MT; t++) {
    UNROLL
    for (int r = 0; r < 2; r++) {
      query[t][r] = Query(a, w, w.first_pair + (warp_m * MT + t) * 16 + lane / 4 + r * 8);
      top[t][r] = NO_SCORE;
      sum[t][r] = 0.f;
    }
    UNROLL
    for (int i = 0; i < D / 8; i++) values[t][i][0] = values[t][i][1] = values[t][i][2] = values[t][i][3] = 0.f;
  }
  // Weights are rounded to 16 bits for the product with V; the rest of each weight follows in a
  // second product where f32 is asked for, and in decode, which waits for memory anyway.
  const bool exact = WN > 1 || a.out_code == CODE_F32;

  const int q_offset = offset(warp_m * MT * 16 + lane % 16, lane / 16);
  const int k_offset = offset(warp_n * NW + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const int v_offset = offset(warp_n * NW + lane % 16, lane / 16);

  for (int tile = 0; tile < tiles; tile++) {
    if (tile + 1 < tiles) {
      load_keys(tile + 1, (tile + 1) & 1);
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    __syncthreads();
    T *tile_k = sk + (tile & 1) * BN * D, *tile_v = sv + (tile & 1) * BN * D;

    float s[MT][NW / 8][4];
    UNROLL
    for (int t = 0; t < MT; t++) {
      UNROLL
      for (int i = 0; i < NW / 8; i++) s[t][i][0] = s[t][i][1] = s[t][i][2] = s[t][i][3] = 0.f;
    }
    UNROLL
    for (int step = 0; step < D / 16; step++) {
      if (step >= k_steps) break;
      uint32_t fragment[MT][4];
      UNROLL
      for (int t = 0; t < MT; t++)
        load_matrices(fragment[t], sq + t * 16 * D + (q_offset ^ step * 16));
      UNROLL
      for (int n = 0; n < NW / 16; n++) {
        uint32_t b[4];
        load_matrices(b, tile_k + n * 16 * D + (k_offset ^ step * 16));
        UNROLL
        for (int t = 0; t < MT; t++) {
          multiply<T>(s[t][2 * n], fragment[t], b[0], b[1]);
          multiply<T>(s[t][2 * n + 1], fragment[t], b[2], b[3]);
        }
      }
    }

    const int32_t first = w.begin + tile * BN + warp_n * NW;
    // Every pair of the block sees every key of this tile.
    const bool open = (a.window == 0 || a.window == EVERY_KEY) && first + NW <= min(w.position(a, w.first_pair) + 1, w.end);
    // One rule at a time, each behind one branch for all scores.
    auto each_score = [&](auto rule) {
      UNROLL
      for (int t = 0; t < MT; t++) {
        UNROLL
        for (int i = 0; i < NW / 8; i++) {
          UNROLL
          for (int e = 0; e < 4; e++) {
            float& x = s[t][i][e];
            x = rule(x, query[t][e / 2], first + i * 8 + lane % 4 * 2 + e % 2);
          }
        }
      }
    };
    each_score([&](float x, const Query&, int32_t) { return x * a.scale; });
    if (a.softcap > 0.f) each_score([&](float x, const Query&, int32_t) { return capped(a, x); });
    if (a.slopes) each_score([&](float x, const Query& of, int32_t key) { return x + of.bias(key); });
    if (!open) each_score([&](float x, const Query& of, int32_t key) { return of.sees(w, key) ? x : NO_SCORE; });

    UNROLL
    for (int t = 0; t < MT; t++) {
      UNROLL
      for (int r = 0; r < 2; r++) {
        float largest = NO_SCORE;
        UNROLL
        for (int i = 0; i < NW / 8; i++) largest = fmaxf(largest, fmaxf(s[t][i][2 * r], s[t][i][2 * r + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        largest = fmaxf(largest, top[t][r]);
        const float base = finite_base(largest), shrink = weight(top[t][r], base);
        top[t][r] = largest;
        sum[t][r] *= shrink;
        UNROLL
        for (int i = 0; i < NW / 8; i++) {
          UNROLL
          for (int e = 0; e < 2; e++) {
            float& x = s[t][i][2 * r + e];
            x = weight(x, base);
            sum[t][r] += x;
          }
        }
        // After the first tiles of a long context the maximum seldom moves.
        if (shrink != 1.f) {
          UNROLL
          for (int i = 0; i < D / 8; i++) {
            values[t][i][2 * r] *= shrink;
            values[t][i][2 * r + 1] *= shrink;
          }
        }
      }
    }

    UNROLL
    for (int step = 0; step < NW / 16; step++) {
      uint32_t high[MT][4], low[MT][4];
      UNROLL
      for (int t = 0; t < MT; t++) {
        UNROLL
        for (int i = 0; i < 4; i++) {
          float x = s[t][2 * step + i / 2][i % 2 * 2], y = s[t][2 * step + i / 2][i % 2 * 2 + 1];
          T xh = narrow<T>(x), yh = narrow<T>(y);
          high[t][i] = pack(xh, yh);
          low[t][i] = exact ? pack(narrow<T>(x - widen(xh)), narrow<T>(y - widen(yh))) : 0;
        }
      }
      UNROLL
      for (int n = 0; n < D / 16; n++) {
        if (n >= v_steps) break;
        uint32_t b[4];
        load_matrices_transposed(b, tile_v + step * 16 * D + (v_offset ^ n * 16));
        UNROLL
        for (int t = 0; t < MT; t++) {
          multiply<T>(values[t][2 * n], high[t], b[0], b[1]);
          multiply<T>(values[t][2 * n + 1], high[t], b[2], b[3]);
          if (exact) {
            multiply<T>(values[t][2 * n], low[t], b[0], b[1]);
            multiply<T>(values[t][2 * n + 1], low[t], b[2], b[3]);
          }
        }
      }
    }
    __syncthreads();
  }

  UNROLL
  for (int t = 0; t < MT; t++) {
    UNROLL
    for (int r = 0; r < 2; r++) {
      sum[t][r] += __shfl_xor_sync(0xffffffffu, sum[t][r], 1);
      sum[t][r] += __shfl_xor_sync(0xffffffffu, sum[t][r], 2);
    }
  }
  if constexpr (WN > 1) {
    static_assert(MT == 1, "warps that share keys hold one tile of pairs");
    // All memory of the tiles is free now. Rows are apart by 8 banks: the lanes of a row write two
    // columns each.
    constexpr int STRIDE = D + 8;
    float *parts = reinterpret_cast<float*>(shared), *part_sums = parts + WN * M * STRIDE;
    UNROLL
    for (int r = 0; r < 2; r++) {
      int p = warp_n * M + warp_m * 16 + lane / 4 + r * 8;
      UNROLL
      for (int i = 0; i < D / 8; i++)
        *reinterpret_cast<float2*>(parts + p * STRIDE + i * 8 + lane % 4 * 2) =
            make_float2(values[0][i][2 * r], values[0][i][2 * r + 1]);
      if (lane % 4 == 0) {
        part_sums[2 * p] = top[0][r];
        part_sums[2 * p + 1] = sum[0][r];
      }
    }
    __syncthreads();
    merge_parts(a, w, WN, M, STRIDE, parts, part_sums);
  } else {
    UNROLL
    for (int t = 0; t < MT; t++) {
      UNROLL
      for (int r = 0; r < 2; r++) {
        uint32_t pair = w.first_pair + (warp_m * MT + t) * 16 + lane / 4 + r * 8;
        if (pair >= w.pairs) continue;
        uint32_t head = w.head(pair);
        int64_t row = int64_t(w.first_row + w.row(pair)) * a.heads + head;
        top[t][r] += w.late_bias(a, pair);
        float factor = normaliser(a.sinks, head, top[t][r], sum[t][r]);
        if (a.lse && lane % 4 == 0) a.lse[row] = log_sum_exp(top[t][r], sum[t][r]);
        UNROLL
        for (int i = 0; i < D / 8; i++) {
          if (i * 8 >= int(a.v_dim)) break;
          int64_t to = row * a.v_dim + i * 8 + lane % 4 * 2;
          float x = values[t][i][2 * r] * factor, y = values[t][i][2 * r + 1] * factor;
          if (a.out_code == CODE_F32) {
            float* out = static_cast<float*>(a.out) + to;
            out[0] = x;
            out[1] = y;
          } else {
            *reinterpret_cast<uint32_t*>(static_cast<T*>(a.out) + to) = pack(narrow<T>(x), narrow<T>(y));
          }
        }
      }
    }
  }
}

}  // namespace paged
