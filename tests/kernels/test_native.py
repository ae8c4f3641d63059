"""The compiled CPU kernels match the recurrence and PyTorch's operators; they are optional."""

import platform
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.kernels.cases import Case, assert_same, needs_compiler
from titans_kernels import native, neural_memory
from titans_kernels.layers import short_convolution
from titans_kernels.memory.forms import native as compiled


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
def test_packed_documents_in_any_number_of_threads(threads, torch_threads):
    torch_threads(threads)
    options = {"chunk_size": 7, "surprise_bound": 0.5}
    options["cu_seqlens"] = torch.tensor([0, 5, 5, 40, 41, 73, 90, 90])
    Case(90, 2, documents=7).check("native", **options)


@needs_compiler
@pytest.mark.parametrize("states", [1, 9])
@pytest.mark.parametrize("borders", [None, [0, 5, 5, 40, 41, 73, 90]])
def test_states_that_are_not_kept_are_computed_again(states, borders, monkeypatch):
    """So many states of 26 or 15 chunks, at least the root; the results are the same to the last bit."""
    rows = {"batch": 1 if borders else 2, "documents": borders and 6}
    case, sizes, of = Case(90, 3, kind="norm", base=True, **rows), [], compiled.Call.of
    options = {"chunk_size": 7, "surprise_bound": 0.5, "backend": "native"}
    options["cu_seqlens"] = borders and torch.tensor(borders)
    expected = case.whole(**options)
    monkeypatch.setattr(compiled.Call, "of", lambda *args: sizes.append(of(*args)) or sizes[-1])
    monkeypatch.setattr(compiled, "KEEP_BYTES", states * 2 * 3 * 2 * 16 * 16 * 8)
    actual = case.whole(**options)
    every = {(1, False): 6, (9, False): 3, (1, True): 5, (9, True): 2}
    assert sizes[0].spec.every == every[states, borders is not None]
    assert_same(expected, actual, case.leaves, results=(0, 0), gradients=(0, 0))


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="set on x86 alone")
def test_denormals_are_flushed_in_the_kernels_and_not_after_them():
    """With small eta the products of a chunk are so small, and slow on Intel."""
    zero, tiny = torch.zeros(1, 4, 1, 16), torch.full((1, 16, 16), 1e-39)
    gate = torch.zeros(1, 4, 1)
    given = zero, zero, zero, gate, gate + 1, gate, (tiny,), (tiny,)
    _, state = neural_memory(*given, chunk_size=4, backend="native")
    assert (state.weights[0] == 0).all()
    assert (state.momentum[0] == 0).all()
    assert (tiny * 0.5 > 0).all()


def test_without_a_compiler_the_other_forms_do_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    native.library.cache_clear()
    try:
        case = Case(5)
        case.whole(chunk_size=4)  # auto
        with pytest.raises(ValueError, match=r"native does not support this call: no C\+\+ compiler"):
            case.whole(chunk_size=4, backend="native")
        assert short_convolution(*(torch.ones(1, 1, 2) for _ in range(3)), [False], 1) is None
    finally:
        native.library.cache_clear()
    assert not list(tmp_path.iterdir())


@needs_compiler
def test_library_is_compiled_once_from_the_sources_of_the_import(monkeypatch, tmp_path):
    texts = dict.fromkeys((*native.SOURCES, *native.HEADERS), "") | {"memory.cpp": "Real one() { return 1; }"}
    monkeypatch.setattr(native, "TEXTS", texts)
    with ThreadPoolExecutor(2) as pool:
        built = set(pool.map(lambda _: native.build("float", tmp_path), range(2)))
    assert list(tmp_path.iterdir()) == list(built)
    modified = built.copy().pop().stat().st_mtime_ns
    assert native.build("float", tmp_path).stat().st_mtime_ns == modified  # not compiled again
    monkeypatch.setattr(native, "FOLDER", tmp_path / "gone")
    assert {native.build(real, tmp_path) for real in ("float", "double")} == set(tmp_path.iterdir()) > built
