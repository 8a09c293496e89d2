"""Tables: the refused ones, and the escaping of cells in each format."""

import io

import pytest

from ksopt.errors import InvalidInputError
from ksopt.report import document, tables
from ksopt.report.document import Section


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="2 columns got a row of 1 cells"):
        tables.of(("chain", ">us"), [("(1,2,3,4)",)])


def test_cells_are_text_in_every_form() -> None:
    table = tables.of(("a|b",), [("<b>|*",)])
    page = document.html("", "", [Section("", table=table)])
    assert "<tr><th>a|b</th></tr>\n<tr><td>&lt;b&gt;|*</td></tr>" in page
    assert table.markdown().splitlines()[-1] == r"| <b>\|\* |"
    stream = io.StringIO()  # no terminal
    tables.write(table, stream)
    assert stream.getvalue() == "a|b\n<b>|*\n"
