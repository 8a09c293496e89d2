"""`ksopt.report.output_folder`: the files of a report, or a sentence."""

from pathlib import Path

import pytest

from ksopt.errors import InvalidInputError
from ksopt.report import output_folder

SVG = '<svg viewBox="0 0 4 4" width="4" height="4"><title>t</title></svg>'


def test_texts_and_drawings_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "report"
    output_folder.write(folder, {"a.md": "one\n", "b.csv": "x\n"}, {"plot": SVG}, "plots")
    assert (folder / "a.md").read_text("utf-8") == "one\n"
    assert (folder / "b.csv").read_text("utf-8") == "x\n"
    assert "<svg" in (folder / "plots" / "plot.svg").read_text("utf-8")


def test_without_drawings_there_is_no_folder_of_them(tmp_path: Path) -> None:
    output_folder.write(tmp_path, {"a.md": ""}, {}, "plots")
    assert [path.name for path in tmp_path.iterdir()] == ["a.md"]


def test_a_folder_that_cannot_be_written_is_a_sentence_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InvalidInputError, match=r"cannot be written to .*file.*: try again"):
        output_folder.write(file, {"a.md": ""}, remedy="try again")
    with pytest.raises(InvalidInputError, match="the measurements are kept; choose another --out"):
        output_folder.write(file / "below", {"a.md": ""})
