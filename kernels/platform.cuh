// The instructions that C++ has no name for: PTX on a GPU, plain code in the emulator.
// Everything else in this folder is the same text for both.
#pragma once
#ifndef __CUDACC__
#include "emulator/cpp/intrinsics.h"
#else
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Shared memory has a spelling of its own because the emulator gives each array its own guarded
// allocation.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define STATIC_SHARED(type, name, count) __shared__ type name[count]
#define UNROLL _Pragma("unroll")
#define UNROLL_BY_2 _Pragma("unroll 2")
#define UNROLL_BY_4 _Pragma("unroll 4")

namespace paged {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes from global to shared memory, asynchronously; zeros if not `valid`, and then nothing
// is read.
__device__ __forceinline__ void copy16_async(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most `pending` committed groups of this thread are under way.
template <int pending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// d += a * b with a 16x16 (rows), b 16x8 (columns), d 16x8 in f32.
#define MULTIPLY(type, T)                                                                               \
  __device__ __forceinline__ void multiply_as(T, float(&d)[4], const uint32_t(&a)[4], uint32_t b0,      \
                                              uint32_t b1) {                                            \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                 \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"                         \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                       \
  }
MULTIPLY("f16", __half)
MULTIPLY("bf16", __nv_bfloat16)
#undef MULTIPLY
template <typename T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_as(T(), d, a, b0, b1);
}

// 2^x within 2 units in the last place; results below the normal range become 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace paged
#endif
