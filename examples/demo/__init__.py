"""`make demo`, `make demo-joins` and `make demo-tables`: the store on real data, with its answers
checked."""
