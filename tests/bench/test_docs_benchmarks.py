"""docs/benchmarks.md matches the command: its commands run, its files and options exist."""

import re
import shlex
from pathlib import Path

import pytest

from ksopt.bench import benchmark
from ksopt.cli import main
from ksopt.measure.roofline import Roofline

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in re.findall(r"^(ksopt .*)$", TEXT, flags=re.MULTILINE)]


@pytest.fixture(autouse=True)
def quick(brief: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    invented = Roofline("cpu", "float32", 1e10, 1e11, 0, 0, "made up")
    monkeypatch.setattr(benchmark, "measure_roofline", lambda device, dtype: invented)
    monkeypatch.setattr(benchmark, "_SECONDS", 0.001)
    monkeypatch.setattr(benchmark, "_MOST_FLOORS", 4.0)
    monkeypatch.chdir(tmp_path)


def test_the_commands_are_of_this_kind() -> None:
    assert len(COMMANDS) >= 4
    assert all(words[:3] == ["ksopt", "bench", "kernels"] for words in COMMANDS)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_runs(words: list[str], capsys: pytest.CaptureFixture) -> None:
    """As it stands where it is for a CPU; on tiny patterns where a GPU would take minutes."""
    arguments = [word for word in words[1:] if word != "--graph"]
    if "--report" in arguments:
        for name in ("fp16", "fp32"):
            tiny = ["--patterns", "(1,4,4,2)", "--batch", "4", "--device", "cpu"]
            dtype = {"fp16": "float16", "fp32": "float32"}[name]
            main.main(["bench", "kernels", *tiny, "--dtype", dtype, "--out", name])
    elif "cpu" not in arguments:
        small = {"paper": "(1,4,4,2)", "(1,64,64,64)*(64,64,64,1)": "(1,4,4,4)*(4,4,4,1)"}
        arguments = [small.get(word, word) for word in arguments]
        arguments = [word.replace("eager,inductor", "eager") for word in arguments]
        arguments += ["--device", "cpu"] + ([] if "--batch" in arguments else ["--batch", "4"])
    assert main.main(arguments) == 0
    assert "median efficiency" in capsys.readouterr().out


def test_the_files_are_those_it_leaves(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--patterns", "(1,4,4,2)", "--batch", "4", "--device", "cpu", "--dtype", "float32"]
    main.main(["bench", "kernels", *words, "--out", str(out)])
    named = re.findall(r"`([a-z]+\.[a-z]+)`", TEXT.split("## Output files")[1])
    assert set(named) == {path.name for path in out.iterdir()}


def test_the_options_exist(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main.main(["bench", "kernels", "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert set(re.findall(r"`(--[a-z-]+)", TEXT)) <= known
    undocumented = known - set(re.findall(r"--[a-z-]+", TEXT))
    assert undocumented <= {"--help", "--json", "--quiet", "--seed", "--traceback", "--verbose"}
