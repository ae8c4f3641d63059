import csv
import io
import json
import math

import pytest

from tests.report.small import save
from titans_platform import text
from titans_platform.config import EvalConfig, RunConfig, TaskConfig
from titans_platform.report import publish as export
from titans_platform.report.publish import as_record, terminal, write_report
from titans_platform.report.report import build_report
from titans_platform.report.table import build_table, by_seed
from titans_platform.runs.folder import RunFolder
from titans_platform.study.grid import Cell, StudyRun
from titans_platform.study.spec import Axis, Column, Row, Scale, Study
from titans_platform.text import plain_console

MEASURES = EvalConfig(columns={key: (TaskConfig(task="recall"),) for key in ("lm_ppl", "reasoning_acc")})
COLUMNS = {
    "lm_ppl": Column(title="LM perplexity", higher_is_better=False, decimals=2),
    "reasoning_acc": Column(title="Reasoning", unit="%", factor=100),
}
ROWS = (
    Row(name="LMM", paper={"lm_ppl": 27.01, "reasoning_acc": 47.83}),
    Row(name="w/o Persistent Memory", paper={"lm_ppl": 27.63}), Row(name="Transformer++", reference=True),
)  # fmt: skip
# row -> (perplexity, accuracy) of each seed
MEASURED = {
    "LMM": [(5.0, 0.50), (5.2, 0.54)], "w/o Persistent Memory": [(6.0, 0.30), (6.4, 0.32)],
    "Transformer++": [(9.0, 0.90), (9.9, 0.99)],
}  # fmt: skip


def cells() -> list[Cell]:
    pairs = [(row, seed) for row in MEASURED for seed in (0, 1)]
    return [Cell(row, seed, RunConfig(seed=seed, eval=MEASURES), f"{row[:3]}{seed}") for row, seed in pairs]


def finish(root, cell: Cell, **changes) -> None:
    ppl, acc = MEASURED[cell.row][cell.seed]
    result = {
        "columns": {"lm_ppl": ppl, "reasoning_acc": acc}, "chance": {"lm_ppl": 260.0, "reasoning_acc": 0.25},
        "tasks": {"reasoning_acc/recall@64": {"value": acc, "stderr": 0.01, "chance": 0.25, "items": 100}},
        "parameters": 137_000, "state_bytes": 9_340, "mlflow_run_id": f"run-{cell.name}",
    }  # fmt: skip
    save(root, cell, **result | changes)


def table(root, commit: str = "c0ffee"):
    study = Study(name="tiny", columns=COLUMNS, scales={"small": Scale(seeds=(0, 1))}, rows=ROWS)
    return build_table(StudyRun(study, "small", root, commit, whole=tuple(cells())))


def test_row_of_several_cells_is_their_mean_for_each_seed(tmp_path):
    measures = EvalConfig(columns={"lm_ppl": (TaskConfig(task="recall"),)})
    axes = {"at": Axis(points={"near": {}, "far": {}}, across=True)}
    columns = {"lm_ppl": COLUMNS["lm_ppl"]}
    study = Study(name="tiny", columns=columns, scales={"small": Scale()}, rows=ROWS[:1], axes=axes)
    of = {("LMM near", 0): 1.0, ("LMM far", 0): 3.0, ("LMM near", 1): 2.0, ("LMM far", 1): 6.0}
    whole = [Cell(row, seed, RunConfig(seed=seed, eval=measures), f"{row}{seed}") for row, seed in of]
    tasks = {"lm_ppl/mse@8": {"value": 1.0, "stderr": 0.1, "chance": None, "items": 9}}
    for cell in whole[:3]:
        save(tmp_path, cell, row=cell.row, tasks=tasks, columns={"lm_ppl": of[cell.row, cell.seed]})
    (line,) = build_table(StudyRun(study, "small", tmp_path, "c0ffee", whole=tuple(whole))).rows
    assert (line.entries["lm_ppl"].values, line.entries["lm_ppl"].wanted) == ((2.0,), 2)
    assert by_seed(line, "lm_ppl") == {0: 2.0}


