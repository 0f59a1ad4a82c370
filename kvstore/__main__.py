"""`python -m kvstore`, where the console script is not installed."""

from kvstore.cli import main

main()
