"""The reference: a list of commits that is read naively. A driver for run.py, see README.md."""

from __future__ import annotations

import json
import sys
from typing import Any

Write = tuple[str, str, Any]
"""An operation, its key, and its value or its end."""


class Model:
    """Commits by their times, each a list of writes in the order in which they take effect."""

    def __init__(self) -> None:
        self.commits: dict[int, list[Write]] = {}
        self.imports: dict[str, tuple[int, list[list[str]]]] = {}
        self.waiting: list[tuple[int, str, int]] = []
        self.feeds: dict[str, list[int]] = {}
        self.rows: list[tuple[int, list[Any]]] = []
        self.clock, self.time, self.since = 1_000_000, 1_000_000, 0

    # -- time and writes --------------------------------------------------------------------

    def expire(self) -> None:
        """Write the deletes that are due, at their times."""
        for due, key, put_at in sorted(self.waiting):
            if due <= self.clock:
                self.waiting.remove((due, key, put_at))
                if self.history({"key": key})["versions"][0][0] == put_at:
                    self.commits.setdefault(due, []).append(("delete", key, None))
                    self.time = max(self.time, due)

    def commit(self, writes: list[Write]) -> int:
        self.time = max(self.time + 1, self.clock)
        self.commits[self.time] = writes
        return self.time

    def open(self, _: dict[str, Any]) -> dict[str, Any]:
        self.__init__()  # type: ignore[misc]  # all anew
        return {}

    def advance(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.clock += asked["ns"]
        return {}

    def now(self, _: dict[str, Any]) -> dict[str, Any]:
        self.time = max(self.time, self.clock - 1)
        return {"time": self.time}

    def batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        ranges: list[Write] = []
        points: dict[str, Write] = {}
        expiring: dict[str, int] = {}
        for op, key, *rest in asked["writes"]:
            if op == "delete_range":
                ranges.append((op, key, rest[0]))
                inside = [each for each in points if key <= each < rest[0]]
                for each in inside:
                    del points[each]
            else:
                points[key] = (op, key, rest[0] if op == "put" else None)
            expiring.pop(key, None)
            if len(rest) == 2:
                expiring[key] = max(self.time, self.clock) + rest[1]
        time = self.commit([*ranges, *points.values()])
        for key, due in expiring.items():
            if points.get(key, ("", "", None))[0] == "put":
                self.waiting.append((due, key, time))
        return {"time": time}

    def import_(self, asked: dict[str, Any]) -> dict[str, Any]:
        time = self.commit([("put", key, value) for key, value in asked["rows"]])
        self.imports[asked["id"]] = time, asked["rows"]
        return {"time": time}

    def revert_import(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The rows do not count from now on: what was below them shows again."""
        writes: list[Write] = []
        added, rows = self.imports[asked["id"]]
        for key, _ in rows:
            versions = self.history({"key": key})["versions"]
            if versions[0][0] != added:
                continue  # a later write covers the row
            older = [each for at, each in versions if at < added]
            back = older[0] if older else None
            writes.append(("delete", key, None) if back is None else ("put", key, back))
        return {"time": self.commit(writes)}

    def gc(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.since = max(self.since, asked["before"])
        return {}

    # -- reads ------------------------------------------------------------------------------

    def state(self, at: int | None) -> dict[str, str]:
        if at is not None and not self.since <= at <= max(self.time, self.clock - 1):
            raise ValueError(f"no state at {at}")
        found: dict[str, str] = {}
        for time in sorted(self.commits):
            if at is not None and time > at:
                break
            for op, key, value in self.commits[time]:
                if op == "put":
                    found[key] = value
                elif op == "delete":
                    found.pop(key, None)
                else:
                    found = {each: v for each, v in found.items() if not key <= each < value}
        return found

    def get(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"value": self.state(asked.get("as_of")).get(asked["key"])}

    def scan(self, asked: dict[str, Any]) -> dict[str, Any]:
        start, end, prefix = asked.get("start", ""), asked.get("end"), asked.get("prefix", "")
        rows = [
            [key, value]
            for key, value in sorted(self.state(asked.get("as_of")).items())
            if key >= start and (end is None or key < end) and key.startswith(prefix)
        ]
        return {"rows": rows[:: -1 if asked.get("reverse") else 1][: asked.get("limit")]}

    def history(self, asked: dict[str, Any]) -> dict[str, Any]:
        key, found, last = asked["key"], [], None
        for time in sorted(self.commits):
            for op, start, value in self.commits[time]:
                if op == "delete_range" and start <= key < value and last is not None:
                    found.append([time, last := None])
                elif op != "delete_range" and start == key:
                    last = value if op == "put" else None
                    if found and found[-1][0] == time:
                        found.pop()
                    found.append([time, last])
        return {"versions": found[::-1]}

    def changes(self, asked: dict[str, Any]) -> dict[str, Any]:
        since, upto = asked["since"], asked.get("upto", self.time)
        if since < self.since:
            raise ValueError(f"no history at {since}")
        return {
            "changes": [
                [time, op, key, value]
                for time in sorted(self.commits)
                if since < time <= upto
                for op, key, value in self.commits[time]
            ]
        }

    def feed(self, asked: dict[str, Any]) -> dict[str, Any]:
        place = self.feeds.setdefault(asked["name"], [asked.get("start", 0), 0])
        found = self.changes({"since": place[0]})
        place[1] = self.time
        return found

    def ack(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.feeds[asked["name"]][0] = self.feeds[asked["name"]][1]
        return {}

    # -- two axes: rows have an event time of their own ----------------------------------------

    def record(self, asked: dict[str, Any]) -> dict[str, Any]:
        time = self.commit([])
        self.rows.append((time, asked["rows"]))
        return {"time": time}

    def recorded(self, asked: dict[str, Any]) -> dict[str, Any]:
        found: list[Any] = []
        for key, event, known in asked["labels"]:
            rows: dict[int, Any] = {}
            for time, written in self.rows:
                rows |= {at: value for each, at, value in written if each == key and time <= known}
            events = [at for at, value in rows.items() if at <= event and value is not None]
            found.append(rows[max(events)] if events else None)
        return {"found": found}

    def join(self, asked: dict[str, Any]) -> dict[str, Any]:
        found: list[Any] = []
        for key, at in asked["labels"]:
            self.state(at)  # or an error
            versions = self.history({"key": key})["versions"]
            time, value = next(([t, v] for t, v in versions if t <= at), [0, None])
            old = "max_age" in asked and at - time > asked["max_age"]
            found.append(None if value is None or old else [value, time])
        return {"found": found}


def main() -> None:
    model = Model()
    for line in sys.stdin:
        asked = json.loads(line)
        name = {"import": "import_"}.get(asked["op"], asked["op"])
        work = getattr(model, name, None)
        if work is None:
            answer: dict[str, Any] = {"unknown": True}
        else:
            try:
                if name != "open":
                    model.expire()
                answer = work(asked)
            except ValueError as error:
                answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
