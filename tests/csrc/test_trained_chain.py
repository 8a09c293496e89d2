"""Trained chains by the host library, on a CPU that plays a CUDA device of compute capability 9.0.

What the library launches is compared with what Python launches itself, argument by argument: only
the compiler and the driver are played.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from played_driver import PACK_TRAINED, TRAINED, trained, variable

from ksopt.errors import InvalidInputError
from ksopt.jit import arch, driver, nvrtc
from ksopt.kernels import (
    gradient_autotuner,
    input_gradients,
    plan_autotuner,
    trained_chain,
    weight_cache,
)
from ksopt.kernels.families.common import chain_launcher, input_grad_tile, weight_packer
from ksopt.kernels.problem import DeviceSpec
from ksopt.ops.trained_chain import ks_chain_keeping
from ksopt.patterns.chain import Chain

LEFT, RIGHT = Chain.parse("(1,192,64,2)*(2,64,192,1)")
FEATURES = RIGHT.in_features
SPEC = DeviceSpec((9, 0), 132, 228 * 1024)
MANY, FEW = 20_000, 600  # blocks with rows of their own; clusters that share them
both = pytest.mark.parametrize("activation", ["none", "gelu"])
"""Without an activation and with one."""


class Device:
    """A device on which the planner takes one launch for the chain, and what Python launches."""

    def __init__(self, library, monkeypatch, activation):
        self.library, self.launches, self.activation = library, [], activation
        monkeypatch.setenv("KSOPT_TUNE", "model")
        backend = SimpleNamespace(spec=lambda _: SPEC)
        monkeypatch.setattr(plan_autotuner, "backend_of", lambda _: backend)
        monkeypatch.setattr(gradient_autotuner, "spec_of", lambda _: SPEC)
        monkeypatch.setattr(input_gradients, "factors_us", lambda *_: 1e9)
        monkeypatch.setattr(DeviceSpec, "of_device", lambda _: SPEC)
        monkeypatch.setattr(arch, "of_device", lambda _: "sm_90a")
        monkeypatch.setattr(nvrtc, "cubin", lambda *_: SimpleNamespace(data=b""))
        monkeypatch.setattr(driver, "load_kernel", self._load_kernel)
        monkeypatch.setattr(driver, "launch", self._launch)
        self.left, self.right = (torch.randn(p.weight_shape).bfloat16() for p in (LEFT, RIGHT))
        self.bias = torch.randn(LEFT.out_features).bfloat16()
        self.others = []  # weights of siblings
        self.packed = 0  # elements for the gradient of x

    def have_siblings(self, count):
        """So many chains from here on, with other memory for each."""
        self.others = [one.clone() for _ in range(count - 1) for one in (self.left, self.right)]
        self.bias = torch.randn(count * LEFT.out_features).bfloat16()

    @staticmethod
    def _load_kernel(cubin, name, shared_bytes, device):
        return PACK_TRAINED if "pack" in name else TRAINED

    def _launch(self, kernel, blocks, threads, shared_bytes, arguments, device, early=False):
        self.launches.append((kernel, (blocks, threads, shared_bytes), arguments))

    def call(self, x):
        """y, what is between the factors, and whether Python launched it."""
        before = len(self.launches)
        weights = [self.left, self.right, *self.others]
        siblings = len(weights) // 2
        y, between, self.of_grad = ks_chain_keeping(
            x, weights, self.bias, siblings, self.activation, self.packed
        )
        assert self.of_grad.shape == (self.packed,)
        assert y.shape == (*x.shape[:-1], siblings * LEFT.out_features)
        planes = (siblings,) if siblings > 1 else ()
        assert between.shape == (*planes, *x.shape[:-1], RIGHT.out_features)
        assert y.dtype == between.dtype == x.dtype
        assert y.is_contiguous()
        assert between.is_contiguous()
        return y, between, len(self.launches) > before

    def is_by_python(self, x):
        return self.call(x)[2]


@pytest.fixture
def activation():
    return "none"


@pytest.fixture
def device(serving, monkeypatch, activation):
    caches = (trained_chain._loaded, gradient_autotuner.loaded, input_gradients.faster)
    for cache in caches:
        cache.cache_clear()
    yield Device(serving, monkeypatch, activation)
    for cache in caches:
        cache.cache_clear()


def rows(*batch):
    return torch.zeros(*batch, FEATURES, dtype=torch.bfloat16)


def values_of(arguments):
    """What a kernel is launched with, by name."""
    if isinstance(arguments, ctypes.Structure):
        return {name: values_of(getattr(arguments, name)) for name, *_ in arguments._fields_}
    if isinstance(arguments, ctypes.Array):
        return [values_of(one) for one in arguments]
    return arguments


def in_another_order(weight):
    return weight.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)


def part_of_wider_rows(x):
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 8, dtype=x.dtype)
    return wide[..., 8:]


def elements_of_grad(rows, siblings=1):
    """Elements of the weights as the kernel of the gradient of x reads them."""
    shape = input_grad_tile.Shape(LEFT, RIGHT, siblings)
    tile = input_gradients.tile_of(shape, torch.bfloat16, rows, torch.device("cpu"))
    return tile.packed_elements(shape)


@both
@pytest.mark.parametrize(("has_bias", "is_of_grad"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("batch", [(MANY,), (4, 5000), (FEW,), (3, 1, 200)], ids=str)
def test_it_launches_what_python_launches(device, batch, has_bias, is_of_grad):
    if not has_bias:
        device.bias = None
    if is_of_grad:
        device.packed = elements_of_grad(rows(*batch)[..., 0].numel())
    for x in (rows(*batch), part_of_wider_rows(rows(*batch))):
        device.left, device.right = map(in_another_order, (device.left, device.right))
        plan_autotuner.forget()
        before = variable(device.library, "launches").value
        python_y, python_between, is_by_python = device.call(x)
        python_of_grad = device.of_grad
        assert is_by_python
        (pack, pack_grid, packing), (chain, chain_grid, multiplying) = device.launches[-2:]
        assert (pack, chain) == (PACK_TRAINED, TRAINED)
        assert (chain_grid[0] > -(-x[..., 0].numel() // 64)) == (batch not in ((MANY,), (4, 5000)))
        assert variable(device.library, "launches").value == before

        y, between, is_by_python = device.call(x)
        assert not is_by_python
        assert variable(device.library, "launches").value == before + 2
        seen_pack, seen_chain = trained(device.library)
        assert seen_chain.number == seen_pack.number + 1
        assert seen_pack.grid == pack_grid
        assert seen_chain.grid == chain_grid
        # Both may start before the kernel ahead has ended: they wait for it by themselves.
        assert (seen_pack.attributes, seen_chain.attributes) == (1, 1)

        # All that is allocated again lies elsewhere; all else is the same.
        actual = chain_launcher.Arguments.from_buffer_copy(seen_chain.arguments)
        assert (multiplying.y, multiplying.z) == (python_y.data_ptr(), python_between.data_ptr())
        assert (actual.y, actual.z) == (y.data_ptr(), between.data_ptr())
        assert packing.packed == multiplying.weights
        packing.packed, multiplying.weights = actual.weights, actual.weights
        if is_of_grad:
            assert packing.packed_of_grad == python_of_grad.data_ptr()
            packing.packed_of_grad = device.of_grad.data_ptr()
        multiplying.y, multiplying.z = actual.y, actual.z
        packed = weight_packer.Arguments.from_buffer_copy(seen_pack.arguments)
        assert values_of(packed) == values_of(packing)
        assert values_of(actual) == values_of(multiplying)


@pytest.mark.parametrize("is_of_grad", [False, True])
def test_siblings_are_one_launch(device, is_of_grad):
    x = part_of_wider_rows(rows(MANY))
    device.have_siblings(3)
    device.packed = elements_of_grad(MANY, 3) if is_of_grad else 0
    assert device.is_by_python(x)
    assert len(device.launches) == 2
    (pack, pack_grid, packing), (chain, chain_grid, multiplying) = device.launches
    assert (pack, chain) == (PACK_TRAINED, TRAINED)
    y, between, is_by_python = device.call(x)
    assert not is_by_python
    seen_pack, seen_chain = trained(device.library)
    assert (seen_pack.grid, seen_chain.grid) == (pack_grid, chain_grid)
    packed = weight_packer.Arguments.from_buffer_copy(seen_pack.arguments)
    actual = chain_launcher.Arguments.from_buffer_copy(seen_chain.arguments)
    weights = [device.left, device.right, *device.others]
    for sibling, (left, right) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
        assert packed.weights[sibling][:2] == [right.data_ptr(), left.data_ptr()]
    assert (actual.y, actual.z, actual.y_stride) == (y.data_ptr(), between.data_ptr(), y.shape[-1])
    assert packed.packed == actual.weights
    packing.packed, multiplying.weights = actual.weights, actual.weights
    if is_of_grad:
        packing.packed_of_grad = device.of_grad.data_ptr()
    multiplying.y, multiplying.z = actual.y, actual.z
    assert values_of(packed) == values_of(packing)
    assert values_of(actual) == values_of(multiplying)
    for count in (2, 1):  # which is known of others
        device.have_siblings(count)
        device.packed = 0
        assert device.is_by_python(x)
        assert not device.is_by_python(x)


def test_the_arguments_are_the_operands(device):
    """In words, beside the comparison with Python."""
    device.right = in_another_order(device.right)
    x = part_of_wider_rows(rows(MANY))
    device.call(x)
    y, between, _ = device.call(x)
    seen_pack, seen_chain = trained(device.library)
    packing = weight_packer.Arguments.from_buffer_copy(seen_pack.arguments)
    for place, weight in enumerate((device.right, device.left)):
        assert packing.weights[0][place] == weight.data_ptr()
        assert tuple(packing.strides[0][place]) == weight.stride()
    assert not any(packing.weights[0][2:])  # no more factors
    assert not any(any(sibling) for sibling in packing.weights[1:])
    assert packing.packed_of_grad is None
    actual = chain_launcher.Arguments.from_buffer_copy(seen_chain.arguments)
    assert (actual.x, actual.bias, actual.residual) == (x.data_ptr(), device.bias.data_ptr(), None)
    assert (actual.y, actual.z) == (y.data_ptr(), between.data_ptr())
    assert actual.weights == packing.packed
    assert (actual.batch, actual.x_stride, actual.y_stride) == (MANY, FEATURES + 8, y.shape[-1])
    assert actual.rows_per_block == 3 * 64  # of 313 units, for 132 multiprocessors
    assert seen_chain.blocks == 105


def test_what_is_packed_for_the_gradient_is_known_of_such_calls(device):
    x = rows(MANY)
    device.call(x)
    device.packed = elements_of_grad(MANY)
    assert device.is_by_python(x)
    assert not device.is_by_python(x)
    device.packed = 0
    assert not device.is_by_python(x)


@both
def test_another_number_of_elements_is_pythons(device):
    """As many are returned: a compiled graph relies on that, and its backward pass packs again."""
    device.packed = elements_of_grad(MANY) + 8
    for _ in range(2):
        assert device.is_by_python(rows(MANY))


def test_each_activation_is_known_by_itself(device):
    activations = ("gelu", "none", "gelu_tanh")
    for device.activation in activations:
        assert device.is_by_python(rows(MANY))
        assert not device.is_by_python(rows(MANY))
    for device.activation in activations:
        assert not device.is_by_python(rows(MANY))
    for device.activation in ("silu_gate", "tanh"):  # which are none
        with pytest.raises(InvalidInputError, match=device.activation):
            device.call(rows(MANY))


@both
def test_a_known_chain_enters_no_python(device, monkeypatch):
    x = rows(MANY)
    device.call(x)

    def refuse(*_):
        raise AssertionError("Python was entered")

    monkeypatch.setattr(trained_chain, "run", refuse)
    for _ in range(3):
        device.left, device.right = device.left * 2, device.right + 1
        device.call(x)


def test_other_numbers_of_rows(device):
    """Known are those up to the same power of two: they have one choice."""
    assert device.is_by_python(rows(MANY))
    for more in (16_385, 32_768):
        assert not device.is_by_python(rows(more))
        actual = chain_launcher.Arguments.from_buffer_copy(trained(device.library)[1].arguments)
        assert actual.batch == more
    for other in (16_384, 32_769):
        assert device.is_by_python(rows(other))
        assert not device.is_by_python(rows(other))


@both
def test_operands_that_the_kernel_cannot_read_are_pythons(device):
    """Which copies them first, and launches."""
    x = rows(MANY)
    device.call(x)
    odd = rows(MANY + 1).flatten()[1 : MANY * FEATURES + 1].view(MANY, FEATURES)
    for _ in range(2):
        assert device.is_by_python(odd)
    assert device.is_by_python(rows(2 * MANY)[:MANY].t().contiguous().t())
    assert device.is_by_python(rows(MANY // 100, 100).transpose(0, 1))
    bias, width = device.bias, len(device.bias)
    device.bias = torch.zeros(width + 1, dtype=bias.dtype)[1:]
    assert device.is_by_python(x)
    device.bias = torch.zeros(2 * width, dtype=bias.dtype)[::2]
    assert device.is_by_python(x)
    device.bias = bias
    assert not device.is_by_python(x)


def test_what_is_known_is_of_such_operands(device):
    x = rows(MANY)
    device.call(x)
    bias, device.bias = device.bias, None
    assert device.is_by_python(x)
    device.bias = bias
    launches = variable(device.library, "launches").value
    assert device.is_by_python(x.half())  # which does not ask what the others are
    for name in ("left", "right", "bias"):
        operand = getattr(device, name)
        setattr(device, name, operand.half())
        assert device.is_by_python(x)
        setattr(device, name, operand)
    device.bias = bias[:-8].contiguous()
    assert device.is_by_python(x)
    assert variable(device.library, "launches").value == launches


@both
def test_a_weight_with_cached_forms_is_dropped_by_python(device):
    x = rows(MANY)
    device.call(x)
    for weight in (device.left, device.right):
        assert not device.is_by_python(x)
        cached = weight_cache.prepared(weight, "doubled", lambda one: 2 * one)
        assert device.is_by_python(x)
        assert weight_cache.prepared(weight, "doubled", lambda one: 2 * one) is not cached
        assert device.is_by_python(x)
    before = weight_cache.forgotten()
    assert not device.is_by_python(x)
    assert weight_cache.forgotten() > before


@both
def test_it_is_forgotten_with_the_plans(device):
    x = rows(MANY)
    device.call(x)
    assert not device.is_by_python(x)
    plan_autotuner.forget()
    assert device.is_by_python(x)
    assert not device.is_by_python(x)


@both
def test_deterministic_algorithms_are_chosen_by_python(device, deterministic):
    x = rows(MANY)
    device.call(x)
    with deterministic():
        assert device.is_by_python(x)
        assert device.is_by_python(x)
    assert not device.is_by_python(x)
