// What the blocks of a cluster do together (sm_90 and up): they reach each other's shared memory.
#pragma once

#include "pipeline.cuh"

// All threads of the cluster; orders their accesses to each other's shared memory.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// Lets other blocks know of the barriers that this thread has set up, once they meet it.
__device__ __forceinline__ void show_barriers_to_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// The same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32 address_in_block(const void* mine, int rank) {
  uint32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared_address(mine)), "r"(rank));
  return address;
}

// Arrives at the barrier of block `rank` that lies where `mine` does.
__device__ __forceinline__ void arrive_in_block(PhaseBarrier* mine, int rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];\n" ::"r"(
                   address_in_block(&mine->state, rank))
               : "memory");
}

// As `PhaseBarrier::wait`, for a barrier at which other blocks arrive.
__device__ __forceinline__ void wait_for_cluster(const PhaseBarrier& barrier, int parity) {
  uint32 over = 0;
  while (over == 0) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(over)
        : "r"(shared_address(&barrier.state)), "r"(parity)
        : "memory");
  }
}

// Neighbouring words of a block's shared memory.
template <int COUNT> __device__ __forceinline__ void load_words(uint32 (&words)[COUNT], uint32 address) {
  static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4, "");
  if constexpr (COUNT == 4) {
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (COUNT == 2) {
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];\n"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ld.shared::cluster.u32 %0, [%1];\n" : "=r"(words[0]) : "r"(address) : "memory");
  }
}

// Writes 16 bytes of a block's shared memory.
__device__ __forceinline__ void store_chunk(uint32 address, uint32 w0, uint32 w1, uint32 w2, uint32 w3) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(w0), "r"(w1), "r"(w2), "r"(w3)
               : "memory");
}

// Orders what this thread wrote to any block before what that block's tensor cores read.
__device__ __forceinline__ void fence_for_tensor_cores_of_cluster() {
  asm volatile("fence.proxy.async.shared::cluster;\n" ::: "memory");
}
