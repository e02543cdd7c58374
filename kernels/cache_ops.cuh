// Kernels that move K/V rows and blocks: `write_kv`, `copy_blocks`.
#pragma once
#include "element.cuh"

namespace paged {

// Row `blockIdx.x` of `rows` into its slot, converted from `S` to `C`. A slot that is negative
// (padding) or outside the cache writes nothing.
template <typename S, typename C>
__device__ __forceinline__ void write_kv(C* cache, const S* rows, const int64_t* slots,
                                         int64_t row_stride, int64_t head_stride, int64_t element_stride,
                                         int64_t block_stride, int64_t cache_slots, uint32_t kv_heads,
                                         uint32_t dim, uint32_t block_shift) {
  int64_t slot = slots[blockIdx.x];
  if (slot < 0 || slot >= cache_slots) return;
  int64_t in_block = slot & ((int64_t(1) << block_shift) - 1);
  int64_t token = int64_t(kv_heads) * dim;
  C* target = cache + (slot >> block_shift) * block_stride + in_block * token;
  const S* source = rows + int64_t(blockIdx.x) * row_stride;
  // Dims are multiples of 8, so 8 elements never straddle two heads.
  uint32_t chunks_per_head = dim / 8;
  bool packed = element_stride == 1 && aligned16(source) && aligned16(target) &&
                (head_stride * int64_t(sizeof(S))) % 16 == 0;
  for (uint32_t chunk = threadIdx.x; chunk < kv_heads * chunks_per_head; chunk += blockDim.x) {
    uint32_t head = chunk / chunks_per_head, first = chunk % chunks_per_head * 8;
    const S* from = source + head * head_stride + first * element_stride;
    C* to = target + head * dim + first;
    if (packed) {
      Vector<S> in[8 / Vector<S>::LEN];
      Vector<C> out[8 / Vector<C>::LEN];
      UNROLL
      for (int i = 0; i < 8 / Vector<S>::LEN; i++) in[i] = load_vector(from + i * Vector<S>::LEN, true);
      UNROLL
      for (int e = 0; e < 8; e++)
        out[e / Vector<C>::LEN].at[e % Vector<C>::LEN] = convert<C>(in[e / Vector<S>::LEN].at[e % Vector<S>::LEN]);
      UNROLL
      for (int i = 0; i < 8 / Vector<C>::LEN; i++) reinterpret_cast<uint4*>(to)[i] = out[i].bits;
    } else {
      for (int e = 0; e < 8; e++) to[e] = convert<C>(from[e * element_stride]);
    }
  }
}

// Block `pairs[2x]` of `source` to block `pairs[2x + 1]` of `target`; the grid's y cuts a block.
// `T` is any type of the elements' size: bits are copied.
template <typename T>
__device__ __forceinline__ void copy_blocks(T* target, const T* source, const uint32_t* pairs,
                                            int64_t target_stride, int64_t source_stride,
                                            int64_t block_len) {
  const T* from = source + int64_t(pairs[2 * blockIdx.x]) * source_stride;
  T* to = target + int64_t(pairs[2 * blockIdx.x + 1]) * target_stride;
  int64_t first = int64_t(blockIdx.y) * blockDim.x + threadIdx.x;
  int64_t step = int64_t(gridDim.y) * blockDim.x;
  constexpr int LEN = Vector<T>::LEN;
  if (aligned16(from) && aligned16(to)) {
    for (int64_t i = first; i < block_len / LEN; i += step)
      reinterpret_cast<uint4*>(to)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
  } else {
    for (int64_t i = first; i < block_len; i += step) to[i] = from[i];
  }
}

}  // namespace paged
