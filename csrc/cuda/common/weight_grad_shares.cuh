// What kernels of a weight's gradient have in common: their arguments, and the sum of shares of the rows.
#pragma once

#include "common/pdl.cuh"
#include "common/ptx.cuh"

// Strides count elements.
struct WeightGradArguments {
  const void* grad;
  const void* x;
  void* to;    // dK [A, B, C, D], or of each share of the rows one in fp32, with the bias's behind it
  void* bias;  // of the bias [A, B, D], where there is one share
  int64 batch, grad_stride, x_stride;
  int64 rows_per_share;  // a multiple of ROWS
  int64 shares;          // none of them empty
};

struct SharesArguments {
  const float* shares;  // [count, elements]
  void* to;
  void* bias;                  // where the elements behind those of `to` go
  int64 count, elements, own;  // multiples of 4; `own` elements go to `to`
};

// Adds the shares up: block `block` has 128 elements, and each of its 8 warps an eighth of the shares.
template <typename T>
__device__ __forceinline__ void add_shares_kernel(const SharesArguments& arguments, int64 block) {
  __shared__ float sums[8][128];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64 first = block * 128, at = first + lane * 4;
  griddepcontrol_wait();
  float own[4] = {};
  if (at < arguments.elements) {
#pragma unroll 4
    for (int64 share = warp; share < arguments.count; share += 8) {
      const float4 values = *reinterpret_cast<const float4*>(arguments.shares + share * arguments.elements + at);
      own[0] += values.x, own[1] += values.y, own[2] += values.z, own[3] += values.w;
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) sums[warp][lane * 4 + e] = own[e];
  __syncthreads();
  if (threadIdx.x >= 64) return;
  float pair[2] = {};
#pragma unroll
  for (int of = 0; of < 8; ++of)
#pragma unroll
    for (int e = 0; e < 2; ++e) pair[e] += sums[of][threadIdx.x * 2 + e];
  const int64 to = first + threadIdx.x * 2;
  if (to >= arguments.elements) return;
  uint16* const result = to < arguments.own ? static_cast<uint16*>(arguments.to) + to
                                            : static_cast<uint16*>(arguments.bias) + (to - arguments.own);
  *reinterpret_cast<uint32*>(result) = pack_pair<T>(pair[0], pair[1]);
}
