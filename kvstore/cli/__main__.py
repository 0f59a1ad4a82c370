"""`python -m kvstore.cli`, where the console script is not installed."""

from kvstore.cli.app import main

main()
