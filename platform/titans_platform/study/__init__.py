"""Studies: a grid of runs in a YAML file, run by Ray Tune, with a table beside the paper's."""
