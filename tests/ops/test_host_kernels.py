"""The host library's own kernels of the products: what is known runs without Python, and rightly.

Compiled graphs call these operators. Every call is watched: Python of ksopt's is none of a hit's.
"""

import gc
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from seen_products import Python, as_close, by_pythons_kernels, without_library
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from ksopt import KSLinear
from ksopt.errors import InvalidInputError, KsoptError
from ksopt.jit import host
from ksopt.kernels import weight_cache, weight_groups
from ksopt.kernels.backends import cpu
from ksopt.reference import ks_reference

KINDS = ["ks_mm_inner", "ks_mm_frozen", "ks_mm_repacked", "ks_mm_inner.out", "ks_mm_repacked.out"]
REPACKED = ["ks_mm_repacked", "ks_mm_repacked.out"]
SHAPE = (2, 3, 4, 5)


@pytest.fixture(scope="module", autouse=True)
def library():
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler on this machine")
    assert host.load() is None


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "off")
    cpu.forget()
    weight_cache.refresh()
    with torch.no_grad():
        yield
    cpu.forget()
    weight_cache.refresh()


def call(kind, x, weight, last=False, owner=None, out=None):
    """The product by an operator; those that write have memory to write into."""
    name, _, overload = kind.partition(".")
    op = getattr(getattr(torch.ops.ksopt, name), overload or "default")
    if not overload:
        return op(x, weight, last, owner)
    if out is None:
        a, b, _, d = weight.shape
        sizes = (a * b * d, *x.shape[1:]) if last else (*x.shape[:-1], a * b * d)
        out = torch.full(sizes, torch.nan, dtype=x.dtype)
    assert op(x, weight, owner, last, out=out) is None
    return out


def watched(kind, *args, **kwargs):
    """The product, and whether it took Python."""
    with Python() as python:
        y = call(kind, *args, **kwargs)
    return y, bool(python.entered)


def operands(batch=(7,), last=False, dtype=torch.float32, shape=SHAPE):
    features = shape[0] * shape[2] * shape[3]
    sizes = (features, *batch) if last else (*batch, features)
    return torch.randn(sizes).to(dtype), torch.randn(shape).to(dtype)


def close(y, x, weight, last=False):
    expected = ks_reference(x, weight, "batch_last" if last else "batch_first")
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_a_known_product_takes_no_python_and_has_the_bits_of_the_first(
    kind, last, dtype, monkeypatch
):
    for shape in (SHAPE, (1, 8, 8, 8), (8, 8, 8, 1), (2, 1, 3, 4)):
        for batch in ((8,), (1,), (2, 13)):
            x, weight = operands(batch, last, dtype, shape)
            first, takes_python = watched(kind, x, weight, last)
            assert takes_python
            for _ in range(2):
                y, takes_python = watched(kind, x, weight, last)
                assert not takes_python
                torch.testing.assert_close(y, first, rtol=0, atol=0)
            with monkeypatch.context() as patch:
                without_library(patch)
                expected = call(kind, x, weight, last)
            as_close(y, expected)
            assert y.is_contiguous()
            assert not y._is_view()


def test_python_serves_what_the_library_does_not(kind, monkeypatch):
    x, weight = operands()
    call(kind, x, weight)
    for _ in range(2):
        with monkeypatch.context() as patch:
            by_pythons_kernels(patch)
            y, takes_python = watched(kind, x, weight)
        assert takes_python
        close(y, x, weight)
        y, takes_python = watched(kind, x, weight)
        assert not takes_python
        close(y, x, weight)


def test_a_weight_that_has_changed_gives_new_results(kind):
    x, weight = operands()
    call(kind, x, weight)
    for change in (
        lambda: weight.mul_(2),
        lambda: weight.data.add_(1),
        lambda: setattr(weight, "data", torch.randn(SHAPE)),
    ):
        change()
        y, takes_python = watched(kind, x, weight)
        assert not takes_python
        close(y, x, weight)
    weight = torch.randn(3, 5, 2, 4).permute(2, 0, 3, 1)
    y, takes_python = watched(kind, x, weight)
    assert not takes_python
    close(y, x, weight)


