"""The budgets of `tools/counts.py`; tools/test_counts.py tests its counts."""

from tools import counts


def test_budgets_hold_and_are_at_or_above_their_goals():
    assert counts.exceeded(counts.measure(counts.Tree(counts.ROOT))) == []
    assert all(most >= goal for most, goal in counts.BUDGETS.values())
