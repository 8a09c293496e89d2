// The kernels that pack all weights of a layer: as ksopt/kernels/families/common/weight_packer.py, without Python.
#pragma once

#include "kernel_table.hpp"

namespace {

constexpr size_t MOST_FACTORS = 4, MOST_SIBLINGS = 4;

// The same struct as in csrc/cuda/common/chain_arguments.cuh.
struct ChainPackArguments {
  const void* weights[MOST_SIBLINGS][MOST_FACTORS];
  int64_t strides[MOST_SIBLINGS][MOST_FACTORS][4];
  void *packed, *packed_of_grad;
};

struct WeightPacking {
  void* kernel;
  unsigned blocks, threads;
  int64_t elements;              // of the packed weights
  int64_t elements_of_grad = 0;  // of those packed for the gradient of a trained chain's input, too
};

WeightPacking packing_of(int64_t kernel, int64_t blocks, int64_t threads, int64_t elements,
                         int64_t elements_of_grad = 0) {
  return {reinterpret_cast<void*>(kernel), static_cast<unsigned>(blocks), static_cast<unsigned>(threads), elements,
          elements_of_grad};
}

// Where the weights of factors, left to right, chain after chain, lie: in the order in which x meets them.
ChainPackArguments factors_of(const std::vector<Tensor>& weights, size_t chains) {
  const size_t factors = weights.size() / chains;
  if (chains > MOST_SIBLINGS || factors > MOST_FACTORS) throw std::runtime_error("ksopt: too many weights to pack");
  ChainPackArguments arguments{};
  for (size_t at = 0; at < weights.size(); ++at) {
    const size_t chain = at / factors, place = factors - 1 - at % factors;
    arguments.weights[chain][place] = weights[at].const_data_ptr();
    for (int64_t dim = 0; dim < 4; ++dim) arguments.strides[chain][place][dim] = weights[at].stride(dim);
  }
  return arguments;
}

struct PackedWeights {
  Tensor packed, of_grad;
};

// On the current stream of the weights' device, into memory of the right sizes; without `of_grad` for the forward pass
// alone. weights: of the factors, left to right, chain after chain.
void pack_weights(const WeightPacking& packing, const std::vector<Tensor>& weights, size_t chains, const Tensor& packed,
                  const Tensor* of_grad = nullptr) {
  ChainPackArguments arguments = factors_of(weights, chains);
  arguments.packed = packed.mutable_data_ptr();
  if (of_grad != nullptr) arguments.packed_of_grad = of_grad->mutable_data_ptr();
  launch_on_current_stream({packing.kernel, packing.threads, 0, true, &arguments}, weights[0].get_device_index(),
                           packing.blocks);
}

Tensor packed_weights(const WeightPacking& packing, const std::vector<Tensor>& weights, size_t chains) {
  const Tensor packed = empty_like_in(weights[0], {packing.elements});
  pack_weights(packing, weights, chains, packed);
  return packed;
}

// The weights of trained chains for both passes; of_grad is empty where the kernel does not pack for it.
PackedWeights packed_for_both(const WeightPacking& packing, const std::vector<Tensor>& weights, size_t chains) {
  const PackedWeights both{empty_like_in(weights[0], {packing.elements}),
                           empty_like_in(weights[0], {packing.elements_of_grad})};
  pack_weights(packing, weights, chains, both.packed, &both.of_grad);
  return both;
}

}  // namespace