def test_owners(kind):
    stored = torch.nn.Parameter(torch.randn(5, 2, 3, 4))
    x, weight = torch.randn(7, 40), stored.detach().permute(1, 2, 3, 0)
    for at in range(3):
        y, takes_python = watched(kind, x, weight, owner=stored)
        assert takes_python == (at == 0)
        close(y, x, weight)
    for _ in range(2):  # of another dtype beside its owner: Python casts
        y, takes_python = watched(kind, x.double(), weight, owner=stored)
        assert takes_python
        torch.testing.assert_close(y, ks_reference(x.double(), weight.double()))


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.randn(7, 41), torch.randn(SHAPE)),
        (torch.randn(7, 40).double(), torch.randn(SHAPE)),
        (torch.randn(7, 40), torch.randn(2, 3, 4)),
        (torch.randn(()), torch.randn(SHAPE)),
        (torch.randn(7, 40), torch.randn(SHAPE, device="meta")),
        (torch.randn(7, 40).to_sparse(), torch.randn(SHAPE)),
    ],
)
def test_what_does_not_fit_is_refused_in_the_same_words(kind, x, weight, monkeypatch):
    call(kind, *operands())
    out = torch.empty(7, 30)
    with pytest.raises(KsoptError) as refused:
        call(kind, x, weight, out=out)
    with monkeypatch.context() as patch:
        by_pythons_kernels(patch)
        with pytest.raises(KsoptError) as by_python:
            call(kind, x, weight, out=out)
    assert str(refused.value) == str(by_python.value)


def test_other_rows_are_multiplied_by_python(kind):
    x, weight = operands((8,))
    call(kind, x, weight)
    for other in (operands((40, 2))[0], x.T.contiguous().T, torch.randn(8, 80)[:, ::2]):
        y, takes_python = watched(kind, other, weight)
        assert takes_python
        close(y, other, weight)
    y = call(kind, torch.randn(0, 40), weight)
    assert y.shape == (0, 30)


def test_lazily_negated_operands_have_the_memory_of_others(kind):
    x, weight = operands()
    expected = call(kind, x, weight)
    for _ in range(2):
        torch.testing.assert_close(call(kind, x, torch._neg_view(weight)), -expected)
        torch.testing.assert_close(call(kind, torch._neg_view(x), weight), -expected)


def test_a_deterministic_product_is_pythons(kind, deterministic):
    x, weight = operands()
    call(kind, x, weight)
    with deterministic():
        y, takes_python = watched(kind, x, weight)
    assert takes_python
    close(y, x, weight)


@pytest.mark.parametrize("kind", ["ks_mm_inner.out", "ks_mm_repacked.out"])
class TestWriting:
    """What holds of those that write into memory which is given."""

    def test_autograd_notices_that_it_was_written(self, kind):
        x, weight = operands()
        call(kind, x, weight)
        out = torch.zeros(7, 30)
        with torch.enable_grad():
            y = out * torch.ones(7, 30, requires_grad=True)
        assert not watched(kind, x, weight, out=out)[1]
        with (
            torch.enable_grad(),
            pytest.raises(RuntimeError, match="modified by an inplace operation"),
        ):
            y.sum().backward()

    def test_no_gradient_is_lost_without_a_word(self, kind):
        x, weight = operands()
        call(kind, x, weight)
        weight.requires_grad_()
        with torch.enable_grad(), pytest.raises(InvalidInputError, match=r"torch\.no_grad"):
            call(kind, x, weight)
        assert not watched(kind, x, weight)[1]

    def test_other_memory_is_copied_into_by_python(self, kind):
        x, weight = operands()
        call(kind, x, weight)
        for out in (torch.empty(30, 7).T, torch.empty(211)[1:].view(7, 30)):
            y, takes_python = watched(kind, x, weight, out=out)
            assert takes_python
            close(y, x, weight)
        with pytest.raises(InvalidInputError, match="out has shape"):
            call(kind, x, weight, out=torch.empty(7, 31))


