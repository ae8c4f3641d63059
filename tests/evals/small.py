"""Helpers that parse items of generated tasks."""

from collections.abc import Iterator

from titans_platform.tasks.items import Item


def questions(item: Item) -> Iterator[tuple[str, str]]:
    """(all text before the answer, answer) of each answer."""
    text = ""
    for piece, is_answer in item.pieces:
        if is_answer:
            yield text, piece
        text += piece
