// Kernels that move K/V rows and blocks: `write_kv`, `copy_blocks`.
#pragma once
#include "element.cuh"

namespace paged {

// `per_block` rows of `rows` into their slots, converted from `S` to `C`. A slot that is negative
// (padding) or outside the cache writes nothing. A thread moves chunks of 8 elements (dims are
// multiples of 8: none straddles two heads), two at a time: both reads, then both writes.
template <typename S, typename C>
__device__ __forceinline__ void write_kv(C* cache, const S* rows, const int64_t* slots, int64_t row_stride,
                                         int64_t head_stride, int64_t element_stride, int64_t block_stride,
                                         int64_t cache_slots, uint32_t row_count, uint32_t per_block,
                                         uint32_t kv_heads, uint32_t dim, uint32_t block_shift) {
  constexpr int BATCH = 2;
  const uint32_t chunks_per_head = dim / 8, chunks = kv_heads * chunks_per_head;
  const uint32_t first_row = blockIdx.x * per_block;
  const uint32_t total = min(per_block, row_count - first_row) * chunks;
  auto times16 = [](int64_t stride, size_t size) { return stride * int64_t(size) % 16 == 0; };
  const bool packed = element_stride == 1 && aligned16(rows) && aligned16(cache) && times16(row_stride, sizeof(S)) &&
                      times16(head_stride, sizeof(S)) && times16(block_stride, sizeof(C));
  for (uint32_t start = threadIdx.x; start < total; start += BATCH * blockDim.x) {
    int64_t slot[BATCH];
    const S* from[BATCH];
    Vector<S> in[BATCH][8 / Vector<S>::LEN];
    UNROLL
    for (int b = 0; b < BATCH; b++) {
      uint32_t i = start + b * blockDim.x, j = min(i, total - 1), row = first_row + j / chunks, chunk = j % chunks;
      slot[b] = __ldg(slots + row);
      if (i >= total || slot[b] >= cache_slots) slot[b] = -1;
      from[b] = rows + row * row_stride + chunk / chunks_per_head * head_stride +
                chunk % chunks_per_head * 8 * element_stride;
    }
    UNROLL
    for (int b = 0; b < BATCH; b++) {
      if (slot[b] < 0 || !packed) continue;
      UNROLL
      for (int i = 0; i < 8 / Vector<S>::LEN; i++) in[b][i] = load_vector(from[b] + i * Vector<S>::LEN, true);
    }
    UNROLL
    for (int b = 0; b < BATCH; b++) {
      if (slot[b] < 0) continue;
      int64_t in_block = slot[b] & ((int64_t(1) << block_shift) - 1);
      C* to = cache + (slot[b] >> block_shift) * block_stride + in_block * kv_heads * dim +
              (start + b * blockDim.x) % chunks * 8;
      if (packed) {
        Vector<C> out[8 / Vector<C>::LEN];
        UNROLL
        for (int e = 0; e < 8; e++)
          out[e / Vector<C>::LEN].at[e % Vector<C>::LEN] =
              convert<C>(in[b][e / Vector<S>::LEN].at[e % Vector<S>::LEN]);
        UNROLL
        for (int i = 0; i < 8 / Vector<C>::LEN; i++) reinterpret_cast<uint4*>(to)[i] = out[i].bits;
      } else {
        for (int e = 0; e < 8; e++) to[e] = convert<C>(from[b][e * element_stride]);
      }
    }
  }
}

// Block `pairs[2x]` of `source` to block `pairs[2x + 1]` of `target`; the grid's y cuts a block. Four
// vectors per thread at a time: all reads, then all writes.
// `T` is any type of the elements' size: bits are copied.
template <typename T>
__device__ __forceinline__ void copy_blocks(T* target, const T* source, const uint32_t* pairs,
                                            int64_t target_stride, int64_t source_stride,
                                            int64_t block_len) {
  const T* from = source + int64_t(pairs[2 * blockIdx.x]) * source_stride;
  T* to = target + int64_t(pairs[2 * blockIdx.x + 1]) * target_stride;
  int64_t first = int64_t(blockIdx.y) * blockDim.x + threadIdx.x;
  int64_t step = int64_t(gridDim.y) * blockDim.x;
  constexpr int BATCH = 4;
  if (aligned16(from) && aligned16(to)) {
    const int64_t count = block_len / Vector<T>::LEN;
    for (int64_t start = first; start < count; start += BATCH * step) {
      uint4 x[BATCH];
      UNROLL
      for (int b = 0; b < BATCH; b++) {
        int64_t i = start + b * step;
        x[b] = __ldg(reinterpret_cast<const uint4*>(from) + (i < count ? i : start));
      }
      UNROLL
      for (int b = 0; b < BATCH; b++) {
        if (start + b * step < count) reinterpret_cast<uint4*>(to)[start + b * step] = x[b];
      }
    }
  } else {
    for (int64_t i = first; i < block_len; i += step) to[i] = from[i];
  }
}

}  // namespace paged
