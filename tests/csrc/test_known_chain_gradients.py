"""Gradients of chains by the host library, on a CPU that plays a CUDA device of capability 9.0.

What the library launches is compared with what Python launches itself, argument by argument: only
the compiler and the driver are played.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from played_driver import ADDING, GRADIENTS, of_gradients, variable

from ksopt.jit import arch, driver, nvrtc
from ksopt.kernels import chain_gradients, gradient_autotuner, weight_gradients
from ksopt.kernels.families import chain_grads_wgmma16
from ksopt.kernels.families import chain_grads_wgmma16 as launcher
from ksopt.kernels.families.common import chain_grads_tile as kernels
from ksopt.kernels.problem import DeviceSpec
from ksopt.ops.chain_gradients import ks_chain_weight_grads
from ksopt.ops.weight_gradient import weight_grad_decomposed
from ksopt.patterns.chain import Chain

LEFT, RIGHT = Chain.parse("(1,192,64,2)*(2,64,192,1)")
SPEC = DeviceSpec((9, 0), 132, 228 * 1024)
ROWS = 4096


class Device:
    """A device on which one launch is taken, unless ``is_faster`` says no."""

    def __init__(self, library, monkeypatch):
        self.library, self.launches, self.is_faster, self.shares = library, [], True, (1, 1)
        monkeypatch.setenv("KSOPT_TUNE", "model")
        monkeypatch.setattr(gradient_autotuner, "spec_of", lambda _: SPEC)
        monkeypatch.setattr(
            chain_gradients, "by_factors_us", lambda *_: 1e9 if self.is_faster else 0.0
        )
        monkeypatch.setattr(weight_gradients, "weight_gradient_us", lambda *_: 0.0)
        monkeypatch.setattr(
            chain_grads_wgmma16,
            "launches_of",
            lambda config, chain, rows, spec, siblings: [
                kernels.launch_of(config, rows, self.shares, siblings)
            ],
        )
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(arch, "of_device", lambda _: "sm_90a")
        monkeypatch.setattr(nvrtc, "cubin", lambda *_: SimpleNamespace(data=b""))
        monkeypatch.setattr(driver, "load_kernel", self._load_kernel)
        monkeypatch.setattr(driver, "launch", self._launch)

    @staticmethod
    def _load_kernel(cubin, name, shared_bytes, device):
        return ADDING if "add" in name else GRADIENTS

    def _launch(self, kernel, blocks, threads, shared_bytes, arguments, device):
        self.launches.append((kernel, (blocks, threads, shared_bytes), arguments))

    def call(self, operands, with_bias=True):
        """The gradients, and whether Python launched them."""
        before, (*several, x) = len(self.launches), operands
        siblings = len(several) // 3
        lists = [several[at : at + siblings] for at in range(0, len(several), siblings)]
        result = ks_chain_weight_grads(*lists, x, 1, 2, 2, 1, with_bias)
        shapes = [LEFT.weight_shape, RIGHT.weight_shape] * siblings
        shapes += [(LEFT.out_features,)] * siblings if with_bias else []
        assert [one.shape for one in result] == shapes
        assert all(one.is_contiguous() and one.dtype == x.dtype for one in result)
        return result, len(self.launches) > before


@pytest.fixture
def device(serving, monkeypatch):
    gradient_autotuner.forget()
    yield Device(serving, monkeypatch)
    gradient_autotuner.forget()


def operands(*batch, dtype=torch.bfloat16, beside=0, siblings=1):
    """Rows that lie ever farther apart, if apart at all."""
    widths = [LEFT.out_features, LEFT.in_features, RIGHT.out_features]
    widths = [one for one in widths for _ in range(siblings)] + [RIGHT.in_features]
    return [
        torch.zeros(*batch, one + beside * at, dtype=dtype)[..., beside * at :]
        for at, one in enumerate(widths, 1)
    ]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("siblings", [1, 3, 4])
@pytest.mark.parametrize("shares", [(1, 1), (3, 1), (1, 2), (3, 2)], ids=str)
def test_it_launches_what_python_launches(device, shares, siblings, with_bias):
    device.shares, number = shares, 600 + sum(shares) + 10 * shares[0] + with_bias
    for inputs in (
        operands(number, siblings=siblings),
        operands(3, number, beside=16, siblings=siblings),
    ):
        before = variable(device.library, "launches").value
        by_python, is_by_python = device.call(inputs, with_bias)
        assert is_by_python
        expected = device.launches[-1 if max(shares) == 1 else -2 :]
        assert variable(device.library, "launches").value == before

        result, is_by_python = device.call(inputs, with_bias)
        assert not is_by_python
        assert variable(device.library, "launches").value == before + len(expected)
        seen = of_gradients(device.library)
        for (_, grid, arguments), one in zip(expected, seen, strict=False):
            assert one.grid == grid
            assert one.attributes == 1  # it waits for what is before it by itself
            actual = type(arguments).from_buffer_copy(one.arguments)
            assert len(bytes(arguments)) == ctypes.sizeof(actual)
            _assert_alike(actual, arguments, result, by_python)


def _assert_alike(actual, expected, result, by_python):
    """All is the same but where results are, and shares."""
    places = {
        one.data_ptr(): other.data_ptr() for one, other in zip(result, by_python, strict=True)
    }
    factors = [
        both
        for ours, theirs in ((actual.left, expected.left), (actual.right, expected.right))
        for both in zip(ours, theirs, strict=True)
    ]
    if isinstance(actual, launcher.AddingArguments):
        assert (actual.left_blocks, actual.blocks) == (expected.left_blocks, expected.blocks)
        added = [both for both in factors if both[0].count]
        first = min(one.shares for one, _ in added) - min(other.shares for _, other in added)
        for one, other in factors:
            assert (one.count, one.elements, one.own) == (other.count, other.elements, other.own)
            assert (one.to is None) == (other.to is None) == (one.count == 0)
            if one.count:
                assert places[one.to] == other.to
                assert (one.bias and places[one.bias]) == other.bias
                assert one.shares - other.shares == first
        return
    assert actual.batch == expected.batch
    for one, other in factors:
        assert (one.bias and places[one.bias]) == other.bias
        for name in ("grad", "x", "grad_stride", "x_stride", "rows_per_block", "shares"):
            assert getattr(one, name) == getattr(other, name), name
        if one.shares == 1:
            assert places[one.to] == other.to


def test_what_is_forgotten_is_not_known(device):
    inputs = operands(ROWS)
    device.call(inputs)
    assert not device.call(inputs)[1]
    gradient_autotuner.forget()
    assert device.call(inputs)[1]


@pytest.mark.parametrize("siblings", [1, 2])
def test_what_is_no_faster_is_computed_factor_by_factor(device, siblings):
    device.is_faster = False
    inputs = [torch.randn_like(one) for one in operands(100, siblings=siblings)]
    for _ in range(2):
        result, is_by_python = device.call(inputs)
        assert not is_by_python
        for at in range(siblings):
            grad, between, grad_between = inputs[at:-1:siblings]
            left, right, bias = *result[2 * at : 2 * at + 2], result[2 * siblings + at]
            assert torch.equal(left, weight_grad_decomposed(grad, between, 1, 2, False))
            assert torch.equal(right, weight_grad_decomposed(grad_between, inputs[-1], 2, 1, False))
            assert torch.equal(bias, grad.sum(0))
    assert device.launches == []


@pytest.mark.parametrize("siblings", [1, 2])
def test_operands_that_the_kernel_cannot_read_are_pythons(device, siblings):
    """Which copies them first, and launches."""
    inputs = operands(ROWS // siblings, siblings=siblings)
    device.call(inputs)
    assert not device.call(inputs)[1]
    for at in range(len(inputs)):
        odd = list(inputs)
        memory = torch.zeros(inputs[at].numel() + 1, dtype=inputs[at].dtype)
        odd[at] = memory[1:].view(inputs[at].shape)
        assert device.call(odd)[1]
        *_, arguments = device.launches[-1]
        read = [one for both in (arguments.left, arguments.right) for one in both[:siblings]]
        assert all(one.grad % 16 == one.x % 16 == 0 for one in read)
    assert not device.call(inputs)[1]
