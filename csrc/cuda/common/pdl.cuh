// For kernels that may be launched before the one ahead of them has ended (programmatic dependent
// launch, sm_90 and up): `early` in Geometry.
//
// Such a kernel may prefetch its weights to the L2 cache at once, which is safe even if an earlier kernel
// writes them. It reads and writes nothing else before `griddepcontrol_wait`. Every thread waits, and only
// then may the next kernel start. When a kernel starts, all kernels but the one right before it have
// ended, so at most two overlap. So where the one right before does not write the weights (`weight_is_settled`), they
// may be read before the wait, too.
#pragma once

#include "common/numeric_types.cuh"

// Results of earlier kernels may be read only after this; without an early launch it does not wait.
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

// Waits for the kernel ahead, and lets the next one start.
__device__ __forceinline__ void follow_kernel_ahead() {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
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
