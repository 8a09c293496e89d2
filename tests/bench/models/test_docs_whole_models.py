"""docs/whole-models.md matches the command: its options, files and words exist."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
import torch

from ksopt.bench.models import measuring
from ksopt.bench.models.build import SIZES, build
from ksopt.bench.models.chains import NAMED
from ksopt.bench.models.options import ModelsOptions
from ksopt.bench.models.request import DTYPES, MODES, PASSES, TUNES, ModelsRequest
from ksopt.bench.models.results import IMPLEMENTATIONS, WORDS, ImplementationResult
from ksopt.cli import main
from ksopt.system import option_fields

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "whole-models.md"
TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = re.findall(r"^ksopt bench models (.*)$", TEXT, flags=re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_asks_for_what_there_is(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ksopt.measure.device.resolve", lambda name: torch.device("cuda:0"))
    parser = argparse.ArgumentParser()
    option_fields.add_arguments(parser, ModelsOptions)
    arguments, rest = parser.parse_known_args(shlex.split(command))
    assert rest[::2] in ([], ["--out"])
    request = ModelsRequest.of(ModelsOptions(**option_fields.values(ModelsOptions, arguments)))
    for subject in request.subjects:
        size = request.size(subject)
        nowhere = torch.device("meta")
        assert build(size, torch.float32, nowhere, rule=request.options.chain).chains > 0


def test_the_options_and_their_words_exist(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main.main(["bench", "models", "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    named = set(re.findall(r"`(--[a-z-]+)", TEXT))
    assert named <= known
    assert known - named <= {"--help", "--quiet", "--traceback", "--verbose"}
    for word in (*SIZES, *NAMED, *DTYPES, *PASSES, *MODES, *TUNES, *WORDS):
        assert f"`{word}`" in TEXT
    assert [line.split("|")[1].strip() for line in TEXT.splitlines() if line.startswith("| dense")
            or line.startswith("| KS")] == list(IMPLEMENTATIONS)  # fmt: skip


@pytest.fixture
def immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built nor measured."""

    def measured(built: object, how: object, progress: object) -> tuple[ImplementationResult, ...]:
        return tuple(ImplementationResult(name, 1, first_s=1.0) for name in IMPLEMENTATIONS)

    monkeypatch.setattr(measuring, "measure_case", measured)


@pytest.mark.usefixtures("immediately")
def test_the_files_are_those_it_leaves(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the models come from transformers")
    out = tmp_path / "out"
    words = ["--small", "--models", "vit", "--dtypes", "float32", "--device", "cpu"]
    assert main.main(["bench", "models", *words, "--out", str(out)]) == 0
    named = re.findall(r"`([a-z]+\.[a-z]+)`", TEXT.split("## Output files")[1])
    assert set(named) == {path.name for path in out.iterdir()}
