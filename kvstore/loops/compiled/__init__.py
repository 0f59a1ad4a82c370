"""The loops of `kvstore/loops/plain` in Cython. `chosen` says when they are taken.

Floors, from the top:

    blocks columns elements floors live lookup matches records rows single timed writes
"""
