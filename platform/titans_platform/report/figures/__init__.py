"""Figures: what they are drawn of, which ones a study gets, and how each is drawn."""
