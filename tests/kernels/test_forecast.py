"""Choices for GPUs that are not here: their kernels compile for them and fit."""

import itertools
import json
import re
from dataclasses import replace

import pytest

from ksopt import Chain, Pattern
from ksopt.bench import random_subjects
from ksopt.bench.paper_patterns import stratified_sample
from ksopt.cli.main import main
from ksopt.errors import InvalidInputError
from ksopt.jit import resources
from ksopt.kernels import forecast, registry
from ksopt.kernels.families.base import families
from ksopt.kernels.gpus import GPUS, spec_of
from ksopt.kernels.problem import Epilogue, Problem

CHAIN = Chain.parse("(1,512,128,2)*(2,128,512,1)")
KINDS = (
    ("float32", False), ("float16", False), ("float32", True), ("bfloat16", True)
)  # fmt: skip
SUBJECTS = [
    *random_subjects.draw(40, seed=11),
    *((Chain((pattern,)), 25_088) for pattern in stratified_sample(20, seed=5)),
]
OTHERS = ("A100", "RTX3090", "RTX4090", "B200", "RTX5090")
_FEW_BYTES = 128
"""Of a thread, spilled: the kernels whose sums take all of 255 registers spill so much."""


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KSOPT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def test_a_chain_is_one_launch_where_the_kernel_exists_and_a_launch_a_factor_elsewhere():
    problem = Problem(CHAIN, "bfloat16", False, epilogue=Epilogue(bias=True))
    on_hopper = forecast.forecast(problem, 8192, GPUS["H200"])
    assert on_hopper.plan.ways == ("chain_wgmma16",)
    assert on_hopper.behind_us == 0
    # There is no such kernel, and the launches are predicted to take longer than the dense layer.
    on_ampere = forecast.forecast(problem, 8192, GPUS["A100"])
    assert on_ampere.plan.ways == ("merged",)
    assert on_ampere.behind_us == 0
    problem = replace(problem, dtype="float16")  # which is not merged
    assert forecast.forecast(problem, 8192, GPUS["RTX4090"]).plan.ways == ("chain_mma",)
    problem = replace(problem, siblings=2)
    assert forecast.forecast(problem, 8192, GPUS["A100"]).plan.ways == ("chain_mma",)
    problem = replace(problem, epilogue=Epilogue(True, "silu_gate"))  # which no kernel has there
    on_ampere = forecast.forecast(problem, 8192, GPUS["A100"])
    assert len(on_ampere.plan.launches) == 4
    assert on_ampere.behind_us > 0
    assert [one.problem for one in on_ampere.plan.launches] == list(problem.factors())[::-1] * 2


@pytest.mark.parametrize("name", GPUS)
def test_the_choice_is_the_least_of_the_predictions_and_never_above_pytorchs(name):
    for chain, _ in SUBJECTS[:8]:
        for dtype, last in KINDS:
            # Choices are made for powers of two.
            one_gpu = forecast.forecast(Problem(chain, dtype, last), 8192, GPUS[name])
            total = one_gpu.plan.predicted_us + one_gpu.behind_us
            assert total <= one_gpu.pytorch_us * 1.000001
            for rivals in one_gpu.rivals:
                times = [one.predicted_us for one in rivals]
                assert times == sorted(times)


def takes(family, problem, rows, spec):
    too_many = family.max_batch is not None and rows > family.max_batch
    if too_many or family.unsupported_reason(problem, spec) is not None:
        return False
    return any(family.fits(problem, tile, spec) for tile in family.configs(problem, spec))


def test_each_family_for_hopper_alone_has_a_twin_on_other_gpus():
    special = [one for one in families() if one.capability_only and not one.takes_chains]
    twins = [one for one in families() if not one.takes_chains and not one.is_fallback]
    assert len(special) >= 5
    taken = dict.fromkeys((one.name for one in special), 0)
    for (chain, rows), (dtype, last) in itertools.product(SUBJECTS, KINDS):
        problem = Problem.of_factor(chain.patterns[-1], dtype, last)
        for family in special:
            if not takes(family, problem, rows, GPUS["H200"]):
                continue
            taken[family.name] += 1
            for name in OTHERS:
                spec = GPUS[name]
                assert any(takes(one, problem, rows, spec) for one in twins), (
                    family.name,
                    name,
                    problem,
                )
    assert min(taken.values()) >= 5, taken


# Tiny blocks and thousands of them, one huge block, c of 1 to 7, any d.
EXTREMES = [
    (1, 24, 24, 4096), (4096, 2, 3, 7), (1, 5000, 5000, 1), (300, 1, 7, 20), (1, 7, 1, 4096),
    (3000, 2, 2, 3), (1, 50257, 768, 1), (1, 10, 7, 3), (2, 64, 5, 14), (20, 3, 6, 2048),
]  # fmt: skip


@pytest.mark.parametrize("name", ["H200", "A100", "RTX4090"])
def test_factors_of_any_size_have_a_fast_family(name):
    fast = [one for one in families() if not (one.takes_chains or one.is_fallback)]
    drawn = [(chain.patterns[-1], rows) for chain, rows in random_subjects.draw(150, seed=3)]
    for pattern, rows in [*drawn, *((Pattern(*shape), 1000) for shape in EXTREMES)]:
        for dtype, last in KINDS:
            is_short = last and dtype == "float32" and pattern.c < 32
            if is_short or (last and pattern.a * pattern.d == 1):
                continue  # left to PyTorch, which copies nothing there, and to the general kernel
            problem = Problem.of_factor(pattern, dtype, last)
            assert any(takes(one, problem, rows, GPUS[name]) for one in fast), problem


