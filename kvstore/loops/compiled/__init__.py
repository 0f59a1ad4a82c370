"""The loops of `kvstore/loops/plain` in Cython. `chosen` says when they are taken.

Floors, from the top:

    columns floors live lookup matches timed writes
"""
