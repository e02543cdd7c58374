// Entry points. src/ops/launch.rs names them, and states grids and arguments.
#include "attend_mma.cuh"
#include "attend_simt.cuh"
#include "cache_ops.cuh"
#include "merge.cuh"

#define KERNEL(name, threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks) name

// ---- moving K/V

#define WRITE_KV(source, S, cache, C)                                                                   \
  KERNEL(write_kv_##source##_##cache, 256, 4)                                                           \
  (C * target, const S* rows, const int64_t* slots, int64_t row_stride, int64_t head_stride,            \
   int64_t element_stride, int64_t block_stride, int64_t cache_slots, uint32_t row_count,               \
   uint32_t per_block, uint32_t kv_heads, uint32_t dim, uint32_t block_shift) {                         \
    paged::write_kv<S, C>(target, rows, slots, row_stride, head_stride, element_stride, block_stride,   \
                          cache_slots, row_count, per_block, kv_heads, dim, block_shift);               \
  }
#define WRITE_KV_INTO(cache, C)            \
  WRITE_KV(f32, float, cache, C)           \
  WRITE_KV(f16, __half, cache, C)          \
  WRITE_KV(bf16, __nv_bfloat16, cache, C)
WRITE_KV_INTO(f32, float)
WRITE_KV_INTO(f16, __half)
WRITE_KV_INTO(bf16, __nv_bfloat16)

#define COPY_BLOCKS(bits, T)                                                                      \
  KERNEL(copy_blocks_b##bits, 128, 6)                                                             \
  (T * target, const T* source, const uint32_t* pairs, int64_t target_stride, int64_t source_stride, \
   int64_t block_len) {                                                                           \
    paged::copy_blocks<T>(target, source, pairs, target_stride, source_stride, block_len);        \
  }
COPY_BLOCKS(16, uint16_t)
COPY_BLOCKS(32, uint32_t)

// ---- attention

#define ATTEND(name, threads, blocks, ...)                                                              \
  KERNEL(name, threads, blocks)                                                                         \
  (void* out, float* lse, float* partial, float* sums, const void* q, const void* k, const void* v,     \
   const uint32_t* indptr, const uint32_t* indices, const uint32_t* first_page,                         \
   const uint32_t* seq_lens, const uint32_t* query_offsets, const float* slopes, const float* sinks,    \
   int64_t q_row_stride, int64_t q_head_stride, int64_t k_block_stride, int64_t v_block_stride,         \
   uint32_t seqs, uint32_t heads, uint32_t kv_heads, uint32_t k_dim, uint32_t v_dim,                    \
   uint32_t block_shift, uint32_t window, uint32_t q_code, uint32_t out_code, uint32_t stream_rows,     \
   uint32_t tiles, float scale, float softcap) {                                                        \
    paged::__VA_ARGS__(paged::Args{out,     lse,      partial,  sums,         q,            k,          \
                                   v,       indptr,   indices,  first_page,   seq_lens,     query_offsets, \
                                   slopes,  sinks,    q_row_stride, q_head_stride, k_block_stride,      \
                                   v_block_stride, seqs, heads, kv_heads, k_dim, v_dim, block_shift,    \
                                   window,  q_code,   out_code, stream_rows,  tiles,        scale,      \
                                   softcap});                                                           \
  }

// Tiles as in `decode_mma` and `prefill_mma` of src/ops/launch.rs: <type, dim, warps over pairs,
// warps over keys, 16-pair tiles of a warp, keys of a tile>.
#define ATTEND_MMA(type, T)                                                        \
  ATTEND(decode_mma_##type##_d64, 128, 3, attend_mma<T, 64, 1, 4, 1, 64>)          \
  ATTEND(decode_mma_##type##_d128, 128, 3, attend_mma<T, 128, 1, 4, 1, 64>)        \
  ATTEND(decode_mma_##type##_d256, 64, 3, attend_mma<T, 256, 1, 2, 1, 32>)         \
  ATTEND(decode_mma_wide_##type##_d64, 128, 3, attend_mma<T, 64, 2, 2, 1, 64>)     \
  ATTEND(decode_mma_wide_##type##_d128, 128, 3, attend_mma<T, 128, 2, 2, 1, 64>)   \
  ATTEND(decode_mma_wide_##type##_d256, 128, 2, attend_mma<T, 256, 2, 2, 1, 32>)   \
  ATTEND(prefill_mma_##type##_d64, 128, 2, attend_mma<T, 64, 4, 1, 2, 64>)         \
  ATTEND(prefill_mma_##type##_d128, 128, 2, attend_mma<T, 128, 4, 1, 2, 32>)       \
  ATTEND(prefill_mma_##type##_d256, 128, 2, attend_mma<T, 256, 4, 1, 1, 32>)
ATTEND_MMA(f16, __half)
ATTEND_MMA(bf16, __nv_bfloat16)

// Tiles as in `attend_simt` of src/ops/launch.rs.
#define ATTEND_SIMT(type, C)                                      \
  ATTEND(attend_simt_##type##_d64, 256, 2, attend_simt<C, 64>)    \
  ATTEND(attend_simt_##type##_d128, 256, 2, attend_simt<C, 128>)  \
  ATTEND(attend_simt_##type##_d256, 256, 1, attend_simt<C, 256>)  \
  ATTEND(attend_simt_##type##_d512, 256, 1, attend_simt<C, 512>)
ATTEND_SIMT(f32, float)
ATTEND_SIMT(f16, __half)
ATTEND_SIMT(bf16, __nv_bfloat16)

KERNEL(reduce, 128, 5)
(void* out, float* lse, const float* partial, const float* sums, const uint32_t* indptr,
 const uint32_t* seq_lens, const uint32_t* query_offsets, const float* sinks, uint32_t heads,
 uint32_t kv_heads, uint32_t v_dim, uint32_t block_shift, uint32_t window, uint32_t out_code,
 uint32_t stream_rows) {
  paged::reduce(out, lse, partial, sums, indptr, seq_lens, query_offsets, sinks, heads, kv_heads, v_dim,
                block_shift, window, out_code, stream_rows);
}

KERNEL(merge_states, 128, 7)
(float* out, float* lse, const float* a_out, const float* a_lse, const float* b_out, const float* b_lse,
 uint32_t pairs, uint32_t v_dim) {
  paged::merge_states(out, lse, a_out, a_lse, b_out, b_lse, pairs, v_dim);
}
