// Warpgroup products of TF32 numbers (sm_90a), the first factor in registers.
//
// Four warps multiply 64 x 8 by 8 x N. Warp w of the warpgroup has rows 16 w to 16 w + 15 of the
// first factor and of the sums, laid out over its lanes as for m16n8k8 (ptx.cuh).
#pragma once

#include "common/wgmma.cuh"

// sums[64 x N] (+)= a[64 x 8] b[8 x N]; the sums before it count only if `accumulate`.
template <int N>
__device__ __forceinline__ void wgmma_mma_async_tf32(float (&sums)[N / 2], const uint32 (&a)[4], uint64 b,
                                                     int accumulate);

#define KSOPT_SUMS_8(s, i)                                                                          \
  "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3]), "+f"(s[i + 4]), "+f"(s[i + 5]),       \
      "+f"(s[i + 6]), "+f"(s[i + 7])

template <>
__device__ __forceinline__ void wgmma_mma_async_tf32<8>(float (&sums)[4], const uint32 (&a)[4], uint64 b,
                                                         int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {"
      "%0, %1, %2, %3"
      "}, {%4, %5, %6, %7}, %8, p, 1, 1;\n}\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
      : "memory");
}

template <>
__device__ __forceinline__ void wgmma_mma_async_tf32<16>(float (&sums)[8], const uint32 (&a)[4], uint64 b,
                                                         int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k8.f32.tf32.tf32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, {%8, %9, %10, %11}, %12, p, 1, 1;\n}\n"
      : KSOPT_SUMS_8(sums, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
      : "memory");
}

template <>
__device__ __forceinline__ void wgmma_mma_async_tf32<24>(float (&sums)[12], const uint32 (&a)[4], uint64 b,
                                                         int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %17, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n24k8.f32.tf32.tf32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
      "}, {%12, %13, %14, %15}, %16, p, 1, 1;\n}\n"
      : KSOPT_SUMS_8(sums, 0), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
      : "memory");
}

template <>
__device__ __forceinline__ void wgmma_mma_async_tf32<32>(float (&sums)[16], const uint32 (&a)[4], uint64 b,
                                                         int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, p, 1, 1;\n}\n"
      : KSOPT_SUMS_8(sums, 0), KSOPT_SUMS_8(sums, 8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
      : "memory");
}

template <>
__device__ __forceinline__ void wgmma_mma_async_tf32<48>(float (&sums)[24], const uint32 (&a)[4], uint64 b,
                                                         int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %29, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n48k8.f32.tf32.tf32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23"
      "}, {%24, %25, %26, %27}, %28, p, 1, 1;\n}\n"
      : KSOPT_SUMS_8(sums, 0), KSOPT_SUMS_8(sums, 8), KSOPT_SUMS_8(sums, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
      : "memory");
}

template <>
__device__ __forceinline__ void wgmma_mma_async_tf32<64>(float (&sums)[32], const uint32 (&a)[4], uint64 b,
                                                         int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1;\n}\n"
      : KSOPT_SUMS_8(sums, 0), KSOPT_SUMS_8(sums, 8), KSOPT_SUMS_8(sums, 16),
        KSOPT_SUMS_8(sums, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
      : "memory");
}

template <>
__device__ __forceinline__ void wgmma_mma_async_tf32<96>(float (&sums)[48], const uint32 (&a)[4], uint64 b,
                                                         int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k8.f32.tf32.tf32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
      "}, {%48, %49, %50, %51}, %52, p, 1, 1;\n}\n"
      : KSOPT_SUMS_8(sums, 0), KSOPT_SUMS_8(sums, 8), KSOPT_SUMS_8(sums, 16),
        KSOPT_SUMS_8(sums, 24), KSOPT_SUMS_8(sums, 32), KSOPT_SUMS_8(sums, 40)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
      : "memory");
}

template <>
__device__ __forceinline__ void wgmma_mma_async_tf32<128>(float (&sums)[64], const uint32 (&a)[4], uint64 b,
                                                         int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, p, 1, 1;\n}\n"
      : KSOPT_SUMS_8(sums, 0), KSOPT_SUMS_8(sums, 8), KSOPT_SUMS_8(sums, 16),
        KSOPT_SUMS_8(sums, 24), KSOPT_SUMS_8(sums, 32), KSOPT_SUMS_8(sums, 40),
        KSOPT_SUMS_8(sums, 48), KSOPT_SUMS_8(sums, 56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
      : "memory");
}

#undef KSOPT_SUMS_8
