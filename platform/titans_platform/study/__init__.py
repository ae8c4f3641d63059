"""Studies: a grid of runs as data, run by Ray Tune, drawn as a table beside the paper's."""
