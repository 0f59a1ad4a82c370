"""Programs that show the store at work. None of them is installed with it: see README.md."""
