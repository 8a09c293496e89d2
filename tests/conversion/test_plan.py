"""Plans: their rules, reading and writing, and invalid ones."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksopt import Chain, InvalidInputError
from ksopt.conversion.plan import Plan, Rule
from ksopt.patterns.surroundings import Surroundings

MONARCH = Chain.monarch(8, 16, p=2)


def test_the_json_is_what_the_schema_says() -> None:
    plan = Plan(
        (
            Rule((), match="head"),
            Rule((MONARCH,), match="block.*", in_features=8, out_features=16),
            Rule((MONARCH, MONARCH), match="qk"),
            Rule((MONARCH,), where=Surroundings(("bias", "gelu"), siblings=1)),
        ),
        made_by="ksopt search",
    )
    assert json.loads(plan.to_json()) == {
        "schema": "ksopt.plan/1",
        "layers": [
            {"match": "head", "chain": None},
            {"match": "block.*", "in_features": 8, "out_features": 16, "chain": str(MONARCH)},
            {"match": "qk", "chains": [str(MONARCH), str(MONARCH)]},
            {
                "match": "*",
                "chain": str(MONARCH),
                "where": {"epilogue": ["bias", "gelu"], "siblings": 1},
            },
        ],
        "made_by": "ksopt search",
    }


rules = st.builds(
    Rule,
    st.sampled_from([(), (MONARCH,), (MONARCH, MONARCH, Chain.dense(8, 3))]),
    st.text(min_size=1, max_size=9),
    st.sampled_from([None, 8]),
    st.none(),
    st.sampled_from([None, Surroundings(("bias",), 3), Surroundings(("silu_gate",), 2)]),
)


@given(st.lists(rules, min_size=1, max_size=4), st.text(max_size=9))
def test_json_round_trip(some: list[Rule], made_by: str) -> None:
    plan = Plan(tuple(some), made_by)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_mapping_of_names_sizes_and_lists(tmp_path: Path) -> None:
    plan = Plan.of({"head": None, "8x16": MONARCH, "q*": [str(MONARCH), MONARCH]})
    assert [rule.match for rule in plan.rules] == ["head", "*", "q*"]
    assert (plan.rules[1].in_features, plan.rules[1].out_features) == (8, 16)
    assert plan.rules[2].chains == (MONARCH, MONARCH)
    assert Plan.of(plan) is plan
    plan.write(tmp_path / "plan.json")
    assert Plan.of(tmp_path / "plan.json") == Plan.of(str(tmp_path / "plan.json")) == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_the_first_match_and_patterns_for_names() -> None:
    rule = Rule((MONARCH,), match="encoder.*.fc[12]")
    assert rule.matches("encoder.layer.0.fc1", 8, 16)
    assert not rule.matches("encoder.layer.0.fc3", 8, 16)
    assert not rule.matches("Encoder.layer.0.fc1", 8, 16)
    assert not rule.is_exact
    assert Rule((MONARCH,), match="encoder.fc").is_exact


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has the schema 'ksopt.plan/1', got 'list'"),
        ('{"schema": "ksopt.plan/2", "layers": []}', "got 'ksopt.plan/2'"),
        ('{"schema": "ksopt.plan/1", "layers": []}', "at least one rule"),
        ('{"schema": "ksopt.plan/1", "layers": {}}', "has a list, 'layers'"),
        ('{"schema": "ksopt.plan/1", "layer": []}', "has 'layer', but may have only"),
        ('{"schema": "ksopt.plan/1", "layers": [3]}', "is an object, got 3"),
        ('{"schema": "ksopt.plan/1", "layers": [{"match": "a"}]}', "must have 'chain'"),
        (
            '{"schema": "ksopt.plan/1", "layers": [{"match": "a", "chain": null, "chains": []}]}',
            "must have 'chain'",
        ),
        ('{"schema": "ksopt.plan/1", "layers": [{"mach": "a", "chain": null}]}', "has 'mach'"),
        ('{"schema": "ksopt.plan/1", "layers": [{"match": 3, "chain": null}]}', "is a text"),
        (
            '{"schema": "ksopt.plan/1", "layers": [{"in_features": 0, "chain": null}]}',
            "whole numbers from 1",
        ),
        ('{"schema": "ksopt.plan/1", "layers": [{"chain": "(1,2"}]}', "is not a pattern"),
        ('{"schema": "ksopt.plan/1", "layers": [{"chain": []}]}', "belongs in 'chains'"),
        ('{"schema": "ksopt.plan/1", "layers": [{"chains": []}]}', "gives []"),
        ('{"schema": "ksopt.plan/1", "layers": [{"chains": [7]}]}', "7 is not a chain"),
        (
            '{"schema": "ksopt.plan/1", "layers": [{"in_features": 3, "chain": "(1,2,2,1)"}]}',
            "is for layers of in_features=3, but",
        ),
        (
            '{"schema": "ksopt.plan/1", "layers": [{"chains": ["(1,2,2,1)", "(1,2,3,1)"]}]}',
            "share their input",
        ),
        ('{"schema": "ksopt.plan/1", "layers": [{"chain": null, "where": 3}]}', "is an object"),
        (
            '{"schema": "ksopt.plan/1", "layers": [{"chain": null, "where": {"sibling": 3}}]}',
            "has 'sibling', but may have only 'epilogue', 'siblings'",
        ),
        (
            '{"schema": "ksopt.plan/1", "layers": [{"chain": null, "where": {"siblings": 9}}]}',
            "rule for '*': siblings 9: at most 4",
        ),
        (
            '{"schema": "ksopt.plan/1", "layers": [{"chain": null, "where": {"siblings": "3"}}]}',
            "siblings must be",
        ),
        (
            '{"schema": "ksopt.plan/1", "layers": [{"chain": null, "where": {"epilogue": "b"}}]}',
            "'epilogue' is a list of texts",
        ),
        (
            '{"schema": "ksopt.plan/1", "layers": [{"chain": null, "where": {"epilogue": ["b"]}}]}',
            "epilogue 'b' is unknown",
        ),
    ],
)
def test_what_is_not_a_plan_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=re.escape(message)) as caught:
        Plan.read(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_other_things_than_plans_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be read"):
        Plan.read(tmp_path / "none.json")
    with pytest.raises(InvalidInputError, match="cannot be written"):
        Plan.of({"a": None}).write(tmp_path / "none" / "plan.json")
    with pytest.raises(InvalidInputError, match="got int"):
        Plan.of(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="keys are texts"):
        Plan.of({3: None})  # type: ignore[dict-item]
    with pytest.raises(InvalidInputError, match="rule for 'a' gives 3"):
        Plan.of({"a": 3})
