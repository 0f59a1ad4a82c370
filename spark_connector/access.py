"""How the driver, the planning workers and the tasks open a collection.

An `Access` holds references, never secrets: the name of an environment variable, or the path of a
file that every machine of the cluster has. The credentials of an object store come from where its
own tools find them: the environment, a profile, or the machine's role.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from backup import Collection
from backup.place import find_place
from backup.sealed import Secret
from backup.shard import Storage
from backup.shard.storage.address import file_path
from kvstore.errors import UsageError

Address: TypeAlias = "Access | str | os.PathLike[str]"
"""An `Access`, or the path or URL of an unencrypted collection."""


@dataclass(frozen=True, slots=True)
class Access:
    """The address of a collection, and references to at most one key.

    `endpoint`, `region` and `skip_signature` are for object stores; their defaults come from the
    environment.
    """

    url: str
    key_file: str | None = None
    passphrase_env: str | None = None
    passphrase_file: str | None = None
    endpoint: str | None = None
    region: str | None = None
    skip_signature: bool = False

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

    @classmethod
    def of(cls, access: Address) -> Access:
        """An `Access` with absolute paths: Spark's processes run in other directories."""
        found = access if isinstance(access, Access) else cls(os.fspath(access))
        url = local(found.url)
        url = url if "://" in url else os.path.abspath(url)
        files = (
            None if path is None else os.path.abspath(path)
            for path in (found.key_file, found.passphrase_file)
        )
        key_file, passphrase_file = files
        return replace(found, url=url, key_file=key_file, passphrase_file=passphrase_file)

    def as_options(self) -> dict[str, str]:
        """The fields but `url`, as options of `format("kvstore")`."""
        given = {
            "keyFile": self.key_file,
            "passphraseEnv": self.passphrase_env,
            "passphraseFile": self.passphrase_file,
            "endpoint": self.endpoint,
            "region": self.region,
            "skipSignature": "true" if self.skip_signature else None,
        }
        return {name: value for name, value in given.items() if value is not None}

    def open(self) -> Collection:
        """Open the collection. Raises `UsageError` if the key is missing or wrong."""
        return Collection(
            self.url, self._passphrase(), key_file=self.key_file, options=self._options()
        )

    def storage(self) -> Storage:
        """The collection's storage, which decrypts with the key. Raises as `open` does."""
        passphrase, secret = self._passphrase(), None
        if passphrase is not None or self.key_file is not None:
            secret = Secret(passphrase=passphrase, key_file=self.key_file)
        return find_place(self.url, secret, options=self._options())

    def _passphrase(self) -> str | None:
        if self.passphrase_file is not None:
            return _first_line(self.passphrase_file)
        if self.passphrase_env is None:
            return None
        passphrase = os.environ.get(self.passphrase_env)
        if passphrase is None:
            raise UsageError(
                f"environment variable {self.passphrase_env} is not set in Spark's processes",
                "set it before the session starts, or spark.executorEnv; or use a key file",
            )
        return passphrase

    def _options(self) -> dict[str, Any]:
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
    return file_path(path) if path.startswith("file:/") else path


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0].rstrip("\r")
    except OSError as error:
        raise UsageError(f"passphrase file {path} cannot be read: {error}") from error
