"""`make demo`, `make demo-joins`, `make demo-tables` and `make demo-features`: the store on real
data, with its answers checked."""
