"""Fuzz targets, one module per group of formats, each with a list `TARGETS`.

`make test` runs every target for some hundred seeded mutations, `make soak` runs it for many more,
then steered by coverage where atheris can be installed: `python -m tests.fuzz NAME`.
"""
