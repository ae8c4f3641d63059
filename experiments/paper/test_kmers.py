from pathlib import Path

from experiments.paper.kmers import kmer_regression
from tests.objectives.test_classification import config, items, write
from titans_platform.objectives import build_objective


def test_kmer_regression_separates_motifs_and_selects_k_on_validation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "motif.csv", items(600, motif="GATTACA"))
    best = kmer_regression(build_objective(config()).prepare(Path("runs")), 4)
    assert best.k >= 3
    assert best.test > 0.85
