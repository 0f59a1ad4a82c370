"""Tools that prove a store: tiny limits, faults, kills, forks, power cuts and hostile files.

They serve the tests of this project and of code that builds on it, and import nothing from our own
tests. Production code never imports this package. `engines`, `histories` and `strategies` need
pytest and hypothesis, which the extra `testing` installs.

Floors, from the top:

    expiries    the same with keys that expire
    histories   random histories of a store against the model, as a state machine to inherit
    engines     the contract of engines, as suites that an engine's tests inherit
    strategies  what random histories draw: keys, values, spans, batches
    model       a store as a list of commits, to compare random histories with
    bounds      every limit set to a tiny value for a while
    kills       a process that is killed in the middle of a write
    forks       children that use what their parent has open
    interrupts  a signal at a random moment of a call
    disk        a disk in memory: kills and power cuts of a journal
    crafted     stores over crafted bytes, and every way to read them
    faults      system calls that fail, one or all from one on
    parts       the parts inside an open store
    seeds       the seed of a random test: printed, and taken from the environment
    workload    the steps of a process that is killed
"""
