"""Data, training, tuning, tracking, evaluation and the command line around `titans_core`."""
