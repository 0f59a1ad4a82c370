"""`python -m benchmarks.asof` is `python -m benchmarks.asof.run`."""

from benchmarks.asof.run import main

main()
