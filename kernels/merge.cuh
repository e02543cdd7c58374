// Merging attention over parts of a context: `reduce` for the chunks of one call, `merge_states`
// for the states of two calls.
#pragma once
#include "problem.cuh"

namespace paged {

constexpr uint32_t ALL_LANES = 0xffffffffu;

// One row and head of a streamed sequence whose keys were cut into several chunks. Grid: sequences,
// heads, streamed rows. Chunk `c` belongs to warp `c % 4`; a lane has the weight of one chunk and the
// values of four dims at a time, so that no load waits for another.
__device__ __forceinline__ void reduce(void* out, float* lse, const float* partial, const float* sums,
                                       const uint32_t* indptr, const uint32_t* seq_lens,
                                       const uint32_t* query_offsets, const float* sinks, uint32_t heads,
                                       uint32_t kv_heads, uint32_t v_dim, uint32_t block_shift,
                                       uint32_t window, uint32_t out_code, uint32_t stream_rows) {
  constexpr int WARPS = 4, MAX_DIM = 512, STEPS = MAX_DIM / 128;
  STATIC_SHARED(float, weights, WARPS * 32);
  STATIC_SHARED(float4, parts, WARPS * MAX_DIM / 4);
  STATIC_SHARED(float, part_sums, WARPS);

  uint32_t seq = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  uint32_t first_row = query_offsets[seq], rows = query_offsets[seq + 1] - first_row;
  if (row >= rows || !is_streamed(rows, heads / kv_heads, window)) return;
  Stream stream(int32_t(seq_lens[seq]), int32_t(rows), window);
  if (stream.chunks == 1) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t slot = int64_t(first_slot(indptr, seq, block_shift));
  auto record = [&](int chunk) { return ((slot + chunk) * stream_rows + row) * heads + head; };

  float top = NO_SCORE;
  for (int chunk = lane; chunk < stream.chunks; chunk += 32) top = fmaxf(top, sums[2 * record(chunk)]);
  UNROLL
  for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, offset));
  const float base = finite_base(top);

  float sum = 0.f, values[STEPS][4];
  UNROLL
  for (int step = 0; step < STEPS; step++) values[step][0] = values[step][1] = values[step][2] = values[step][3] = 0.f;
  for (int first = warp; first < stream.chunks; first += WARPS * 32) {
    const int mine = first + WARPS * lane;
    float share = 0.f;
    if (mine < stream.chunks) {
      share = weight(sums[2 * record(mine)], base);
      sum += share * sums[2 * record(mine) + 1];
    }
    weights[warp * 32 + lane] = share;
    __syncwarp();
    const int count = min((stream.chunks - first + WARPS - 1) / WARPS, 32);
    UNROLL
    for (int step = 0; step < STEPS; step++) {
      const uint32_t d = step * 128 + lane * 4;
      if (d >= v_dim) break;
      UNROLL_BY_4
      for (int i = 0; i < count; i++) {
        const float4 x = *reinterpret_cast<const float4*>(partial + record(first + WARPS * i) * v_dim + d);
        const float share = weights[warp * 32 + i];
        values[step][0] += share * x.x;
        values[step][1] += share * x.y;
        values[step][2] += share * x.z;
        values[step][3] += share * x.w;
      }
    }
    __syncwarp();
  }
  UNROLL
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);

  UNROLL
  for (int step = 0; step < STEPS; step++)
    parts[warp * MAX_DIM / 4 + step * 32 + lane] =
        make_float4(values[step][0], values[step][1], values[step][2], values[step][3]);
  if (lane == 0) part_sums[warp] = sum;
  __syncthreads();
  sum = 0.f;
  UNROLL
  for (int part = 0; part < WARPS; part++) sum += part_sums[part];
  const float factor = normaliser(sinks, head, top, sum);
  const int64_t at = int64_t(first_row + row) * heads + head;
  for (uint32_t d = threadIdx.x; d < v_dim; d += blockDim.x) {
    float value = 0.f;
    UNROLL
    for (int part = 0; part < WARPS; part++) value += reinterpret_cast<const float*>(parts)[part * MAX_DIM + d];
    store_element(out, at * v_dim + d, out_code, value * factor);
  }
  if (threadIdx.x == 0 && lse) lse[at] = log_sum_exp(top, sum);
}

// The union of two disjoint sets of keys from the attention over each; one pair per warp.
__device__ __forceinline__ void merge_states(float* out, float* lse, const float* a_out, const float* a_lse,
                                             const float* b_out, const float* b_lse, uint32_t pairs,
                                             uint32_t v_dim) {
  uint32_t pair = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (pair >= pairs) return;
  float a = a_lse[pair], b = b_lse[pair];
  float top = fmaxf(a, b), base = finite_base(top);
  float wa = weight(a, base), wb = weight(b, base), total = wa + wb;
  float factor = total == 0.f ? 0.f : 1.f / total;
  int64_t first = int64_t(pair) * v_dim;
  // Four dims of both at a time: all reads, then all writes.
  for (uint32_t start = lane; start < v_dim; start += 128) {
    float x[4], y[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
      uint32_t d = min(start + 32 * i, v_dim - 1);
      x[i] = __ldg(a_out + first + d);
      y[i] = __ldg(b_out + first + d);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
      if (start + 32 * i < v_dim) out[first + start + 32 * i] = (x[i] * wa + y[i] * wb) * factor;
    }
  }
  if (lane == 0) lse[pair] = log_sum_exp(top, total);
}

}  // namespace paged
