"""Untrusted files: every defect of one is a sentence that names it."""

import contextlib
import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ksopt
from ksopt.bench.result_tables import Series
from ksopt.cli.main import main
from ksopt.conversion import weights
from ksopt.conversion.plan import Plan
from ksopt.errors import InvalidInputError
from ksopt.search.hf_config import layers_of_config
from ksopt.system import untrusted
from ksopt.system.atomic_files import check_new_folder, new_folder

DEEP = "[" * 100_000 + "]" * 100_000
INDEX = "model.safetensors.index.json"


def refused(read, path: Path) -> str:
    with pytest.raises(InvalidInputError) as error:
        read(path)
    assert str(path) in str(error.value)
    return str(error.value)


READERS = {
    "plan": (Plan.read, "plan.json"),
    "config": (layers_of_config, "config.json"),
    "index": (weights.read, INDEX),
    "pt": (weights.read, "state.pt"),
    "safetensors": (weights.read, "one.safetensors"),
}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "3", "null", '"x"', DEEP, '{"a": ' * 100_000, "9" * 5000, "\0", "NaN"),
        '{"weight_map": 3}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": {"b": 1}}}',
        '{"weight_map": {"a": "x\\u0000.safetensors"}}',
        f'{{"weight_map": {DEEP}}}',
        '{"model_type": "bert", "hidden_size": 1e999}',
        f'{{"model_type": "bert", "hidden_size": {"9" * 4000}}}',
        '{"schema": "ksopt.plan/1", "layers": [{"chain": "(1,' + "9" * 4000 + ',1,1)"}]}',
        '{"schema": "ksopt.plan/1", "layers": [{"chain": {}}]}',
        '{"schema": "ksopt.plan/1", "layers": [{"chain": null, "in_features": 1e999}]}',
    ],
)
def test_a_malformed_file_is_one_sentence(tmp_path: Path, kind: str, content: str) -> None:
    read, name = READERS[kind]
    (tmp_path / name).write_text(content)
    refused(read, tmp_path / name)


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("what", ["missing", "folder", "loop", "binary", "utf-16", "endless"])
def test_what_is_no_such_file_is_one_sentence(tmp_path: Path, kind: str, what: str) -> None:
    read, name = READERS[kind]
    path = tmp_path / name
    if what == "folder":
        path.mkdir()
    elif what == "loop":
        path.symlink_to(path)
    elif what == "binary":
        path.write_bytes(bytes(range(256)) * 10)
    elif what == "utf-16":
        path.write_text("{}", encoding="utf-16")
    elif what == "endless":
        path.symlink_to("/dev/zero")
    with pytest.raises(InvalidInputError, match=name):
        read(path)


@pytest.mark.parametrize("name", ["nul\0byte", "x" * 5000, "\udcff"])
def test_names_that_no_file_has(tmp_path: Path, name: str) -> None:
    for read in (Plan.read, weights.read, layers_of_config, Series.read):
        with pytest.raises(InvalidInputError):
            read(tmp_path / name)
    if name != "\udcff":
        with pytest.raises(InvalidInputError):
            check_new_folder(tmp_path / name)


@pytest.mark.parametrize(
    "data",
    [
        b"he.",
        b"q\x00he.",
        b"(K\x01o.",
        b"\x80\x02]q\x01h\x7f.",
        b"\x80\x02}u.",
        b"\x80\x05K",
        b"R.",
    ],
)
def test_a_pickle_that_asks_for_what_it_has_not(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "state.pt").write_bytes(data)
    refused(weights.read, tmp_path / "state.pt")


