"""Public suites that other projects wrote for stores like ours: `make conformance`."""