def test_in_inference_mode(kind):
    with torch.inference_mode():
        x, weight = operands()
        for _ in range(2):
            y, takes_python = watched(kind, x, weight)
            close(y, x, weight)
        assert not takes_python


class Seeing(TorchDispatchMode):
    """Notes the operators of a block."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_see_it_and_traces_hold_it(kind):
    x, weight = operands()
    expected = call(kind, x, weight)
    with Seeing() as mode:
        torch.testing.assert_close(call(kind, x, weight), expected)
    name, _, overload = kind.partition(".")
    op = getattr(getattr(torch.ops.ksopt, name), overload or "default")
    assert op in mode.seen
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert call(kind, x, weight).shape == (7, 30)
    traced = make_fx(lambda x, weight: call(kind, x, weight))(x, weight)
    assert op in [node.target for node in traced.graph.nodes]
    torch.testing.assert_close(traced(x, weight), expected)


def doubled(weight):
    return 2 * weight


def of(weight):
    """A preparation that is cached."""
    return weight_cache.prepared(weight, "doubled", doubled)


@pytest.mark.parametrize("kind", REPACKED)
class TestForgetting:
    """A product by a weight that is trained forgets what is cached of it."""

    @staticmethod
    def known(kind, x, weight, owner=None):
        return not watched(kind, x, weight, owner=owner)[1]

    @pytest.mark.parametrize("viewed", [False, True])
    def test_entries_of_it_or_of_its_base(self, kind, viewed):
        stored = torch.randn(5, 2, 3, 4)
        x, weight = torch.randn(7, 40), stored.permute(1, 2, 3, 0)
        call(kind, x, weight)
        assert self.known(kind, x, weight)
        for _ in range(2):
            first = of(weight if viewed else stored)
            assert of(weight if viewed else stored) is first
            assert not self.known(kind, x, weight)
            assert of(weight if viewed else stored) is not first
            call(kind, x, weight)
            assert self.known(kind, x, weight)
            assert weight_cache.cached_bytes(torch.device("cpu")) == 0

    def test_entries_of_its_owner(self, kind):
        stored = torch.nn.Parameter(torch.randn(5, 2, 3, 4))
        x, weight = torch.randn(7, 40), stored.detach().permute(1, 2, 3, 0)
        call(kind, x, weight, owner=stored)
        first = of(stored)
        assert self.known(kind, x, torch.randn(SHAPE))
        assert not self.known(kind, x, weight, stored)
        assert self.known(kind, x, weight, stored)
        assert of(stored) is not first

    def test_entries_prepared_of_several(self, kind):
        x, weight = operands()
        other = torch.randn(SHAPE)

        def packed():
            return weight_groups.prepared_together([weight, other], "packed", torch.stack)

        for changed in (weight, other):
            call(kind, x, changed)
            first = packed()
            assert packed() is first
            assert not self.known(kind, x, changed)
            assert self.known(kind, x, changed)
            assert packed() is not first
            weight_cache.refresh()

    def test_nothing_is_left_behind(self, kind):
        """What was forgotten in another way costs no Python for good."""
        x, weight = operands()
        call(kind, x, weight)
        for forget in (weight_cache.refresh, lambda: weight_cache.forget(weight)):
            of(weight)
            forget()
            assert self.known(kind, x, weight)
        weight.requires_grad_()
        weight.grad = torch.zeros_like(weight)
        of(weight)
        torch.optim.SGD([weight], lr=0.1).step()
        call(kind, x, weight)
        assert self.known(kind, x, weight)
        for _ in range(50):  # at addresses that have held others
            one = torch.randn(SHAPE)
            of(one)
            del one
            gc.collect()
            assert self.known(kind, x, torch.randn(SHAPE))

    def test_it_is_counted_for_graphs_that_hold_more(self, kind):
        x, weight = operands()
        call(kind, x, weight)
        before = weight_cache.forgotten()
        assert self.known(kind, x, weight)
        assert weight_cache.forgotten() != before


@pytest.mark.slow
def test_entries_from_before_the_library_is_loaded_are_dropped(tmp_path):
    program = """
