"""``ksopt convert``: its output, files and error messages; killed, it leaves no partial result."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conversion_models import DOWN, UP, Tiny, tiny

import ksopt
from ksopt.cli.main import main
from ksopt.conversion.plan import Rule
from ksopt.patterns.surroundings import Surroundings

HERE = Path(__file__).parent


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan and the user's module in it, which is the current one."""
    ksopt.Plan.of({"32x8": DOWN, "blocks.0.up": UP}).write(tmp_path / "plan.json")
    shutil.copy(HERE / "conversion_models.py", tmp_path / "usersmodel.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "usersmodel", raising=False)
    return tmp_path


WORDS = ("convert", "--model", "usersmodel:tiny", "--plan", "plan.json", "--out", "out")


def test_it_converts_reports_and_writes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(WORDS) == 0
    printed = capsys.readouterr()
    assert f"importing {place / 'usersmodel.py'}, which runs its code" in printed.err
    assert "projecting 3/3 blocks.1.down" in printed.err
    assert "3 layers converted" in printed.out
    assert "error: ||W - W'|| / ||W||" in printed.out
    load, train = printed.out.splitlines()[-2:]
    assert load == "next:    model = ksopt.load_converted('out', usersmodel.tiny())"
    assert "ksopt.distil(model, usersmodel.tiny(), batches)" in train
    assert str(place / "out") in printed.out
    model = ksopt.load_converted("out", Tiny().eval())
    tokens = torch.arange(5).reshape(1, 5)
    expected = ksopt.convert(tiny(), "plan.json").model(tokens)
    assert torch.equal(model(tokens), expected)
    assert str(place) not in sys.path


def test_a_model_that_stays_dense_is_reported(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main((*WORDS, "--max-error", "0")) == 0
    printed = capsys.readouterr().out
    assert "No layer was converted; the model still has " in printed
    assert "next:" not in printed
    ksopt.Plan.of({"32x8": None}).write("plan.json")
    assert main((*WORDS[:-2], "--dry-run")) == 0
    assert capsys.readouterr().out == (
        "5 layers left dense (no rule of the plan matches it): "
        "blocks.0.qkv, blocks.0.up, blocks.1.qkv, blocks.1.up, head\n"
        "2 layers left dense (the plan keeps it dense): blocks.0.down, blocks.1.down\n"
        "0 layers would be converted.\n"
    )


def test_json_holds_the_config_alone(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*WORDS, "--json", "--exclude", "*.up", "--max-error", "0.9")) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((place / "out" / "config.json").read_text())
    assert [layer["names"] for layer in printed["layers"]] == [["blocks.0.down"], ["blocks.1.down"]]
    assert printed["model"] == "usersmodel:tiny"


def test_the_rules_of_several_plans_follow_each_other(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ksopt.Plan.of({"blocks.0.down": None, "8x32": UP}).write("first.json")
    words = ["convert", "--model", "usersmodel:tiny", "--dry-run", "--json"]
    assert main([*words, "--plan", "first.json", "plan.json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    names = [layer["name"] for layer in printed["layers"]]
    assert names == ["blocks.0.up", "blocks.1.up", "blocks.1.down"]
    unmatched = dict.fromkeys(
        ["blocks.0.qkv", "blocks.1.qkv", "head"], "no rule of the plan matches it"
    )
    assert printed["dense"] == {"blocks.0.down": "the plan keeps it dense"} | unmatched


def test_layers_that_no_rule_matches_are_listed(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "(no rule of the plan matches it)"
    assert main((*WORDS, "--exclude", "head")) == 0
    printed = capsys.readouterr().out
    assert f"3 layers left dense {reason}: blocks.0.qkv, blocks.1.qkv, blocks.1.up\n" in printed
    config = json.loads((place / "out" / "config.json").read_text())
    assert set(config["dense"]) == {"blocks.0.qkv", "blocks.1.qkv", "blocks.1.up"}
    assert "no rule of the plan matches it" in (place / "out" / "report.md").read_text()
    words = (*WORDS[:-2], "--dry-run")
    assert main((*words, "--include", "blocks.1.*", "--exclude", "*.qkv")) == 0
    assert f"1 layer left dense {reason}: blocks.1.up\n" in capsys.readouterr().out


def test_a_long_list_of_dense_layers_is_cut(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "deep.py").write_text(
        "from torch import nn\n\n\n"
        "def build():\n    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))\n"
    )
    ksopt.Plan.of({"0": "(1,8,8,1)"}).write("plan.json")
    words = ("convert", "--model", "deep:build", "--plan", "plan.json", "--dry-run")
    assert main(words) == 0
    assert capsys.readouterr().out.endswith(
        "11 layers left dense (no rule of the plan matches it): 1, 2, 3, 4, 5, 6, 7, 8, ... and 3 "
        "more\n1 layer would be converted.\n"
    )
    assert main((*words, "--json")) == 0
    assert len(json.loads(capsys.readouterr().out)["dense"]) == 11


def conditional_plan() -> None:
    """Chains for the first layers of MLPs, where a ReLU follows them, and for the second ones."""
    wanted = Surroundings(("bias", "relu"))
    up = Rule((ksopt.Chain.parse(UP),), in_features=8, out_features=32, where=wanted)
    down = Rule((ksopt.Chain.parse(DOWN),), in_features=32, out_features=8)
    ksopt.Plan((up, down)).write("conditional.json")


def test_inputs_show_where_a_condition_is_true(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conditional_plan()
    words = ["convert", "--model", "usersmodel:tiny", "--plan", "conditional.json"]
    assert main([*words, "--dry-run"]) == 0
    without = capsys.readouterr().out
    assert "2 layers left dense (the plan has chains for such layers only where" in without
    assert "): blocks.0.up, blocks.1.up\n2 layers would be converted.\n" in without
    assert "--inputs of the command" in without
    words += ["--inputs", "usersmodel:inputs"]
    assert main([*words, "--dry-run", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    names = [layer["name"] for layer in printed["layers"]]
    assert names == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    assert main([*words, "--out", "out"]) == 0
    assert "4 layers converted" in capsys.readouterr().out
    ksopt.load_converted("out", Tiny())


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("usersmodel:nothing", "has no function nothing"),
        ("usersmodel", "--inputs 'usersmodel': write MODULE:FACTORY"),
        ("usersmodel:no_inputs", "the function returned None"),
        ("usersmodel:not_a_model", "the inputs must be a tensor"),
        ("usersmodel:wrong_inputs", "the model does not take these inputs"),
    ],
)
@pytest.mark.parametrize("last", [("--dry-run",), ("--out", "out")])
def test_wrong_inputs_are_one_sentence(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    inputs: str,
    message: str,
    last: tuple[str, ...],
) -> None:
    conditional_plan()
    words = ["convert", "--model", "usersmodel:tiny", "--plan", "conditional.json"]
    assert main([*words, "--inputs", inputs, *last]) == 2
    printed = capsys.readouterr()
    assert message in printed.err.splitlines()[-1]
    assert "Traceback" not in printed.err
    assert not (place / "out").exists()


def test_weights_from_a_file(place: Path) -> None:
    state = {name: 2 * tensor for name, tensor in tiny().state_dict().items()}
    torch.save(state, "weights.pt")
    assert main((*WORDS, "--weights", "weights.pt", "--refine", "2")) == 0
    model = ksopt.load_converted("out", Tiny())
    assert torch.equal(model.embed.weight, state["embed.weight"])


def test_a_model_without_values_is_refused_and_listed(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "empty.py").write_text(
        "import torch\nfrom usersmodel import tiny\n\n\ndef meta():\n    return tiny().to('meta')\n"
    )
    words = (*WORDS[:2], "empty:meta", *WORDS[3:])
    assert main(words) == 2
    refused = capsys.readouterr().err
    assert "is on the device meta, which holds no values to convert" in refused
    assert "Traceback" not in refused
    assert not (place / "out").exists()
    assert main((*words, "--dry-run")) == 0


def test_a_dry_run_writes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in place.iterdir())
    words = (*WORDS[:-2], "--dry-run")
    assert main(words) == 0
    table = capsys.readouterr().out
    assert "blocks.1.down" in table
    assert UP in table
    assert main((*words, "--json")) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert layers[0] == {"name": "blocks.0.up", "chain": UP}
    assert [path for path in sorted(p.name for p in place.iterdir()) if path != "__pycache__"] == [
        name for name in before if name != "__pycache__"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--model": "usersmodel"}, "write MODULE:FACTORY"),
        ({"--model": "../x:y"}, "write MODULE:FACTORY"),
        ({"--model": "nowhere:build"}, "there is no module nowhere"),
        ({"--model": "no.where:build"}, "there is no module no.where"),
        ({"--model": "usersmodel:nothing"}, "has no function nothing"),
        ({"--model": "usersmodel:tniy"}, "has no function tniy; did you mean 'tiny'?"),
        ({"--model": "usersmodel:not_a_model"}, "must return a torch.nn.Module, and returned int"),
        ({"--plan": "none.json"}, "the plan none.json cannot be read"),
        ({"--plan": "usersmodel.py"}, "usersmodel.py: the plan is not JSON"),
        ({"--out": "."}, "is not empty"),
        ({"--out": "plan.json"}, "is not a folder"),
        ({"--out": None}, "name a new folder for the result"),
        ({"--include": "blocks.7.*"}, "include 'blocks.7.*' matches no linear layer"),
        ({"--max-error": "-1"}, "give a relative error"),
        ({"--max-error": "much"}, "'much'"),
        ({"--refine": "-1"}, "--refine -1: give the steps, 0 or more"),
        ({"--weights": "none.pt"}, "there is no file none.pt"),
        ({"--device": "moon"}, "moon"),
        ({"--plan": None}, "--plan"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_misuse_is_one_sentence(
    place: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str | None], message: str
) -> None:
    arguments = dict(zip(WORDS[1::2], WORDS[2::2], strict=True)) | change
    words = [
        word for name, value in arguments.items() if value is not None for word in (name, value)
    ]
    try:
        code = main(["convert", *words])
    except SystemExit as leaving:  # argparse's way
        code = leaving.code  # type: ignore[assignment]
    printed = capsys.readouterr()
    assert code == 2
    assert message in printed.err.splitlines()[-1]
    assert printed.err.splitlines()[-1].startswith("ksopt")
    assert printed.out == ""
    assert not (place / "out").exists()


def test_the_users_code_may_fail_and_print(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "loud.py").write_text(
        "from usersmodel import tiny\n"
        "def build():\n    print('building')\n    return tiny()\n"
        "def broken():\n    raise RuntimeError('no such file')\n"
    )
    assert main((*WORDS[:2], "loud:build", *WORDS[3:], "--json")) == 0
    printed = capsys.readouterr()
    json.loads(printed.out)
    assert "building" in printed.err
    words = (*WORDS[:2], "loud:broken", *WORDS[3:-1], "other")
    assert main(words) == 2
    assert "broken() raised RuntimeError: no such file" in capsys.readouterr().err
    with pytest.raises(ksopt.errors.InvalidInputError) as reported:
        main((*words, "--traceback"))
    assert isinstance(reported.value.__cause__, RuntimeError)


def test_killed_in_the_middle_it_leaves_no_folder_and_runs_again(place: Path) -> None:
    (place / "slow.py").write_text(
        "import safetensors.torch, time\n"
        "from usersmodel import tiny as build\n"
        "save = safetensors.torch.save_file\n"
        "def slowly(tensors, path, **options):\n"
        "    save(tensors, path, **options)\n"
        "    print('half', flush=True)\n"
        "    time.sleep(60)\n"
        "safetensors.torch.save_file = slowly\n"
    )
    words = [*WORDS[:2], "slow:build", *WORDS[3:]]
    process = subprocess.Popen(
        [sys.executable, "-m", "ksopt", *words], cwd=place, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not (place / "out").exists()
    began = time.monotonic()
    assert main(WORDS) == 0
    assert time.monotonic() - began < 30
    assert (place / "out" / "report.md").exists()
