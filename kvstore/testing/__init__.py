"""Tools that prove a store: tiny limits, faults, kills, forks, power cuts and hostile files.

They serve the tests of this project and of code that builds on it. Production code never imports
this package. Every random tool takes a seed and prints it.
"""
