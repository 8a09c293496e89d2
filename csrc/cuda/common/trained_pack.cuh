// The weights of trained chains in both orders in one launch: in that of its forward pass, chain_wgmma16.cuh, and in
// that of the gradient of its input, input_grad_wgmma16.cuh.
#pragma once

#include "common/input_grad_pack.cuh"

template <typename P, typename Tile, typename GradP, typename GradTile>
__device__ __forceinline__ void trained_pack_kernel(const ChainPackArguments& arguments) {
  constexpr int FORWARD = static_cast<int>(Tile::PACKED_BYTES / 16);
  const int chunk = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
#pragma unroll
  for (int sibling = 0; sibling < P::SIBLINGS; ++sibling) prefetch_chain<P>(arguments, sibling);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (chunk < FORWARD) {
    pack_chain<P, Tile>(arguments, chunk);
  } else {
    pack_of_grad<GradP, GradTile>(arguments, arguments.packed_of_grad, chunk - FORWARD);
  }
}

// The same in the launch that multiplies by them.
struct FusedChainArguments {
  ChainArguments chain;
  ChainPackArguments packing;
  uint32* turns;  // pieces taken, pieces done, blocks that have left; all 0 before and after a launch
};

__device__ __forceinline__ uint32 load_acquire(const uint32* from) {
  uint32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Blocks take pieces in turns until all are taken, and wait until all are done. A block that is not running has taken
// none, so that none waits for it.
template <int THREADS, typename P, typename Tile, typename GradP, typename GradTile>
__device__ __forceinline__ void pack_in_turns(const FusedChainArguments& arguments) {
  constexpr int FORWARD = static_cast<int>(Tile::PACKED_BYTES / 16);
  constexpr int ALL = FORWARD + static_cast<int>(GradTile::PACKED_BYTES / 16);
  constexpr int AT_ONCE = 2, PIECE = THREADS * AT_ONCE, PIECES = (ALL + PIECE - 1) / PIECE;
  __shared__ int piece_of_block;
  uint32* const turns = arguments.turns;
  int next = 0;
  if (threadIdx.x == 0) next = static_cast<int>(atomicAdd(turns, 1u));
  while (true) {
    __syncthreads();
    if (threadIdx.x == 0) piece_of_block = next;
    __syncthreads();
    const int piece = piece_of_block;
    if (piece >= PIECES) break;
    if (threadIdx.x == 0) next = static_cast<int>(atomicAdd(turns, 1u));
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      const int chunk = piece * PIECE + u * THREADS + static_cast<int>(threadIdx.x);
      if (chunk < FORWARD) {
        pack_chain<P, Tile>(arguments.packing, chunk);
      } else if (chunk < ALL) {
        pack_of_grad<GradP, GradTile>(arguments.packing, arguments.packing.packed_of_grad, chunk - FORWARD);
      }
    }
    asm volatile("fence.proxy.async;\n" ::: "memory");
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(turns + 1, 1u);
  }
  if (threadIdx.x == 0) {
    while (load_acquire(turns + 1) < PIECES) {
    }
    if (atomicAdd(turns + 2, 1u) == gridDim.x - 1) turns[0] = turns[1] = turns[2] = 0;
  }
  __syncthreads();
  asm volatile("fence.proxy.async;\n" ::: "memory");
}
