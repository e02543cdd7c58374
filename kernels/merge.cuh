// Merging attention over parts of a context: `reduce` for the chunks of one call, `merge_states`
// for the states of two calls.
#pragma once
#include "problem.cuh"

namespace paged {

// One row and head of a streamed sequence whose keys were cut into several chunks. Grid: sequences,
// heads, streamed rows.
__device__ __forceinline__ void reduce(void* out, float* lse, const float* partial, const float* sums,
                                       const uint32_t* indptr, const uint32_t* seq_lens,
                                       const uint32_t* query_offsets, const float* sinks, uint32_t heads,
                                       uint32_t kv_heads, uint32_t v_dim, uint32_t block_shift,
                                       uint32_t window, uint32_t out_code, uint32_t stream_rows) {
  uint32_t seq = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  uint32_t first_row = query_offsets[seq], rows = query_offsets[seq + 1] - first_row;
  if (row >= rows || !is_streamed(rows, heads / kv_heads)) return;
  Stream stream(int32_t(seq_lens[seq]), int32_t(rows), window);
  if (stream.chunks == 1) return;
  int64_t slot = int64_t(first_slot(indptr, seq, block_shift));
  auto record = [&](int chunk) { return ((slot + chunk) * stream_rows + row) * heads + head; };
  float top = NO_SCORE, sum = 0.f;
  for (int chunk = 0; chunk < stream.chunks; chunk++) top = fmaxf(top, sums[2 * record(chunk)]);
  float base = finite_base(top);
  for (int chunk = 0; chunk < stream.chunks; chunk++)
    sum += weight(sums[2 * record(chunk)], base) * sums[2 * record(chunk) + 1];
  float factor = normaliser(sinks, head, top, sum);
  int64_t at = int64_t(first_row + row) * heads + head;
  for (uint32_t d = threadIdx.x; d < v_dim; d += blockDim.x) {
    float value = 0.f;
    for (int chunk = 0; chunk < stream.chunks; chunk++)
      value += weight(sums[2 * record(chunk)], base) * partial[record(chunk) * v_dim + d];
    store_element(out, at * v_dim + d, out_code, value * factor);
  }
  if (threadIdx.x == 0 && lse) lse[at] = log_sum_exp(top, sum);
}

// The union of two disjoint sets of keys from the attention over each; one pair per block.
__device__ __forceinline__ void merge_states(float* out, float* lse, const float* a_out, const float* a_lse,
                                             const float* b_out, const float* b_lse, uint32_t v_dim) {
  float a = a_lse[blockIdx.x], b = b_lse[blockIdx.x];
  float top = fmaxf(a, b), base = finite_base(top);
  float wa = weight(a, base), wb = weight(b, base), total = wa + wb;
  float factor = total == 0.f ? 0.f : 1.f / total;
  int64_t first = int64_t(blockIdx.x) * v_dim;
  for (uint32_t d = threadIdx.x; d < v_dim; d += blockDim.x)
    out[first + d] = (a_out[first + d] * wa + b_out[first + d] * wb) * factor;
  if (threadIdx.x == 0) lse[blockIdx.x] = log_sum_exp(top, total);
}

}  // namespace paged
