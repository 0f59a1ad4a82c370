"""`python -m benchmarks.year` is `python -m benchmarks.year.run`."""

from benchmarks.year.run import main

main()
