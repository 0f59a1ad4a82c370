"""`python -m kvstore.cli`, where the console script is not installed."""

from kvstore.cli.start import main

main()
