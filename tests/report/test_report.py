"""The report: a self-contained page, figures derived from a study's axes, LaTeX."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tests.report.small import save
from titans_platform.config import EvalConfig, RunConfig, TaskConfig
from titans_platform.report import picture as plot
from titans_platform.report import publish as export
from titans_platform.report.figures import depth_maps, pictures
from titans_platform.report.picture import figure_data, svg
from titans_platform.report.publish import report_page
from titans_platform.report.report import Links, build_report
from titans_platform.report.table import Table, build_table
from titans_platform.runs.folder import RunFolder
from titans_platform.study.grid import Cell, StudyRun, expand
from titans_platform.study.spec import Axis, Column, Expectation, Row, Scale, Study

PPL = Column(title="LM perplexity", higher_is_better=False, decimals=2)
ACC = Column(title="Reasoning", unit="%", factor=100)


def study(rows: list[Row], **columns: Column) -> Study:
    columns = columns or {"ppl": PPL, "acc": ACC}
    return Study(name="tiny", columns=columns, scales={"small": Scale()}, rows=tuple(rows))


def measured(root: Path, study: Study, seeds=(0, 1), tasks=(), skip=()) -> Table:
    """The table of a study whose every cell is done, but for those skipped (row, seed)."""
    measures, cells = EvalConfig(columns={key: (TaskConfig(task="recall"),) for key in study.columns}), []
    for i, (row, seed) in enumerate(product(study.rows, seeds)):
        cells.append(Cell(row.name, seed, RunConfig(seed=seed, eval=measures), f"{i // len(seeds)}x{seed}"))
        if (row.name, seed) not in skip:
            finish(root, cells[-1], i, tasks)
    return table_of(root, study, cells)


def table_of(root: Path, study: Study, cells: list[Cell]) -> Table:
    return build_table(StudyRun(study, "small", root, "c0ffee", cells=tuple(cells), whole=tuple(cells)))


def finish(root: Path, cell: Cell, i: int, tasks=(), **fields) -> None:
    """Write the result of the ``i``-th cell, with these tasks; ``fields`` are put in place of its own."""
    made = {
        "columns": {"ppl": 5 + i / 8, "acc": 0.25 + i / 100}, "chance": {"acc": 0.25},
        "tasks": {key: {"value": 0.5, "stderr": 0.1, "chance": 0.25, "items": 9} for key in tasks},
        "parameters": 1000 + i, "state_bytes": 64, "tokens": 1000, "train_seconds": 2.0,
        "mlflow_run_id": f"run{cell.name}",
    }  # fmt: skip
    save(root, cell, **made | fields)


def curves(table: Table) -> dict:
    return {result.cell: [(step, 5 / step) for step in range(1, 50)] for result in table.results}


def page(table: Table) -> str:
    return report_page(build_report(table, curves(table), links=Links("http://127.0.0.1:5000", "1")))


def test_page_is_self_contained_marks_missing_cells_links_numbers_and_latex_is_escaped(tmp_path):
    """Of three rows: whole, one seed failed with a reason that looks like HTML, nothing there."""
    rows = [Row(name="LMM", paper={"ppl": 27.01}), Row(name="w/o <Conv> & co"), Row(name="gone")]
    RunFolder(tmp_path, "1x1").record_failure(ValueError("loss <script>alert(1)</script>"), "c0ffee")
    hurt = measured(tmp_path, study(rows), skip={("w/o <Conv> & co", 1), ("gone", 0), ("gone", 1)})
    text = page(hurt)
    assert not re.search(r"(?:src|href)=\"(?!#|http://127\.0\.0\.1:5000/)|@import|url\((?!#)", text)
    assert "<script>alert" not in text
    assert "loss &lt;script&gt;" in text
    assert text.count("missing") >= 4
    assert "3 of 6 cells" in text
    for run in ("run0x0", "run0x1", "run1x0"):
        assert f'href="http://127.0.0.1:5000/#/experiments/1/runs/{run}"' in text
    # a mean leads to its runs side by side, one seed to the run itself
    assert "#/compare-runs?runs=[&#34;run0x0&#34;,&#34;run0x1&#34;]&amp;experiments=[&#34;1&#34;]" in text
    text = export.latex(build_report(hurt))
    assert r"w/o $<$Conv$>$ \& co &" in text
    assert r"LMM & $\mathbf{" in text


def grid(*axes: tuple[str, list]) -> list[Row]:
    keys, points = [key for key, _ in axes], product(*(values for _, values in axes))
    return [Row(name=" ".join(map(str, point)), set=dict(zip(keys, point, strict=True))) for point in points]


VARIANT = ("model.variant", ["lmm", "mac"])
DEPTH, CHUNK = ("model.memory.depth", [1, 2, 3]), ("model.memory.chunk_size", [16, 64])
LENGTH, RATE = ("data.sequence_length", [64, 128]), ("optim.lr", [1e-3, 1e-2])


@pytest.mark.parametrize(("rows", "expected"), [
    ([Row(name="LMM"), Row(name="b", set={"model.memory.depth": 1})], {"columns", "curves"}),
    (grid(VARIANT, DEPTH, CHUNK), {"grid-ppl", "grid-acc", "grid-throughput", "curves"}),
    (grid(DEPTH, LENGTH), {"against-sequence_length", "curves"}), (grid(DEPTH, CHUNK, RATE), {"curves"}),
    (grid(DEPTH), {"against-depth", "curves"}),
])  # fmt: skip
def test_figures_follow_from_the_axes(tmp_path, rows, expected):
    table = measured(tmp_path, study(rows))
    assert {picture.key for picture in pictures(figure_data(table, curves(table)))} == expected


def test_needle_depths_are_a_heat_map_over_length(tmp_path):
    columns = {f"pk_{n}": Column(title=f"PK {n}T", unit="%", factor=100) for n in (1, 2, 3)}
    cells = [Cell(row, seed, RunConfig(), f"{row}{seed}") for row in ("LMM", "Window") for seed in (0, 1)]
    for cell in cells:
        shares = {"0-10%": float(cell.row == "LMM"), "90-100%": 1.0 - cell.seed / 2}
        keys = ("pk_1/needle-passkey@64", "pk_2/needle-passkey@128")
        others = {"pk_3/needle-passkey@64": {"0-10%": 0.5}, "ppl/perplexity@64": {"64-127": 3.0}}
        finish(tmp_path, cell, 0, keys, buckets=dict.fromkeys(keys, shares) | others)
    table = table_of(tmp_path, study([Row(name="LMM"), Row(name="Window")], **columns), cells)
    # the third column's task has other options, and the same label
    picture, other = depth_maps(figure_data(table))
    assert (picture.key, other.key) == ("depth-needle-passkey", "depth-needle-passkey-pk_3")
    numbers = re.findall(r">([^<>]+)</text>", svg(picture))
    # LMM at 0-10% and 90-100%, then Window, each at 64 and 128 tokens
    assert [float(n) for n in numbers if n.endswith(".0")] == [100, 100, 75, 75, 0, 0, 75, 75]
    assert {"LMM", "Window", "64", "128", "0-10%", "90-100%"} <= set(numbers)


def test_trials_of_a_search_are_drawn_against_each_field(tmp_path):
    trials = [
        {"params": {"optim.lr": 10.0**-i, "model.memory.activation": "silu"}, "steps": 9 + i % 2, "value": i}
        for i in range(1, 4)
    ]
    trials.append({"params": {"optim.lr": 1.0}, "steps": 0, "value": None})
    data = figure_data(measured(tmp_path, study([Row(name="LMM")])), search={"trials": trials})
    picture = next(picture for picture in pictures(data) if picture.key == "search")
    assert len(picture.panels) == 1
    assert svg(picture).count("<use") >= 3


def test_grid_has_a_tile_for_every_cell_and_marks_missing_ones(tmp_path):
    table = measured(tmp_path, study(grid(VARIANT, DEPTH, CHUNK)), skip={("mac 2 64", 0), ("mac 2 64", 1)})
    text = page(table)
    figure = next(part for part in re.findall(r"<figure.*?</figure>", text, re.S) if "grid-ppl" in part)
    numbers = re.findall(r">(\d+\.\d\d)</text>", figure)
    assert len(numbers) == 2 * 3 * 2 - 1
    assert figure.count("color-mix") >= len(numbers)
    assert ">—</text>" in figure


def test_expectation_of_a_column_that_the_scale_lacks_is_left_out(tmp_path):
    expected = {key: Expectation(better=True, because=f"Of {key}.") for key in ("ppl", "acc")}
    narrow = study([Row(name="LMM"), Row(name="MAC", expected=expected)])
    narrow = narrow.model_copy(update={"scales": {"small": Scale(columns={"acc": ACC})}})
    cells = [Cell(row.name, 0, RunConfig(), f"{row.name}x0") for row in narrow.rows]
    for i, cell in enumerate(cells):
        finish(tmp_path, cell, i, columns={"acc": 0.5})
    notes = " ".join(build_report(table_of(tmp_path, narrow, cells)).notes)
    assert ("Of acc." in notes, "Of ppl." in notes) == (True, False)


def test_row_of_several_runs_joins_their_numbers_and_has_its_expectation(tmp_path):
    why = Expectation(better=False, because="A derivation.")
    tasks = {key: {"eval.columns": {key: [{"task": "recall"}]}} for key in ("ppl", "acc")}
    axes = {"task": Axis(points=tasks, label="on {}", across=True)}
    across = study([Row(name="LMM"), Row(name="Linear", expected={"acc": why})])
    across = across.model_copy(update={"axes": axes})
    cells = [replace(cell, name=f"{i}") for i, cell in enumerate(expand(across, "small", seeds=[0, 1, 2]))]
    for i, cell in enumerate(cells[:-1]):  # the last, one of Linear's, is missing
        key = next(iter(cell.config.eval.columns))
        finish(tmp_path, cell, i, columns={key: 0.5 - 0.2 * (cell.row[:3] == "Lin") + i**2 / 1e5})
    table = table_of(tmp_path, across, cells)
    assert [row.row.name for row in table.rows] == ["LMM", "Linear"]
    counts = [[(len(e.values), e.wanted) for e in row.entries.values()] for row in table.rows]
    assert counts == [[(3, 3), (3, 3)], [(3, 3), (2, 3)]]
    text = export.markdown(build_report(table))
    assert "beside the study file's direction: of 1 comparison 1 agree" in text
    assert "mean ± sd over 3 seeds" in text
    assert f"<code>{cells[-1].name}</code>" in page(table)
    assert figure_data(table).axes == ()


def test_other_seeds_and_other_scales_are_named(tmp_path):
    """Such as seeds that a recipe was tuned on: a mean that counts them says so."""
    tuned = study([Row(name="LMM")]).model_copy(update={"scales": {"small": Scale(seeds=(0, 1))}})
    note = "Seeds that are not the scale's are counted: 100, 101."
    for seeds, counted in (((0, 1), False), ((0, 1, 100, 101), True)):
        assert (note in build_report(measured(tmp_path / str(len(seeds)), tuned, seeds)).notes) == counted
    rows = [Row(name="LMM", paper={"ppl": 27.0}), Row(name="b", paper={"ppl": 28.0})]
    for comparable, shared in ((True, "on the same scale"), (False, "a scale of their own")):
        of = study(rows).model_copy(update={"scales": {"small": Scale(comparable=comparable)}})
        assert shared in pictures(figure_data(measured(tmp_path / shared, of)))[0].caption


def test_colour_follows_chance():
    def colours(values, column=ACC, chance=25.0, of=()):
        return [float(plot.heat_scale(values, column, chance=chance)(mean)) for mean in of or values]

    assert colours([10.0, 20.0, 60.0, 40.0]) == [0.0, 0.0, 1.0, pytest.approx(15 / 35)]
    # all of them no better than chance: all palest
    assert max(colours([10.0, 20.0])) == 0.0
    # where lower is better the scale is turned round when it is drawn
    assert min(colours([300.0, 280.0], PPL, 260.0)) == 1
