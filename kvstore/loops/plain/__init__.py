"""The loops in Python. `kvstore/loops/compiled` says the same in Cython: change both together.

Floors, from the top:

    blocks elements floors live lookup matches records rows single timed writes
    buffers columns deletions labels newest parts
"""
