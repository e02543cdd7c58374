// Element types: conversions and 16-byte vectors.
#pragma once
#include <type_traits>

#include "platform.cuh"

namespace paged {

// As `Element::code` in src/ops/launch.rs.
enum Code : uint32_t { CODE_F32 = 0, CODE_F16 = 1, CODE_BF16 = 2 };

template <typename T>
__device__ __forceinline__ float widen(T x) {
  if constexpr (std::is_same<T, float>::value)
    return x;
  else if constexpr (std::is_same<T, __half>::value)
    return __half2float(x);
  else
    return __bfloat162float(x);
}
template <typename T>
__device__ __forceinline__ T narrow(float x) {
  if constexpr (std::is_same<T, float>::value)
    return x;
  else if constexpr (std::is_same<T, __half>::value)
    return __float2half_rn(x);
  else
    return __float2bfloat16_rn(x);
}

// Between element types; equal types keep every bit, also those of NaN.
template <typename To, typename From>
__device__ __forceinline__ To convert(From x) {
  if constexpr (std::is_same<To, From>::value)
    return x;
  else
    return narrow<To>(widen(x));
}

// 16 bytes of elements.
template <typename T>
union Vector {
  static constexpr int LEN = 16 / sizeof(T);
  uint4 bits;
  T at[LEN];
  __device__ Vector() {}
};

__device__ __forceinline__ bool aligned16(const void* p) {
  return (reinterpret_cast<uintptr_t>(p) & 15) == 0;
}

// `Vector::LEN` consecutive elements from any address that is aligned to an element.
template <typename T>
__device__ __forceinline__ Vector<T> load_vector(const T* p, bool aligned) {
  Vector<T> v;
  if (aligned) {
    v.bits = __ldg(reinterpret_cast<const uint4*>(p));
  } else {
    UNROLL
    for (int e = 0; e < Vector<T>::LEN; e++) v.at[e] = p[e];
  }
  return v;
}

// Two elements in one register, `a` in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack(T a, T b) {
  uint16_t low, high;
  static_assert(sizeof(T) == 2, "16-bit elements");
  __builtin_memcpy(&low, &a, 2);
  __builtin_memcpy(&high, &b, 2);
  return static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16;
}

// An element of a tensor whose type is known at run time only.
__device__ __forceinline__ float load_element(const void* base, int64_t at, uint32_t code) {
  if (code == CODE_F32) return static_cast<const float*>(base)[at];
  if (code == CODE_F16) return widen(static_cast<const __half*>(base)[at]);
  return widen(static_cast<const __nv_bfloat16*>(base)[at]);
}
__device__ __forceinline__ void store_element(void* base, int64_t at, uint32_t code, float x) {
  if (code == CODE_F32)
    static_cast<float*>(base)[at] = x;
  else if (code == CODE_F16)
    static_cast<__half*>(base)[at] = narrow<__half>(x);
  else
    static_cast<__nv_bfloat16*>(base)[at] = narrow<__nv_bfloat16>(x);
}

}  // namespace paged
