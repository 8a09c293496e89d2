// Repairs a product by one matrix of a chain of two factors, where that matrix holds zeros that no path leads to.
//
// Zero times infinity or NaN is NaN, so an input that is not finite makes every output of its row infinite or NaN.
// Where the first output of a row is finite, all of the row's inputs are, and the product is correct. Otherwise a
// block computes the row again, by the factors.
#pragma once

#include "common/chain_arguments.cuh"
#include "common/kernel_params.cuh"
#include "common/pdl.cuh"

// The operands are those of the product; of the weights' arguments those of the first chain are read.
struct ChainRepairArguments {
  ChainPackArguments factors;
  ChainArguments operands;  // last: the host library's is longer
};

// An element of a row: elements of a row lie `stride` apart, batch last, and side by side, batch first.
template <typename T, bool BATCH_LAST>
__device__ __forceinline__ T* element_of_row(T* operand, int64 stride, int64 row, int64 feature) {
  return operand + (BATCH_LAST ? feature * stride + row : row * stride + feature);
}

// A factor's weights (a, b, c, d), of any strides.
template <typename T, typename P> struct FactorWeights {
  static constexpr int64 OUTPUTS = int64(P::A) * P::B * P::D;
  const T* first;
  const int64* strides;

  // The sum over l in [begin, end) of the weights of output `feature`, times what `input(feature of input)` returns.
  template <typename Input>
  __device__ __forceinline__ float sum(int64 feature, int64 begin, int64 end, const Input& input) const {
    const int64 i = feature / (P::B * P::D), k = feature / P::D % P::B, j = feature % P::D;
    const T* const weight = first + i * strides[0] + k * strides[1] + j * strides[3];
    float result = 0.0f;
    for (int64 l = begin; l < end; ++l) {
      result = fmaf(to_float(weight[l * strides[2]]), input((i * P::C + l) * P::D + j), result);
    }
    return result;
  }
  // The first l of output `feature` whose input is at least `input`.
  __device__ __forceinline__ int64 first_of(int64 feature, int64 input) const {
    const int64 behind = input - (feature / (P::B * P::D) * P::C * P::D + feature % P::D);
    const int64 l = behind <= 0 ? 0 : (behind + P::D - 1) / P::D;
    return l < P::C ? l : P::C;
  }
};

constexpr int REPAIR_THREADS = 256, REPAIR_ROWS = 64;     // of a block, and of its pass
constexpr int REPAIR_VALUES = 4096, REPAIR_OUTPUTS = 8;  // between the factors at a time, and of a thread

// All threads of a block compute a row again. `between`: memory for REPAIR_VALUES.
template <typename T, typename Left, typename Right, bool BIAS, bool BATCH_LAST>
__device__ __forceinline__ void repair_row(const ChainRepairArguments& arguments, int64 row, float* between) {
  const ChainArguments& operands = arguments.operands;
  const FactorWeights<T, Right> right{static_cast<const T*>(arguments.factors.weights[0][0]),
                                      arguments.factors.strides[0][0]};
  const FactorWeights<T, Left> left{static_cast<const T*>(arguments.factors.weights[0][1]),
                                    arguments.factors.strides[0][1]};
  const auto x = [&](int64 feature) {
    return to_float(*element_of_row<const T, BATCH_LAST>(static_cast<const T*>(operands.x), operands.x_stride, row,
                                                         feature));
  };
  constexpr int64 VALUES = FactorWeights<T, Right>::OUTPUTS, OUTPUTS = FactorWeights<T, Left>::OUTPUTS;
  for (int64 first = threadIdx.x; first - threadIdx.x < OUTPUTS; first += REPAIR_THREADS * REPAIR_OUTPUTS) {
    float sums[REPAIR_OUTPUTS] = {};
    for (int64 from = 0; from < VALUES; from += REPAIR_VALUES) {
      const int64 to = from + REPAIR_VALUES < VALUES ? from + REPAIR_VALUES : VALUES;
      __syncthreads();  // the values before have been read
      for (int64 at = from + threadIdx.x; at < to; at += REPAIR_THREADS) {
        between[at - from] = right.sum(at, 0, Right::C, x);
      }
      __syncthreads();
      const auto value = [&](int64 feature) { return between[feature - from]; };
#pragma unroll
      for (int u = 0; u < REPAIR_OUTPUTS; ++u) {
        const int64 output = first + u * REPAIR_THREADS;
        if (output < OUTPUTS) {
          sums[u] += left.sum(output, left.first_of(output, from), left.first_of(output, to), value);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < REPAIR_OUTPUTS; ++u) {
      const int64 output = first + u * REPAIR_THREADS;
      if (output < OUTPUTS) {
        const float added = BIAS ? to_float(static_cast<const T*>(operands.bias)[output]) : 0.0f;
        *element_of_row<T, BATCH_LAST>(static_cast<T*>(operands.y), operands.y_stride, row, output) =
            from_float<T>(sums[u] + added);
      }
    }
  }
}

template <typename T, typename Left, typename Right, bool BIAS, bool BATCH_LAST>
__device__ __forceinline__ void chain_repair_kernel(const ChainRepairArguments& arguments) {
  __shared__ float between[REPAIR_VALUES];
  __shared__ int is_spoilt[REPAIR_ROWS];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const ChainArguments& operands = arguments.operands;
  const int64 step = int64(gridDim.x) * REPAIR_ROWS;
  for (int64 row0 = int64(blockIdx.x) * REPAIR_ROWS; row0 < operands.batch; row0 += step) {
    const int64 row = row0 + threadIdx.x;
    bool is_not_finite = false;
    if (threadIdx.x < REPAIR_ROWS && row < operands.batch) {
      const float value = to_float(
          *element_of_row<const T, BATCH_LAST>(static_cast<const T*>(operands.y), operands.y_stride, row, 0));
      is_not_finite = value - value != 0.0f;
    }
    if (__syncthreads_or(is_not_finite) == 0) continue;
    if (threadIdx.x < REPAIR_ROWS) is_spoilt[threadIdx.x] = is_not_finite;
    __syncthreads();
    for (int at = 0; at < REPAIR_ROWS; ++at) {
      if (is_spoilt[at]) repair_row<T, Left, Right, BIAS, BATCH_LAST>(arguments, row0 + at, between);
    }
    __syncthreads();  // all have looked before the flags of the next rows are written
  }
}
