"""Which micro-batch of which stream some rows are: a repetition is told from other rows by it.

Spark numbers the micro-batches of a stream from 0, in its checkpoint location, and runs the last
one again after a crash. So a number alone does not tell a repetition: a stream with a lost or new
checkpoint location counts anew, and a checkpoint location that was put back plans a known number
with other rows. What was written keeps the origin of its rows, and the next rows are compared.

    query   the id of the stream, which Spark makes with the checkpoint location
    plan    "offsets-" and a digest of the offsets as Spark wrote them before the micro-batch ran,
            or "rows-" and a digest of the rows; plans of two kinds are not compared

    text := query " " plan        either may be empty: it is not known

An origin of which nothing is known is empty, and contradicts nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore.errors import UsageError


class BatchOrigin(NamedTuple):
    """The stream and the plan of a micro-batch."""

    query: str = ""
    plan: str = ""

    @property
    def text(self) -> str:
        """The form in which it is stored; empty if nothing is known."""
        return f"{self.query} {self.plan}" if any(self) else ""

    @classmethod
    def of_text(cls, text: str) -> BatchOrigin:
        """The origin that `text` has stored."""
        query, _, plan = text.partition(" ")
        return cls(query, plan)

    def require_same_query(
        self, name: str, number: int, known: BatchOrigin, known_number: int
    ) -> None:
        """Raise `UsageError` if micro-batch `number` of this origin is of another stream than the
        one that was written under `name` as `known_number`."""
        if self.query and known.query and self.query != known.query:
            raise UsageError(
                f"micro-batch {number} of {name} is of the stream {self.query}, and micro-batch "
                f"{known_number} came from the stream {known.query}",
                "pass another name or position: a new checkpoint location makes another stream",
            )

    def require_repeated(self, name: str, number: int, known: BatchOrigin) -> None:
        """Raise `UsageError` if this is not the micro-batch `number` that was written under `name`
        before, but other rows under its number."""
        self.require_same_query(name, number, known, number)
        kinds = self.plan.partition("-")[0], known.plan.partition("-")[0]
        if kinds[0] and kinds[0] == kinds[1] and self.plan != known.plan:
            raise UsageError(
                f"micro-batch {number} of {name} was written before with other {kinds[0]}",
                "the checkpoint location is older than what was written: pass another name or "
                "position, and start a stream with a new checkpoint location from a time before",
            )
