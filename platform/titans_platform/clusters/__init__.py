"""Clusters: where a study runs. A file says which; `registry.py` knows the kinds, one file each."""
