"""`KSLinear`, a drop-in for `torch.nn.Linear` whose matrix is a Kronecker-sparse chain, and
`KSStacked`, several of them on one input."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ksopt import ops
from ksopt.epilogue import check_activation
from ksopt.errors import InvalidInputError
from ksopt.functional import ks_linear
from ksopt.kernels.validation import DTYPES
from ksopt.nn import init
from ksopt.patterns.chain import Chain
from ksopt.patterns.chain_texts import chain_of
from ksopt.precision import dtype_name
from ksopt.projection import project
from ksopt.reference import chain_to_dense, is_batch_last


class KSLinear(nn.Module):
    r"""y = act(x (K_1 K_2 ... K_L)ᵀ + bias).

    Args:
        in_features: size of each input.
        out_features: size of each output.
        chain: the patterns of the factors, their text (``"(1,768,192,2)*(2,192,192,1)"``), or the
            name of a family, such as ``"monarch"``: see `ksopt.patterns.chain_texts.chain_of`.
        bias: whether to add a learnable bias.
        layout: "batch_first" for x [*batch, in_features], "batch_last" for [in_features, *batch].
        device: where the parameters are.
        dtype: of the parameters: float32, float16, bfloat16 or float64.
        activation: applied to the result: "relu", "gelu" (by erf), "gelu_tanh", "silu", or None.

    Attributes:
        weights: the factors' nonzero entries, left to right: ``weights[l]`` is [a, b, c, d] of
            K_{l+1}. In a state_dict they are ``weights.0``, ``weights.1``, ...
        bias: [out_features], or None.
        chain: the chain.
        in_features, out_features, layout, activation: as passed.

    Shape:
        x: [*batch, in_features] -> y: [*batch, out_features], or, in the layout batch_last,
        [in_features, *batch] -> [out_features, *batch].

    Initialisation. `torch.nn.Linear` draws its N*M weights and its bias from U(-1/√N, 1/√N), so
    that inputs of mean square σ² have outputs of variance N σ² · 1/(3N) = σ²/3, and the bias adds
    1/(3N). Here `ksopt.nn.init.chain_uniform_` with a gain of sqrt(1/3) does the same for chains ::

        weights[l] ~ U(-β_l, β_l),   β_l = sqrt(3^(1 - 1/L) / c_l),   v_l = β_l²/3 = 3^(-1/L) / c_l

    each factor multiplies the mean square by 3^(-1/L), and the chain by 1/3, whatever its patterns.
    For one factor (1, M, N, 1) this is nn.Linear's own rule. The bias is U(-1/√N, 1/√N), as there.

    Raises:
        InvalidInputError: there is no chain, its features do not match, or the layout or the
            activation is unknown.

    Source: the paper, section 1; the patterns of `ksopt.patterns.chain.Chain`.

    Example:
        >>> layer = KSLinear(384, 1536, "(1,768,192,2)*(2,192,192,1)")
        >>> layer(torch.randn(8, 384)).shape
        torch.Size([8, 1536])
    """

    in_features: int
    out_features: int
    chain: Chain
    layout: str
    activation: str | None
    weights: nn.ParameterList
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        chain: Chain | str | None = None,
        bias: bool = True,
        layout: str = "batch_first",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        activation: str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(chain, str):
            chain = chain_of(chain, in_features, out_features)
        if not isinstance(chain, Chain):
            raise InvalidInputError(
                f"KSLinear({in_features}, {out_features}): chain is {chain!r}: give a Chain, its "
                f'text, or a name such as "monarch"; ksopt search {in_features}x{out_features} '
                "finds a fast one"
            )
        if chain.shape != (out_features, in_features):
            raise InvalidInputError(
                f"KSLinear: the chain {chain} has in_features={chain.in_features} and "
                f"out_features={chain.out_features}, but the layer is asked for "
                f"in_features={in_features} and out_features={out_features}"
            )
        is_batch_last(layout)
        if activation is not None:
            check_activation(activation)
        kind = torch.get_default_dtype() if dtype is None else dtype
        if kind not in DTYPES:
            allowed = ", ".join(dtype_name(one) for one in DTYPES)
            raise InvalidInputError(
                f"KSLinear: dtype is {str(kind).removeprefix('torch.')}, but it must be one of "
                f"{allowed}"
            )
        self.in_features = in_features
        self.out_features = out_features
        self.chain = chain
        self.layout = layout
        self.activation = activation
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(pattern.weight_shape, device=device, dtype=dtype))
            for pattern in chain
        )
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self._names = tuple(map(str, range(len(self.chain))))  # of the weights in their list
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again (see the class for the distribution)."""
        init.chain_uniform_(self.weights, init.LINEAR_GAIN)
        if self.bias is not None:
            init.bias_uniform_(self.bias, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """[*batch, in_features] -> [*batch, out_features] (features first in batch_last)."""
        return ks_linear(x, self._factors(), self.bias, self.layout, activation=self.activation)

    def _factors(self) -> list[Tensor]:
        """``list(self.weights)``, in a fifth of the time where they are plain parameters."""
        if not torch.compiler.is_compiling():
            try:
                weights: Any = self._modules["weights"]
                return [weights._parameters[name] for name in self._names]
            except KeyError:  # parametrized, pruned or sharded: they are found elsewhere
                pass
        return list(self.weights)

    def to_dense(self) -> Tensor:
        """The matrix K_1 K_2 ... K_L: [out_features, in_features], as nn.Linear's weight."""
        return chain_to_dense(list(self.weights))

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        chain: Chain | str,
        layout: str = "batch_first",
        tolerance: float | None = None,
    ) -> KSLinear:
        """A layer that computes the same as ``linear``, whose weight is a product of ``chain``.

        Args:
            linear: a dense layer; its bias, dtype, device, requires_grad and training mode are
                preserved.
            chain: a chain of the layer's features.
            layout: of the new layer.
            tolerance: the largest ||W - K_1 ... K_L|| / ||W|| (Frobenius norm) that counts as the
                same. Default: 4 (L + 1) times the dtype's rounding (``torch.finfo(dtype).eps``),
                which is what storing W and L factors in that dtype can cost, plus 1e-13 for the
                computation in float64.

        Raises:
            InvalidInputError: the features differ, or the weight is not a product of the chain as
                far as `ksopt.project` can tell; the message has the relative error.

        Source: Le, Zheng, Riccietti, Gribonval 2024 (arXiv 2411.04506).

        Example:
            >>> linear = nn.Linear(6, 4, bias=False)
            >>> _ = linear.weight.data.copy_(torch.outer(torch.arange(4.0), torch.ones(6)))
            >>> KSLinear.from_linear(linear, "(1,4,1,1)*(1,1,6,1)").chain.nnz
            10
        """
        weight = linear.weight.detach()
        if weight.is_meta:
            raise InvalidInputError(
                "from_linear: the layer is on the meta device, so there are no values to factorize"
            )
        layer = cls(
            linear.in_features,
            linear.out_features,
            chain,
            bias=linear.bias is not None,
            layout=layout,
            device=weight.device,
            dtype=weight.dtype,
        )
        with torch.no_grad():
            projection = project(weight, layer.chain)
            for own, projected in zip(layer.weights, projection.weights, strict=True):
                own.copy_(projected)
            if layer.bias is not None:
                layer.bias.copy_(linear.bias)
        error = projection.relative_error
        if tolerance is None:
            tolerance = 4 * (len(layer.chain) + 1) * torch.finfo(weight.dtype).eps + 1e-13
        if not error <= tolerance:
            raise InvalidInputError(
                f"from_linear: the weight is not a product of the chain {layer.chain}: the nearest "
                f"one found has relative error {error:.3g}, more than the tolerance {tolerance:.3g}"
            )
        for own in layer.weights:
            own.requires_grad_(linear.weight.requires_grad)
        if layer.bias is not None:
            layer.bias.requires_grad_(linear.bias.requires_grad)
        return layer.train(linear.training)

    def extra_repr(self) -> str:
        """The text between the parentheses of the module's repr."""
        activation = "" if self.activation is None else f", activation={self.activation}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"chain={self.chain}, bias={self.bias is not None}, layout={self.layout}{activation}"
        )


