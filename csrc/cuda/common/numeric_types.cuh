// Storage types and their conversions, in inline PTX so that no CUDA header is needed.
#pragma once

using int64 = long long;
using uint64 = unsigned long long;
using uint16 = unsigned short;
using uint32 = unsigned int;

// 16-bit floats are carried as their bits; the type says how to read them.
struct Float16 { uint16 bits; };
struct BFloat16 { uint16 bits; };

__device__ __forceinline__ float to_float(float value) { return value; }

__device__ __forceinline__ float to_float(Float16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

__device__ __forceinline__ float to_float(BFloat16 value) {
  return __uint_as_float(static_cast<uint32>(value.bits) << 16);
}

template <typename T> __device__ __forceinline__ T from_float(float value);

template <> __device__ __forceinline__ float from_float<float>(float value) { return value; }

template <> __device__ __forceinline__ Float16 from_float<Float16>(float value) {
  Float16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}

template <> __device__ __forceinline__ BFloat16 from_float<BFloat16>(float value) {
  BFloat16 result;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#else
  // Round to nearest even by hand; a NaN stays one whatever its payload.
  const uint32 bits = __float_as_uint(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  result.bits = is_nan ? 0x7fff : static_cast<uint16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
  return result;
}
