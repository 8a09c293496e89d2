// A layer through which gradients are recorded, as one operator of autograd: a step runs no Python of ksopt's.
//
// Weights that are trained are prepared at each call, and forms of frozen ones are cached.
// It computes the same as the composition of ks_mm and torch's operations in ksopt/ops/chain.py. Where a gradient's
// own gradient is needed, the backward pass is composed of those operators, too. It saves the same, except what is
// between the factors where that would take more memory than a dense layer (see is_smaller_than_dense). Under autocast
// weights, bias and residual are cast here; x comes in the dtype to compute in, so that no other copy of it is saved.
#undef TORCH_TARGET_VERSION  // like torch_ops.cpp: for the torch that it is compiled with

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/threshold_backward.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>

#include "aten_handles.hpp"
#include "chain_gradients.hpp"
#include "input_gradient.hpp"
#include "dispatch.hpp"
#include "torch_ops.hpp"
#include "torch_weight_gradient.hpp"

namespace {

using at::Tensor;
using ksopt::Activation;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<Tensor>;

// The structure of a layer, without its tensors. The weights are those of its factors, left to right, sibling after
// sibling.
struct Form {
  Activation activation;
  bool batch_last;
  int64_t siblings;
  bool exact;  // fp32 products
  bool repacked;  // weights may change without training, too
  int64_t dtype;  // what operands are cast to

  at::ScalarType scalar_type() const { return static_cast<at::ScalarType>(dtype); }
  int64_t features_dim(const Tensor& rows) const { return batch_last ? 0 : rows.dim() - 1; }
};

template <typename Signature>
c10::TypedOperatorHandle<Signature> operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Products that autograd does not see.
struct Known {
  const Form& form;

  // owner: what weight is, or views.
  Tensor product(const Tensor& x, const Tensor& weight, const Tensor& owner) const {
    if (!owner.requires_grad() && !form.repacked) {
      static const auto op =
          operator_of<Tensor(const Tensor&, const Tensor&, bool, const MaybeTensor&)>("ksopt::ks_mm_frozen");
      return op.call(x, weight, form.batch_last, owner);
    }
    if (!at::globalContext().deterministicAlgorithms()) {
      try {
        Tensor rows = x, matrix = weight;
        AtenTensorHandle y = ksopt::multiply_known(reinterpret_cast<AtenTensorHandle>(&rows),
                                                   reinterpret_cast<AtenTensorHandle>(&matrix),
                                                   {form.batch_last, form.exact, true}, {}, nullptr);
        if (y != nullptr) {
          const std::unique_ptr<Tensor> owned(reinterpret_cast<Tensor*>(y));
          return *owned;
        }
      } catch (const std::exception&) {  // the path that checks and decides reports the error
      }
    }
    static const auto op =
        operator_of<Tensor(const Tensor&, const Tensor&, bool, const MaybeTensor&)>("ksopt::ks_mm_repacked");
    return op.call(x, weight, form.batch_last, std::nullopt);
  }

  // As ksopt/ops/implementation.py, weight_grad; where of_bias is, and a kernel sums the rows of grad too, there.
  Tensor weight_gradient(const Tensor& grad, const Tensor& x, const Tensor& weight, Tensor* of_bias) const {
    if (!x.is_cuda() || form.batch_last || x.element_size() > 4 || x.numel() == 0) return by_torch(grad, x, weight);
    Tensor of_y = grad, rows = x;
    const auto known = ksopt::weight_gradient_known(reinterpret_cast<AtenTensorHandle>(&of_y),
                                                    reinterpret_cast<AtenTensorHandle>(&rows), weight.size(0),
                                                    weight.size(3), of_bias != nullptr);
    if (known.bias != nullptr) {
      const std::unique_ptr<Tensor> owned(reinterpret_cast<Tensor*>(known.bias));
      *of_bias = *owned;
    }
    if (known.gradient != nullptr) {
      const std::unique_ptr<Tensor> owned(reinterpret_cast<Tensor*>(known.gradient));
      return *owned;
    }
    if (known.is_known) return by_torch(grad, x, weight);
    if (of_bias != nullptr) {
      static const auto both = operator_of<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, c10::SymInt,
                                                                      c10::SymInt)>(
          "ksopt::ks_mm_weight_bias_grad_inner");
      auto [of_weight, sum] = both.call(grad, x, weight.size(0), weight.size(3));
      *of_bias = sum;
      return of_weight;
    }
    static const auto op = operator_of<Tensor(const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, bool)>(
        "ksopt::ks_mm_weight_grad_inner");
    return op.call(grad, x, weight.size(0), weight.size(3), false);
  }