class KSStacked(nn.Module):
    """Layers on one input, outputs concatenated: a fused q, k, v with one chain for each.

    Parts of one chain are one operator's work: one launch, where that is the fastest.

    Args:
        parts: one layer or more, of equal in_features, batch_first.

    Attributes:
        parts: the layers; ``parts[0]`` computes the first outputs.
        in_features: size of each input.
        out_features: size of each output, the sum of the parts'.

    Shape:
        x: [*batch, in_features] -> y: [*batch, out_features].

    Raises:
        InvalidInputError: no parts, or they differ in in_features, or one is batch_last.

    Example:
        >>> q, k, v = (KSLinear(8, 8, "(1,4,2,2)*(2,2,4,1)") for _ in range(3))
        >>> KSStacked([q, k, v])(torch.randn(5, 8)).shape
        torch.Size([5, 24])
    """

    def __init__(self, parts: Iterable[KSLinear]) -> None:
        super().__init__()
        layers = list(parts)
        inputs = {layer.in_features for layer in layers}
        if len(inputs) != 1 or any(layer.layout != "batch_first" for layer in layers):
            raise InvalidInputError(
                "KSStacked: give one layer or more, all batch_first and with the same in_features; "
                f"got {len(layers)} with in_features {sorted(inputs)}"
            )
        self.parts = nn.ModuleList(layers)
        (self.in_features,) = inputs
        self.out_features = sum(layer.out_features for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        """[*batch, in_features] -> [*batch, out_features]."""
        # In a graph the backend decides which layers of one input share a launch.
        if torch.compiler.is_compiling() or not self._are_siblings():
            return torch.cat([part(x) for part in self.parts], dim=-1)
        first, *others = parts = [cast(KSLinear, part) for part in self.parts]
        biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
        bias = torch.cat(biases) if biases and others else first.bias
        return ops.chain(
            x, [weight for part in parts for weight in part._factors()], bias,
            activation=first.activation or "none", siblings=len(parts), op="KSStacked",
        )  # fmt: skip

    def _are_siblings(self) -> bool:
        """Whether the parts are plain layers with one chain, which one operator computes."""
        first = self.parts[0]
        return not _has_any_global_hook() and all(
            type(part) is KSLinear
            and not (part._forward_hooks or part._forward_pre_hooks)
            and not (part._backward_hooks or part._backward_pre_hooks)
            and "forward" not in part.__dict__
            and part.chain == first.chain
            and part.activation == first.activation
            and (part.bias is None) == (first.bias is None)
            for part in self.parts
        )

    def to_dense(self) -> Tensor:
        """The matrix of all parts: [out_features, in_features]."""
        return torch.cat([part.to_dense() for part in self.parts])  # type: ignore[operator]
