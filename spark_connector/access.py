"""How the driver, the planning workers and the tasks open a collection, or call a server.

An `Access` holds references, never secrets: the name of an environment variable, or the path of a
file that every machine of the cluster has. The credentials of an object store come from where its
own tools find them: the environment, a profile, or the machine's role.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from backup import Collection
from backup.place import find_place
from backup.sealed import Secret
from backup.shard import Storage
from bulk.addresses import staging_place
from bulk.bucket import BucketUrl
from kvstore.errors import UsageError
from kvstore.storage.address import file_path, require_address

if TYPE_CHECKING:
    from kvstore.client import Client

Address: TypeAlias = "Access | str | os.PathLike[str]"
"""An `Access`, the path or URL of an unencrypted collection, or the URL of a server that asks for
no token."""

LEASE_SECONDS: Final = 3600
"""The default time for which history of a live store outlasts the last task that reads it."""

_SERVERS: Final = ("http://", "https://")
_FOR_SERVERS: Final = ("token_env", "token_file", "ca_file", "lease_seconds")
_FOR_COLLECTIONS: Final = (
    "key_file",
    "passphrase_env",
    "passphrase_file",
    "endpoint",
    "region",
    "skip_signature",
)

_OPTIONS: Final[Mapping[str, str]] = {
    "key_file": "keyFile",
    "passphrase_env": "passphraseEnv",
    "passphrase_file": "passphraseFile",
    "endpoint": "endpoint",
    "region": "region",
    "skip_signature": "skipSignature",
    "token_env": "tokenEnv",
    "token_file": "tokenFile",
    "ca_file": "caFile",
    "lease_seconds": "leaseSeconds",
}
"""The names of the fields as options of `format("kvstore")`."""


@dataclass(frozen=True, slots=True)
class Access:
    """The address of a collection with references to at most one key, or of a server with a
    reference to at most one token.

    `endpoint`, `region` and `skip_signature` are for object stores; their defaults come from the
    environment. `ca_file` has the certificates of the server's issuers, unless the machine trusts
    them anyway. `lease_seconds` is the time for which a live store keeps history after the last
    task has read it.
    """

    url: str
    key_file: str | None = None
    passphrase_env: str | None = None
    passphrase_file: str | None = None
    endpoint: str | None = None
    region: str | None = None
    skip_signature: bool = False
    token_env: str | None = None
    token_file: str | None = None
    ca_file: str | None = None
    lease_seconds: int = LEASE_SECONDS

    def __post_init__(self) -> None:
        if self.url.startswith("memory://"):
            raise UsageError(
                f"{self.url} is in the memory of one process", "Spark has several: use a path"
            )
        keys = [self.key_file, self.passphrase_env, self.passphrase_file]
        if sum(key is not None for key in keys) > 1:
            raise UsageError(
                "more than one of keyFile, passphraseEnv, passphraseFile is given", "pass one"
            )
        if self.token_env is not None and self.token_file is not None:
            raise UsageError("tokenEnv and tokenFile are both given", "pass one")
        foreign = _FOR_COLLECTIONS if self.is_server else _FOR_SERVERS
        given = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        for name in given:
            if name in foreign:
                what = "a server" if self.is_server else "no server"
                raise UsageError(f"{_OPTIONS[name]} is given, and the path is {what}", "remove it")
        if self.is_server and "@" in self.url.partition("://")[2].partition("/")[0]:
            raise UsageError("the URL of a server has a password in it", "pass tokenFile")

    @property
    def is_server(self) -> bool:
        """Whether the URL is one of a server."""
        return self.url.startswith(_SERVERS)

    @classmethod
    def of(cls, access: Address) -> Access:
        """An `Access` with absolute paths: Spark's processes run in other directories."""
        found = access if isinstance(access, Access) else cls(os.fspath(access))
        return replace(
            found,
            url=absolute(found.url),
            key_file=_absolute(found.key_file),
            passphrase_file=_absolute(found.passphrase_file),
            token_file=_absolute(found.token_file),
            ca_file=_absolute(found.ca_file),
        )

    def directories(self) -> list[str]:
        """The directories that a task must see to use the collection: its state, if it is local."""
        return [] if "://" in self.url else [os.path.join(self.url, "consensus")]

    def as_options(self) -> dict[str, str]:
        """The fields but `url`, as options of `format("kvstore")`."""
        texts: dict[str, str] = {}
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if value != each.default:
                texts[_OPTIONS[each.name]] = "true" if value is True else str(value)
        return texts

    def connect(self) -> Client:
        """A client of the server. Raises `UsageError` if the token is missing, and the errors of
        `kvstore.connect`."""
        token = None
        if self.token_file is not None:
            token = _first_line(self.token_file, "token")
        elif self.token_env is not None:
            token = _variable(self.token_env, "a token file")
        from kvstore.client import connect  # brings TLS with it, which most tasks do not need

        return connect(self.url, token, ca=self.ca_file)

    def open(self) -> Collection:
        """Open the collection. Raises `UsageError` if the key is missing or wrong."""
        return Collection(
            self.url, self._passphrase(), key_file=self.key_file, options=self.bucket_options()
        )

    def storage(self) -> Storage:
        """The collection's storage, which decrypts with the key. Raises as `open` does."""
        passphrase, secret = self._passphrase(), None
        if passphrase is not None or self.key_file is not None:
            secret = Secret(passphrase=passphrase, key_file=self.key_file)
        return find_place(self.url, secret, options=self.bucket_options()).storage

    def _passphrase(self) -> str | None:
        if self.passphrase_file is not None:
            return _first_line(self.passphrase_file, "passphrase")
        if self.passphrase_env is None:
            return None
        return _variable(self.passphrase_env, "a key file")

    def bucket_options(self) -> dict[str, Any]:
        """The options by which the object store is opened."""
        options: dict[str, Any] = {}
        if self.endpoint is not None:
            options["endpoint"] = self.endpoint
        if self.region is not None:
            options["region"] = self.region
        if self.skip_signature:
            options["skip_signature"] = True
        return options


def local(path: str) -> str:
    """The path that a `file:` URL names, also in Hadoop's form `file:/a`; other texts unchanged."""
    return file_path(path) if path.lower().startswith("file:/") else path


def absolute(path: str) -> str:
    """A path or the path of a `file:` URL as an absolute path; another URL unchanged.

    Tasks run in directories of their own, so a path is made absolute before it is sent to one.
    Raises `UsageError` for a text that is empty, or a URL with one slash, as `dbfs:/folder`.
    """
    path = require_address(local(path))
    return path if "://" in path else os.path.abspath(path)


def staging_at(given: Address) -> Path | BucketUrl:
    """The staging place that `given` names: a directory with an absolute path, or a URL.

    Spark's machines write there and the store's process reads there. Raises `UsageError` for the
    memory of one process, and for any other text.
    """
    access = given if isinstance(given, Access) else None
    text = access.url if access is not None else local(os.fspath(given))  # type: ignore[arg-type]
    if text.startswith("memory:"):
        raise UsageError(f"{text} is in the memory of one process", "pass a directory or a bucket")
    options = {} if access is None else access.bucket_options()
    return staging_place(given if text == given else text, options)


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def _variable(name: str, other: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise UsageError(
            f"environment variable {name} is not set in Spark's processes",
            f"set it before the session starts, or spark.executorEnv; or use {other}",
        )
    return value


def _first_line(path: str, what: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0].rstrip("\r")
    except OSError as error:
        what = f"{what} file {path} cannot be read: {error}"
        raise UsageError(what, "check the path, and that all machines see it") from error
