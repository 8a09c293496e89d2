// Warpgroup products of 16-bit numbers (sm_90a), both factors in shared memory, rows along the
// summation.
//
// Rows of 64 or 128 bytes lie one after the other, and the 16-byte chunks of a row are permuted by
// `swizzled_chunk`: then neither the copies that write rows nor the tensor cores meet a bank twice.
#pragma once

#include "wgmma.cuh"

// Where chunk `chunk` of row `row` lies in its row; the first row is at a multiple of 1024 bytes.
template <int ROW_BYTES> __device__ __forceinline__ int swizzled_chunk(int chunk, int row) {
  static_assert(ROW_BYTES == 64 || ROW_BYTES == 128, "");
  return ROW_BYTES == 128 ? chunk ^ row % 8 : chunk ^ row / 2 % 4;
}

// The operand whose first row begins at `address`, less than a row after a multiple of 8 rows.
template <int ROW_BYTES> __device__ __forceinline__ uint64 describe_rows_of_sums(uint32 address) {
  return uint64(address >> 4 & 0x3fff) | uint64(1) << 16 | uint64(8 * ROW_BYTES >> 4) << 32 |
         uint64(ROW_BYTES == 128 ? 1 : 2) << 62;
}

// sums[64 x N] (+)= a[64 x 16] b[16 x N]; the sums before it count only if `accumulate`.
template <typename T, int N>
__device__ __forceinline__ void multiply_warpgroup_rows(float (&sums)[N / 2], uint64 a, uint64 b, int accumulate);

#define KSOPT_SUMS_4(s, i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define KSOPT_SUMS_8(s, i) KSOPT_SUMS_4(s, i), KSOPT_SUMS_4(s, i + 4)
#define KSOPT_SUMS_16(s, i) KSOPT_SUMS_8(s, i), KSOPT_SUMS_8(s, i + 8)
#define KSOPT_SUMS_32(s, i) KSOPT_SUMS_16(s, i), KSOPT_SUMS_16(s, i + 16)

// One instruction. `names`: of the sums' registers; then of a, of b and of the flag.
#define KSOPT_PRODUCT(type, ptx_type, n, names, a_name, b_name, flag_name, ...)                         \
  template <>                                                                                          \
  __device__ __forceinline__ void multiply_warpgroup_rows<type, n>(float(&sums)[n / 2], uint64 a, uint64 b, \
                                                                   int accumulate) {                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag_name ", 0;\n"                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ptx_type "." ptx_type " {" names      \
                 "}, " a_name ", " b_name ", p, 1, 1, 0, 0;\n}\n"                                      \
                 : __VA_ARGS__                                                                          \
                 : "l"(a), "l"(b), "r"(accumulate)                                                      \
                 : "memory");                                                                           \
  }
#define KSOPT_PRODUCTS(n, names, a_name, b_name, flag_name, ...)                       \
  KSOPT_PRODUCT(Float16, "f16", n, names, a_name, b_name, flag_name, __VA_ARGS__)      \
  KSOPT_PRODUCT(BFloat16, "bf16", n, names, a_name, b_name, flag_name, __VA_ARGS__)

KSOPT_PRODUCTS(64,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
               "%32", "%33", "%34",
               KSOPT_SUMS_32(sums, 0))
KSOPT_PRODUCTS(96,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
               "%48", "%49", "%50",
               KSOPT_SUMS_32(sums, 0), KSOPT_SUMS_16(sums, 32))
KSOPT_PRODUCTS(128,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
               "%64", "%65", "%66",
               KSOPT_SUMS_32(sums, 0), KSOPT_SUMS_32(sums, 32))
KSOPT_PRODUCTS(192,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95",
               "%96", "%97", "%98",
               KSOPT_SUMS_32(sums, 0), KSOPT_SUMS_32(sums, 32), KSOPT_SUMS_32(sums, 64))
KSOPT_PRODUCTS(256,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127",
               "%128", "%129", "%130",
               KSOPT_SUMS_32(sums, 0), KSOPT_SUMS_32(sums, 32), KSOPT_SUMS_32(sums, 64), KSOPT_SUMS_32(sums, 96))

#undef KSOPT_PRODUCTS
#undef KSOPT_PRODUCT
#undef KSOPT_SUMS_32
#undef KSOPT_SUMS_16
#undef KSOPT_SUMS_8
#undef KSOPT_SUMS_4
