"""Tables: which columns are cut and left out where they do not fit."""

from __future__ import annotations

import pytest

from hybridc.report.table import Column, render_table

COLUMNS = (
    Column("id", numeric=True),
    Column("time", numeric=True, dispensable=1),
    Column("bytes", numeric=True, dispensable=2),
    Column("name", least=6),
    Column("why", least=4),
)
ROWS = [("1", "2.00 ms", "4.00 MiB", "a" * 10 + "z" * 10, "short"), ("10", "-", "0 B", "b", "because of it")]


@pytest.mark.parametrize(
    ("width", "heading", "first"),
    [
        (None, "id time bytes name why", "1 2.00 ms 4.00 MiB aaaaaaaaaazzzzzzzzzz short"),
        (58, "id time bytes name why", "1 2.00 ms 4.00 MiB aaaaaaaaaazzzzzzzzzz short"),
        (57, "id time bytes name why", "1 2.00 ms 4.00 MiB aaaaaaaaa..zzzzzzzz short"),
        (50, "id time bytes name why", "1 2.00 ms 4.00 MiB aaaaaa..zzzzz short"),
        (36, "id time bytes name why", "1 2.00 ms 4.00 MiB aa..zz short"),
        (34, "id time name why", "1 2.00 ms aaaa..zzzz short"),
        (20, "id name why", "1 aaa..zzz short"),
        (5, "id name why", "1 aa..zz s..t"),
    ],
)
def test_what_has_most_to_spare_is_cut_first_and_then_columns_are_left_out(
    width: int | None, heading: str, first: str
) -> None:
    lines = render_table(COLUMNS, ROWS, width)
    assert [line.split() for line in lines[:2]] == [heading.split(), first.split()]


@pytest.mark.parametrize("width", range(16, 70))
def test_lines_fit_from_the_least_width_on(width: int) -> None:
    lines = render_table(COLUMNS, ROWS, width)
    assert max(map(len, lines[:3])) <= width
    left_out = [column.heading for column in COLUMNS if column.heading not in lines[0].split()]
    assert lines[3:] == ([f"(no room for {', '.join(left_out)})"] if left_out else [])


def test_table_without_rows() -> None:
    assert render_table(COLUMNS, [], 80) == ["id  time  bytes  name  why"]