  // The gradients of both weights of a chain in one launch, and if of_bias is not null, that of a bias there; none
  // where each is known to be launched alone.
  std::optional<std::array<Tensor, 2>> both_weight_gradients(const Tensor& grad, const Tensor& between,
                                                             const Tensor& grad_between, const Tensor& x,
                                                             at::TensorList weights, Tensor* of_bias) const {
    if (!x.is_cuda() || form.batch_last || x.element_size() != 2 || x.numel() == 0) return std::nullopt;
    Tensor rows[] = {grad, between, grad_between, x};
    ksopt::ChainRows of{{},
                        {weights[0].size(0), weights[1].size(0)},
                        {weights[0].size(3), weights[1].size(3)},
                        of_bias != nullptr};
    for (Tensor& one : rows) of.rows.push_back(reinterpret_cast<AtenTensorHandle>(&one));
    const auto known = ksopt::chain_gradients_known(of);
    std::vector<Tensor> gradients = ksopt::taken(known.gradients);
    if (gradients.empty()) {
      if (known.is_known) return std::nullopt;
      static const auto op = operator_of<std::vector<Tensor>(at::TensorList, at::TensorList, at::TensorList,
                                                             const Tensor&, c10::SymInt, c10::SymInt, c10::SymInt,
                                                             c10::SymInt, bool)>("ksopt::ks_chain_weight_grads");
      gradients = op.call(grad, between, grad_between, x, of.a[0], of.d[0], of.a[1], of.d[1], of.with_bias);
    }
    if (of_bias != nullptr) *of_bias = gradients[2];
    return std::array{gradients[0], gradients[1]};
  }

  // The gradients of what is between two factors and of what they read, where one launch computes both; else none.
  variable_list input_gradient(const Tensor& grad, const Tensor& left, const Tensor& right) const {
    if (!left.requires_grad() && !right.requires_grad()) return {};  // their cached forms are multiplied by
    if (!grad.is_cuda() || form.batch_last || grad.element_size() != 2 || grad.numel() == 0) return {};
    Tensor rows = grad, of_left = left, of_right = right;
    const auto known = ksopt::input_gradient_known(
        {reinterpret_cast<AtenTensorHandle>(&rows)},
        {reinterpret_cast<AtenTensorHandle>(&of_left), reinterpret_cast<AtenTensorHandle>(&of_right)}, nullptr);
    if (!known.gradients.empty()) {
      const std::vector<Tensor> gradients = ksopt::taken(known.gradients);
      return {gradients[1], gradients[0]};
    }
    if (known.is_known) return {};
    static const auto op =
        operator_of<std::tuple<Tensor, Tensor>(at::TensorList, at::TensorList, const MaybeTensor&)>(
            "ksopt::ks_chain_input_grad");
    const auto [of_x, of_between] = op.call({rows}, {of_left, of_right}, std::nullopt);
    return {of_between, of_x};
  }

  Tensor by_torch(const Tensor& grad, const Tensor& x, const Tensor& weight) const {
    const ksopt::TorchWeightGradient of{weight.size(0), weight.size(1), weight.size(2), weight.size(3),
                                        form.batch_last};
    const auto as_matrix = [&](const Tensor& t) {
      return form.batch_last ? t.reshape({t.size(0), -1}) : t.reshape({-1, t.size(-1)});
    };
    return of(as_matrix(grad), as_matrix(x));
  }
};

// The same products by differentiable operators.
struct Differentiable {
  const Form& form;

  Tensor product(const Tensor& x, const Tensor& weight, const Tensor&) const {
    static const auto op =
        operator_of<Tensor(const Tensor&, const Tensor&, bool, const MaybeTensor&)>("ksopt::ks_mm");
    return op.call(x, weight, form.batch_last, std::nullopt);
  }
  Tensor weight_gradient(const Tensor& grad, const Tensor& x, const Tensor& weight, Tensor*) const {
    static const auto op = operator_of<Tensor(const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, bool)>(
        "ksopt::ks_mm_weight_grad");
    return op.call(grad, x, weight.size(0), weight.size(3), form.batch_last);
  }
  static std::optional<std::array<Tensor, 2>> both_weight_gradients(const Tensor&, const Tensor&, const Tensor&,
                                                                    const Tensor&, at::TensorList, Tensor*) {
    return std::nullopt;
  }
  variable_list input_gradient(const Tensor&, const Tensor&, const Tensor&) const { return {}; }
};

