"""Chains of two 16-bit factors in one launch: index logic and hand-over, run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cuda_emulator import EmulationError
from emulated_chains import (
    Operands,
    assert_right,
    build,
    expected,
    on_demand,
    run,
    run_keeping,
)
from packed_kernels import without_predicates

from ksopt.kernels.families.common.chain_tile import Config, Epilogue, Shape
from ksopt.patterns.chain import Chain
from ksopt.reference import ks_reference

# Chain, siblings, tile, epilogue, dtype.
CASES = [
    # One slot after another; several passes; two groups, with and without turns.
    ("(1,32,16,4)*(2,32,32,1)", 1, (2, 1, 16, 16, 1, 1, 1, 2), ("none", "none", 1, 0), "bfloat16"),
    ("(1,32,16,4)*(2,32,32,1)", 1, (2, 1, 16, 16, 1, 4, 1, 2), ("relu", "none", 1, 0), "bfloat16"),
    ("(1,32,16,4)*(2,32,64,1)", 1, (3, 1, 16, 32, 1, 2, 1, 3), ("gelu", "none", 1, 1), "float16"),
    # Several classes, or parts of one, in a slot; an odd number of tiles in a block and a class.
    ("(1,32,72,2)*(3,48,48,1)", 1, (1, 1, 32, 48, 1, 1, 5, 3), ("relu", "none", 0, 1), "bfloat16"),
    ("(1,24,48,8)*(4,96,32,1)", 1, (2, 1, 24, 16, 2, 2, 4, 2), ("silu", "none", 1, 0), "float16"),
    # Columns of z that are no feature, outputs that are none, a block of x that is no whole part.
    ("(1,20,24,4)*(4,24,24,1)", 1, (1, 1, 16, 16, 1, 2, 2, 2), ("none", "silu", 1, 0), "bfloat16"),
    # Siblings; one class; 16 classes; a bias that is too long for shared memory.
    ("(1,48,32,4)*(2,64,96,1)", 3, (1, 1, 48, 48, 2, 4, 2, 2), ("none", "none", 1, 0), "bfloat16"),
    (
        "(1,64,64,1)*(1,64,32,1)",
        1,
        (1, 1, 64, 32, 1, 1, 4, 2),
        ("gelu_tanh", "relu", 0, 0),
        "float16",
    ),
    (
        "(1,16,16,16)*(1,256,32,1)",
        1,
        (1, 1, 16, 16, 2, 8, 1, 2),
        ("none", "none", 1, 1),
        "bfloat16",
    ),
    ("(1,400,16,4)*(1,64,32,1)", 1, (2, 1, 16, 32, 1, 4, 1, 2), ("none", "none", 1, 0), "float16"),
    # Clusters of blocks: by blocks of z, by parts of one, of an odd number of tiles; siblings.
    (
        "(1,32,16,4)*(2,32,32,1)",
        1,
        (1, 1, 16, 16, 1, 1, 1, 2, 2),
        ("gelu", "none", 1, 0),
        "bfloat16",
    ),
    (
        "(1,32,48,2)*(2,48,48,1)",
        1,
        (2, 1, 16, 48, 1, 2, 3, 2, 2),
        ("none", "relu", 1, 1),
        "float16",
    ),
    (
        "(1,32,24,8)*(2,96,32,1)",
        1,
        (1, 1, 8, 16, 2, 2, 2, 3, 4),
        ("silu", "none", 1, 0),
        "bfloat16",
    ),
    # Shares that are not equal: of three blocks of z, of three chunks.
    (
        "(1,48,48,4)*(3,64,32,1)",
        1,
        (1, 1, 16, 32, 1, 2, 3, 2, 2),
        ("none", "none", 1, 0),
        "float16",
    ),
    (
        "(1,64,32,4)*(8,16,24,1)",
        2,
        (1, 1, 16, 16, 1, 4, 4, 2, 8),
        ("none", "none", 0, 1),
        "float16",
    ),
    # Gates: two groups; shares that are not equal, with an activation between; eight classes.
    (
        "(1,32,16,4)*(2,32,32,1)",
        2,
        (2, 1, 16, 16, 1, 1, 1, 2),
        ("silu_gate", "none", 1, 1),
        "bfloat16",
    ),
    (
        "(1,48,48,2)*(2,48,48,1)",
        2,
        (1, 1, 16, 48, 1, 2, 3, 2, 2),
        ("gelu_gate", "relu", 1, 0),
        "float16",
    ),
    (
        "(1,32,24,8)*(2,96,32,1)",
        2,
        (1, 1, 8, 16, 2, 2, 2, 3, 4),
        ("relu_gate", "none", 0, 0),
        "bfloat16",
    ),
    # A bias too long for shared memory.
    (
        "(1,200,16,4)*(1,64,32,1)",
        2,
        (2, 1, 16, 32, 1, 4, 1, 2),
        ("gelu_tanh_gate", "none", 1, 0),
        "float16",
    ),
]


def cases() -> Iterator[tuple[Shape, Config, Epilogue, str]]:
    for text, siblings, tile, (activation, middle, bias, residual), dtype in CASES:
        shape = Shape.of(Chain.parse(text), siblings)
        after = Epilogue(bool(bias), activation, bool(residual), middle=middle)
        yield shape, Config(*tile), after, dtype
    # Results in float32: of several classes, siblings, a cluster and a gate.
    for at in (0, 4, 6, 10, 17):
        text, siblings, tile, (activation, middle, bias, _), dtype = CASES[at]
        after = Epilogue(bool(bias), activation, in_float32=True, middle=middle)
        yield Shape.of(Chain.parse(text), siblings), Config(*tile), after, dtype


ALL = list(cases())


@pytest.fixture(scope="module")
def kernels(emulator):
    return on_demand(emulator, ALL)


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(ALL)), ids=lambda at: f"{ALL[at][0]}-{at}")
def test_results(kernels, at):
    shape, _, epilogue, dtype = ALL[at]
    for rows in (1, 200):
        o = Operands.random(shape, dtype, rows, seed=rows).for_epilogue(epilogue)
        assert_right(run(kernels[at], ALL[at], o), o, epilogue)


def _storing(epilogue: Epilogue) -> Epilogue:
    return replace(epilogue, middle="none", keeps_z=True)


# One class, two, four and eight; parts of a block; several groups; a cluster; columns without l;
# siblings.
KEEPING = [
    (shape, tile, _storing(epilogue), of)
    for shape, tile, epilogue, of in (
        *(ALL[at] for at in (0, 1, 3, 4, 5, 7, 8, 10, 11, 12)),
        *[
            one
            for one in ALL
            if one[0].siblings > 1 and not one[2].is_gated and one[2].middle == "none"
        ],
    )
    if shape.l_of_block % 2 == 0 and not epilogue.in_float32
]


@pytest.fixture(scope="module")
def keeping(emulator):
    return on_demand(emulator, KEEPING)


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(KEEPING)), ids=lambda at: f"{KEEPING[at][0]}-{at}")
def test_the_values_between_the_factors_are_stored(keeping, at):
    shape, _, epilogue, dtype = KEEPING[at]
    for rows in (1, 200):
        o = Operands.random(shape, dtype, rows, seed=rows)
        y, z = run_keeping(keeping[at], KEEPING[at], o)
        assert_right(y, o, epilogue)
        unit = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
        for of_one, right in zip(z, o.right, strict=True):
            truth = ks_reference(o.x.double(), right.double())
            size = ks_reference(o.x.abs().double(), right.abs().double())
            assert (
                (of_one.double() - truth).abs() <= unit * truth.abs() + 1e-6 * size + 1e-6
            ).all()


@pytest.mark.parametrize("at", [1, *(pytest.param(at, marks=pytest.mark.slow) for at in (2, 15))])
def test_one_block_takes_several_passes(kernels, at):
    shape, _, epilogue, dtype = ALL[at]
    o = Operands.random(shape, dtype, 450, seed=at).for_epilogue(epilogue)
    y = run(kernels[at], ALL[at], o, sms=1)
    assert_right(y, o, epilogue)
    assert torch.equal(y, run(kernels[at], ALL[at], o, sms=8))


@pytest.mark.parametrize("at", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_what_is_not_finite_reaches_what_it_met(kernels, at):
    """Also where columns are filled up: a zero times infinity is in no sum."""
    shape, _, epilogue, dtype = ALL[at]
    o = Operands.random(shape, dtype, 40, seed=at)
    o.x[3, 1], o.x[17, 0] = float("inf"), float("nan")
    y = run(kernels[at], ALL[at], o)
    truth = expected(o, epilogue)[0]
    assert torch.equal(y.isnan(), truth.isnan())
    assert torch.equal(y.isinf(), truth.isinf())
    assert y[17].isnan().all()
    assert y[[row for row in range(40) if row not in (3, 17)]].isfinite().all()


RING = "common/warpgroup_ring.cuh"


@pytest.mark.parametrize(
    ("at", "name", "cut", "left"),
    [
        (0, RING, "wait_until_full() { full[slot].wait(parity); }", "wait_until_full() {}"),
        pytest.param(
            *(0, RING, "wait_until_empty() { empty[slot].wait(parity); }", "wait_until_empty() {}"),
            marks=pytest.mark.slow,
        ),
        (
            *(10, "chain_wgmma16.cuh"),
            "    arrive_at_cluster<Tile>();\n    wait_for_cluster<Tile>();\n    const int64 row",
            "    const int64 row",
        ),
    ],
)
def test_a_missing_wait_is_detected(emulator, at, name, cut, left):
    """So the hand-over of slots, and of z in a cluster, is really checked."""

    def edit(header: str, text: str) -> str:
        if header == name:
            assert text.count(cut) == 1
            text = text.replace(cut, left)
        return without_predicates(header, text)

    (kernel,) = build(emulator, ALL[at : at + 1], edit)
    o = Operands.random(ALL[at][0], ALL[at][3], 200, seed=0)
    with pytest.raises(EmulationError):
        run(kernel, ALL[at], o)
