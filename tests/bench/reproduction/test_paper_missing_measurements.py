"""The ways of `ksopt bench paper` without a time, counted by their reasons."""

from ksopt.bench.reproduction import missing_measurements
from ksopt.bench.reproduction.missing_measurements import Absence
from ksopt.bench.reproduction.products import FIRST, LAST

SLOW = "not tried: blocks of {} take minutes"
ABSENCES = (
    Absence("float32", "bsr", FIRST, "(1,8,8,2)", SLOW.format(128)),
    Absence("float32", "bsr", LAST, "(1,8,8,2)", SLOW.format(128)),
    Absence("float16", "bsr", FIRST, "(1,9,9,2)", SLOW.format("1,024")),
    Absence("float16", "sparse", LAST, "(1,9,9,2)", "wrong: largest error 1.1e-03, allowed 9e-04"),
)


def test_reasons_that_differ_in_numbers_only_are_one_row() -> None:
    table = missing_measurements.table(ABSENCES)
    assert table.heads == ("way", "reason, of one pattern", "float32", "float16")
    assert table.rows == (
        ("bsr", "(1,8,8,2): " + SLOW.format(128), "1 + 1", "1 + 0"),
        (
            *("sparse", "(1,9,9,2): wrong: largest error 1.1e-03, allowed 9e-04"),
            *("0 + 0", "0 + 1"),
        ),
    )


def test_a_group_is_a_sentence() -> None:
    (first, _) = missing_measurements.grouped(ABSENCES)
    words = "bsr: patterns without a time: 1 + 1 (float32), 1 + 0 (float16); (1,8,8,2): not tried"
    assert str(first).startswith(words)


def test_what_is_wrong_is_a_fault_and_what_is_not_tried_is_not() -> None:
    assert [one.is_fault for one in ABSENCES] == [False, False, False, True]
