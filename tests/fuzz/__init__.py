"""Fuzz targets, one module per group of formats, each with a list `TARGETS`.

`make test` runs every target for some hundred seeded mutations, `make soak` for many more, and
then steered by coverage where atheris installs: `python -m tests.fuzz NAME`.
"""
