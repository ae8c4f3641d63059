"""The layers of the source tree, and what each needs to be imported."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from titans_platform.errors import TRAIN
from tools.counts import lines_of_code

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
OPERATOR = """
import torch, titans_kernels
q, k, v = torch.randn(3, 1, 9, 2, 4)
gates, weights = torch.rand(3, 1, 9, 2), (torch.randn(2, 4, 4), torch.randn(2, 4, 4))
titans_kernels.neural_memory(q, k, v, *gates, weights, chunk_size=4)
"""
MODEL = """
from titans_core import LanguageModel, MemoryConfig, ModelConfig
memory = MemoryConfig(heads=2, chunk_size=4)
config = ModelConfig(variant="mag", vocab_size=9, d_model=8, n_layers=1, memory=memory)
LanguageModel(config).generate([[1, 2]], max_new_tokens=2)
"""
OPTIONAL = ("titans_kernels.bench", "titans_core.adapt", "titans_core.huggingface")
"""Modules with requirements of their own: click, transformers."""
MODULES = """
import importlib, pkgutil, sys
import titans_kernels
assert not {{"torch._dynamo", "torch._inductor"}} & set(sys.modules), "the compiler is imported"
for name in {packages}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__") and not module.name.startswith({left_out}):
            importlib.import_module(module.name)
"""


@pytest.mark.parametrize("folder", ["platform", "kernels", "tests", "tests/platform", "sweeps", "clusters"])
def test_source_roots_are_no_packages(folder):
    assert not (ROOT / folder / "__init__.py").exists(), f"{folder}/__init__.py shadows another module"


def of_extra(name: str) -> set[str]:
    packages = {re.split(r"[^\w-]", line)[0] for line in PROJECT["optional-dependencies"][name]}
    return {"yaml" if name == "pyyaml" else name for name in packages}


def run_without(hidden: set[str], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.modules.update(dict.fromkeys({sorted(hidden)}))\n{code}"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(("packages", "left_out", "hidden", "use"), [
    (["titans_kernels"], OPTIONAL, {"titans_core", "pydantic", "safetensors"}, OPERATOR),
    (["titans_kernels", "titans_core"], OPTIONAL, set(), OPERATOR + MODEL),
], ids=["operator", "models"])  # fmt: skip
def test_layer_is_imported_and_used_without_packages_of_the_layers_above(packages, left_out, hidden, use):
    # torch itself imports these two
    hidden = hidden | {"titans_platform", "transformers"} | of_extra("train") - {"filelock", "jinja2"}
    done = run_without(hidden, MODULES.format(packages=packages, left_out=left_out) + use)
    assert done.returncode == 0, done.stderr


def test_library_requires_five_packages():
    names = {re.split(r"[^\w-]", line)[0] for line in PROJECT["dependencies"]}
    assert names == {"torch", "triton", "numpy", "pydantic", "safetensors"}
    assert of_extra("train") == set(TRAIN)


@pytest.mark.parametrize(("hidden", "words"), [("click", ["train", "run.yaml"]), ("yaml", ["tasks"])])
def test_command_without_the_extra_train_names_it(hidden, words):
    done = run_without({hidden}, "from titans_platform.__main__ import main; main()", *words)
    line = f"error: {hidden} is not installed; pip install 'titans-lab[train]'\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_imports_go_down_and_in_no_circle():
    """The contracts of import-linter in pyproject.toml: floors, and no modules that need each other."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_no_module_has_outgrown_its_frame():
    files = [*(ROOT / "platform").rglob("*.py"), *(ROOT / "titans_core").rglob("*.py")]
    long = {path.name: lines for path in files if (lines := lines_of_code(path.read_text("utf-8"))) > 300}
    assert not long
