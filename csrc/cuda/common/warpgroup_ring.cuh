// What kernels share whose first warpgroup fills a ring of slots of shared memory, and whose others multiply from it on
// warpgroup tensor cores (16 bit, sm_90a).
#pragma once

#include "common/mbarrier.cuh"
#include "common/pdl.cuh"
#include "common/wgmma_16bit.cuh"

// The ring of slots, as seen by a thread that fills or uses them in order.
template <int SLOT_BYTES_, int STAGES> struct Ring {
  static constexpr int SLOT_BYTES = SLOT_BYTES_;
  unsigned char* slots;
  Mbarrier *full, *empty;
  int slot = 0, parity;
  __device__ __forceinline__ Ring(unsigned char* slots_, Mbarrier* full_, Mbarrier* empty_, int parity_)
      : slots(slots_), full(full_), empty(empty_), parity(parity_) {}
  __device__ __forceinline__ unsigned char* here() const { return slots + slot * SLOT_BYTES; }
  __device__ __forceinline__ void wait_until_full() { full[slot].wait(parity); }
  __device__ __forceinline__ void wait_until_empty() { empty[slot].wait(parity); }
  __device__ __forceinline__ void next() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
  // This thread has used a slot.
  __device__ __forceinline__ void release(int used) { empty[used].arrive(); }
  // One thread starts the copy of packed weights, and advances by their size.
  __device__ __forceinline__ void load_weights(const unsigned char*& weights, int at, int bytes) {
    full[slot].arrive_and_expect_tx(bytes);
    full[slot].cp_async_bulk(here() + at, weights, bytes);
    weights += bytes;
  }
};

// Loads `slots` slots of weights alone.
template <typename AnyRing>
__device__ __forceinline__ void load_weight_slots(AnyRing& ring, const unsigned char* weights, int slots, int bytes) {
#pragma unroll 1
  for (int at = 0; at < slots; ++at) {
    ring.wait_until_empty();
    if (threadIdx.x == 0) ring.load_weights(weights, 0, bytes);
    ring.full[ring.slot].arrive();
    ring.next();
  }
}

// Prefetches the rows of the next pass to the L2 cache while outputs are computed and memory would be idle.
template <int FEATURES, int ROWS>
__device__ __forceinline__ void prefetch_rows(const void* from, int64 stride, int64 row0, int64 end) {
  for (int row = threadIdx.x; row < ROWS; row += 128) {
    if (row0 + row >= end) break;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(static_cast<const uint16*>(from) +
                                                                      (row0 + row) * stride),
                 "r"(FEATURES * 2)
                 : "memory");
  }
}

// The work of a warpgroup without rows while others of its block have some: it releases the slots.
template <typename AnyRing> __device__ __forceinline__ void pass_slots_by(AnyRing& ring, int slots) {
#pragma unroll 1
  for (int at = 0; at < slots; ++at) {
    ring.wait_until_full();
    ring.release(ring.slot);
    ring.next();
  }
}

// The widest product instruction that leaves no narrow remainder.
constexpr int part_of_product(int n) {
  return n == 256 ? 128 : n == 144 || n == 160 ? 96 : n == 104 ? 64
       : n >= 192 ? 192 : n >= 128 ? 128 : n >= 96 ? 96 : n >= 64 ? 64
       : n >= 48 ? 48 : n >= 32 ? 32 : n >= 24 ? 24 : n >= 16 ? 16 : 8;
}

// sums[64 x N] (+)= a[64 x 16] b[16 x N]: the last N columns of `sums`.
template <typename T, int N, int COUNT>
__device__ __forceinline__ void multiply_columns(float (&sums)[COUNT], const uint32 (&a)[4], uint64 b, int accumulate) {
  constexpr int PART = part_of_product(N);
  wgmma_mma_async_16<T, PART>(*reinterpret_cast<float(*)[PART / 2]>(&sums[COUNT - N / 2]), a, b, accumulate);
  if constexpr (PART < N) multiply_columns<T, N - PART>(sums, a, b + PART, accumulate);  // 16 bytes a column
}

// Tells the compiler that asynchronous products no longer read or write these registers.
template <int STEPS> __device__ __forceinline__ void keep_operands(uint32 (&a)[STEPS][4]) {
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      asm volatile("" : "+r"(a[s][e])::"memory");
    }
}

// Both halves of a word as fp32.
template <typename T> __device__ __forceinline__ float half_of(uint32 word, int half) {
  return to_float(T{static_cast<uint16>(word >> 16 * half)});
}

// The position of a thread that multiplies: its warpgroup, warp, lane and rows.
template <typename Tile> struct WarpgroupThread {
  int group, warp, lane, quarter, row;  // row: the thread's first one in its block's pass
  __device__ __forceinline__ explicit WarpgroupThread(int thread)
      : group(__shfl_sync(~0u, thread / 128, 0)), warp(thread / 32 % 4), lane(thread % 32), quarter(lane % 4),
        row(group * 64 + warp * 16 + lane / 4) {}
};
