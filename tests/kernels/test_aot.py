"""Every kernel, compiled ahead of time for A100, H100 and B200, stays within their resource limits."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from titans_kernels import supports
from titans_kernels.bench.shapes import SHAPES
from titans_kernels.memory.forms.triton import delta

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory a program may have, bytes."""

SPILLED = 240
"""Most bytes a thread may spill."""

COVERED = {
    "l1-d64-bound": ("gates", "columns", "reads.update"),
    "l2-d64-h64-bound": ("resident", "reads.forward", "reads.backward", "reads.base"),
    "l2-d64-h64-budget": ("budget",), "l3-d64-h64": ("streamed",), "l2-d64-h256": ("reads.update",),
    "l1-d128-online": ("delta",),
}  # fmt: skip
"""Shapes that launch every kernel, and the kernels each is compiled for."""
OTHERS = [
    ("bf16", "stepped", "l2-d1024-one"), ("fp16", "columns", "l1-d64-bound"),
    ("fp32", "streamed", "l2-d64-h64-bound"), ("fp32", "delta", "l1-d64-online"),
]  # fmt: skip
"""Other types and widths: dtype, kernel, shape."""
EDGES = {
    "fp32": ("reads.backward+hidden+base", "streamed_backward.backward"),
    "bf16": ("columns.write+read+keep", "reads.backward+hidden+base"),
}
"""The kernels that take most of what shared memory there is, more with a base. All, minutes of compiling:
`python -m titans_kernels.bench.aot --largest --target 90 --dtype fp32 --dtype bf16`."""
FIELDS = "depth", "head_dim", "hidden", "batch", "length", "chunk_size", "heads", "bound", "budget"


SCRIPT = """
import json, sys
from titans_kernels.bench.aot import main

for name, line in json.loads(sys.argv[1]).items():
    main([*line, "--json", name + ".json"], standalone_mode=False)
"""


