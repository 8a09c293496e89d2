// How blocks of a cluster add up through each other's shared memory (sm_90 and up).
#pragma once

#include "numeric_types.cuh"
#include "ptx.cuh"

// All threads of the cluster; orders their accesses to each other's shared memory.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// Four floats at the same place of another block's shared memory.
__device__ __forceinline__ float4 load_from_block(const float* mine, int rank) {
  uint32 address;
  float4 value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void add(float4& sum, const float4& value) {
  sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
}