@pytest.mark.parametrize("legacy", [False, True])
def test_every_part_of_a_torch_file_may_be_cut_or_wrong(tmp_path: Path, legacy: bool) -> None:
    whole = tmp_path / "whole.pt"
    torch.save({"w": torch.ones(3)}, whole, _use_new_zipfile_serialization=not legacy)
    data, path = whole.read_bytes(), tmp_path / "state.pt"
    for at in range(0, len(data), 7):
        for changed in (
            data[:at],
            data[:at] + b"\xff" + data[at + 1 :],
            data[:at] + data[at + 1 :],
        ):
            path.write_bytes(changed)
            with contextlib.suppress(InvalidInputError):  # anything else is a failure
                state = weights.read(path)
                assert all(isinstance(value, torch.Tensor) for value in state.values())


@pytest.mark.parametrize(
    "state",
    [
        *({1: torch.ones(1)}, {"a": 1}, [torch.ones(1)], torch.ones(1), None),
        {"a": torch.ones(2, 2).to_sparse()},
        {"a": torch.ones(2, 2, device="meta")},
    ],
)
def test_what_is_no_state_dict(tmp_path: Path, state: object) -> None:
    torch.save(state, tmp_path / "state.pt")
    assert "tensors by name" in refused(weights.read, tmp_path / "state.pt")


def test_an_archive_that_unpacks_to_more_than_it_takes_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**7))
    assert "not packed" in refused(weights.read, path)


def test_a_safetensors_file_of_a_dtype_that_torch_has_not(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    save_file({"w": torch.ones(4)}, path)
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F99"'))
    refused(weights.read, path)


def test_rows_of_a_benchmark_that_are_none(tmp_path: Path) -> None:
    setting = {"schema": "ksopt.bench/1", "identity": {}}
    for line in ("[{}]", "3", "[]", "{", DEEP, '[{"subject": 1}]'):
        (tmp_path / "setting.json").write_text(json.dumps(setting))
        (tmp_path / "rows.jsonl").write_text(line + "\n")
        assert "line 1" in refused(Series.read, tmp_path)
    (tmp_path / "setting.json").write_text(DEEP)
    refused(Series.read, tmp_path)


def test_a_converted_models_config_of_another_form(tmp_path: Path) -> None:
    build = lambda: torch.nn.Sequential(torch.nn.Linear(8, 16))  # noqa: E731
    folder = tmp_path / "converted"
    ksopt.save_converted(ksopt.convert(build(), {"0": "(1,8,4,2)*(2,4,4,1)"}), folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in (("layers", 3), ("layers", [{}]), ("aliases", []), ("layers", [[]])):
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(InvalidInputError, match=r"config\.json"):
            ksopt.load_converted(folder, build())


def test_text_of_a_large_file_is_not_read_whole(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(untrusted, "MOST_BYTES", 10)
    (tmp_path / "plan.json").write_text("x" * 11)
    assert "larger" in refused(Plan.read, tmp_path / "plan.json")


def test_a_folder_that_fails_leaves_no_folder_above_it(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "a" / "b" / "c"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


SEARCH = ("search", "--dims", "32x64", "--batch", "16", "--device", "cpu", "--trials", "3")


@pytest.mark.sweep
@pytest.mark.parametrize(
    "words",
    [
        ("--storage", "sqlite:///garbage"),
        ("--storage", "journal:garbage"),
        ("--storage", "nonsense"),
        ("--storage", "sqlite:////proc/x/y.db"),
        ("--budget", "300%"),
        ("--weights", "garbage"),
    ],
)
@pytest.mark.parametrize("out", ["new", "new/deep", "there", "loop", "loop/x", "garbage"])
def test_a_refused_search_leaves_nothing(
    words: tuple[str, ...], out: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "garbage").write_bytes(b"garbage" * 100)
    (tmp_path / "there").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.rglob("*"))
    assert main([*SEARCH, "--out", out, *words]) == 2
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "garbage").read_bytes() == b"garbage" * 100
    assert "rror" not in capsys.readouterr().err.splitlines()[-1].partition(":")[0]


def test_a_link_in_the_place_of_the_folders_lock_is_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").symlink_to(precious)
    assert main([*SEARCH, "--out", str(tmp_path / "out")]) == 2
    assert "symbolic links" in capsys.readouterr().err
    assert precious.read_text() == "years of work"