@pytest.mark.parametrize("path", sorted(Path(delta.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_no_kernel_is_specialized_to_a_number_of_tokens(path):
    """Segments of packed documents have any number, and a multiple of 16 would be a kernel of its own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and "tokens" in [x.arg for x in node.args.args]:
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            assert "jit" not in decorators or "do_not_specialize=['tokens'" in decorators, node.name


def compiled(folder: Path, lines: dict[str, list[str]]) -> dict[str, list[dict]]:
    """The reports of each line of options, by name, from a process whose kernels are not interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(lines)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: json.loads((folder / f"{name}.json").read_text())["kernels"] for name in lines}


# one process for all, whose imports take seconds
@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, list[dict]]:
    lines = {name: ["--shape", name, *kernel_options(kernels)] for name, kernels in COVERED.items()}
    for dtype, name, shape in OTHERS:
        lines[f"other {shape}"] = [f"--shape={shape}", f"--dtype={dtype}", "--target=90", f"--kernel={name}"]
    for dtype, kernels in EDGES.items():
        lines[f"largest {dtype}"] = ["--largest", f"--dtype={dtype}", "--target=90", *kernel_options(kernels)]
    return compiled(tmp_path_factory.mktemp("aot"), lines)


def kernel_options(kernels: tuple[str, ...]) -> list[str]:
    return [f"--kernel={kernel}" for kernel in kernels]


@pytest.fixture
def reports(made) -> list[dict]:
    return [row for name in COVERED for row in made[name]]


def test_every_kernel_is_compiled_for_every_target(reports):
    kernels = {row["kernel"].split("+")[0] for row in reports}
    assert kernels == {
        "gates.forward", "gates.backward", "budget.forward", "budget.backward",
        "budget.keys_backward", "columns.write", "columns.backward", "reads.forward",
        "reads.backward", "resident.write", "streamed.write", "reads.base_backward",
        "streamed_backward.backward", "reads.update_backward", "delta.forward", "delta.backward",
    }  # fmt: skip
    for kernel in kernels:
        # an A100 has too little shared memory for a state that stays resident
        targets = {90, 100} if kernel == "resident.write" else {80, 90, 100}
        assert {row["target"] for row in reports if row["kernel"].startswith(kernel)} == targets
    assert set(COVERED) <= set(SHAPES)


def test_programs_fit_a_multiprocessor_and_spill_little(reports):
    for row in reports:
        assert row["registers"] <= 255, row
        assert row["registers"] * row["warps"] * 32 <= 65536, row
        assert row["shared"] <= SHARED_LIMIT[row["target"]], row
    assert [row for row in reports if row["spilled"] > SPILLED] == []


def shipped() -> dict[str, list[dict]]:
    """Shapes of the memories that every scale of every study trains on GPUs with kernels, by dtype."""
    # here, so that the tests for a GPU are collected without the platform
    from titans_platform.study.grid import expand, known_studies, load_study

    shapes: dict[str, dict[tuple, dict]] = {"bf16": {}, "fp32": {}}
    for study in map(load_study, known_studies()):
        for scale in (name for name, one in study.scales.items() if one.resources.gpus_per_worker):
            for c in (cell.config for cell in expand(study, scale)):
                memory, dtype = c.model.memory, c.optim.precision
                width = c.model.d_model // memory.heads
                if not supports(memory, width, TYPES[dtype], 90).kernels:
                    continue
                hidden = memory.expansion * width * (memory.depth > 1)
                sizes = memory.depth, width, hidden, 16, 4096, memory.chunk_size, memory.heads
                sizes = *sizes, memory.surprise_bound, memory.write_budget
                key = *sizes[:3], *sizes[5:6], *sizes[7:]
                shapes[dtype].setdefault(key, dict(zip(FIELDS, sizes, strict=True)))
    return {
        dtype: [{"name": f"shipped-{i}"} | sizes for i, sizes in enumerate(distinct.values())]
        for dtype, distinct in shapes.items()
    }


def test_every_path_of_a_shipped_scale_is_enumerated():
    paths = {(s["depth"], s["head_dim"], s["chunk_size"]) for s in shipped()["bf16"]}
    assert {(depth, 64, b) for depth in (1, 2, 3, 4) for b in (16, 64)} | {(1, 128, 64)} <= paths


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_path_of_a_shipped_scale_spills_much(dtype, tmp_path):
    (tmp_path / "shapes.json").write_text(json.dumps(shipped()[dtype]))
    (rows,) = compiled(tmp_path, {dtype: ["--packed", "--shapes=shapes.json", f"--dtype={dtype}"]}).values()
    assert [r for r in rows if r["spilled"] > SPILLED or r["shared"] > SHARED_LIMIT[r["target"]]] == []


def test_products_are_on_tensor_cores(reports):
    for row in reports:
        kernel = row["kernel"].removesuffix("+base")
        if not kernel.startswith("gates") and kernel != "reads.update_backward":
            assert row["tensor_core"] > 0, row


def test_write_budget_takes_few_instructions(reports):
    """In PTX, whose loops stay loops: `forward` had 722 when each token took products with all keys."""
    most = {"budget.forward": 580, "budget.backward": 610, "budget.keys_backward": 1260}
    rows = [row for row in reports if row["kernel"] in most]
    assert [row for row in rows if row["instructions"] > most[row["kernel"]]] == []


def test_no_product_reads_a_tile_while_the_next_one_arrives(reports):
    """In the kernels that are pipelined and carry a sum over their loops.

    W's tile in the update has one buffer, so a product that ran on into the next iteration would read half
    of each. With the product of W last this was 1 at hidden 256, and an emulator of the compiled code
    reported, at hidden 128, 256 writes of cp.async to shared memory "while a wgmma reads"; with it first,
    none.
    """
    assert [row for row in reports if row["kernel"].startswith("columns") and row["carried"]] == []
    steps = [row for row in reports if row["kernel"].startswith("reads.update_backward+keys")]
    assert {row["shape"] for row in steps} == {"l1-d64-bound", "l2-d64-h256"}
    assert {row["kernel"] for row in steps} == {f"reads.update_backward+keys{base}" for base in ("", "+base")}
    assert [row["carried"] for row in steps] == [0] * len(steps)


@pytest.mark.parametrize(("dtype", "kernel", "shape"), OTHERS)
def test_other_types_and_widths_compile_too(dtype, kernel, shape, made):
    rows = made[f"other {shape}"]
    assert rows
    assert all(row["kernel"].startswith(kernel) and row["dtype"] == dtype for row in rows)
    assert all(row["shared"] <= SHARED_LIMIT[90] for row in rows)
    assert [row for row in rows if row["spilled"] > SPILLED] == []


@pytest.mark.parametrize("dtype", EDGES)
def test_largest_that_is_served_fits_a_multiprocessor(dtype, made):
    rows = made[f"largest {dtype}"]
    assert {row["kernel"] for row in rows} >= set(EDGES[dtype])
    assert [row for row in rows if row["shared"] > SHARED_LIMIT[90]] == []


def test_interpreted_process_is_refused(monkeypatch, capsys):
    from titans_kernels.bench import aot

    monkeypatch.setattr(aot, "INTERPRETED", True)
    with pytest.raises(SystemExit, match=r"^2$"):
        aot.main(["--shape", "l1-d128"])
    assert capsys.readouterr().err.splitlines()[-1].startswith("Error: TRITON_INTERPRET is set")