Tensor along_features(const Tensor& bias, const Form& form, int64_t dims) {
  if (!form.batch_last) return bias;
  std::vector<int64_t> shape(static_cast<size_t>(dims), 1);
  shape[0] = -1;
  return bias.view(shape);
}

// The input of each weight's factor, from x.
template <typename Products>
std::vector<Tensor> factor_inputs(const Products& products, const Tensor& x, at::TensorList weights) {
  const size_t length = weights.size() / static_cast<size_t>(products.form.siblings);
  std::vector<Tensor> inputs(weights.size());
  for (size_t at = weights.size(); at-- > 0;) {
    const bool is_first = (at + 1) % length == 0;  // the last weight of a chain meets x first
    inputs[at] = is_first ? x : products.product(inputs[at + 1], weights[at + 1], weights[at + 1]);
  }
  return inputs;
}

// The products of the siblings, side by side, from the input of each weight's factor.
template <typename Products>
Tensor multiply(const Products& products, const std::vector<Tensor>& inputs, at::TensorList weights) {
  const size_t length = weights.size() / static_cast<size_t>(products.form.siblings);
  std::vector<Tensor> parts;
  for (size_t first = 0; first < weights.size(); first += length) {
    parts.push_back(products.product(inputs[first], weights[first], weights[first]));
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts, products.form.features_dim(parts[0]));
}

// Whether a step that saves what is between the factors needs no more memory than that of a dense layer: the chain
// has fewer weights, and as much less of their gradients. As bytes_more_than_dense of
// ksopt/compile/lowering/recomputed_activations.py.
bool is_smaller_than_dense(const Form& form, const std::vector<Tensor>& inputs, at::TensorList weights) {
  const size_t length = weights.size() / static_cast<size_t>(form.siblings);
  const Tensor &left = weights[0], &right = weights[length - 1];
  const int64_t out_features = left.size(0) * left.size(1) * left.size(3);
  const int64_t in_features = right.size(0) * right.size(2) * right.size(3);
  int64_t fewer = form.siblings * out_features * in_features, between = 0;
  for (size_t at = 0; at < weights.size(); ++at) {
    fewer -= weights[at].numel();
    if ((at + 1) % length != 0) between += inputs[at].numel();
  }
  return between <= 2 * fewer;
}

Tensor through_activation(const Tensor& grad, const Tensor& before, Activation activation) {
  switch (activation) {
    case Activation::none: return grad;
    case Activation::relu: return at::threshold_backward(grad, before, 0);
    case Activation::gelu: return at::gelu_backward(grad, before, "none");
    case Activation::gelu_tanh: return at::gelu_backward(grad, before, "tanh");
    case Activation::silu: {
      if (!at::GradMode::is_enabled()) return at::silu_backward(grad, before);
      const Tensor gate = at::sigmoid(before);  // torch has no derivative of silu_backward
      const Tensor slope = at::add(at::mul(before, at::rsub(gate, 1)), 1);
      return at::mul(at::mul(grad, gate), slope);
    }
  }
  TORCH_CHECK(false, "ksopt: no such activation");
}

Tensor activated(const Tensor& before, Activation activation) {
  switch (activation) {
    case Activation::none: return before;
    case Activation::relu: return at::relu(before);
    case Activation::gelu: return at::gelu(before, "none");
    case Activation::gelu_tanh: return at::gelu(before, "tanh");
    case Activation::silu: return at::silu(before);
  }
  TORCH_CHECK(false, "ksopt: no such activation");
}

// The gradients that a backward pass needs.
struct Needed {
  bool x;
  std::vector<bool> weights;

  bool any_weight(size_t first, size_t last) const {
    return std::find(weights.begin() + static_cast<int64_t>(first), weights.begin() + static_cast<int64_t>(last),
                     true) != weights.begin() + static_cast<int64_t>(last);
  }
  bool all_weights() const { return std::find(weights.begin(), weights.end(), false) == weights.end(); }
};

