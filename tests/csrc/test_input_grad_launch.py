"""Input gradients of trained chains by the host library, on a CPU that plays a CUDA device.

What the library launches is compared with what Python launches itself, argument by argument: only
the compiler and the driver are played.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from played_driver import INPUT_GRAD, PACK_INPUT_GRAD, trained, variable

from ksopt.jit import arch, driver, nvrtc
from ksopt.kernels import gradient_autotuner, input_gradients, weight_cache
from ksopt.kernels.families import input_grad_wgmma16 as kernels
from ksopt.kernels.families.common import input_grad_tile, weight_packer
from ksopt.kernels.problem import DeviceSpec
from ksopt.ops.input_gradient import ks_chain_input_grad, ks_chain_input_grad_activated
from ksopt.patterns.chain import Chain, Pattern
from ksopt.reference import ks_reference

LEFT, RIGHT = Chain.parse("(1,192,64,2)*(2,64,96,1)")
BELOW = Pattern.parse("(1,96,32,2)")
FEATURES = LEFT.out_features
SPEC = DeviceSpec((9, 0), 132, 228 * 1024)
both = pytest.mark.parametrize("activation", ["none", "gelu"])
"""By either overload of the operator."""


class Device:
    """A device on which one launch computes the gradients, and what Python launches."""

    def __init__(self, library, monkeypatch, activation):
        self.library, self.launches, self.activation = library, [], activation
        monkeypatch.setenv("KSOPT_TUNE", "model")
        monkeypatch.setattr(gradient_autotuner, "spec_of", lambda _: SPEC)
        monkeypatch.setattr(input_gradients, "factors_us", lambda *_: 1e9)
        apart_us = input_gradients.apart_us
        monkeypatch.setattr(
            input_gradients,
            "apart_us",
            lambda s, *case: apart_us(s, *case) if s.activation == "none" else 1e9,
        )
        monkeypatch.setattr(DeviceSpec, "of_device", lambda _: SPEC)
        monkeypatch.setattr(arch, "of_device", lambda _: "sm_90a")
        monkeypatch.setattr(nvrtc, "cubin", lambda *_: SimpleNamespace(data=b""))
        monkeypatch.setattr(driver, "load_kernel", self._load_kernel)
        monkeypatch.setattr(driver, "launch", self._launch)
        self.packed = None
        self.below = self.bias = None  # of the factor below; new at each call where they are none
        self.last = torch.randn(BELOW.weight_shape).bfloat16()
        self.left, self.right, *self.others = (
            torch.randn(p.weight_shape).bfloat16() for p in (LEFT, RIGHT) * 4
        )

    @staticmethod
    def _load_kernel(cubin, name, shared_bytes, device):
        return PACK_INPUT_GRAD if "pack" in name else INPUT_GRAD

    def _launch(self, kernel, blocks, threads, shared_bytes, arguments, device, early=False):
        self.launches.append((kernel, (blocks, threads, shared_bytes), arguments))

    def call(self, grad):
        """Both gradients, and whether Python launched them."""
        before = len(self.launches)
        to, between = self._gradients([grad])
        assert to.shape == (*grad.shape[:-1], RIGHT.in_features)
        assert between.shape == (*grad.shape[:-1], RIGHT.out_features)
        assert to.dtype == between.dtype == grad.dtype
        assert to.is_contiguous()
        assert between.is_contiguous()
        return to, between, len(self.launches) > before

    def _gradients(self, grads):
        """By the overload; ``addresses`` are those of what is below, and of the bias."""
        weights = [self.left, self.right, *self.others][: 2 * len(grads)]
        self.addresses = (None, None)
        if self.activation == "none":
            return ks_chain_input_grad(grads, weights, self.packed)
        batch, dtype = grads[0].shape[:-1], grads[0].dtype
        below, bias = self.below, self.bias
        if below is None:
            below = torch.zeros(*batch, BELOW.in_features, dtype=dtype)
        if bias is None and batch[0] % 2 == 0:
            bias = torch.zeros(RIGHT.in_features, dtype=dtype)
        weights.append(self.last)
        self.addresses = (below.data_ptr(), None if bias is None else bias.data_ptr())
        return ks_chain_input_grad_activated(grads, weights, below, bias, self.activation)

    def call_siblings(self, grads):
        """Both gradients of what several chains read, and whether Python launched them."""
        before = len(self.launches)
        to, between = self._gradients(grads)
        assert to.shape == (*grads[0].shape[:-1], RIGHT.in_features)
        assert between.shape == (len(grads), *grads[0].shape[:-1], RIGHT.out_features)
        return to, between, len(self.launches) > before

    def is_by_python(self, grad):
        return self.call(grad)[2]


@pytest.fixture
def activation():
    return "none"


@pytest.fixture
def device(serving, monkeypatch, activation):
    for cache in (gradient_autotuner.loaded, input_gradients.faster):
        cache.cache_clear()
    yield Device(serving, monkeypatch, activation)
    for cache in (gradient_autotuner.loaded, input_gradients.faster):
        cache.cache_clear()


def rows(*batch):
    return torch.zeros(*batch, FEATURES, dtype=torch.bfloat16)


def part_of_wider_rows(grad):
    wide = torch.zeros(*grad.shape[:-1], grad.shape[-1] + 8, dtype=grad.dtype)
    return wide[..., 8:]


@both
@pytest.mark.parametrize("batch", [(20_000,), (4, 5001), (300,), (3, 1, 101)], ids=str)
def test_it_launches_what_python_launches(device, batch):
    device.right = device.right.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    python_to, python_between, is_by_python = device.call(rows(*batch))
    python_addresses = device.addresses
    assert is_by_python
    for grad in (rows(*batch), part_of_wider_rows(rows(*batch))):
        before = variable(device.library, "launches").value
        to, between, is_by_python = device.call(grad)
        assert not is_by_python
        assert variable(device.library, "launches").value == before + 2
        (pack, pack_grid, packing), (kernel, grid, multiplying) = device.launches[-2:]
        assert (pack, kernel) == (PACK_INPUT_GRAD, INPUT_GRAD)
        seen_pack, seen = trained(device.library)
        assert seen.number == seen_pack.number + 1
        assert (seen_pack.grid, seen.grid) == (pack_grid, grid)
        assert (seen_pack.attributes, seen.attributes) == (1, 1)  # both may start early

        actual_packing = weight_packer.Arguments.from_buffer_copy(seen_pack.arguments)
        actual = kernels.Arguments.from_buffer_copy(seen.arguments)
        assert actual_packing.packed == actual.weights
        assert actual.grads[:] == [grad.data_ptr(), None, None, None]
        assert actual.grad_strides[:] == [grad.stride(-2), 0, 0, 0]
        assert (actual.to, actual.between) == (to.data_ptr(), between.data_ptr())
        assert (actual.below, actual.bias) == device.addresses
        assert actual.batch == grad[..., 0].numel()
        factors = [device.last] * (device.activation != "none") + [device.right, device.left]
        for place, weight in enumerate(factors):
            assert actual_packing.weights[0][place] == weight.data_ptr()
            assert tuple(actual_packing.strides[0][place]) == weight.stride()

        # What is allocated again, or another gradient, lies elsewhere; all else is the same.
        assert multiplying.weights == packing.packed
        assert (multiplying.to, multiplying.between) == (
            python_to.data_ptr(),
            python_between.data_ptr(),
        )
        assert (multiplying.below, multiplying.bias) == python_addresses
        packed, own = bytes(packing)[:-16], bytes(actual_packing)[:-16]
        assert packed == own
        for name in ("grads", "weights", "between", "to", "grad_strides", "below", "bias"):
            setattr(actual, name, getattr(multiplying, name))
        assert bytes(actual) == bytes(multiplying)
        assert ctypes.sizeof(packing) == 656
        assert ctypes.sizeof(actual) == 120


@pytest.mark.parametrize("count", [2, 3, 4])
def test_siblings_are_one_launch(device, count):
    """Of which each has a gradient of its own, whose rows lie as they like."""
    length = 510 + count  # known of no other test
    grads = [part_of_wider_rows(rows(2, length)), *(rows(2, length) for _ in range(count - 1))]
    assert device.call_siblings(grads)[2]
    assert len(device.launches) == 2
    (_, pack_grid, packing), (_, grid, multiplying) = device.launches
    to, between, is_by_python = device.call_siblings(grads)
    assert not is_by_python
    seen_pack, seen = trained(device.library)
    assert (seen_pack.grid, seen.grid) == (pack_grid, grid)
    packed = weight_packer.Arguments.from_buffer_copy(seen_pack.arguments)
    actual = kernels.Arguments.from_buffer_copy(seen.arguments)
    assert bytes(packed)[:-16] == bytes(packing)[:-16]
    assert actual.weights == packed.packed
    nothing = [None] * (4 - count)
    assert actual.grads[:] == [grad.data_ptr() for grad in grads] + nothing
    assert actual.grad_strides[:count] == [grad.stride(-2) for grad in grads]
    assert (actual.to, actual.between) == (to.data_ptr(), between.data_ptr())
    for name in ("weights", "between", "to"):
        setattr(actual, name, getattr(multiplying, name))
    assert bytes(actual) == bytes(multiplying)

    # What the kernel cannot read, Python copies; another number of chains is another case.
    assert device.call_siblings([*grads[1:], rows(length, 2).transpose(0, 1)])[2]
    assert device.is_by_python(rows(2, length))
    assert not device.call_siblings(grads)[2]


def test_siblings_that_are_faster_apart_are_launched_apart(device, monkeypatch):
    """The library knows that, and the launch of each."""
    monkeypatch.setattr(input_gradients, "apart_us", lambda s, *_: 1e9 if s.siblings == 1 else 0.0)
    grads = [rows(1007), rows(1007)]
    device.call_siblings(grads)
    before = variable(device.library, "launches").value
    assert not device.call_siblings(grads)[2]
    assert variable(device.library, "launches").value == before + 4


def test_weights_that_were_packed_before_are_not_packed_again(device):
    """By either; another number of elements is of another tile."""
    grad = rows(1006)
    device.call(grad)
    shape = input_grad_tile.Shape(LEFT, RIGHT)
    tile = input_gradients.tile_of(shape, grad.dtype, 1006, grad.device)
    elements = tile.packed_elements(shape)
    for count, launches in ((elements, 1), (elements + 8, 2), (0, 2)):
        device.packed = torch.zeros(count, dtype=grad.dtype)
        before = variable(device.library, "launches").value
        assert not device.is_by_python(grad)
        assert variable(device.library, "launches").value == before + launches
        actual = kernels.Arguments.from_buffer_copy(trained(device.library)[1].arguments)
        assert (actual.weights == device.packed.data_ptr()) == (launches == 1)
        del device.launches[:]  # those by Python, of rows that the library does not know
        grads = rows(503, 2).transpose(0, 1)
        assert device.is_by_python(grads)
        assert len(device.launches) == launches


def test_each_activation_is_known_by_itself(device):
    activations = ("gelu", "none", "gelu_tanh")
    for device.activation in activations:
        assert device.is_by_python(rows(1008))
        assert not device.is_by_python(rows(1008))
    for device.activation in activations:
        assert not device.is_by_python(rows(1008))


@pytest.mark.parametrize("activation", ["silu"])
def test_what_is_below_is_read_as_it_is_or_copied_by_python(device):
    features, grad = BELOW.in_features, rows(1009)
    device.call(grad)
    for below in (
        part_of_wider_rows(torch.randn(1009, features).bfloat16()),
        torch.randn(features, 1009).bfloat16().t(),
        torch.randn(1009 * features + 1).bfloat16()[1:].view(1009, features),
    ):
        device.below = below
        assert device.is_by_python(grad)
        assert device.launches[-1][2].below not in (None, below.data_ptr())
    device.below = None
    assert not device.is_by_python(grad)
    device.bias = torch.zeros(RIGHT.in_features + 1).bfloat16()[1:]
    assert device.is_by_python(grad)
    assert device.launches[-1][2].bias not in (None, device.bias.data_ptr())


@both
def test_a_known_launch_enters_no_python(device, monkeypatch):
    device.call(rows(1001))

    def refuse(*_):
        raise AssertionError("Python was entered")

    monkeypatch.setattr(input_gradients, "run", refuse)
    for _ in range(3):
        device.left, device.right = device.left * 2, device.right + 1
        device.call(rows(1001))


@both
def test_what_is_known_is_of_such_operands(device):
    device.call(rows(1002))
    assert not device.is_by_python(rows(1002))
    assert device.is_by_python(rows(1003))
    assert device.is_by_python(rows(501, 2)[..., ::1].transpose(0, 1))  # Python copies them
    odd = rows(1003).flatten()[1 : 1002 * FEATURES + 1].view(1002, FEATURES)
    assert device.is_by_python(odd)
    device.left, device.right = device.left.half(), device.right.half()
    device.last = device.last.half()
    assert device.is_by_python(rows(1002).half())
    assert not device.is_by_python(rows(1002).half())


@both
def test_a_weight_with_cached_forms_is_dropped_by_python(device):
    device.call(rows(1004))
    last = [device.last] * (device.activation != "none")
    for weight in (device.left, device.right, *last):
        assert not device.is_by_python(rows(1004))
        cached = weight_cache.prepared(weight, "doubled", lambda one: 2 * one)
        assert device.is_by_python(rows(1004))
        assert weight_cache.prepared(weight, "doubled", lambda one: 2 * one) is not cached
        assert device.is_by_python(rows(1004))
    before = weight_cache.forgotten()
    assert not device.is_by_python(rows(1004))
    assert weight_cache.forgotten() > before


def test_what_a_launch_a_factor_computes_faster_it_computes(device, monkeypatch):
    """The library knows that, too, and asks Python to do so."""
    monkeypatch.setattr(input_gradients, "factors_us", lambda *_: 0.0)
    grad = torch.randn(1005, FEATURES).bfloat16()
    products = []
    monkeypatch.setattr(
        "ksopt.ops.implementation.repacked",
        lambda x, weight: products.append(weight) or ks_reference(x, weight),
    )
    for _ in range(2):
        assert not device.is_by_python(grad)
    assert len(products) == 4
