"""The loops in Python. `kvstore/loops/compiled` says the same in Cython: change both together."""
