"""The options of `format("kvstore")`, and which of them each mode takes.

Option names are Delta's where Delta has the option; their case does not matter. An option that is
unknown, means nothing to the mode, or contradicts another option is an error: an option that does
nothing gives a wrong answer.

    every read   path  prefix | startKey, endKey | ranges  keyEncoding  columns  numPartitions
                 batchRows  batchBytes                             no ranges in a stream
    tables       table                                             in the place of bounds on keys
    state        timestampAsOf | versionAsOf                       at or before it
    changes      readChangeFeed=true  revisions  includePreimage
                 startingTimestamp | startingAfterTimestamp        changes after it, it excluded
                 endingTimestamp                                   up to it, it included
    stream       as changes, without an end; maxRowsPerTrigger | maxBytesPerTrigger
                 failOnDataLoss
    batch reads  filters                                           as read_where writes them
    collections  keyFile | passphraseEnv | passphraseFile          references, never secrets
                 endpoint  region  skipSignature                   for an object store
    servers      tokenEnv | tokenFile  caFile                      references, never secrets
                 leaseSeconds
    write        path  compression  endpoint  region  skipSignature
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from kvstore.base.clock import Clock
from kvstore.base.span import Span
from kvstore.base.timestamp import OTHER_UNITS_MAX, Timestamp, is_plain_number, to_timestamp
from kvstore.bulk.bucket import BucketUrl
from kvstore.changes import Revisions
from kvstore.errors import Argument, UsageError
from kvstore.limits import ARROW_BYTES_MAX, ARROW_ROWS_MAX, READER_LEASE_S_MAX
from kvstore.spark.access import LEASE_SECONDS, Access, staging_at
from kvstore.spark.pushdown import Filters, from_text, spans_of

Mode: TypeAlias = Literal["state", "changes", "stream", "write"]

REVISIONS: Final[tuple[Revisions, ...]] = ("all", "latest")
PARTITIONS_MAX: Final = 10_000
BATCH_ROWS_MAX: Final = 1 << 20

_READ = {
    "path": "path",
    "table": "table",
    "prefix": "prefix",
    "startkey": "startKey",
    "endkey": "endKey",
    "keyencoding": "keyEncoding",
    "columns": "columns",
    "numpartitions": "numPartitions",
    "batchrows": "batchRows",
    "batchbytes": "batchBytes",
    "readchangefeed": "readChangeFeed",
    "keyfile": "keyFile",
    "passphraseenv": "passphraseEnv",
    "passphrasefile": "passphraseFile",
    "endpoint": "endpoint",
    "region": "region",
    "skipsignature": "skipSignature",
    "tokenenv": "tokenEnv",
    "tokenfile": "tokenFile",
    "cafile": "caFile",
    "leaseseconds": "leaseSeconds",
}
_SECRETS = {
    "passphrase",
    "token",
    "access_key_id",
    "secret_access_key",
    "session_token",
    "account_key",
}
"""Refused options: Spark writes options to plans, logs and checkpoints of streams."""
_OF_CATALOG: Final = frozenset(["owner", "provider", "is_managed_location", "external", "location"])
"""Properties that Spark gives to a table of its catalog. No option of a read has such a name."""

_VIEW_INSTEAD: Final = (
    "Spark passes no option of such a table to a Python source: "
    "CREATE TEMPORARY VIEW name USING kvstore OPTIONS (path '...')"
)
_PATH_IS: Final = (
    "pass one to load() or save(); in SQL create a temporary view, because Spark passes no option "
    "of a table of its catalog to a Python source"
)
_WINDOW = {
    "startingtimestamp": "startingTimestamp",
    "startingaftertimestamp": "startingAfterTimestamp",
    "revisions": "revisions",
    "includepreimage": "includePreimage",
}
_HONOURED: Final[Mapping[str, Mapping[str, str]]] = {
    "state": {
        **_READ,
        "timestampasof": "timestampAsOf",
        "versionasof": "versionAsOf",
        "ranges": "ranges",
        "filters": "filters",
    },
    "changes": {
        **_READ,
        **_WINDOW,
        "endingtimestamp": "endingTimestamp",
        "ranges": "ranges",
        "filters": "filters",
    },
    "stream": {
        **_READ,
        **_WINDOW,
        "maxrowspertrigger": "maxRowsPerTrigger",
        "maxbytespertrigger": "maxBytesPerTrigger",
        "failondataloss": "failOnDataLoss",
    },
    "write": {
        "path": "path",
        "compression": "compression",
        "endpoint": "endpoint",
        "region": "region",
        "skipsignature": "skipSignature",
    },
}
_KNOWN = {name: text for names in _HONOURED.values() for name, text in names.items()}
_MODE_TEXT = {
    "state": "a read of the state",
    "changes": "a read of changes",
    "stream": "a stream",
    "write": "a write",
}
_TIMES: Final = (
    *("timestampasof", "versionasof", "endingtimestamp"),
    *("startingtimestamp", "startingaftertimestamp"),
)
_COUNT: Final = re.compile(r"[0-9]{1,19}")
_NUMBER: Final = "pass ISO-8601 with a zone, or nanoseconds since 1970"
_OF_TODAY_NS: Final = 10**18
"""September 2001. A store that ends below it has a clock of its own, as tests have."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The checked options of one read. A time that was not given is None.

    `spans` are the keys to read: disjoint, and in order.
    `numbers` has the options that give a time as a plain number, with this number.
    """

    access: Access
    spans: tuple[Span, ...]
    table: str | None
    columns: tuple[str, ...] | None
    partitions: int | None
    batch_rows: int
    batch_bytes: int
    as_of: Timestamp | None = None
    since: Timestamp | None = None
    upto: Timestamp | None = None
    revisions: Revisions = "all"
    changes: bool = False
    images: bool = False
    rows_per_trigger: int | None = None
    bytes_per_trigger: int | None = None
    fail_on_data_loss: bool = True
    numbers: tuple[tuple[str, int], ...] = ()
    filters: Filters | None = None

    def require_nanoseconds(self, upper: int) -> None:
        """See `require_nanoseconds`. Changes may start or end at 0, the beginning."""
        for name, number in self.numbers:
            if number or name.endswith("AsOf"):
                require_nanoseconds(name, number, upper)

    @property
    def latest(self) -> bool:
        """Whether the read asks for the last change of each key only."""
        return self.revisions == "latest"


def require_nanoseconds(name: str, given: object, upper: int) -> None:
    """Raise `UsageError` if a plain number is surely no time of a store that ends at `upper`.

    Delta counts versions of a table from 0, so a small number is a version by mistake.
    """
    if type(given) is int and given < OTHER_UNITS_MAX and upper - 1 > _OF_TODAY_NS:
        raise UsageError(
            f"{name}={given} is {Timestamp(given)}: versions are nanoseconds since 1970",
            "pass ISO-8601 with a zone, or _commit_version of a change",
        )


def require_readable_options(options: Mapping[str, str]) -> None:
    """Raise `UsageError` for options that will not reach a read: those of a table of the catalog.

    Spark tells a Python source the properties of the new table when it asks for the columns, and no
    option when the table is read.
    """
    given = _lowered(options)
    if _OF_CATALOG.intersection(given) or any(name.startswith("option.") for name in given):
        raise UsageError("CREATE TABLE ... USING kvstore is not offered", _VIEW_INSTEAD)
    if not given.get("path") and "paths" not in given:
        raise UsageError("no path is given", _PATH_IS)


def reads_changes(options: Mapping[str, str]) -> bool:
    """Whether `readChangeFeed` is true. Raises `UsageError` if it is neither true nor false."""
    return _flag(_lowered(options), "readchangefeed", default=False)


def asked_table(options: Mapping[str, str]) -> ReadOptions | None:
    """The checked options of a read that names a table; None if it names none. Spark asks for the
    schema of a stream and of a read alike."""
    given = _lowered(options)
    if "table" not in given:
        return None
    if not reads_changes(options):
        return read_options(options, "state")
    is_read = "endingtimestamp" in given or "filters" in given or "ranges" in given
    return read_options(options, "changes" if is_read else "stream")


def column_names(text: str | None) -> tuple[str, ...] | None:
    """The columns that the option `columns` names. None if the option is not given."""
    return None if text is None else tuple(name.strip() for name in text.split(","))


def read_options(options: Mapping[str, str], mode: Mode) -> ReadOptions:
    """Check the options of a read. A `UsageError` names the option that is at fault."""
    given = honoured(options, mode)
    as_of = _time(given, "timestampasof", "versionasof")
    since = _time(given, "startingtimestamp", "startingaftertimestamp")
    upto = _time(given, "endingtimestamp")
    times = {name: _time(given, name) for name in _TIMES if is_plain_number(given.get(name))}
    numbers = tuple((_KNOWN[name], int(time)) for name, time in times.items() if time is not None)
    rows, size = (_count(given, name) for name in ("maxrowspertrigger", "maxbytespertrigger"))
    if rows is not None and size is not None:
        raise UsageError("maxRowsPerTrigger and maxBytesPerTrigger are both given", "pass one")
    if mode == "stream" and not _flag(given, "readchangefeed", default=False):
        raise UsageError("a stream reads changes", 'set .option("readChangeFeed", "true")')
    return ReadOptions(
        access=_access(given),
        spans=spans_of(given),
        table=_table(given),
        columns=column_names(given.get("columns")),
        partitions=_count(given, "numpartitions", at_most=PARTITIONS_MAX),
        batch_rows=_count(given, "batchrows", at_most=BATCH_ROWS_MAX) or ARROW_ROWS_MAX,
        batch_bytes=_count(given, "batchbytes", at_most=1 << 30) or ARROW_BYTES_MAX,
        as_of=as_of,
        since=since,
        upto=upto,
        revisions=_revisions(given),
        changes=mode != "state",
        images=_flag(given, "includepreimage", default="table" in given),
        rows_per_trigger=rows,
        bytes_per_trigger=size,
        fail_on_data_loss=_flag(given, "failondataloss", default=True),
        numbers=numbers,
        filters=from_text(given["filters"]) if "filters" in given else None,
    )


def honoured(options: Mapping[str, str], mode: Mode) -> dict[str, str]:
    """The options under lower-case names. Raises `UsageError` unless `mode` takes all of them.

    A path must be among them.
    """
    given = _lowered(options)
    if "paths" in given:
        raise UsageError("several paths are given", "read one path at a time, and unite the frames")
    for name in given:
        if name in _SECRETS:
            raise UsageError(
                f"option {name} is a secret, and Spark writes options to plans and logs",
                "pass keyFile, passphraseFile or passphraseEnv; for a server tokenFile, tokenEnv; "
                "credentials of object stores come from the environment",
            )
        if name not in _KNOWN:
            known = ", ".join(sorted(_HONOURED[mode].values()))
            raise UsageError(f"option {name!r} is not known", f"{_MODE_TEXT[mode]} takes {known}")
        if name not in _HONOURED[mode]:
            raise UsageError(
                f"option {_KNOWN[name]} means nothing to {_MODE_TEXT[mode]}",
                "remove it" if mode != "state" else 'remove it, or set readChangeFeed to "true"',
            )
    if not given.get("path"):
        raise UsageError("no path is given", _PATH_IS)
    return given


def _lowered(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items()}


def _flag(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = given.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false"):
        raise UsageError(f"{_KNOWN[name]}={text!r}", 'pass "true" or "false"')
    return text.lower() == "true"


def _count(given: Mapping[str, str], name: str, *, at_most: int = (1 << 63) - 1) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not _COUNT.fullmatch(text) or not 1 <= int(text) <= at_most:
        raise UsageError(f"{_KNOWN[name]}={text!r}", f"pass a number from 1 to {at_most}")
    return int(text)


def _time(given: Mapping[str, str], *names: str) -> Timestamp | None:
    """The time that one of several options gives, as `kvstore.base.timestamp.to_timestamp` reads
    it."""
    present = [name for name in names if name in given]
    if len(present) > 1:
        both = " and ".join(_KNOWN[name] for name in present)
        raise UsageError(f"{both} are both given", "pass one")
    if not present:
        return None
    text, name = given[present[0]], _KNOWN[present[0]]
    try:
        return to_timestamp(text, name=name, now=Clock().wall_ns)
    except UsageError as error:
        raise UsageError(error.what, _NUMBER if is_plain_number(text) else error.remedy) from None


def _table(given: Mapping[str, str]) -> str | None:
    for name in ("prefix", "startkey", "endkey", "ranges", "keyencoding"):
        if "table" in given and name in given:
            raise UsageError(
                f"table and {_KNOWN[name]} are both given",
                "filter on the first columns of the table's key: where(...)",
            )
    return given.get("table")


def _access(given: Mapping[str, str]) -> Access:
    lease = _count(given, "leaseseconds", at_most=int(READER_LEASE_S_MAX))
    access = Access(
        given["path"],
        key_file=given.get("keyfile"),
        passphrase_env=given.get("passphraseenv"),
        passphrase_file=given.get("passphrasefile"),
        endpoint=given.get("endpoint"),
        region=given.get("region"),
        skip_signature=_flag(given, "skipsignature", default=False),
        token_env=given.get("tokenenv"),
        token_file=given.get("tokenfile"),
        ca_file=given.get("cafile"),
        lease_seconds=lease or LEASE_SECONDS,
    )
    return Access.of(access)


def staging_of(given: Mapping[str, str]) -> Path | BucketUrl:
    """The staging place of a write."""
    names = ("endpoint", "region", "skipsignature")
    if not any(name in given for name in names):
        return staging_at(given["path"])
    access = Access(
        given["path"],
        endpoint=given.get("endpoint"),
        region=given.get("region"),
        skip_signature=_flag(given, "skipsignature", default=False),
    )
    return staging_at(access)


def _revisions(given: Mapping[str, str]) -> Revisions:
    text = given.get("revisions", "all").lower()
    for known in REVISIONS:
        if text == known:
            return known
    raise UsageError(Argument.of("revisions", text), 'pass "all" or "latest"')