@pytest.fixture
def full(tmp_path):
    for cell in cells():
        finish(tmp_path, cell)
    return table(tmp_path)


def test_means_links_and_csv_of_a_whole_table(full):
    lmm = full.rows[0].entries
    assert (lmm["lm_ppl"].mean, lmm["lm_ppl"].sd) == (pytest.approx(5.1), pytest.approx(0.2 / math.sqrt(2)))
    assert lmm["reasoning_acc"].mean == pytest.approx(52.0)
    assert (full.chance, full.missing) == ({"lm_ppl": 260.0, "reasoning_acc": 25.0}, 0)
    text = export.markdown(build_report(full))
    assert [c.name for c in cells() if f"`{c.name}` | `run-{c.name}`" not in text] == []
    tables = export.tables(build_report(full))
    rows = list(csv.DictReader(io.StringIO(tables["table.csv"])))
    assert (len(rows), rows[1]["row"]) == (6, "LMM")
    assert (float(rows[1]["mean"]), rows[5]["paper"]) == (pytest.approx(52.0), "")
    by_cell = {row["cell"]: row for row in csv.DictReader(io.StringIO(tables["cells.csv"]))}
    assert (by_cell["LMM1"]["mlflow_run_id"], float(by_cell["LMM1"]["lm_ppl"])) == ("run-LMM1", 5.2)
    assert float(by_cell["LMM1"]["reasoning_acc (%)"]) == pytest.approx(54.0)
    assert float(by_cell["LMM1"]["reasoning_acc stderr (%)"]) == pytest.approx(1.0)
    assert json.dumps(as_record(full))


def printed(view, width: int = 80) -> list[str]:
    console = plain_console(width=width, file=io.StringIO())
    console.print(terminal(build_report(view), width))
    return console.file.getvalue().splitlines()


def test_no_number_is_cut_on_a_narrow_terminal(tmp_path, full):
    lines = printed(full)
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.startswith("LMM"))
    assert " ".join(row.split()) == "LMM 5.10±0.14 27.01 52.0±2.8 47.83 137K 9.34K 131M 0.0004"
    for cell in cells():
        finish(tmp_path, cell, commit="deadbeef" if cell.seed else "c0ffee", parameters=137_000_000)
    lines = [line.rstrip() for line in printed(table(tmp_path), 60)]
    numbers, sizes = (line for line in lines if line.startswith("w/o Persistent Memory†"))
    assert numbers.endswith("31.0±1.4     —")
    assert sizes.endswith("137M 9.34K   131M 0.0004")


def test_missing_failed_and_stale_cells_are_marked(tmp_path):
    done = cells()
    for cell in done[:2]:
        finish(tmp_path, cell, commit="c0ffee" if cell.seed else "deadbeef" * 5)
    finish(tmp_path, done[2])
    error = ValueError("loss is\nnan" + 60 * " long" + " fix=lr")
    RunFolder(tmp_path, done[3].name).record_failure(error, "c0ffee")
    view = table(tmp_path)
    lines = "\n".join(printed(view))
    # the end of a long note is its fix
    parts = ("LMM†", "commit deadbeefdead;", "6.00 1/2", "seed 1: failed: ValueError: loss is nan", "fix=lr")
    assert [part for part in (*parts, "— 0/2") if part not in lines] == []
    assert view.missing == 3


@pytest.mark.parametrize(("device", "noted"), [("NVIDIA H100", True), ("CPU, 2 cores", False)])
def test_rows_without_kernels_on_a_gpu_are_named(tmp_path, device, noted):
    first, *others = cells()
    for cell in (first, *others):
        form = "chunked" if cell.row == first.row else "triton"
        finish(tmp_path, cell, environment={"device": device}, forms=[f"neural_memory: {form}"])
    line = f"{first.row}: the memory ran on a GPU without kernels (chunked); do not compare times."
    assert (line in build_report(table(tmp_path)).notes) == noted


