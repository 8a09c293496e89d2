// Runs of bytes on their way from shared memory to memory, in the background (sm_90 and up).
#pragma once

#include "ptx.cuh"

// Orders this thread's writes to shared memory before what copies in the background read.
__device__ __forceinline__ void fence_for_copies() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// Copies a run of bytes, a multiple of 16 at multiples of 16.
__device__ __forceinline__ void store_in_bulk(void* global, uint32 shared, uint32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_stores_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }

// Waits until all bytes of this thread's stores have been read.
__device__ __forceinline__ void wait_until_stores_have_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}

// Waits until they have been written.
__device__ __forceinline__ void wait_for_bulk_stores() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }
