"""The result of a verification: the problems, up to a bound, and counts of checked things."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import CorruptionError, FormatVersionError
from kvstore.limits import VERIFY_PROBLEMS_MAX


class Problem(NamedTuple):
    """One problem and its place."""

    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


@dataclass(frozen=True, slots=True)
class StoreReport:
    """The outcome. Counts are of the things that were checked."""

    problems: tuple[Problem, ...]
    complete: bool
    """False if there were more problems than are listed, or a pass ended at damage."""
    keys: int
    versions: int
    range_tombstones: int
    change_entries: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def require_ok(self) -> None:
        """Raise `CorruptionError` with the first problem, if there is one."""
        if self.problems:
            first = self.problems[0]
            more = f" ({len(self.problems)} problems)" if len(self.problems) > 1 else ""
            raise CorruptionError(first.where, first.problem + more)


class Findings:
    """Collects problems, at most `VERIFY_PROBLEMS_MAX`."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.complete = True

    def add(self, where: str, problem: str) -> None:
        """Note a problem."""
        if len(self.problems) < VERIFY_PROBLEMS_MAX:
            self.problems.append(Problem(where, problem))
        else:
            self.complete = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A pass. Bytes that cannot be read end it and are noted as a problem."""
        try:
            yield
        except CorruptionError as error:
            self.add(error.where, error.problem)
            self.complete = False
        except FormatVersionError as error:
            self.add(error.path, f"format version {error.found}, not {error.supported}")
            self.complete = False
