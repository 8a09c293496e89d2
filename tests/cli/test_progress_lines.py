"""Lines on stderr of long measurements."""

import pytest

from ksopt.cli.progress_lines import print_left


def test_what_is_left_agrees_in_number(capsys: pytest.CaptureFixture[str]) -> None:
    print_left(1, "product")
    print_left(5, "layer")
    assert capsys.readouterr().err.splitlines() == [
        "1 product is left: the same command goes on with it",
        "5 layers are left: the same command goes on with them",
    ]