// The gradients of x and of the weights, from that of the products; if of_bias is not null, and one kernel computes
// both, that of a bias added to them goes there. inputs: of the factors whose weights need gradients.
template <typename Products>
variable_list gradients(const Products& products, Tensor grad, at::TensorList weights, const std::vector<Tensor>& inputs,
                        const Needed& needed, Tensor* of_bias) {
  const Form& form = products.form;
  const size_t length = weights.size() / static_cast<size_t>(form.siblings);
  const int64_t dim = form.features_dim(grad), features = grad.size(dim) / form.siblings;
  variable_list input_grads(weights.size() + 1);
  const auto through = [&](const Tensor& part, size_t at) {
    return products.product(part, weights[at].transpose(1, 2), weights[at]);
  };
  for (int64_t sibling = form.siblings; sibling-- > 0;) {  // in the order of autograd's own sum
    const size_t first = static_cast<size_t>(sibling) * length, last = first + length;
    if (!needed.x && !needed.any_weight(first, last)) continue;
    Tensor part = form.siblings == 1 ? grad : grad.narrow(dim, sibling * features, features);
    part = part.contiguous();
    variable_list ahead;  // of what is behind each factor, where all are computed at once
    if (needed.x && length == 2) ahead = products.input_gradient(part, weights[first], weights[first + 1]);
    if (length == 2 && form.siblings == 1 && needed.all_weights()) {
      const Tensor between = ahead.empty() ? through(part, 0) : ahead[0];
      const auto both = products.both_weight_gradients(part, inputs[0], between, inputs[1], weights, of_bias);
      input_grads[1] = both ? (*both)[0] : products.weight_gradient(part, inputs[0], weights[0], of_bias);
      input_grads[2] = both ? (*both)[1] : products.weight_gradient(between, inputs[1], weights[1], nullptr);
      if (needed.x) input_grads[0] = ahead.empty() ? through(between, 1) : ahead[1];
      break;
    }
    for (size_t at = first; at < last; ++at) {
      Tensor* const beside = at == 0 && form.siblings == 1 ? of_bias : nullptr;
      if (needed.weights[at]) input_grads[at + 1] = products.weight_gradient(part, inputs[at], weights[at], beside);
      if (!ahead.empty()) {
        part = ahead[at - first];
      } else if (needed.x || needed.any_weight(at + 1, last)) {
        part = through(part, at);
      }
    }
    if (needed.x) input_grads[0] = input_grads[0].defined() ? at::add(input_grads[0], part) : part;
  }
  return input_grads;
}

// Differentiable where gradients are recorded.
Tensor in_dtype(const Tensor& one, at::ScalarType dtype) {
  return !one.defined() || one.scalar_type() == dtype ? one : one.to(dtype);
}

// The operand in the dtype to compute in.
Tensor cast(const Tensor& operand, const Form& form) { return in_dtype(operand, form.scalar_type()); }

MaybeTensor cast(const MaybeTensor& operand, const Form& form) {
  return operand ? MaybeTensor(cast(*operand, form)) : std::nullopt;
}

// Marks copies of trained weights as trained, or not: what a trained one is prepared to is not cached. A copy that is
// saved with the mark would get a node of autograd's.
void mark(const std::vector<Tensor>& copies, at::TensorList weights, bool trained) {
  for (size_t at = 0; at < weights.size(); ++at) {
    if (copies[at].defined() && !copies[at].is_same(weights[at]) && weights[at].requires_grad()) {
      copies[at].set_requires_grad(trained);
    }
  }
}

