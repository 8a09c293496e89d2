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
from ksopt.kernels.families import chain_grads_launcher
from ksopt.kernels.families import chain_grads_launcher as launcher
from ksopt.kernels.families import chain_grads_wgmma16 as kernels
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
            chain_grads_launcher,
            "launches_of",
            lambda config, chain, rows, spec: [kernels.launch_of(config, rows, self.shares)],
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
        before = len(self.launches)
        result = ks_chain_weight_grads(*operands, 1, 2, 2, 1, with_bias)
        left, right, bias = result
        assert (left.shape, right.shape) == (LEFT.weight_shape, RIGHT.weight_shape)
        assert bias.shape == (LEFT.out_features if with_bias else 0,)
        assert all(one.is_contiguous() and one.dtype == operands[3].dtype for one in result)
        return result, len(self.launches) > before


@pytest.fixture
def device(serving, monkeypatch):
    gradient_autotuner.forget()
    yield Device(serving, monkeypatch)
    gradient_autotuner.forget()


def operands(*batch, dtype=torch.bfloat16, beside=0):
    widths = (LEFT.out_features, LEFT.in_features, RIGHT.out_features, RIGHT.in_features)
    return [torch.zeros(*batch, one + beside, dtype=dtype)[..., beside:] for one in widths]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shares", [(1, 1), (3, 1), (1, 2), (3, 2)], ids=str)
def test_it_launches_what_python_launches(device, shares, with_bias):
    device.shares, number = shares, ROWS + sum(shares) + 10 * shares[0] + with_bias
    for inputs in (operands(number), operands(3, number, beside=16)):
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
    if isinstance(actual, launcher.AddingArguments):
        assert actual.left_blocks == expected.left_blocks
        for one, other in ((actual.left, expected.left), (actual.right, expected.right)):
            assert (one.count, one.elements, one.own) == (other.count, other.elements, other.own)
            assert (one.to is None) == (other.to is None) == (one.count == 0)
            if one.count:
                assert places[one.to] == other.to
                assert (one.bias and places[one.bias]) == other.bias
        if actual.left.count and actual.right.count:
            apart = actual.left.count * actual.left.elements * 4
            assert actual.right.shares - actual.left.shares == apart
            assert expected.right.shares - expected.left.shares == apart
        return
    assert actual.batch == expected.batch
    assert (actual.bias and places[actual.bias]) == expected.bias
    for one, other in ((actual.left, expected.left), (actual.right, expected.right)):
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


def test_what_is_no_faster_is_computed_factor_by_factor(device):
    device.is_faster = False
    inputs = [torch.randn_like(one) for one in operands(100)]
    for _ in range(2):
        (left, right, bias), is_by_python = device.call(inputs)
        assert not is_by_python
        grad, between, grad_between, x = inputs
        assert torch.equal(left, weight_grad_decomposed(grad, between, 1, 2, False))
        assert torch.equal(right, weight_grad_decomposed(grad_between, x, 2, 1, False))
        assert torch.equal(bias, grad.sum(0))
    assert device.launches == []


def test_operands_that_the_kernel_cannot_read_are_pythons(device):
    """Which copies them first, and launches."""
    inputs = operands(ROWS)
    device.call(inputs)
    assert not device.call(inputs)[1]
    for at in range(4):
        odd = list(inputs)
        memory = torch.zeros(inputs[at].numel() + 1, dtype=inputs[at].dtype)
        odd[at] = memory[1:].view(inputs[at].shape)
        assert device.call(odd)[1]
        *_, arguments = device.launches[-1]
        read = arguments.left if at < 2 else arguments.right
        assert (read.grad if at % 2 == 0 else read.x) % 16 == 0
    assert not device.call(inputs)[1]
