"""Contracts that other implementations inherit, and a model to compare a store with.

An engine of your own passes `engines`, and `histories` over a store on it. Blobs and consensus have
their contracts in `kvstore.backup.testing`. Production code never imports this package. `model`
needs nothing; the other modules need pytest and hypothesis, which the extra `testing` installs.
"""