def test_every_format_has_the_verdict(tmp_path):
    steady = {"LMM": (5.0, 0.5), "w/o Persistent Memory": (6.0, 0.3), "Transformer++": (9.0, 0.9)}
    for cell in cells():
        ppl, acc = (value * (1 + cell.seed / 1000) for value in steady[cell.row])
        finish(tmp_path, cell, columns={"lm_ppl": ppl, "reasoning_acc": acc})
    full = table(tmp_path)
    (line,) = [each for each in printed(full) if "Persistent" in each and "agrees" in each]
    # 1.00 higher, which is worse; the paper too says worse
    assert line.split()[-3:] == ["-1.00", "p<0.001", "agrees"]
    paths = write_report(build_report(full), tmp_path)
    for name, less in (("table.md", "<"), ("table.tex", "$<$"), ("report.html", "&lt;")):
        text = paths[name].read_text()
        assert "of 1 comparison 1 agree, 0 disagree, 0 are not resolved" in text
        assert f"-1.00 [-1.01, -0.99] p{less}0.001 agrees" in text
    (judged, free) = csv.DictReader(io.StringIO(paths["verdict.csv"].read_text()))
    assert (judged["column"], judged["verdict"], judged["p"]) == ("lm_ppl", "agrees", judged["p_holm"])
    assert (free["column"], free["verdict"], free["p_holm"]) == ("reasoning_acc", "", "")


def best(view, key: str = "reasoning_acc") -> list[str]:
    return sorted(build_report(view).best[key])


def test_bold_is_the_best_of_the_compared_rows_and_nothing_at_chance(tmp_path, full):
    # Transformer++ has 94.5% and is a reference row
    assert best(full) == ["LMM"]
    assert "Transformer++ left out" in build_report(full).bold_note
    for cell in cells():
        acc = 0.24 if cell.row == "LMM" else 0.10
        finish(tmp_path, cell, columns={"lm_ppl": 300.0 + cell.seed, "reasoning_acc": acc})
    assert best(table(tmp_path)) == best(table(tmp_path), "lm_ppl") == []
    assert "mathbf" not in export.latex(build_report(table(tmp_path)))


def test_numbers_timed_beside_other_cells_are_marked(tmp_path):
    def timed(cell: Cell, host: str, began: int, ended: int) -> bool:
        cell.folder(tmp_path).update(attempt={"host": host, "began": began, "ended": ended})
        note = "Reasoning: timed while other cells ran on the same machine."
        return note in build_report(table(tmp_path)).notes

    for i, cell in enumerate(cells()):
        finish(tmp_path, cell, tasks={"reasoning_acc/throughput@64": {"value": 9.0, "stderr": None}})
        assert not timed(cell, "a", 10 * i, 10 * i + 9)
    assert timed(cells()[1], "a", 5, 19)
    assert not timed(cells()[1], "b", 5, 19)


def test_empty_table_has_a_report_and_counts_are_abbreviated(tmp_path):
    paths = write_report(build_report(table(tmp_path)), tmp_path / "views")
    assert {path for path in (tmp_path / "views").rglob("*") if path.is_file()} == set(paths.values())
    assert paths["figures/columns.png"].read_bytes().startswith(b"\x89PNG")
    assert paths["figures/columns.pdf"].read_bytes().startswith(b"%PDF")
    short = {None: "—", 0: "0", 999: "999", 1000: "1K", 137_400: "137K", 999_600: "1M", 15 * 10**9: "15B"}
    assert {value: text.count(value) for value in short} == short
    assert text.commit("deadbeef" * 5) == "deadbeefdead"
    assert text.commit("deadbeef" * 5 + "-dirty") == "deadbeefdead-dirty"


def test_cell_that_failed_when_it_ran_again_is_unfinished(tmp_path):
    first, *others = cells()
    for cell in (first, *others):
        finish(tmp_path, cell)
    folder = RunFolder(tmp_path, first.name)
    folder.set_aside()
    folder.record_failure(ValueError("loss is nan"), "c0ffee")
    view = table(tmp_path)
    assert view.missing == 1
    assert any("failed: ValueError: loss is nan" in note for note in build_report(view).footnotes)
    assert view.rows[0].runs("lm_ppl") != view.rows[0].runs("other")
