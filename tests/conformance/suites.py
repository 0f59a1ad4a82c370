"""The public suites, one each: where it comes from, what it needs, what is left out and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

MCP_SCENARIOS: Final = (
    *("server-initialize", "logging-set-level", "ping", "completion-complete", "tools-list"),
    *("tools-call-simple-text", "tools-call-image", "tools-call-audio"),
    *("tools-call-embedded-resource", "tools-call-mixed-content", "tools-call-with-logging"),
    *("tools-call-error", "tools-call-with-progress", "tools-call-sampling"),
    *("tools-call-elicitation", "json-schema-2020-12", "elicitation-sep1034-defaults"),
    *("server-sse-polling", "server-sse-multiple-streams", "elicitation-sep1330-enums"),
    *("resources-list", "resources-read-text", "resources-read-binary"),
    *("resources-templates-read", "resources-subscribe", "resources-unsubscribe"),
    *("prompts-list", "prompts-get-simple", "prompts-get-with-args"),
    *("prompts-get-embedded-resource", "prompts-get-with-image", "dns-rebinding-protection"),
)
"""The scenarios of the suite of the Model Context Protocol for servers."""


@dataclass(frozen=True, slots=True)
class Suite:
    """One suite, in an environment of its own."""

    name: str
    """Also of the module `suite_NAME.py`, and of the environment."""
    adapter: str
    """The module of ours that is tested."""
    source: str
    """What the suite is, for the page."""
    package: str
    """The package whose version the page tells. With `checkout`, the repository."""
    requires: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Tests that do not run, by a part of their ids, each with the reason."""
    page: str = ""
    """The how-to that runs in the same environment, below `docs`."""
    checkout: str = ""
    """The variable that names a checkout, whose commit the page tells."""


