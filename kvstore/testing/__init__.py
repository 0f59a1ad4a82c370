"""Contracts that other implementations inherit, and a model to compare a store with.

An engine of your own passes `engines`, and `histories` over a store on it. Blobs and consensus have
their contracts in `backup.testing`. Production code never imports this package. `model` needs
nothing; the other modules need pytest and hypothesis, which the extra `testing` installs.

Floors, from the top:

    histories   random histories of a store against the model, as a state machine to inherit
    engines     the contract of engines, as suites that an engine's tests inherit
    strategies  what random histories draw: keys, values, spans, batches
    model       a store as a list of commits, to compare random histories with
"""
