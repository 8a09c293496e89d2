// Blocks of a cluster and each other's shared memory (sm_90 and up).
#pragma once

#include "common/ptx.cuh"

// All threads of all blocks, in whole warps: what each wrote before, all can read behind it.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// The same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32 address_in_block(const void* mine, int rank) {
  uint32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared_address(mine)), "r"(rank));
  return address;
}

// What block `rank` has there.
__device__ __forceinline__ float4 load_from_block(const float4* mine, int rank) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address_in_block(mine, rank))
               : "memory");
  return value;
}
__device__ __forceinline__ float load_from_block(const float* mine, int rank) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];\n" : "=f"(value) : "r"(address_in_block(mine, rank)) : "memory");
  return value;
}
