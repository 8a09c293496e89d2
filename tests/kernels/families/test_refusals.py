"""Problems that a family does not compute, and the sentence that says why."""

import pytest
from checks import H200

from ksopt.kernels.families.base import KernelFamily, families, family_of
from ksopt.kernels.problem import Problem, SecondLayer
from ksopt.patterns.chain import Chain, Pattern

DTYPES = ("float64", "float32", "float16", "bfloat16")
COMMON = Pattern(4, 64, 64, 16)  # every family of one factor takes it
SHORT_SUMS = Pattern(2, 8, 8, 64)  # for the family that takes no others
COMMON_CHAIN = Chain.parse("(1,192,48,2)*(2,48,192,1)")  # and every one of chains this

FOLDS_16 = "2, 3, 4, 6, 12 or a multiple of 8"
FOLDS_32 = "1, 2, 3, 6 or a multiple of 4"
MMA_16 = ("mma16", "wgmma16", "wgmma16_streamed")
TF32 = ("mma_tf32x3", "wgmma_tf32x3")

# Families, dtype and pattern, and the reason.
REFUSED = [
    (("mma16",), "float16", "(1,8,8,5)", f"d = 5 is not 1, {FOLDS_16}"),
    (("mma16",), "float16", "(1,8,8,20)", f"d = 20 is not 1, {FOLDS_16}"),
    (MMA_16[1:], "float16", "(1,8,8,1)", f"d = 1 is not {FOLDS_16}"),
    (MMA_16[1:], "float16", "(1,8,8,20)", f"d = 20 is not {FOLDS_16}"),
    (MMA_16, "float16", "(1,9,16,2)", "tiles of 8 outputs would compute 1.78 times b = 9"),
    (
        MMA_16,
        "float16",
        "(1,8,6,2)",
        "c*d = 12 is not a multiple of 8, so rows of a group are not aligned",
    ),
    (MMA_16[:2], "float16", "(1,8,100000,8)", "no tile's weights fit in shared memory"),
    (("wgmma16",), "float16", "(1,1024,1024,16)", "no tile's weights fit in shared memory"),
    (TF32, "float32", "(1,64,64,5)", f"d = 5 is not {FOLDS_32}"),
    (TF32, "float32", "(1,4,64,4)", "tiles of 8 outputs would compute 2.00 times b = 4"),
    (
        TF32,
        "float32",
        "(1,64,63,2)",
        "c*d = 126 is not a multiple of 4, so rows of a group are not aligned",
    ),
    (
        TF32,
        "float32",
        "(1,32768,32768,4)",
        "(1,32768,32768,4) has more elements in a row or a group than 32 bits count",
    ),
    (("decode_mma16",), "float16", "(4,64,64,5)", f"d = 5 is not 1, {FOLDS_16}"),
    (
        ("decode_mma16",),
        "float16",
        "(8,64,12,1)",
        "c*d = 12 is not a multiple of 8, so rows of the weight are not aligned",
    ),
    (("decode_mma16",), "float16", "(3,9,64,1)", None),  # rows of y at any address
    (
        ("decode_mma16",),
        "float16",
        "(1,8,65536,1)",
        "a sum over c = 65536 of 16 rows does not fit in shared memory",
    ),
    (
        ("decode_fma",),
        "float32",
        "(4,64,6,1)",
        "c*d = 6 is no multiple of 4, so rows of the weight are not aligned",
    ),
    (("decode_fma",), "float32", "(3,9,64,1)", None),
    (
        ("batch_last_mma16",),
        "bfloat16",
        "(1,64,100000,1)",
        "the weights of 16 outputs (c = 100000) do not fit in shared memory",
    ),
    (
        ("batch_last_mma_tf32x3", "batch_last_wgmma_tf32x3"),
        "float32",
        "(1,64,100000,1)",
        "the weights of 16 outputs (c = 100000) do not fit in shared memory",
    ),
    (
        ("batch_last_wgmma16",),
        "float16",
        "(1,64,100000,1)",
        "the weights of 64 outputs (c = 100000) do not fit in shared memory",
    ),
    (("transpose_bmm",), "float16", "(4,16,16,1)", "d = 1 needs no transposes"),
    (
        ("transpose_bmm",),
        "float16",
        "(1,16,20,4)",
        "20 is not a multiple of 8, the elements of 16 bytes",
    ),
    (
        ("transpose_bmm",),
        "float16",
        "(1,12,16,4)",
        "12 is not a multiple of 8, the elements of 16 bytes",
    ),
    (
        ("transpose_bmm",),
        "float16",
        "(1,16,16,20)",
        "d = 20 is neither a multiple of 8 nor at most 12",
    ),
    # Weights that are streamed need not fit.
    (("wgmma16_streamed",), "float16", "(1,8,100000,8)", None),
    (("wgmma16_streamed",), "float16", "(1,1024,1024,16)", None),
]
CASES = [(name, *case) for names, *case in REFUSED for name in names]


def layouts(family: KernelFamily) -> list[bool]:
    """Whether the batch is last, for each layout that a family computes."""
    return [
        last
        for last in (False, True)
        if family.layout in (None, ("batch_first", "batch_last")[last])
    ]


@pytest.mark.parametrize(("name", "dtype", "text", "reason"), CASES)
def test_a_refusal_says_why(name, dtype, text, reason):
    family = family_of(name)
    problem = Problem.of_factor(Pattern.parse(text), dtype, layouts(family)[0])
    assert family.unsupported_reason(problem, H200) == reason


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_a_family_takes_its_own_dtypes_and_refuses_others(family, dtype):
    own = ", ".join(family.dtypes)
    factor = SHORT_SUMS if family.name == "lane_fma" else COMMON
    chain = COMMON_CHAIN if family.takes_chains else Chain((factor,))
    takes_two = family.takes_mlps and family.name != "chain_mma"  # which takes one layer in all
    second = SecondLayer(COMMON_CHAIN) if takes_two else None
    if family.name == "chain_activated_wgmma16":  # a factor each
        left, right = COMMON_CHAIN
        chain, second = Chain((right,)), SecondLayer(Chain((left,)))
    for last in layouts(family):
        reason = family.unsupported_reason(Problem(chain, dtype, last, second=second), H200)
        assert reason == (None if dtype in family.dtypes else f"{dtype} is not one of {own}")


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_a_family_leaves_the_other_layout_to_others(family):
    for last in {False, True} - set(layouts(family)):
        reason = family.unsupported_reason(
            Problem.of_factor(COMMON, next(iter(family.dtypes)), last), H200
        )
        assert reason == f"{'batch_last' if last else 'batch_first'} has its own kernels"
