// Warpgroup products of 16-bit numbers (sm_90a) whose summation runs over rows of shared memory.
//
// Both factors lie as `make_swizzled_smem_desc` (wgmma.cuh) says: rows along the summation, 64 neighbouring
// features of a row in 128 bytes. sums[m][n] is the sum over 16 rows of a[row][m] b[row][n].
#pragma once

#include "common/wgmma.cuh"

// sums[64 x N] (+)= a[16 x 64]^T b[16 x N]; the sums before it count only if `accumulate`.
template <typename T, int N>
__device__ __forceinline__ void multiply_rows(float (&sums)[N / 2], uint64 a, uint64 b, int accumulate);

#define KSOPT_NAMES_32                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                 \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KSOPT_NAMES_64                                                                     \
  KSOPT_NAMES_32                                                                           \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "     \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KSOPT_NAMES_96                                                                     \
  KSOPT_NAMES_64                                                                           \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "     \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define KSOPT_NAMES_128                                                                    \
  KSOPT_NAMES_96                                                                           \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "     \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, "   \
  "%124, %125, %126, %127"
#define KSOPT_SUMS_4(s, i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define KSOPT_SUMS_16(s, i) KSOPT_SUMS_4(s, i), KSOPT_SUMS_4(s, i + 4), KSOPT_SUMS_4(s, i + 8), KSOPT_SUMS_4(s, i + 12)
#define KSOPT_SUMS_32(s, i) KSOPT_SUMS_16(s, i), KSOPT_SUMS_16(s, i + 16)

// One instruction. The last names are those of a, b and the flag; behind the flag: signs, and rows along the
// summation in both factors.
#define KSOPT_PRODUCT(type, ptx_type, n, names, a_name, b_name, flag_name, ...)                                 \
  template <>                                                                                                 \
  __device__ __forceinline__ void multiply_rows<type, n>(float(&sums)[n / 2], uint64 a, uint64 b, int accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag_name ", 0;\n"                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ptx_type "." ptx_type " {" names             \
                 "}, " a_name ", " b_name ", p, 1, 1, 1, 1;\n}\n"                                              \
                 : __VA_ARGS__                                                                                \
                 : "l"(a), "l"(b), "r"(accumulate)                                                            \
                 : "memory");                                                                                 \
  }
#define KSOPT_PRODUCTS(n, names, a_name, b_name, flag_name, ...)                    \
  KSOPT_PRODUCT(Float16, "f16", n, names, a_name, b_name, flag_name, __VA_ARGS__)   \
  KSOPT_PRODUCT(BFloat16, "bf16", n, names, a_name, b_name, flag_name, __VA_ARGS__)

KSOPT_PRODUCTS(64, KSOPT_NAMES_32, "%32", "%33", "%34", KSOPT_SUMS_32(sums, 0))
KSOPT_PRODUCTS(128, KSOPT_NAMES_64, "%64", "%65", "%66", KSOPT_SUMS_32(sums, 0), KSOPT_SUMS_32(sums, 32))
KSOPT_PRODUCTS(192, KSOPT_NAMES_96, "%96", "%97", "%98", KSOPT_SUMS_32(sums, 0), KSOPT_SUMS_32(sums, 32),
               KSOPT_SUMS_32(sums, 64))
KSOPT_PRODUCTS(256, KSOPT_NAMES_128, "%128", "%129", "%130", KSOPT_SUMS_32(sums, 0), KSOPT_SUMS_32(sums, 32),
               KSOPT_SUMS_32(sums, 64), KSOPT_SUMS_32(sums, 96))

#undef KSOPT_PRODUCTS
#undef KSOPT_PRODUCT
#undef KSOPT_SUMS_32
#undef KSOPT_SUMS_16
#undef KSOPT_SUMS_4
#undef KSOPT_NAMES_128
#undef KSOPT_NAMES_96
#undef KSOPT_NAMES_64
#undef KSOPT_NAMES_32
