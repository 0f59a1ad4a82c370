"""The loops of `kvstore/loops/plain` in Cython. `chosen` says when they are taken."""
