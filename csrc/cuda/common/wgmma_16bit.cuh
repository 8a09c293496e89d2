// Warpgroup products of 16-bit numbers (sm_90a), the first factor in registers.
//
// Four warps multiply 64 x 16 by 16 x N. Warp w of the warpgroup has rows 16 w to 16 w + 15 of the
// first factor and of the sums, laid out over its lanes as for m16n8k16 (ptx.cuh); the second factor
// is named by a descriptor of 16-byte rows along the summation (wgmma.cuh, `make_smem_desc`).
#pragma once

#include "common/wgmma.cuh"

// sums[64 x N] (+)= a[64 x 16] b[16 x N]; the sums before it count only if `accumulate`.
template <typename T, int N>
__device__ __forceinline__ void wgmma_mma_async_16(float (&sums)[N / 2], const uint32 (&a)[4], uint64 b,
                                                   int accumulate);

#define KSOPT_SUMS_4(s, i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define KSOPT_SUMS_8(s, i) KSOPT_SUMS_4(s, i), KSOPT_SUMS_4(s, i + 4)
#define KSOPT_SUMS_16(s, i) KSOPT_SUMS_8(s, i), KSOPT_SUMS_8(s, i + 8)
#define KSOPT_SUMS_32(s, i) KSOPT_SUMS_16(s, i), KSOPT_SUMS_16(s, i + 16)

// One instruction. `names`: of the sums' registers; then of a's, of b's and of the flag's.
#define KSOPT_PRODUCT(type, ptx_type, n, names, a_names, b_name, flag_name, ...)                          \
  template <>                                                                                            \
  __device__ __forceinline__ void wgmma_mma_async_16<type, n>(float(&sums)[n / 2], const uint32(&a)[4], \
                                                              uint64 b, int accumulate) {              \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag_name ", 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ptx_type "." ptx_type " {" names        \
                 "}, {" a_names "}, " b_name ", p, 1, 1, 0;\n}\n"                                         \
                 : __VA_ARGS__                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)                    \
                 : "memory");                                                                             \
  }
#define KSOPT_PRODUCTS(n, names, a_names, b_name, flag_name, ...)                           \
  KSOPT_PRODUCT(Float16, "f16", n, names, a_names, b_name, flag_name, __VA_ARGS__)          \
  KSOPT_PRODUCT(BFloat16, "bf16", n, names, a_names, b_name, flag_name, __VA_ARGS__)

KSOPT_PRODUCTS(8,
               "%0, %1, %2, %3",
               "%4, %5, %6, %7", "%8", "%9",
               KSOPT_SUMS_4(sums, 0))
KSOPT_PRODUCTS(16,
               "%0, %1, %2, %3, %4, %5, %6, %7",
               "%8, %9, %10, %11", "%12", "%13",
               KSOPT_SUMS_8(sums, 0))
KSOPT_PRODUCTS(24,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11",
               "%12, %13, %14, %15", "%16", "%17",
               KSOPT_SUMS_8(sums, 0), KSOPT_SUMS_4(sums, 8))
KSOPT_PRODUCTS(32,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
               "%16, %17, %18, %19", "%20", "%21",
               KSOPT_SUMS_16(sums, 0))
KSOPT_PRODUCTS(48,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23",
               "%24, %25, %26, %27", "%28", "%29",
               KSOPT_SUMS_16(sums, 0), KSOPT_SUMS_8(sums, 16))
KSOPT_PRODUCTS(64,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
               "%32, %33, %34, %35", "%36", "%37",
               KSOPT_SUMS_32(sums, 0))
KSOPT_PRODUCTS(96,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
               "%48, %49, %50, %51", "%52", "%53",
               KSOPT_SUMS_32(sums, 0), KSOPT_SUMS_16(sums, 32))
KSOPT_PRODUCTS(128,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
               "%64, %65, %66, %67", "%68", "%69",
               KSOPT_SUMS_32(sums, 0), KSOPT_SUMS_32(sums, 32))
KSOPT_PRODUCTS(192,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95",
               "%96, %97, %98, %99", "%100", "%101",
               KSOPT_SUMS_32(sums, 0), KSOPT_SUMS_32(sums, 32), KSOPT_SUMS_32(sums, 64))

#undef KSOPT_PRODUCTS
#undef KSOPT_PRODUCT
#undef KSOPT_SUMS_32
#undef KSOPT_SUMS_16
#undef KSOPT_SUMS_8
#undef KSOPT_SUMS_4
