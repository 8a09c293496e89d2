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
