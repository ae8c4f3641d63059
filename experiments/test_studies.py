"""Every cell of every study here resolves, at every scale, and is accepted by its objective."""

import pytest

from experiments.tables import HERE
from titans_platform.objectives import build_objective
from titans_platform.study.grid import expand, load_study


@pytest.mark.parametrize("name", sorted(path.parent.name for path in HERE.glob("*/study.yaml")))
def test_study_resolves_at_every_scale(name):
    study = load_study(name)
    assert study.name == name
    for scale in study.scales:
        cells = expand(study, scale)
        assert cells
    for cell in {cell.row: cell for cell in expand(study, "smoke")}.values():
        build_objective(cell.config).check()
