"""The language of a server and its clients: names, bytes in JSON, errors, and Arrow columns.

    GET | PUT | DELETE  /v1/keys/<key>     one key, percent-encoded; the value is the body
    GET | POST          /v1/<verb>         every other verb; arguments in the query, or as JSON

Rows travel as Arrow IPC streams, other answers as JSON. `docs/reference/protocol.md` describes all
of it.

Floors, from the top:

    failures results   errors as JSON; the answers of verbs
    parameters         the arguments of verbs
    values columns     bytes as JSON; operations of a batch as Arrow columns
"""

from kvstore.protocol.columns import (
    ARROW_TYPE,
    EPOCHS_SCHEMA,
    ERROR_NAME,
    JSON_TYPE,
    KEYS_SCHEMA,
    LABELS_SCHEMA,
    OCTETS_TYPE,
    POSITION_NAME,
    READ_SCHEMA,
    VALUES_SCHEMA,
    WRITES_SCHEMA,
    WriteOp,
)
from kvstore.protocol.failures import failure_fields, failure_of
from kvstore.protocol.values import (
    KEYS_PATH,
    VERBS_PATH,
    arguments_json,
    from_json,
    quoted,
    span_fields,
    to_json,
    unquoted,
)

__all__ = [
    "ARROW_TYPE",
    "EPOCHS_SCHEMA",
    "ERROR_NAME",
    "JSON_TYPE",
    "KEYS_PATH",
    "KEYS_SCHEMA",
    "LABELS_SCHEMA",
    "OCTETS_TYPE",
    "POSITION_NAME",
    "READ_SCHEMA",
    "VALUES_SCHEMA",
    "VERBS_PATH",
    "WRITES_SCHEMA",
    "WriteOp",
    "arguments_json",
    "failure_fields",
    "failure_of",
    "from_json",
    "quoted",
    "span_fields",
    "to_json",
    "unquoted",
]
