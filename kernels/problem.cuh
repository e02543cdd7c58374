// What a block of an attention kernel has to do: which sequence, which pairs, which keys; and
// what becomes of its result. The rules are those of src/ops/launch.rs.
#pragma once
#include "element.cuh"

namespace paged {

// A sequence with one row, or with at most this many pairs per KV head, is streamed; the second
// number is that of a mask without causality.
constexpr uint32_t STREAM_PAIRS = 16, STREAM_PAIRS_FULL = 128;
// The `window` of a mask without causality: every query sees every key.
constexpr uint32_t EVERY_KEY = 0xffffffffu;
// Keys of the smallest context chunk.
constexpr int32_t CHUNK = 256;
constexpr float LOG2_E = 1.4426950408889634f;
#define NO_SCORE (-INFINITY)

// Arguments of the attention kernels, in order; contexts are shorter than 2^31 tokens.
struct Args {
  void* out;              // [rows, heads, v_dim] of `out_code`
  float* lse;             // [rows, heads], or null
  float* partial;         // [records, v_dim] of split sequences, not normalised
  float* sums;            // [records, 2]: largest score, sum of weights relative to it
  const void* q;          // [rows, heads, k_dim] of `q_code`
  const void* k;          // [blocks, block_size, kv_heads, k_dim]
  const void* v;          // [blocks, block_size, kv_heads, v_dim]
  const uint32_t* indptr;  // the arrays of PageTable
  const uint32_t* indices;
  const uint32_t* first_page;
  const uint32_t* seq_lens;
  const uint32_t* query_offsets;
  const float* slopes;    // [heads], or null
  const float* sinks;     // [heads], or null
  int64_t q_row_stride, q_head_stride, k_block_stride, v_block_stride;  // elements
  uint32_t seqs, heads, kv_heads, k_dim, v_dim, block_shift;
  uint32_t window;        // keys a query sees, itself included; 0: all up to its own; or EVERY_KEY
  uint32_t q_code, out_code;
  uint32_t stream_rows;   // rows per chunk slot in `partial`
  uint32_t tiles;         // blocks per chunk slot; 0: this launch takes what is not streamed
  float scale;
  float softcap;          // 0: none
};

__device__ __forceinline__ bool is_streamed(uint32_t rows, uint32_t group, uint32_t window) {
  return rows == 1 || rows * group <= (window == EVERY_KEY ? STREAM_PAIRS_FULL : STREAM_PAIRS);
}
__device__ __forceinline__ int32_t chunk_keys(int32_t keys) { return keys <= 8192 ? CHUNK : 2 * CHUNK; }

// First key that a query at `position` >= 0 sees.
__device__ __forceinline__ int32_t first_key(int32_t position, uint32_t window) {
  return window == 0 || window == EVERY_KEY ? 0 : max(position + 1 - int32_t(window), 0);
}

// First chunk slot of a sequence: at least one, and at least one per CHUNK listed tokens, follow.
__device__ __forceinline__ uint64_t first_slot(const uint32_t* indptr, uint32_t seq, uint32_t block_shift) {
  return ((uint64_t(indptr[seq]) << block_shift) / CHUNK) + seq;
}
// First flat tile of a sequence that is not streamed, by the same reasoning.
__device__ __forceinline__ uint64_t first_tile(const uint32_t* query_offsets, uint32_t seq, uint32_t group,
                                               uint32_t tile_pairs) {
  return uint64_t(query_offsets[seq]) * group / tile_pairs + seq;
}

// Last sequence whose first slot (or tile) is at most `flat`; the starts increase strictly.
template <typename Start>
__device__ __forceinline__ uint32_t find_sequence(uint32_t seqs, uint64_t flat, Start start) {
  uint32_t low = 0, high = seqs;
  while (high - low > 1) {
    uint32_t middle = (low + high) / 2;
    if (start(middle) <= flat)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// The visible keys of a streamed sequence and their chunks.
struct Stream {
  int32_t begin, end, chunk, chunks;
  __device__ Stream(int32_t len, int32_t rows, uint32_t window) {
    end = len;
    begin = min(first_key(max(len - rows, 0), window), len);
    chunk = chunk_keys(end - begin);
    chunks = max((end - begin + chunk - 1) / chunk, 1);
  }
};

// The work of one block.
struct Work {
  uint32_t seq, kv_head, group;
  uint32_t first_row;      // of the sequence in the batch
  int32_t first_position;  // of that row, see `position`; negative if there are more rows than tokens
  uint32_t first_pair, pairs;  // first of this block, and number in the sequence
  int32_t begin, end;      // keys that any pair of this block sees
  uint32_t span;           // a query sees the keys at distances below
  int64_t page_base;       // indices[page_base + token >> block_shift] is the token's block
  uint64_t slot;
  bool split;              // the result is one of several chunks

  // False if there is nothing to do, for all threads of the block alike.
  __device__ __forceinline__ bool locate(const Args& a, uint32_t tile_pairs) {
    kv_head = blockIdx.y;
    group = a.heads / a.kv_heads;
    bool streaming = a.tiles != 0;
    uint32_t tile;
    slot = 0;
    if (streaming) {
      slot = blockIdx.x / a.tiles;
      tile = blockIdx.x % a.tiles;
      seq = find_sequence(a.seqs, slot, [&](uint32_t s) { return first_slot(a.indptr, s, a.block_shift); });
    } else {
      // The last tiles see the most keys: they start first.
      uint32_t flat = gridDim.x - 1 - blockIdx.x;
      auto start = [&](uint32_t s) { return first_tile(a.query_offsets, s, group, tile_pairs); };
      seq = find_sequence(a.seqs, flat, start);
      tile = flat - uint32_t(start(seq));
    }
    first_row = a.query_offsets[seq];
    uint32_t rows = a.query_offsets[seq + 1] - first_row;
    pairs = rows * group;
    first_pair = tile * tile_pairs;
    if (first_pair >= pairs || is_streamed(rows, group, a.window) != streaming) return false;
    int32_t len = int32_t(a.seq_lens[seq]);
    first_position = len - (a.window == EVERY_KEY ? 1 : int32_t(rows));
    page_base = int64_t(a.indptr[seq]) - a.first_page[seq];
    span = a.window == 0 ? 1u << 31 : min(a.window, 1u << 31);
    split = false;
    if (streaming) {
      Stream stream(len, rows, a.window);
      int32_t index = int32_t(slot - first_slot(a.indptr, seq, a.block_shift));
      if (index >= stream.chunks) return false;
      begin = stream.begin + index * stream.chunk;
      end = min(begin + stream.chunk, stream.end);
      split = stream.chunks > 1;
    } else {
      uint32_t last_pair = min(first_pair + tile_pairs, pairs) - 1;
      end = max(min(position(a, last_pair) + 1, len), 0);
      begin = min(first_key(max(position(a, first_pair), 0), a.window), end);
    }
    return true;
  }

  __device__ __forceinline__ uint32_t row(uint32_t pair) const { return pair / group; }
  __device__ __forceinline__ uint32_t head(uint32_t pair) const { return kv_head * group + pair % group; }
  // The last key that a pair sees. Without causality all queries are taken to stand at the last
  // token; what their places change, `late_bias` adds.
  __device__ __forceinline__ int32_t position(const Args& a, uint32_t pair) const {
    return first_position + (a.window == EVERY_KEY ? 0 : int32_t(pair / group));
  }
  // What is missing in all scores of a pair, so in their maximum: it stands before the last token.
  __device__ __forceinline__ float late_bias(const Args& a, uint32_t pair) const {
    if (a.window != EVERY_KEY || a.slopes == nullptr) return 0.f;
    return a.slopes[head(pair)] * float((pairs - 1) / group - pair / group);
  }
  // The block of a token that this block of threads reads.
  __device__ __forceinline__ uint32_t page(const Args& a, int32_t token) const {
    return a.indices[page_base + (token >> a.block_shift)];
  }
  // First element of a token's head in a cache tensor.
  __device__ __forceinline__ int64_t cache_offset(const Args& a, int64_t block, int32_t token,
                                                  int64_t block_stride, uint32_t dim) const {
    int64_t in_block = token & ((1 << a.block_shift) - 1);
    return block * block_stride + (in_block * a.kv_heads + kv_head) * dim;
  }
  __device__ __forceinline__ int64_t query_offset(const Args& a, uint32_t pair) const {
    return int64_t(first_row + row(pair)) * a.q_row_stride + int64_t(head(pair)) * a.q_head_stride;
  }
  __device__ __forceinline__ int64_t record(const Args& a, uint32_t pair) const {
    return (int64_t(slot) * a.stream_rows + row(pair)) * a.heads + head(pair);
  }
};

// What one pair may see and how its scores are shifted.
struct Query {
  int32_t position;
  float slope;

  __device__ __forceinline__ Query() {}
  // A pair past the sequence's last sees nothing.
  __device__ __forceinline__ Query(const Args& a, const Work& w, uint32_t pair) {
    bool real = pair < w.pairs;
    position = real ? w.position(a, pair) : -1;
    slope = real && a.slopes ? a.slopes[w.head(pair)] : 0.f;
  }
  // A later key is a distance below 0, which is a large one without a sign.
  __device__ __forceinline__ bool sees(const Work& w, int32_t key) const {
    return uint32_t(position - key) < w.span;
  }
  __device__ __forceinline__ float bias(int32_t key) const { return slope * float(key - position); }
};

__device__ __forceinline__ float capped(const Args& a, float score) {
  return a.softcap * tanhf(score / a.softcap);
}

__device__ __forceinline__ float weight(float score, float base) { return exp2_fast((score - base) * LOG2_E); }
// A base to subtract from scores: -inf - -inf would be NaN.
__device__ __forceinline__ float finite_base(float max_score) { return max_score == NO_SCORE ? 0.f : max_score; }

// Factor of the accumulated values: 1 / sum, with the head's sink in the sum.
__device__ __forceinline__ float normaliser(const float* sinks, uint32_t head, float max_score, float sum) {
  if (sum == 0.f) return 0.f;  // no key: 0, with sinks too
  if (sinks == nullptr) return 1.f / sum;
  float sink = sinks[head], top = fmaxf(max_score, sink), w = weight(max_score, top);
  return w / (sum * w + weight(sink, top));
}
// Natural, without the sink.
__device__ __forceinline__ float log_sum_exp(float max_score, float sum) {
  return sum == 0.f ? NO_SCORE : max_score + logf(sum);
}

// Copies the keys from `first` on to shared memory: BN rows of K and of V with D elements each, row
// and chunk (16 bytes) at element `place(row, chunk)`. Elements past a head's dim are zeros up to
// `k_fill` and `v_fill`, and untouched behind; rows past the last key are zeros. Asynchronous where
// rows start at multiples of 16 bytes; the caller commits.
template <typename C, int D, int BN, int THREADS, typename Place>
__device__ __forceinline__ void load_tile(const Args& a, const Work& w, int32_t first, C* tile_k, C* tile_v,
                                          uint32_t k_fill, uint32_t v_fill, bool k_aligned, bool v_aligned,
                                          Place place) {
  constexpr int VEC = Vector<C>::LEN, CHUNKS = D / VEC, ROWS = THREADS / CHUNKS, BATCH = 4;
  static_assert(CHUNK % BN == 0, "only the last tile of a sequence has keys past `w.end`: no query sees them");
  static_assert(BN % (BATCH * ROWS) == 0, "a thread copies one chunk of every ROWS-th row, four at a time");
  const uint32_t chunk = threadIdx.x % CHUNKS, d = chunk * VEC;
  auto inside = [&](int32_t key) { return key < w.end; };
  auto copy = [&](C* to, const void* cache, int64_t from, bool valid, bool aligned) {
    const C* source = static_cast<const C*>(cache) + from + d;
    if (aligned) {
      copy16_async(to, source, valid);
    } else {
      Vector<C> x;
      x.bits = make_uint4(0, 0, 0, 0);
      if (valid) x = load_vector(source, false);
      *reinterpret_cast<uint4*>(to) = x.bits;
    }
  };
  for (int start = threadIdx.x / CHUNKS; start < BN; start += BATCH * ROWS) {
    // The page ids first, all under way at once: the copies wait for them. Keys past the last one take
    // its page, so that no load is in a branch.
    uint32_t page[BATCH];
    UNROLL
    for (int i = 0; i < BATCH; i++) {
      int32_t key = first + start + i * ROWS;
      page[i] = w.page(a, min(key, w.end - 1));
    }
    UNROLL
    for (int i = 0; i < BATCH; i++) {
      int row = start + i * ROWS;
      int32_t key = first + row;
      if (d < k_fill)
        copy(tile_k + place(row, chunk), a.k, w.cache_offset(a, page[i], key, a.k_block_stride, a.k_dim),
             inside(key) && d < a.k_dim, k_aligned);
      if (d < v_fill)
        copy(tile_v + place(row, chunk), a.v, w.cache_offset(a, page[i], key, a.v_block_stride, a.v_dim),
             inside(key) && d < a.v_dim, v_aligned);
    }
  }
}

// Merges what `parts` groups of warps found for the same `m` pairs and hands it on: to the workspace
// if the sequence is split, else to the output. `values` [parts][m] in rows of `stride`, and `sums`
// [parts][m][2], are in shared memory, complete for all threads.
__device__ __forceinline__ void merge_parts(const Args& a, const Work& w, int parts, int m, int stride,
                                            const float* values, const float* sums) {
  int total = m * int(a.v_dim);
  for (int i = threadIdx.x; i < total; i += blockDim.x) {
    int p = i / int(a.v_dim), d = i % int(a.v_dim);
    uint32_t pair = w.first_pair + p;
    if (pair >= w.pairs) break;
    float top = NO_SCORE, sum = 0.f, value = 0.f;
    for (int part = 0; part < parts; part++) top = fmaxf(top, sums[(part * m + p) * 2]);
    float base = finite_base(top);
    for (int part = 0; part < parts; part++) {
      float share = weight(sums[(part * m + p) * 2], base);
      sum += share * sums[(part * m + p) * 2 + 1];
      value += share * values[(part * m + p) * stride + d];
    }
    top += w.late_bias(a, pair);
    if (w.split) {
      int64_t record = w.record(a, pair);
      a.partial[record * a.v_dim + d] = value;
      if (d == 0) {
        a.sums[2 * record] = top;
        a.sums[2 * record + 1] = sum;
      }
    } else {
      uint32_t head = w.head(pair);
      int64_t at = int64_t(w.first_row + w.row(pair)) * a.heads + head;
      store_element(a.out, at * a.v_dim + d, a.out_code, value * normaliser(a.sinks, head, top, sum));
      if (d == 0 && a.lse) a.lse[at] = log_sum_exp(top, sum);
    }
  }
}

}  // namespace paged
