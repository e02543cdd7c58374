// cuda_on_cpu.h - run CUDA C++ kernel source on the CPU (verification only, one host thread, fibers).
// Include this INSTEAD of cuda_runtime.h when compiling a .cu file with g++ -x c++ -std=c++17.
// host paths give bit-exact conversions. The run time (cuda_on_cpu.cpp) must be compiled WITHOUT
// -fsanitize=thread/address instrumentation (but with -DEMU_ASAN / -DEMU_TSAN to annotate fibers).
#pragma once
#ifdef __CUDACC__
#error "cuda_on_cpu.h is for the host compiler"
#endif
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <functional>
#include <type_traits>
#include <vector_types.h>
#include <vector_functions.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __shared__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
// Plain __shared__ works (function-local static: ASan redzones, blocks run one after another) but is not
// NaN-filled per block, and TSan sees it as shared between blocks. Kernels should use CK_SHARED/CK_DYN_SHARED.
#define __shared__ static

#define EMU_LOC const char *file_ = __builtin_FILE(), int line_ = __builtin_LINE()
#define EMU_PASS file_, line_

namespace emu {
enum Order { LOWEST = 0, HIGHEST = 1, RANDOM = 2, RANDOM_WARP = 3 };
struct Config {
  int order = LOWEST;       // which ready thread runs next
  uint64_t seed = 1;        // for the random orders, block order and cp.async timing
  int block_order = 0;      // 0 ascending, 1 descending, 2 random
  int cp_async = 0;         // 0 late (at wait), 1 early (at issue), 2 random per copy
  bool strict_exit = true;  // a thread that has exited does not count at __syncthreads
};
extern Config config;
struct Stats { uint64_t blocks, threads, collectives, barriers, switches; };
extern Stats stats;

extern uint3 g_threadIdx, g_blockIdx;
extern dim3 g_blockDim, g_gridDim;

[[noreturn]] void fail(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void launch_raw(const char *name, dim3 grid, dim3 block, size_t dyn_smem, void (*fn)(void *), void *ctx);
template <class F> void launch(const char *name, dim3 grid, dim3 block, size_t dyn_smem, F &&f) {
  auto tramp = [](void *p) { (*static_cast<std::remove_reference_t<F> *>(p))(); };
  launch_raw(name, grid, block, dyn_smem, tramp, (void *)&f);
}

// memory
unsigned char *dyn_shared();
void *static_shared(size_t bytes, int key);
bool is_shared(const void *p, size_t n);
void *dev_alloc(const char *name, size_t bytes);  // guard regions on both sides, right aligned, 0xFF filled
void dev_free(void *p);

// barriers and warp collectives
void block_barrier(const char *what, const char *file, int line);
struct Rdv;
enum Kind { K_SYNCWARP, K_SHFL, K_SHFL_UP, K_SHFL_DOWN, K_SHFL_XOR, K_BALLOT, K_ANY, K_ALL, K_MATCH, K_LDMATRIX, K_LDMATRIX_T, K_MMA, K_REDUCE };
constexpr int MAXW = 8;  // 64 bytes exchanged per lane
Rdv *rdv_enter(Kind k, uint32_t mask, const uint64_t *payload, int words, const char *file, int line);
const uint64_t *rdv_peek(Rdv *r, int lane);  // null if that lane does not take part
void rdv_leave(Rdv *r);
int lane_id();
uint32_t live_mask();

// cp.async queue of the current thread
struct CpOp { void *dst; const void *src; int bytes, valid; };
bool cp_push(const CpOp &op);            // true: the caller copies now
void cp_commit();
bool cp_take(int keep_groups, CpOp *op); // next copy that must be done so that only keep_groups groups stay
int block_pred(int pred, int what);      // __syncthreads_or/and/count support

template <class T> inline uint64_t to_bits(const T &v) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "shuffle operand");
  uint64_t u = 0; __builtin_memcpy(&u, &v, sizeof(T)); return u;
}
template <class T> inline T from_bits(uint64_t u) { T v; __builtin_memcpy((void *)&v, &u, sizeof(T)); return v; }
template <class T> inline T shfl(Kind k, uint32_t mask, T v, int src, int width, bool in_range, const char *f, int l) {
  if (width <= 0 || width > 32 || (width & (width - 1))) fail("%s:%d: shuffle width %d", f, l, width);
  uint64_t b = to_bits(v);
  Rdv *r = rdv_enter(k, mask, &b, 1, f, l);
  const uint64_t *p = in_range ? rdv_peek(r, src) : &b;
  if (!p) fail("%s:%d: lane %d shuffles from lane %d, which is not in mask %08x", f, l, lane_id(), src, mask);
  T o = from_bits<T>(*p);
  rdv_leave(r);
  return o;
}
}  // namespace emu

#define threadIdx (emu::g_threadIdx)
#define blockIdx (emu::g_blockIdx)
#define blockDim (emu::g_blockDim)
#define gridDim (emu::g_gridDim)
#define warpSize 32

