// How warps with different jobs hand stages to each other (sm_90a).
#pragma once

#include "common/ptx.cuh"

// A barrier in shared memory that completes a phase each time `arrivals` threads have arrived.
struct Mbarrier {
  unsigned long long state;

  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(&state)), "r"(arrivals)
                 : "memory");
  }

  __device__ __forceinline__ void arrive() {
    [[maybe_unused]] unsigned long long phase;
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];\n" : "=l"(phase) : "r"(shared_address(&state)) : "memory");
  }

  // Arrives, and makes the phase wait for `bytes` bytes of `cp_async_bulk` too.
  __device__ __forceinline__ void arrive_and_expect_tx(uint32 bytes) {
    [[maybe_unused]] unsigned long long phase;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 %0, [%1], %2;\n"
                 : "=l"(phase)
                 : "r"(shared_address(&state)), "r"(bytes)
                 : "memory");
  }

  // Arrives as soon as all copies that this thread has begun with `cp_async_16` have landed.
  __device__ __forceinline__ void cp_async_arrive() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(shared_address(&state)) : "memory");
  }

  // Copies a run of bytes, a multiple of 16, to shared memory in the background; they count for the
  // phase that expects them.
  __device__ __forceinline__ void cp_async_bulk(void* shared, const void* global, uint32 bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
            shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(&state))
        : "memory");
  }

  // Waits for the phase of this parity: the first phase is 0, and "the one before it", 1, is over.
  __device__ __forceinline__ void wait(int parity) {
    uint32 over = 0;
    while (over == 0) {
      asm volatile(
          "{\n.reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}\n"
          : "=r"(over)
          : "r"(shared_address(&state)), "r"(parity)
          : "memory");
    }
  }
};

// Arrives at a barrier at which others of its `threads` threads wait (`named_barrier_sync` in ptx.cuh).
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// Changes the registers that each thread of this warpgroup may use; a multiple of 8.
template <int COUNT> __device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(COUNT));
}