@pytest.mark.sweep
@pytest.mark.parametrize("place", range(40))
def test_chosen_kernels_compile_and_fit(place):
    chain, rows = SUBJECTS[place + 10]
    dtype, last = KINDS[place % 4]
    spec = GPUS[OTHERS[place % 5]]
    problem = Problem.of_factor(chain.patterns[-1], dtype, last)
    for one in registry.best_kernels(problem, rows, spec, most=1):
        kernels = [
            kernel
            for source in one.sources()
            for kernel in resources.of_source(source, forecast.target(spec))
        ]
        static = max(kernel.shared_bytes for kernel in kernels)
        block = one.family.shared_bytes(problem, one.tile) + static + 1024
        assert block * one.tile.blocks <= spec.shared_bytes
        assert all(0 < kernel.registers <= 255 for kernel in kernels)
        assert all(kernel.spilled_bytes <= _FEW_BYTES for kernel in kernels), (one.label, kernels)


def test_a_launch_is_compiled_for_its_gpu():
    problem = Problem.of_factor(Pattern(1, 512, 128, 2), "bfloat16", False)
    (launch,) = forecast.forecast(problem, 8192, GPUS["A100"]).plan.launches
    compiled = forecast.compiled(launch, GPUS["A100"])
    assert compiled.fits
    assert compiled.blocks >= 1
    assert all("ksopt" in one.kernel for one in compiled.resources)
    small = replace(GPUS["A100"], shared_bytes=compiled.dynamic_shared_bytes)
    with pytest.raises(AssertionError):  # its tile exists on no such device
        assert forecast.compiled(launch, small).fits
    by_pytorch = forecast.forecast(
        Problem.of_factor(Pattern(1, 8, 8, 1), "float64", False), 8, small
    )
    assert forecast.compiled(by_pytorch.plan.launches[0], small) is None


def test_gpus_by_name_and_by_numbers():
    assert spec_of("8.0,108,164") == spec_of("a100") == GPUS["A100"]
    for wrong, words in (
        ("H20", "did you mean"), ("9.0,0,228", "at least 1"), ("9.0,132", "such as 9.0,132,228")
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match=words):
            spec_of(wrong)


def test_the_command_prints_a_row_a_launch_and_all_candidates_of_one_gpu(capsys):
    words = ["explain-kernel", str(CHAIN), "--dtype", "float16", "--bias"]
    assert main(["explain-kernel", str(CHAIN), "--dtype", "bfloat16", "--bias"]) == 0
    assert re.search(r"^A100 .* merged ", capsys.readouterr().out, flags=re.MULTILINE)
    assert main(words) == 0
    out = capsys.readouterr().out
    for name in GPUS:
        assert re.search(rf"^{name} ", out, flags=re.MULTILINE)
    assert "All candidates" not in out
    words += ["--gpu", "A100", "--siblings", "2", "--activation", "silu_gate", "--compile"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "PyTorch's operations" in out
    assert "All candidates, best predicted first" in out
    assert re.search(r"(mma16|expanded_bmm) .* yes$", out, flags=re.MULTILINE)
    assert "naive(" in out


def test_the_commands_json_has_what_the_table_has(capsys):
    words = ["explain-kernel", str(CHAIN), "--dtype", "float16", "--gpu", "A100", "H200"]
    assert main([*words, "--json", "--compile"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["gpus"]) == ["A100", "H200"]
    whole = document["gpus"]["H200"]["launches"]
    assert [one["way"] for one in whole] == ["chain_wgmma16"]
    assert whole[0]["compiled"]["fits"] is True
    assert whole[0]["compiled"]["resources"][0]["registers"] > 0
    assert len(document["gpus"]["A100"]["launches"]) == 2


def test_the_command_says_what_the_last_launch_adds(capsys):
    words = ["explain-kernel", str(CHAIN), "--dtype", "bfloat16", "--bias", "--batch", "16"]
    assert main([*words, "--gpu", "H200"]) == 0
    out = capsys.readouterr().out
    assert out.count(" with bias ") == 1
    assert re.search(r"decode_mma16 with bias ", out)
    assert main([*words, "--gpu", "H200", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)["gpus"]["H200"]
    assert (seen["within"], seen["behind"], seen["behind_us"]) == (["bias"], [], 0)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["(1,2,3)"], "(1,2,3)"),
        (["(1,2,2,1)", "--gpu", "H20"], "did you mean 'H200'"),
        (["(1,2,2,1)", "--dtype", "flaot16"], "did you mean 'float16'"),
        (["(1,2,2,1)", "--layout", "last"], "--layout 'last' is not one of"),
        (["(1,2,2,1)", "--batch", "0"], "--batch 0: it must be from 1 to"),
        (["(1,2,2,1)", "--dtype", "float16", "--tf32"], "--tf32 is for float32"),
        (["(1,2,2,1)", "--siblings", "0"], "siblings 0: there must be at least 1"),
        (["(1,2,2,1)", "--activation", "sulu"], "activation 'sulu' is unknown"),
    ],
)
def test_refusals_are_sentences(words, text, capsys):
    assert main(["explain-kernel", *words]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "Traceback" not in err
