"""Series as data: reading, splitting, and the windows of a run."""

import lzma

import numpy as np
import pytest
import torch

from tests.data.small import drawing
from titans_platform.data import NotPrepared
from titans_platform.errors import UsageError
from titans_platform.objectives.files import SeriesTable, load_series, read_series, save_series, sines
from titans_platform.objectives.regression import SeriesData

CSV = "date,load,note,oil\n2016-07-01,1,a,4.5\n2016-07-02,2,b,5.5\n2016-07-03,3,c,6.5\n"


def line(steps: int = 40) -> SeriesTable:
    """A series whose values say when they are, beside a constant one."""
    return SeriesTable(np.stack([np.arange(steps, dtype=float), np.full(steps, 7.0)], 1), ("t", "constant"))


def when(data: SeriesData, values: torch.Tensor) -> torch.Tensor:
    """The steps of standardised values of `line`."""
    train = np.arange(data.parts.training)
    return (values[..., 0] * train.std() + train.mean()).round().long()


def test_windows_are_cut_by_time_and_in_units_of_the_training_part():
    data = SeriesData(line(), length=6, horizon=2, validation_fraction=0.25)
    train = data.values_NC[: data.parts.training]
    torch.testing.assert_close(train[:, 0].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(train[:, 0].std(correction=0), torch.tensor(1.0))
    assert (data.values_NC[:, 1] == 0).all()
    stream = data.train_stream(drawing(4))
    steps = torch.cat([when(data, torch.cat(stream.batch(step), 1)) for step in range(30)])
    assert (steps.diff(dim=1) == 1).all()
    assert (steps.min(), steps.max()) == (0, 29)
    (batch,) = data.held_out(length=6, items=100, batch_size=100)
    assert when(data, batch.targets).unique().tolist() == list(range(30, 40))
    (longer,) = data.held_out(length=12, items=100, batch_size=100)
    assert torch.equal(longer.targets, batch.targets)
    with pytest.raises(UsageError, match="lengths: 31 steps of input are more than the 30"):
        next(data.held_out(31, 1, 1))
    with pytest.raises(UsageError, match=r"30 training steps are too few for a window of 29 \+ 2"):
        SeriesData(line(), 29, 2, 0.25)


def test_epochs_have_every_window_once_and_columns_of_numbers_are_read(tmp_path):
    data = SeriesData(line(), length=6, horizon=2, validation_fraction=0.25)
    alone = data.train_stream(drawing(23, 3))
    first = when(data, alone.batch(0).inputs)[:, 0]
    assert sorted(first.tolist()) == list(range(23))
    assert first.tolist() != when(data, alone.batch(1).inputs)[:, 0].tolist()
    shared = [data.train_stream(drawing(23, 3), rank, 2).batch(1).inputs for rank in range(2)]
    assert torch.equal(torch.cat(shared).sort(0).values, alone.batch(1).inputs.sort(0).values)
    (tmp_path / "s.csv").write_text(CSV)
    (tmp_path / "s.csv.xz").write_bytes(lzma.compress(CSV.encode()))
    table = read_series(str(tmp_path / "s.csv"), (), "f")
    assert table.channels == ("load", "oil")
    assert table.values_NC.tolist() == [[1, 4.5], [2, 5.5], [3, 6.5]]
    assert read_series(str(tmp_path / "s.csv.xz"), ("oil",), "f").values_NC.tolist() == [[4.5], [5.5], [6.5]]
    np.save(tmp_path / "s.npy", np.arange(4))
    assert read_series(str(tmp_path / "s.npy"), (), "f").values_NC.shape == (4, 1)
    np.save(tmp_path / "one.npy", np.float64(3))
    assert read_series(str(tmp_path / "one.npy"), (), "f").values_NC.tolist() == [[3]]


@pytest.mark.parametrize(("name", "content", "columns", "says"), [
    ("none.csv", None, (), r"f: .*none.csv cannot be read: .*No such file"),
    ("s.txt", "1", (), "f: .*s.txt: unsupported file type; use .csv"),
    ("s.csv", CSV, ("lod",), "has no numeric column lod; it has load, oil"),
    ("s.csv", "a,b\n1,2\n3,\n", (), "no finite number in row 1 of b"),
    ("s.csv", "a,b\n1,2\n3,x\n5,6\n", (), "row 1 of b is 'x', and not a number; correct"),
    ("s.csv", "a\nx\n", (), "has no numbers"), ("s.csv", "a,a\n1,2\n", (), "has the column a more than once"),
    ("s.csv", f"a\n{2**53 + 1}\n", (), "cannot be read: .*9007199254740993"),
    *((f"s.{kind}", "another format", (), "cannot be read") for kind in ("csv.xz", "npy", "parquet")),
])  # fmt: skip
def test_unreadable_series_is_one_line(tmp_path, name, content, columns, says):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=says):
        read_series(str(tmp_path / name), columns, "f")


def test_kept_series_is_read_again_and_checked(tmp_path):
    path, table = tmp_path / "series" / "x.parquet", sines(50, 2, seed=0)
    with pytest.raises(NotPrepared):
        load_series(path)
    save_series(table, path)
    again = load_series(path)
    assert again.channels == table.channels
    assert np.array_equal(again.values_NC, table.values_NC)
    content = bytearray(path.read_bytes())
    content[content.index(table.values_NC[3, 1].tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match="damaged"):
        load_series(path)
    save_series(table, path)
    assert np.array_equal(load_series(path).values_NC, table.values_NC)
