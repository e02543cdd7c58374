// The emulator's run time: CUDA C++ kernel sources on one CPU thread. Every CUDA thread is a fiber; which
// one goes on at a barrier or a warp instruction is a setting, so that orders which a GPU leaves open can
// be tried. Wrong masks, exited lanes, divergent barriers and deadlocks end with a message.
//
// Names: rdv is a rendezvous, where the lanes of a warp instruction meet and exchange a payload; cp are
// the cp.async copies of a thread that are under way.
//
// Needs the toolkit's headers alone (vector_types.h, cuda_fp16.h, cuda_bf16.h): their host paths convert
// bit for bit. runtime.cpp is compiled WITHOUT sanitizers, with -DEMU_ASAN or -DEMU_TSAN to tell them of
// the fibers; the kernels are compiled with them.
#pragma once
#ifdef __CUDACC__
#error "the emulator is for the host compiler"
#endif
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// __shared__ has no meaning here: platform.cuh spells shared memory DYNAMIC_SHARED and STATIC_SHARED.

#define EMU_LOC const char *file_ = __builtin_FILE(), int line_ = __builtin_LINE()
#define EMU_PASS file_, line_

namespace emu {
enum Order { LOWEST = 0, HIGHEST = 1, RANDOM = 2, RANDOM_WARP = 3 };
struct Config {
  int order = LOWEST;       // which ready thread runs next
  uint64_t seed = 1;        // for the random orders, block order and cp.async timing
  int block_order = 0;      // 0 ascending, 1 descending, 2 random
  int cp_async = 0;         // 0 late (at wait), 1 early (at issue), 2 random per copy
};
extern Config config;

extern uint3 g_threadIdx, g_blockIdx;
extern dim3 g_blockDim, g_gridDim;

[[noreturn]] void fail(const char* fmt, ...) __attribute__((format(printf, 1, 2)));
void launch_raw(const char* name, dim3 grid, dim3 block, size_t dyn_smem, void (*fn)(void*), void* ctx);
template <class F>
void launch(const char* name, dim3 grid, dim3 block, size_t dyn_smem, F&& f) {
  auto tramp = [](void* p) { (*static_cast<std::remove_reference_t<F>*>(p))(); };
  launch_raw(name, grid, block, dyn_smem, tramp, (void*)&f);
}

// memory
unsigned char* dyn_shared();
void* static_shared(size_t bytes, int key);
bool is_shared(const void* p, size_t n);
void* dev_alloc(const char* name, size_t bytes);  // guard regions on both sides, right aligned, 0xFF filled
void dev_free(void* p);

// barriers and warp collectives
void block_barrier(const char* what, const char* file, int line);
struct Rdv;
enum Kind { K_SYNCWARP, K_SHFL_XOR, K_LDMATRIX, K_LDMATRIX_T, K_MMA };
constexpr int MAXW = 8;  // 64 bytes exchanged per lane
Rdv* rdv_enter(Kind k, uint32_t mask, const uint64_t* payload, int words, const char* file, int line);
const uint64_t* rdv_peek(Rdv* r, int lane);  // null if that lane does not take part
void rdv_leave(Rdv* r);
void warp_barrier(uint32_t mask, const char* file, int line);
int lane_id();

// cp.async queue of the current thread
struct CpOp {
  void* dst;
  const void* src;
  int bytes, valid;
};
bool cp_push(const CpOp& op);  // true: the caller copies now
void cp_commit();
bool cp_take(int keep_groups, CpOp* op);  // next copy that must be done so that only keep_groups groups stay

template <class T>
inline uint64_t to_bits(const T& v) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "shuffle operand");
  uint64_t u = 0;
  __builtin_memcpy(&u, &v, sizeof(T));
  return u;
}
template <class T>
inline T from_bits(uint64_t u) {
  T v;
  __builtin_memcpy((void*)&v, &u, sizeof(T));
  return v;
}
template <class T>
inline T shfl(Kind k, uint32_t mask, T v, int src, int width, bool in_range, const char* f, int l) {
  if (width <= 0 || width > 32 || (width & (width - 1))) fail("%s:%d: shuffle width %d", f, l, width);
  uint64_t b = to_bits(v);
  Rdv* r = rdv_enter(k, mask, &b, 1, f, l);
  const uint64_t* p = in_range ? rdv_peek(r, src) : &b;
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

inline void __syncthreads(EMU_LOC) {
  emu::block_barrier("__syncthreads", EMU_PASS);
}
inline void __syncwarp(uint32_t mask = ~0u, EMU_LOC) {
  emu::warp_barrier(mask, EMU_PASS);
}
template <class T>
inline T __shfl_xor_sync(uint32_t mask, T v, int x, int width = 32, EMU_LOC) {
  int lane = emu::lane_id(), src = lane ^ x, seg = lane & ~(width - 1);
  return emu::shfl(emu::K_SHFL_XOR, mask, v, src, width, src < seg + width, EMU_PASS);
}

// loads and maths
template <class T>
inline T __ldg(const T* p) {
  return *p;
}
#define EMU_MINMAX(T)      \
  inline T min(T a, T b) { \
    return b < a ? b : a;  \
  }                        \
  inline T max(T a, T b) { \
    return a < b ? b : a;  \
  }
EMU_MINMAX(int)
EMU_MINMAX(unsigned)
#undef EMU_MINMAX