import warnings
warnings.simplefilter("error")
import torch
from ksopt import ops
from ksopt.jit import host
from ksopt.kernels import weight_cache
assert not host.is_loaded()
x, weight = torch.randn(7, 40), torch.randn(2, 3, 4, 5)
def of(): return weight_cache.prepared(weight, "doubled", lambda w: 2 * w)
with torch.no_grad():
    for _ in range(2):
        ops.ks_mm_repacked(x, torch.randn(2, 3, 4, 5))
    first = of()
    assert host.load() is None
    ops.ks_mm_repacked(x, torch.randn(2, 3, 4, 5))
    assert of() is first
    ops.ks_mm_repacked(x, weight)
    assert of() is not first
"""
    settings = {**os.environ, "KSOPT_TUNE": "off"}
    subprocess.run([sys.executable, "-c", program], check=True, env=settings)


@pytest.mark.slow
def test_a_compiled_step_of_training_calls_them(monkeypatch):
    """As eager: gradients, and a weight that an optimizer changes."""
    torch.manual_seed(0)
    layer = KSLinear(64, 64, "(1,8,8,8)*(8,8,8,1)")
    twin = KSLinear(64, 64, "(1,8,8,8)*(8,8,8,1)")
    twin.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, backend="ksopt")
    x = torch.randn(16, 64)
    steps = [torch.optim.SGD(one.parameters(), lr=1e-3) for one in (layer, twin)]
    with torch.enable_grad():
        for at in range(4):
            leaf = x.clone().requires_grad_()
            with Python() as python:
                y = compiled(leaf)
                y.square().sum().backward()
            if at > 1:
                assert not {"repacked", "product", "run_known_repacked"} & set(python.entered)
            other = x.clone().requires_grad_()
            twin(other).square().sum().backward()
            torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-4, atol=1e-4)
            for one, right in zip(layer.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(one.grad, right.grad, rtol=1e-4, atol=1e-4)
            for step in steps:
                step.step()
                step.zero_grad()
    torch.testing.assert_close(compiled(x), twin(x), rtol=1e-4, atol=1e-4)


def test_threads_that_train_and_evaluate_one_weight(kind):
    x, weight = operands()
    expected = call(kind, x, weight)
    wrong = []

    def work(seed):
        for at in range(200):
            if (at + seed) % 5 == 0:
                of(weight)
            if not torch.equal(call(kind, x, weight), expected):
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_known_product_of_a_detached_weight_requires_no_gradient():
    """Its owner does; autograd's fallback for operators without a gradient would pass that on."""
    stored = torch.nn.Parameter(torch.randn(5, 2, 3, 4))
    x, weight = torch.randn(7, 40), stored.detach().permute(1, 2, 3, 0)
    with torch.enable_grad():
        results = [torch.ops.ksopt.ks_mm(x, weight, False, stored) for _ in range(3)]
        assert not any(y.requires_grad for y in results)
        layers = [
            torch.ops.ksopt.ks_chain(x, [weight], None, None, "none", False, 1, [stored])
            for _ in range(3)
        ]
    assert not any(y.requires_grad for y in layers)
    for y in (*results, *layers):
        close(y, x, weight)


@pytest.mark.slow
def test_the_library_may_be_loaded_before_the_operators_are_there():
    program = (
        "from ksopt.jit import host\n"
        "assert host.load() is None\n"
        "import ksopt, torch\n"
        "layer = ksopt.KSLinear(32, 32, '(1,8,4,4)*(4,4,8,1)')\n"
        "assert layer(torch.randn(3, 32)).shape == (3, 32)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
