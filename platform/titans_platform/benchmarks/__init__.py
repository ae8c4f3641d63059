"""Measurements of speed and space, each beside what it is to be judged by."""
