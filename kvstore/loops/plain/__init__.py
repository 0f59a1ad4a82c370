"""The loops in Python. `kvstore/loops/compiled` says the same in Cython: change both together.

Floors, from the top:

    floors live lookup matches timed writes
    columns
"""
