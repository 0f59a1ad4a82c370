"""Builds from an empty directory, so that no module of an earlier build is packaged again.

setuptools copies into `build/` and never removes from there: a module that was deleted since, or a
compiled file of older sources, would be in the next wheel. All else stands in pyproject.toml.
"""

from __future__ import annotations

import shutil

from setuptools import setup
from setuptools.command.build import build


class CleanBuild(build):
    """`build` that begins with nothing."""

    def run(self) -> None:
        shutil.rmtree(self.build_base, ignore_errors=True)
        super().run()


setup(cmdclass={"build": CleanBuild})