// Saves x, the weights, the inputs of factors whose weights are trained, what is activated with its bias, and weights
// that were cast.
struct TrainedLayer : torch::autograd::Function<TrainedLayer> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, at::TensorList as_stored, const MaybeTensor& stored_bias,
                        const MaybeTensor& stored_residual, int64_t activation, bool batch_last, int64_t siblings,
                        bool exact, bool repacked) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Form form{static_cast<Activation>(activation), batch_last, siblings, exact, repacked,
                    static_cast<int64_t>(x.scalar_type())};
    std::vector<Tensor> weights;
    for (const Tensor& weight : as_stored) weights.push_back(cast(weight, form));
    mark(weights, as_stored, true);
    const MaybeTensor bias = cast(stored_bias, form), residual = cast(stored_residual, form);
    std::vector<Tensor> inputs = factor_inputs(Known{form}, x, weights);
    Tensor y = multiply(Known{form}, inputs, weights);
    const size_t length = weights.size() / static_cast<size_t>(siblings);
    const bool is_smaller = is_smaller_than_dense(form, inputs, weights);
    bool is_any_trained = false;
    for (size_t at = 0; at < inputs.size(); ++at) {
      const bool is_first = (at + 1) % length == 0, is_trained = weights[at].requires_grad();
      is_any_trained |= is_trained;
      // Otherwise the backward pass multiplies again.
      if (is_first || !is_trained || !is_smaller) inputs[at] = Tensor();
    }
    if (bias) y.add_(along_features(*bias, form, y.dim()));
    const bool is_activated = form.activation != Activation::none;
    mark(weights, as_stored, false);
    variable_list saved(as_stored.begin(), as_stored.end());
    saved.insert(saved.end(), inputs.begin(), inputs.end());
    saved.push_back(is_any_trained || is_activated ? x : Tensor());
    saved.push_back(is_activated ? y : Tensor());
    saved.push_back(is_activated && bias ? *stored_bias : Tensor());
    for (size_t at = 0; at < weights.size(); ++at) {
      saved.push_back(weights[at].is_same(as_stored[at]) ? Tensor() : weights[at]);
    }
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["form"] = std::vector<int64_t>{activation, batch_last, siblings, exact, repacked, form.dtype};
    const auto dtype_of = [](const MaybeTensor& one) { return one ? static_cast<int64_t>(one->scalar_type()) : -1; };
    ctx->saved_data["summands"] = std::vector<int64_t>{dtype_of(stored_bias), dtype_of(stored_residual)};
    y = activated(y, form.activation);
    if (residual) y = is_activated ? y.add_(*residual) : y.add(*residual);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto numbers = ctx->saved_data["form"].toIntVector();
    const Form form{static_cast<Activation>(numbers[0]), numbers[1] != 0, numbers[2], numbers[3] != 0, numbers[4] != 0,
                    numbers[5]};
    const auto summands = ctx->saved_data["summands"].toIntVector();
    const variable_list saved = ctx->get_saved_variables();
    const size_t count = (saved.size() - 3) / 3;
    const at::TensorList as_stored(saved.data(), count);
    const Tensor &x = saved[2 * count], &before_activation = saved[2 * count + 1], &bias = saved[2 * count + 2];
    const Tensor& grad = grads[0];
    std::vector<Tensor> weights(as_stored.begin(), as_stored.end());
    Needed needed{ctx->needs_input_grad(0), std::vector<bool>(count)};
    for (size_t at = 0; at < count; ++at) needed.weights[at] = ctx->needs_input_grad(at + 1);
    const bool is_bias_trained = summands[0] >= 0 && ctx->needs_input_grad(count + 1);
    variable_list input_grads;
    Tensor of_sum = grad, of_bias;
    if (at::GradMode::is_enabled()) {
      const Differentiable products{form};
      for (Tensor& weight : weights) weight = cast(weight, form);
      std::vector<Tensor> inputs(count);
      if (x.defined()) inputs = factor_inputs(products, x, weights);  // saved ones are cut off from x
      if (form.activation != Activation::none) {
        Tensor before = multiply(products, inputs, weights);
        if (bias.defined()) before = at::add(before, along_features(cast(bias, form), form, before.dim()));
        of_sum = through_activation(grad, before, form.activation);
      }
      input_grads = gradients(products, of_sum, weights, inputs, needed, nullptr);
    } else {
      const at::AutoDispatchBelowADInplaceOrView below;
      for (size_t at = 0; at < count; ++at) {
        if (saved[2 * count + 3 + at].defined()) weights[at] = saved[2 * count + 3 + at];
      }
      mark(weights, as_stored, true);
      const size_t length = count / static_cast<size_t>(form.siblings);
      std::vector<Tensor> inputs(count);
      bool is_any_missing = false;
      for (size_t at = 0; at < count; ++at) {
        inputs[at] = (at + 1) % length == 0 ? x : saved[count + at];
        is_any_missing |= needed.weights[at] && !inputs[at].defined();
      }
      if (is_any_missing) inputs = factor_inputs(Known{form}, x, weights);
      of_sum = through_activation(grad, before_activation, form.activation);
      input_grads = gradients(Known{form}, of_sum, weights, inputs, needed, is_bias_trained ? &of_bias : nullptr);
    }
    if (is_bias_trained && !of_bias.defined()) {
      const int64_t dim = form.features_dim(of_sum);
      of_bias = of_sum.movedim(dim, -1).reshape({-1, of_sum.size(dim)}).sum(0);
    }
    for (size_t at = 0; at < count; ++at) {
      input_grads[at + 1] = in_dtype(input_grads[at + 1], as_stored[at].scalar_type());
    }
    input_grads.push_back(summands[0] >= 0 ? in_dtype(of_bias, static_cast<at::ScalarType>(summands[0])) : of_bias);
    input_grads.push_back(summands[1] >= 0 ? in_dtype(grad, static_cast<at::ScalarType>(summands[1])) : Tensor());
    input_grads.resize(input_grads.size() + 5);  // numbers have none
    return input_grads;
  }
};