inline void __syncthreads(EMU_LOC) { emu::block_barrier("__syncthreads", EMU_PASS); }
inline int __syncthreads_or(int p, EMU_LOC) { emu::block_pred(p, 0); emu::block_barrier("__syncthreads_or", EMU_PASS); int r = emu::block_pred(0, 1); emu::block_barrier("__syncthreads_or", EMU_PASS); return r != 0; }
inline void __syncwarp(uint32_t mask = 0xffffffffu, EMU_LOC) { emu::rdv_leave(emu::rdv_enter(emu::K_SYNCWARP, mask, nullptr, 0, EMU_PASS)); }
template <class T> inline T __shfl_sync(uint32_t mask, T v, int src, int width = 32, EMU_LOC) {
  int lane = emu::lane_id();
  return emu::shfl(emu::K_SHFL, mask, v, (lane & ~(width - 1)) | (src & (width - 1)), width, true, EMU_PASS);
}
template <class T> inline T __shfl_xor_sync(uint32_t mask, T v, int x, int width = 32, EMU_LOC) {
  int lane = emu::lane_id(), src = lane ^ x, seg = lane & ~(width - 1);
  return emu::shfl(emu::K_SHFL_XOR, mask, v, src, width, src < seg + width, EMU_PASS);
}
template <class T> inline T __shfl_down_sync(uint32_t mask, T v, unsigned d, int width = 32, EMU_LOC) {
  int lane = emu::lane_id(), src = lane + (int)d, seg = lane & ~(width - 1);
  return emu::shfl(emu::K_SHFL_DOWN, mask, v, src, width, src < seg + width, EMU_PASS);
}
template <class T> inline T __shfl_up_sync(uint32_t mask, T v, unsigned d, int width = 32, EMU_LOC) {
  int lane = emu::lane_id(), src = lane - (int)d, seg = lane & ~(width - 1);
  return emu::shfl(emu::K_SHFL_UP, mask, v, src, width, src >= seg, EMU_PASS);
}
inline uint32_t __ballot_sync(uint32_t mask, int pred, EMU_LOC) {
  uint64_t b = pred != 0;
  emu::Rdv *r = emu::rdv_enter(emu::K_BALLOT, mask, &b, 1, EMU_PASS);
  uint32_t o = 0;
  for (int i = 0; i < 32; i++) if (const uint64_t *p = emu::rdv_peek(r, i)) o |= (uint32_t)(*p != 0) << i;
  emu::rdv_leave(r);
  return o;
}
inline int __any_sync(uint32_t mask, int pred, EMU_LOC) { return __ballot_sync(mask, pred, EMU_PASS) != 0; }
inline int __all_sync(uint32_t mask, int pred, EMU_LOC) { return __ballot_sync(mask, pred, EMU_PASS) == mask; }
inline uint32_t __activemask() { return emu::live_mask(); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
[[noreturn]] inline void __trap() { emu::fail("__trap()"); }

// atomics (real atomics, so that TSan knows them)
template <class T, class F> inline T emu_atomic_rmw(T *p, F f) {
  using U = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomic size");
  U old = __atomic_load_n((U *)p, __ATOMIC_RELAXED), nw;
  do { nw = (U)emu::to_bits(f(emu::from_bits<T>(old))); } while (!__atomic_compare_exchange_n((U *)p, &old, nw, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return emu::from_bits<T>(old);
}
template <class T, class V> inline T atomicAdd(T *p, V v) { return emu_atomic_rmw(p, [=](T o) { return (T)(o + (T)v); }); }
template <class T, class V> inline T atomicMax(T *p, V v) { return emu_atomic_rmw(p, [=](T o) { return o < (T)v ? (T)v : o; }); }
template <class T, class V> inline T atomicMin(T *p, V v) { return emu_atomic_rmw(p, [=](T o) { return o > (T)v ? (T)v : o; }); }
template <class T, class V> inline T atomicExch(T *p, V v) { return emu_atomic_rmw(p, [=](T) { return (T)v; }); }
template <class T> inline T atomicCAS(T *p, T c, T v) { return emu_atomic_rmw(p, [=](T o) { return o == c ? v : o; }); }

// loads and maths
template <class T> inline T __ldg(const T *p) { return *p; }
template <class T> inline T __ldcs(const T *p) { return *p; }
template <class T> inline T __ldcg(const T *p) { return *p; }
template <class T> inline void __stcs(T *p, T v) { *p = v; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned __float_as_uint(float f) { return (unsigned)emu::to_bits(f); }
inline int __float_as_int(float f) { return (int)emu::to_bits(f); }
inline float __uint_as_float(unsigned u) { return emu::from_bits<float>(u); }
inline float __int_as_float(int u) { return emu::from_bits<float>((unsigned)u); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
#define EMU_MINMAX(T) inline T min(T a, T b) { return b < a ? b : a; } inline T max(T a, T b) { return a < b ? b : a; }
EMU_MINMAX(int) EMU_MINMAX(unsigned) EMU_MINMAX(long) EMU_MINMAX(unsigned long) EMU_MINMAX(long long) EMU_MINMAX(float) EMU_MINMAX(double)
#undef EMU_MINMAX
