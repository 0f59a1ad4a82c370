"""Benchmarks: named workloads, every figure a ratio to raw rocksdict taken in the same run."""
