"""Every row of the paper's tables is run by a study or is a reference with a source."""

import pytest

from titans_core import count_parameters
from titans_platform.errors import UsageError
from titans_platform.study.grid import expand, known_studies, load_study
from titans_platform.study.spec import Row, read_paper

PAPER = read_paper()
SIZES = [(key, *sized) for key, table in PAPER.tables.items() for sized in table.sizes.items()]
ROWS = [(key, size, row) for key, size, rows in SIZES for row in rows]


@pytest.fixture(scope="module")
def shown() -> dict[tuple[str, str], dict[str, Row]]:
    """The rows of each study that runs a table, at each size that the paper prints it for."""
    wanted = {(table.study, size) for table in PAPER.tables.values() for size in table.sizes}
    known, actual = known_studies(), {}
    for name, size in wanted:
        if name in known:
            study = load_study(name)
            cells = {cell.row for cell in expand(study, size, seeds=[0])}
            # the runs of a line have its numbers, each for the columns that it measures
            rows = [row for row in study.rows_at(size) if row.name in cells]
            actual[name, size] = {row.as_line().name: row for row in rows}
    return actual


@pytest.mark.parametrize(("table", "size", "row"), ROWS)
def test_each_printed_row_is_run_or_has_a_source(table, size, row, shown):
    printed = PAPER.tables[table]
    runs = shown.get((printed.study, size), {}).get(row)
    assert (runs is not None) != (row in printed.references), "one of the two, and not both"
    if runs is None:
        assert len(printed.references[row].split()) > 3
    else:
        assert not runs.reference
        assert {key: runs.paper.get(key) for key in printed.columns} == printed.numbers(row, size)


def test_tables_and_figures_are_all_there_and_rows_the_paper_lacks_are_left_out():
    assert {key: len(table.sizes) for key, table in PAPER.tables.items()} == {
        "table_1": 3, "table_2": 1, "table_3": 1, "table_4": 1, "table_5": 1,
    }  # fmt: skip
    assert [len(rows) for rows in PAPER.tables["table_1"].sizes.values()] == [11, 15, 13]
    assert list(PAPER.figures) == ["figure_6", "figure_7", "figure_8", "figure_9"]
    assert next(iter(PAPER.items)) == "Table 1"
    assert all(table.columns for table in PAPER.tables.values())
    for table in PAPER.tables.values():
        assert not set(table.references) - {row for rows in table.sizes.values() for row in rows}
    study = load_study("language")
    for size, rows in PAPER.tables["table_1"].sizes.items():
        assert {row.name for row in study.rows_at(size)} == set(rows)


def test_numbers_of_one_table_follow_from_those_of_another():
    """Table 5 at 400M: the mean of two perplexities, the average, the mean of Table 2's twelve cells."""
    rows = {row.name: row.paper for row in load_study("language").rows_at("laptop")}
    names = {"LMM": "LMM"} | {f"+ Attn ({name})": name for name in ("MAC", "MAG", "MAL")}
    for titans_row, name in names.items():
        derived = rows[f"Titans ({name})"]
        for column, number in PAPER.tables["table_5"].numbers(titans_row, "").items():
            assert derived[column] == pytest.approx(number, abs=0.011), f"{name} {column}"
    # Table 2 has no such row
    assert rows["Samba"]["lm_ppl"] == pytest.approx((25.32 + 29.47) / 2)
    assert rows["Samba"].get("long_context_acc") is None


def test_rows_at_small_scales_have_the_same_parameters():
    counts = [count_parameters(cell.config.model) for cell in expand(load_study("language"), "laptop")]
    assert max(counts) < 1.05 * min(counts)


def test_unknown_table_of_the_paper_is_an_error(tmp_path):
    path = tmp_path / "s.yaml"
    text = "name: s\npaper: [table_6]\ncolumns: {a: {title: A}}\nrows: [{name: A}]\nscales: {x: {}}\n"
    path.write_text(text)
    with pytest.raises(UsageError, match="no table of the paper 'table_6'; did you mean table_"):
        load_study(str(path))
