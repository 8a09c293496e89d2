// For kernels that may be launched before the one ahead of them has ended (programmatic dependent
// launch, sm_90 and up): `early` in Geometry.
//
// Such a kernel may ask the L2 cache for its weights at once, which is harmless whoever writes them,
// and reads or writes nothing before `griddepcontrol_wait`. Every thread waits, and only then
// is the next kernel let in: so all that came before is over when the next one begins, and only
// one kernel at a time runs beside the one that it follows.
#pragma once

#include "numeric_types.cuh"

// Before this nothing that an earlier kernel writes may be read; without an early launch, no wait.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// Asks the L2 cache for this block's equal share of `bytes`, whichever block is to use it.
template <int THREADS>
__device__ __forceinline__ void prefetch_share(const void* from, int64 bytes, int share, int shares) {
#if __CUDA_ARCH__ >= 900
  constexpr int PIECE = 2048;
  const int64 pieces = (bytes + PIECE - 1) / PIECE;
  for (int64 piece = share + int64(threadIdx.x) * shares; piece < pieces; piece += int64(THREADS) * shares) {
    const int64 left = bytes - piece * PIECE;
    const char* const address = static_cast<const char*>(from) + piece * PIECE;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(address),
                 "r"(left < PIECE ? static_cast<int>(left) : PIECE)
                 : "memory");
  }
#endif
}
