// The instructions that CUDA C++ has no name for.
#pragma once

#include "common/numeric_types.cuh"

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes to shared memory in the background, or writes 16 zero bytes if not `inside`.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(inside ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most `PENDING` of this thread's latest groups of copies are under way.
template <int PENDING> __device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}

// sum[16 x 8] += a[16 x 16] b[16 x 8] across a warp, 16-bit factors and fp32 sums.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&sum)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<Float16>(float (&sum)[4], const uint32 (&a)[4], uint32 b0,
                                                      uint32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<BFloat16>(float (&sum)[4], const uint32 (&a)[4], uint32 b0,
                                                       uint32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two fp32 values rounded to 16 bits, the first in the low half.
template <typename T> __device__ __forceinline__ uint32 pack_pair(float low, float high);

template <> __device__ __forceinline__ uint32 pack_pair<Float16>(float low, float high) {
  uint32 result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

template <> __device__ __forceinline__ uint32 pack_pair<BFloat16>(float low, float high) {
  uint32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// Copies the first `bytes` (0 to 16) of 16 to shared memory in the background, and writes zeros after.
__device__ __forceinline__ void cp_async_up_to_16(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global),
               "r"(bytes)
               : "memory");
}

// Shared memory by its address: of a pointer the compiler recomputes the block's window at each use.
__device__ __forceinline__ uint32 load_shared_16_bits(uint32 address) {
  uint32 result;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=r"(result) : "r"(address));
  return result;
}

__device__ __forceinline__ uint32 load_shared_word(uint32 address) {
  uint32 result;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(result) : "r"(address));
  return result;
}

__device__ __forceinline__ uint2 load_shared_2_words(uint32 address) {
  uint2 result;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];\n" : "=r"(result.x), "=r"(result.y) : "r"(address));
  return result;
}

__device__ __forceinline__ uint4 load_shared_4_words(uint32 address) {
  uint4 result;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w)
               : "r"(address));
  return result;
}

__device__ __forceinline__ void store_shared_16_bits(uint32 address, uint16 value) {
  asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(address), "h"(value) : "memory");
}

__device__ __forceinline__ void store_shared_word(uint32 address, uint32 value) {
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_2_words(uint32 address, uint32 first, uint32 second) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};\n" ::"r"(address), "r"(first), "r"(second) : "memory");
}

// Copies 16 bytes to an address of shared memory in the background, or writes 16 zero bytes if not `inside`.
__device__ __forceinline__ void cp_async_16(uint32 shared, const void* global, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global),
               "r"(inside ? 16 : 0)
               : "memory");
}

// Four 8 x 8 matrices of 16-bit elements: lanes 8i to 8i + 7 give the addresses of the rows of matrix i;
// a lane gets elements (lane / 4, 2 (lane % 4)) and (lane / 4, 2 (lane % 4) + 1).
__device__ __forceinline__ void ldmatrix_x4(uint32 (&words)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// The same, transposed: lanes 8i to 8i + 7 give the addresses of the
// rows of matrix i; a lane gets elements (2 (lane % 4), lane / 4) and (2 (lane % 4) + 1, lane / 4).
__device__ __forceinline__ void ldmatrix_x4_trans(uint32 (&words)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// The value's nearest TF32 number: 10 bits of fraction, the rest zero.
__device__ __forceinline__ uint32 to_tf32(float value) {
  uint32 result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(value));
  return result;
}

// sum[16 x 8] += a[16 x 8] b[8 x 8] across a warp: the upper 19 bits of fp32 factors, fp32 sums.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&sum)[4], const uint32 (&a)[4], uint32 b0,
                                                 uint32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Stores 16 bytes at once. (Of words that it has to gather the compiler makes four stores, each of which
// travels like a sector of 32 bytes.)
__device__ __forceinline__ void store_16_bytes(void* to, uint32 w0, uint32 w1, uint32 w2, uint32 w3) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"l"(to), "r"(w0), "r"(w1), "r"(w2), "r"(w3));
}

__device__ __forceinline__ void store_8_bytes(void* to, uint32 w0, uint32 w1) {
  asm volatile("st.global.v2.b32 [%0], {%1,%2};\n" ::"l"(to), "r"(w0), "r"(w1));
}

// Loads 16 bytes that no thread writes while the kernel runs. (Volatile: else the compiler may load where a condition
// forbids it.)
__device__ __forceinline__ void load_16_bytes(uint32 (&words)[4], const void* from) {
  asm volatile("ld.global.nc.v4.b32 {%0,%1,%2,%3}, [%4];\n"
      : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
      : "l"(from));
}

// Waits for the `threads` threads (whole warps) that share `barrier`, 1 to 15.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}