bool is_plain(const Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_neg() && !tensor.is_conj();
}

// Whether the operands fit together; the checks that refuse others report why.
bool fits(const Tensor& x, at::TensorList weights, const MaybeTensor& bias, const MaybeTensor& residual,
          bool batch_last, int64_t siblings, bool casts) {
  const auto is_like_x = [&](const Tensor& t) {
    const bool is_cast = casts && at::isFloatingType(t.scalar_type()) && t.scalar_type() != at::kDouble;
    return is_plain(t) && (is_cast || t.scalar_type() == x.scalar_type()) && t.device() == x.device();
  };
  if (!is_plain(x) || x.dim() == 0 || x.numel() == 0 || siblings < 1 || weights.empty() ||
      weights.size() % static_cast<size_t>(siblings) != 0) {
    return false;
  }
  const size_t length = weights.size() / static_cast<size_t>(siblings);
  const int64_t dim = batch_last ? 0 : x.dim() - 1;
  int64_t features = 0;
  for (size_t at = weights.size(); at-- > 0;) {
    const Tensor& weight = weights[at];
    if (weight.dim() != 4 || !is_like_x(weight) || weight.sizes() != weights[at % length].sizes()) return false;
    if ((at + 1) % length == 0) features = x.size(dim);
    if (features != weight.size(0) * weight.size(2) * weight.size(3)) return false;
    features = weight.size(0) * weight.size(1) * weight.size(3);
  }
  if (bias && (!is_like_x(*bias) || bias->dim() != 1 || bias->size(0) != siblings * features)) return false;
  if (!residual) return true;
  auto shape = x.sizes().vec();
  shape[static_cast<size_t>(dim)] = siblings * features;
  return is_like_x(*residual) && residual->sizes() == at::IntArrayRef(shape);
}

// casts: autocast casts operands to x's dtype.
MaybeTensor run_trained(const Tensor& x, at::TensorList weights, const MaybeTensor& bias, const MaybeTensor& residual,
                        int64_t activation, bool batch_last, int64_t siblings, bool exact, bool repacked, bool casts) {
  if (activation < 0 || activation > 4 || !fits(x, weights, bias, residual, batch_last, siblings, casts)) {
    return std::nullopt;
  }
  const bool is_frozen = std::none_of(weights.begin(), weights.end(), [](const Tensor& t) { return t.requires_grad(); });
  const auto apply = [&](int64_t its_activation, const MaybeTensor& its_residual) {
    return TrainedLayer::apply(x, weights, bias, its_residual, its_activation, batch_last, siblings, exact, repacked);
  };
  if (!is_frozen || activation == 0) return apply(activation, residual);
  // Autograd's own activation saves its input alone, also for gradients of gradients.
  const Tensor y = activated(apply(0, std::nullopt), static_cast<Activation>(activation));
  return residual ? at::add(y, in_dtype(*residual, y.scalar_type())) : y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ksopt_host, m) {
  m.def(
      "run_trained(Tensor x, Tensor[] weights, Tensor? bias, Tensor? residual, int activation, bool batch_last, "
      "int siblings, bool exact, bool repacked, bool casts) -> Tensor?");
}

TORCH_LIBRARY_IMPL(ksopt_host, CompositeImplicitAutograd, m) { m.impl("run_trained", TORCH_FN(run_trained)); }