SUITES = (
    Suite(
        "fsspec",
        "kvstore.adapters.fsspec",
        "`fsspec.tests.abstract`",
        "fsspec",
        ("fsspec", "pandas>=2.2,<3"),
        page="how-to/neighbours/fsspec.md",
    ),
    Suite(
        "zarr",
        "kvstore.adapters.zarr",
        "`zarr.testing`: `StoreTests`, and the state machines of stores and of hierarchies",
        "zarr",
        ("zarr", "hypothesis", "numpy"),
        page="how-to/neighbours/zarr.md",
    ),
    Suite(
        "langgraph",
        "kvstore.adapters.langgraph",
        "`langgraph.checkpoint.conformance` (81 checks in one test), and our contract of stores",
        "langgraph",
        ("langgraph", "langgraph-checkpoint-conformance"),
        page="how-to/neighbours/langgraph.md",
    ),
    Suite(
        "langchain",
        "kvstore.adapters.langchain",
        "`langchain_tests`: byte stores and caches",
        "langchain-tests",
        ("langchain-core", "langchain-tests"),
        page="how-to/neighbours/langchain.md",
    ),
    Suite(
        "key_value",
        "kvstore.adapters.key_value",
        "its project's tests of stores, retold",
        "py-key-value-aio",
        ("py-key-value-aio[memory]",),
        page="how-to/neighbours/key_value.md",
    ),
    Suite(
        "optuna",
        "kvstore.adapters.optuna",
        "`optuna.testing.pytest_storages`",
        "optuna",
        ("optuna", "fakeredis"),
        page="how-to/neighbours/optuna.md",
    ),
    Suite(
        "huey",
        "kvstore.adapters.huey",
        "`huey.tests.test_storage`, the slow tests too",
        "huey",
        ("huey",),
        page="how-to/neighbours/huey.md",
    ),
    Suite(
        "zict",
        "kvstore.adapters.zict",
        "`zict.tests.utils_test`",
        "zict",
        ("zict",),
        page="how-to/neighbours/zict.md",
    ),
    Suite(
        "dogpile",
        "kvstore.adapters.dogpile",
        "`dogpile.testing.fixtures`: backends, serializers, locks",
        "dogpile.cache",
        ("dogpile.cache",),
        page="how-to/neighbours/dogpile.md",
    ),
    Suite(
        "django",
        "kvstore.adapters.django",
        "its project's tests of cache backends, retold",
        "django",
        ("django",),
        page="how-to/neighbours/django.md",
    ),
    Suite(
        "cachelib",
        "kvstore.adapters.cachelib",
        "its project's tests of caches, retold",
        "cachelib",
        ("cachelib",),
        page="how-to/neighbours/cachelib.md",
    ),
    Suite(
        "diskcache",
        "kvstore.cache",
        "its project's tests of caches, retold; each runs on its own `Cache` too, and the last "
        "ones tell where the two differ",
        "diskcache",
        ("diskcache",),
        {
            "test_deque": "with `test_index`: a queue and a mapping; a store is a mapping itself",
            "test_push": "pulls and peeks too: queues, for which `kvstore.tasks` and huey are here",
            "peekitem": "asks for the entry set last; ours are sorted by their keys",
            "test_read": "values as open files",
            "test_stats": "a count of hits that all processes share is a write for each look-up",
            "test_tag_index": "tags always have their index",
            "test_pragma": "with `test_disk` and `test_reset`: settings of SQLite and of pickle",
            "test_check": "`kvstore verify` finds damage in any store",
            "least_frequently": "with `custom_eviction`: an eviction by counts, or by a user's SQL",
            "test_rlock": "a lock that its holder takes twice; ours waits for its lease",
            "test_semaphore": "with `averager` and `throttle`: recipes of one transaction each",
            "memoize_stampede": "renews a result before its time; ours is made once behind it",
            "ioerror": "with `timeout`: replace the inside of its own class by mocks",
            "test_rsync": "the tool copies files; ours has backups",
        },
    ),
    Suite(
        "mcp",
        "kvstore.adapters.mcp",
        "its project's scenarios for servers (`@modelcontextprotocol/conformance`, by npm), and "
        "our tests through its client",
        "mcp",
        ("mcp",),
        {
            "tools-call": "calls the tools of the suite's own example server, as the next ones do",
            "elicitation": "the example asks the model's user; no tool of ours does",
            "server-sse-polling": "calls a tool of the example that ends a stream",
            "json-schema-2020-12": "lists a tool of the example",
            **dict.fromkeys(
                ("resources-read", "resources-templates", "resources-sub", "resources-unsub"),
                "reads resources of the example; ours has none",
            ),
            "prompts-get": "gets prompts of the example; ours has none",
            "completion-complete": "completes arguments of prompts",
            "logging-set-level": "ours sends no log to a model",
        },
        page="how-to/neighbours/mcp.md",
    ),
    Suite(
        "zodb",
        "kvstore.adapters.zodb",
        "the mixins of `ZODB.tests` by which ZODB tests its FileStorage, and random histories of "
        "both storages, compared",
        "ZODB",
        ("ZODB", "zope.testing", "manuel"),
        {
            "external_invalidate": "asks for several clients of a storage at once, as ZEO has",
            "testblob": "blobs are left out",
            "CorruptionTests": "damages the file of a FileStorage",
        },
        page="how-to/neighbours/zodb.md",
    ),
    Suite(
        "feast",
        "kvstore.feast",
        "both halves against each other, and Feast's universal suites (one test) of the checkout "
        "that `FEAST_CHECKOUT` names",
        "feast",
        (
            *("feast", "pandas>=2.2,<3", "hypothesis", "pytest-mock", "pytest-xdist", "grpcio"),
            *("pytest-asyncio", "grpcio-health-checking", "grpcio-reflection", "fastapi"),
            *("testcontainers", "minio", "python-keycloak", "boto3", "google-cloud-bigquery"),
        ),
        {
            "entities_from_query": "the entity rows are a query of SQL, and no SQL is read here",
            "test_reorder_columns": "writes structs to a column in which its own rows have texts",
            "test_writing_consecutively": "writes structs to texts, too",
            "test_non_entity_mode_preserves": "writes doubles to floats, which do not hold them",
            "dynamo": "asks for DynamoDB",
        },
        page="how-to/neighbours/feast.md",
    ),
    Suite(
        "porcupine",
        "tests.shared.linearizability",
        "the histories of Porcupine, in the checkout that `PORCUPINE_CHECKOUT` names: 102 of etcd, "
        "6 of stores of texts, and whether each is linearizable",
        "anishathalye/porcupine",
        left_out={
            "TestKvNoPartition": "the same histories, all keys in one search",
            "etcd_095": "the file is empty: the cluster did not start",
        },
        checkout="PORCUPINE_CHECKOUT",
    ),
    Suite(
        "elle",
        "tests.txn.appends",
        "the histories of Elle, in the checkout that `ELLE_CHECKOUT` names, and whether each is "
        "serialisable, and strictly so; those in its tests are retold in `tests/txn`",
        "jepsen-io/elle",
        left_out={
            "small-slow-scc": "its project measures its time, and tells no verdict",
            "rw_register_test": "registers do not tell the order of their versions",
        },
        checkout="ELLE_CHECKOUT",
    ),
)
