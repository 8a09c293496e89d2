"""A problem: a chain, its epilogue, its siblings; and the key that a choice is stored under."""

import json

import pytest

from ksopt.errors import InvalidInputError
from ksopt.kernels import tuning_cache
from ksopt.kernels.families.base import families
from ksopt.kernels.problem import EMPTY, DeviceSpec, Epilogue, Problem, ProblemKey
from ksopt.kernels.tuning_cache import Record, Timed
from ksopt.patterns.chain import Chain, Pattern

H200 = DeviceSpec((9, 0), 132, 228 * 1024)
CHAIN = Chain.parse("(1,192,48,2)*(2,48,192,1)")
PATTERN = Pattern(4, 64, 64, 1)
EVERY = Epilogue(bias=True, activation="gelu", residual=True)
EPILOGUES = [Epilogue(bias=True), Epilogue(activation="silu"), Epilogue(residual=True), EVERY]
APART = [  # each differs from the others in one thing at least
    Problem.of_factor(PATTERN, "float16", False),
    Problem(CHAIN, "float16", False),
    Problem(CHAIN, "float16", True),
    Problem(CHAIN, "bfloat16", False),
    Problem(CHAIN, "float32", False),
    Problem(CHAIN, "float32", False, exact=False),
    Problem(CHAIN, "float16", False, epilogue=Epilogue(bias=True)),
    Problem(CHAIN, "float16", False, epilogue=Epilogue(residual=True)),
    Problem(CHAIN, "float16", False, epilogue=Epilogue(in_float32=True)),
    Problem(CHAIN, "float16", False, epilogue=Epilogue(activation="gelu")),
    Problem(CHAIN, "float16", False, epilogue=Epilogue(activation="gelu_tanh")),
    Problem(CHAIN, "float16", False, epilogue=EVERY),
    Problem(CHAIN, "float16", False, siblings=3),
    Problem(CHAIN, "float16", False, siblings=2),
    Problem(CHAIN, "float16", False, epilogue=Epilogue(activation="silu_gate"), siblings=2),
    Problem(Chain((PATTERN, PATTERN)), "float16", False),
    Problem(Chain((PATTERN,) * 40), "float16", False),  # its text is longer than a file's name
    Problem(Chain((PATTERN,) * 41), "float16", False),
]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))


def test_a_factor_is_a_chain_of_one_with_nothing_around_it():
    problem = Problem.of_factor(PATTERN, "float32", True, exact=False)
    assert problem == Problem(Chain((PATTERN,)), "float32", True, False, EMPTY, 1)
    assert problem.is_factor
    assert problem.pattern == PATTERN
    assert [other.is_factor for other in APART] == [True, *[False] * (len(APART) - 1)]


def test_a_chain_is_its_factors_in_order():
    problem = Problem(CHAIN, "float32", True, False, EVERY, 2)
    assert [one.pattern for one in problem.factors()] == list(CHAIN)
    assert all(one.is_factor and one.batch_last and not one.exact for one in problem.factors())
    assert problem.out_features == 2 * CHAIN.out_features
    with pytest.raises(ValueError, match="too many values"):
        _ = problem.pattern


def test_a_gate_has_one_result_of_two_siblings():
    problem = Problem(CHAIN, "float16", False, epilogue=Epilogue(True, "silu_gate"), siblings=2)
    assert problem.epilogue.names == ("bias", "silu_gate")
    assert problem.out_features == CHAIN.out_features
    assert problem.product_features == 2 * CHAIN.out_features
    assert problem.one() == Problem(CHAIN, "float16", False, epilogue=Epilogue(True))
    for siblings in (1, 3):
        with pytest.raises(InvalidInputError, match="the products of 2 siblings"):
            Problem(CHAIN, "float16", False, epilogue=problem.epilogue, siblings=siblings)


def test_an_unknown_activation_is_refused():
    with pytest.raises(
        InvalidInputError,
        match="'tanh' is unknown: it must be one of none, relu, gelu, gelu_tanh, silu",
    ):
        Epilogue(activation="tanh")


def test_a_key_comes_back_from_json_and_from_disk():
    machine = {"device": "Stand-in"}
    timed = (Timed("factors", None, "any", None, 3.0, 2.0, 4.0),)
    keys = [ProblemKey.of_problem(problem, 100) for problem in APART]
    for at, key in enumerate(keys):
        assert ProblemKey.from_json(json.loads(json.dumps(key.to_json()))) == key
        assert tuning_cache.save(machine, Record(key, 64 + at, timed, 0, 0))
    assert len({str(key) for key in keys}) == len(keys)
    for at, key in enumerate(keys):  # each in a file of its own
        record = tuning_cache.load(machine, key)
        assert record is not None
        assert record.batch == 64 + at
    assert len(tuning_cache.load_all(machine)) == len(keys)
    names = [tuning_cache.path_of(machine, key).name for key in keys]
    assert max(map(len, names)) < 255
    assert names[0] == "4_64_64_1-float16-batch_first-aligned-128.json"
    assert "1_192_48_2.2_48_192_1-bias-gelu-residual-float16-batch_first-aligned-128.json" in names


@pytest.mark.parametrize("broken", [{"siblings": 0}, {"epilogue": {"bias": 1}}, {"pattern": "x"}])
def test_what_is_no_key_is_refused(broken):
    values = ProblemKey.of_problem(APART[0], 100).to_json()
    with pytest.raises((ValueError, TypeError, KeyError)):
        ProblemKey.from_json(values | broken)


def test_what_is_printed_of_a_key():
    key = ProblemKey.of_problem(Problem(CHAIN, "float32", False, False, EVERY, 3), 100)
    assert str(key) == (
        "(1,192,48,2)*(2,48,192,1) bias gelu residual 3 siblings float32 batch_first tf32 "
        "batch<=128"
    )


@pytest.mark.parametrize(
    "family",
    [family for family in families() if not family.takes_chains],
    ids=lambda family: family.name,
)
def test_a_family_of_one_factor_refuses_all_else(family):
    dtype = next(iter(family.dtypes))
    last = family.layout == "batch_last"
    alone = Problem.of_factor(PATTERN, dtype, last)
    others = [
        Problem(Chain((PATTERN, PATTERN)), dtype, last),
        *(Problem(alone.chain, dtype, last, epilogue=epilogue) for epilogue in EPILOGUES),
        Problem(alone.chain, dtype, last, siblings=2),
    ]
    why = "it computes one factor's product alone"
    assert family.unsupported_reason(alone, H200) != why
    assert {family.unsupported_reason(other, H200) for other in others} == {why}


@pytest.mark.parametrize(
    ("dtype", "residual", "words"),
    [("float32", False, "of float32"), ("bfloat16", True, "of bfloat16, with a residual")],
)
def test_a_result_in_float32_is_of_16_bit_operands_without_a_residual(dtype, residual, words):
    with pytest.raises(InvalidInputError, match=f"this is {words}$"):
        Problem(CHAIN, dtype, False, epilogue=Epilogue(residual=residual, in_float32=True))


def test_a_result_in_float32_has_a_key_of_its_own_and_other_keys_stay():
    plain, cast = (
        ProblemKey.of_problem(
            Problem(CHAIN, "bfloat16", False, epilogue=Epilogue(True, in_float32=is_cast)), 64
        )
        for is_cast in (False, True)
    )
    assert "in_float32" not in plain.to_json()["epilogue"]
    for one in (plain, cast):
        assert ProblemKey.from_json(one.to_json()) == one
    assert plain.file_name != cast.file_name
    assert Epilogue.of_names(cast.problem.epilogue.names) == cast.problem.epilogue
