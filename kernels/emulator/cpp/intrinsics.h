// The emulator's side of kernels/platform.cuh: the same functions as plain code on fibers.
#pragma once
#include "runtime.h"

#define DYNAMIC_SHARED(name) unsigned char* name = emu::dyn_shared()
#define STATIC_SHARED(type, name, count) \
  type* name = static_cast<type*>(emu::static_shared(sizeof(type) * (count), __COUNTER__))
#define UNROLL
#define UNROLL_BY_2
#define UNROLL_BY_4

namespace paged {

// Instrumented code, so that the sanitizers see both accesses.
inline void perform(const emu::CpOp& op) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (op.valid) v = *static_cast<const uint4*>(op.src);
  *static_cast<uint4*>(op.dst) = v;
}
inline void copy16_async(void* shared, const void* global, bool valid, EMU_LOC) {
  // The hardware wants the address aligned even when nothing is read.
  if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) & 15)
    emu::fail("%s:%d: cp.async address is not a multiple of 16", EMU_PASS);
  if (!emu::is_shared(shared, 16))
    emu::fail("%s:%d: cp.async destination is not in the block's shared memory", EMU_PASS);
  if (emu::is_shared(global, 1)) emu::fail("%s:%d: cp.async source is shared memory", EMU_PASS);
  emu::CpOp op{shared, global, 16, valid ? 16 : 0};
  if (emu::cp_push(op)) perform(op);
}
inline void copy_commit() {
  emu::cp_commit();
}
template <int pending>
inline void copy_wait() {
  emu::CpOp op;
  while (emu::cp_take(pending, &op)) perform(op);
}

inline const unsigned char* matrix_row(emu::Rdv* r, int lane) {
  return reinterpret_cast<const unsigned char*>(*emu::rdv_peek(r, lane));
}
inline void load_matrices_as(emu::Kind kind, uint32_t (&out)[4], const void* row, const char* file_,
                             int line_) {
  if (reinterpret_cast<uintptr_t>(row) & 15)
    emu::fail("%s:%d: ldmatrix row is not at a multiple of 16", EMU_PASS);
  if (!emu::is_shared(row, 16))
    emu::fail("%s:%d: ldmatrix row is not in the block's shared memory", EMU_PASS);
  uint64_t address = reinterpret_cast<uint64_t>(row);
  emu::Rdv* r = emu::rdv_enter(kind, ~0u, &address, 1, EMU_PASS);
  int lane = emu::lane_id(), group = lane / 4, column = lane % 4;
  for (int i = 0; i < 4; i++) {
    if (kind == emu::K_LDMATRIX) {
      out[i] = *reinterpret_cast<const uint32_t*>(matrix_row(r, i * 8 + group) + 4 * column);
    } else {
      auto element = [&](int row_of) {
        return static_cast<uint32_t>(
            *reinterpret_cast<const uint16_t*>(matrix_row(r, i * 8 + 2 * column + row_of) + 2 * group));
      };
      out[i] = element(0) | element(1) << 16;
    }
  }
  emu::rdv_leave(r);
}
inline void load_matrices(uint32_t (&r)[4], const void* row, EMU_LOC) {
  load_matrices_as(emu::K_LDMATRIX, r, row, EMU_PASS);
}
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row, EMU_LOC) {
  load_matrices_as(emu::K_LDMATRIX_T, r, row, EMU_PASS);
}

inline float element_value(uint16_t bits, __half*) {
  __half_raw raw;
  raw.x = bits;
  return __half2float(__half(raw));
}
inline float element_value(uint16_t bits, __nv_bfloat16*) {
  return emu::from_bits<float>(uint64_t(bits) << 16);
}

// Products are exact in double; one rounding per element at the end. A tensor core rounds more
// often, within the tolerances that the tests use.
template <typename T>
inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_LOC) {
  float mine[12];
  uint32_t in[6] = {a[0], a[1], a[2], a[3], b0, b1};
  for (int i = 0; i < 6; i++) {
    mine[2 * i] = element_value(in[i] & 0xffff, static_cast<T*>(nullptr));
    mine[2 * i + 1] = element_value(in[i] >> 16, static_cast<T*>(nullptr));
  }
  uint64_t payload[6];
  __builtin_memcpy(payload, mine, sizeof mine);
  emu::Rdv* r = emu::rdv_enter(emu::K_MMA, ~0u, payload, 6, EMU_PASS);
  int lane = emu::lane_id(), group = lane / 4, column = lane % 4;
  const float *A[4], *B[2][4];
  for (int q = 0; q < 4; q++) {
    A[q] = reinterpret_cast<const float*>(emu::rdv_peek(r, 4 * group + q));
    for (int n = 0; n < 2; n++)
      B[n][q] = reinterpret_cast<const float*>(emu::rdv_peek(r, 4 * (2 * column + n) + q));
  }
  for (int row = 0; row < 2; row++)
    for (int n = 0; n < 2; n++) {
      double sum = 0;
      for (int half = 0; half < 2; half++)
        for (int q = 0; q < 4; q++)
          for (int e = 0; e < 2; e++)
            sum += double(A[q][(row + 2 * half) * 2 + e]) * double(B[n][q][8 + 2 * half + e]);
      d[row * 2 + n] = float(double(d[row * 2 + n]) + sum);
    }
  emu::rdv_leave(r);
}

inline float exp2_fast(float x) {
  return exp2f(x);
}

}  // namespace paged
