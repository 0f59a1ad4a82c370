from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from typing_extensions import Buffer

from kvstore.loops.shapes import Absent, BackSeeker, Found, Frontiers, Keys, LimitNode, Seeker

class Readers:
    def __init__(
        self, make: Callable[[], Any], check: Callable[[Any], None], most: int
    ) -> None: ...
    def renew(self) -> None: ...
    def outlive(self, points: Mapping[bytes, bytes | None], bytes_max: int) -> None: ...
    def borrow(self) -> tuple[list[Any], Any]: ...
    def give_back(self, ticket: list[Any], reader: Any) -> None: ...
    def find(self, key: bytes, rest: bytes, limit: bytes) -> Found: ...

class Lookup:
    def __init__(
        self,
        engine: Any,
        slowly: Callable[[bytes, int], bytes | None],
        newest: NewestValues | None = None,
    ) -> None: ...
    def show(
        self, limits: LimitNode, depth: int, stamps: Mapping[bytes, tuple[int, int]]
    ) -> None: ...
    def get(self, key: bytes, as_of: int) -> bytes | None: ...

class PointRead:
    def __init__(
        self, lookup: Lookup, frontiers: Frontiers, otherwise: Callable[[Any, Any, Any], Any]
    ) -> None: ...
    def get(self, key: Any, as_of: Any = None, default: Any = None) -> Any: ...

def are_keys(keys: list[Any]) -> bool: ...
def find_many(
    reader: Seeker,
    check: Callable[[Any], None],
    keys: Sequence[bytes],
    rest: bytes,
    limits: LimitNode,
    depth: int,
    absent: Literal[Absent.ABSENT] | None,
) -> list[Found]: ...
def find_among(
    reader: Seeker,
    check: Callable[[Any], None],
    keys: Sequence[bytes],
    as_of: int,
    rest: bytes,
    stamps: Mapping[bytes, tuple[int, int]],
) -> tuple[list[bytes | None], bytes]: ...

ENTRY_BYTES: int
SPANS_MAX: int
REPLACED_MAX: int
ROUND: int
SAMPLE: int
WRITES_JUDGED: int

class NewestValues:
    most: int
    size: int
    hits: int
    misses: int
    passed: int
    def __init__(self, most: int) -> None: ...
    def __len__(self) -> int: ...
    def get(self, key: bytes, as_of: int) -> bytes | None: ...
    def keep(self, key: bytes, value: bytes, as_of: int) -> None: ...
    def note(
        self,
        timestamp: int,
        points: Mapping[bytes, bytes | None],
        spans: Iterable[tuple[bytes, bytes | None]],
    ) -> None: ...

def find_timed(
    reader: Seeker,
    check: Callable[[Any], None],
    keys: Sequence[bytes],
    times: Buffer,
    limits: LimitNode,
    depth: int,
    stamps: Mapping[bytes, tuple[int, int]],
    age_max: int,
    steps: int,
    bytes_max: int,
) -> tuple[list[bytes | None], array[int]] | None: ...
def find_ordered(
    reader: Seeker,
    check: Callable[[Any], None],
    keys: Keys,
    starts: Buffer,
    times: Buffer,
    limits: LimitNode,
    depth: int,
    stamps: Mapping[bytes, tuple[int, int]],
    age_max: int,
    steps: int,
    bytes_max: int,
) -> tuple[array[int], bytes, array[int]] | None: ...
def find_following(
    reader: BackSeeker,
    check: Callable[[Any], None],
    keys: Sequence[bytes],
    times: Buffer,
    limits: LimitNode,
    depth: int,
    stamps: Mapping[bytes, tuple[int, int]],
    upto: int,
) -> array[int]: ...
def find_floors(
    reader: BackSeeker,
    check: Callable[[Any], None],
    places: Sequence[bytes],
    times: Sequence[int],
    least: bytes,
    limits: LimitNode,
    depth: int,
    stamps: Mapping[bytes, tuple[int, int]],
    steps: int,
    bytes_max: int,
) -> list[tuple[bytes, bytes] | None] | None: ...
