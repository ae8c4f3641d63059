"""Figures: which ones a study gets, what they are drawn of, and how each is drawn.

A new kind of figure is one function and its line in ``RULES``; no study names its figures.
"""

from titans_platform.report.figures import buckets, rules
from titans_platform.report.figures.data import FigureData
from titans_platform.report.figures.picture import Picture

RULES = (
    rules.rows_side_by_side,
    rules.heat_maps,
    rules.against_a_field,
    rules.against_measured_length,
    buckets.depth_maps,
    buckets.against_position,
    rules.against_every_field,
    rules.trials_of_a_search,
    rules.learning_curves,
)


def pictures(data: FigureData) -> list[Picture]:
    """Every figure of a study, in the order of the report."""
    return [picture for rule in RULES for picture in rule(data)]
