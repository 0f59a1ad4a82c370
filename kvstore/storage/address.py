"""Storage by address: one URL gives a blob and a consensus. All doors read addresses here.

    path, file:///path    local files: FileBlob in <path>/blob, FileConsensus in <path>/consensus
    memory://name         this process's memory; the same name is the same storage
    s3://  gs://  az://   an object store, with objects below the URL's path

Options of object stores (region, endpoint, keys) are passed on to obstore, which also reads the
environment as the providers' own tools do.

Invariants
1. One text names one place, whichever door it comes through, or it is refused. Readers of URLs cut
   off what follows a `#` or `?`, drop line ends and users, and walk through `..`: then a text names
   another place than the one that is written there, where an expiry would delete. So a URL is taken
   apart here, and object stores get the URL that `StorageAddress.url` writes anew.
2. In a path of a file system each character stands for itself. In a URL `%23` stands for `#`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, BinaryIO, Final, NamedTuple
from urllib.parse import quote, unquote

from kvstore.base.meters import OnProgress
from kvstore.base.paths import is_url, require_no_home
from kvstore.errors import KVStoreError, UsageError
from kvstore.storage.contract import Blob, Storage
from kvstore.storage.local_files import FileBlob, FileConsensus
from kvstore.storage.memory_storage import MemoryBlob, MemoryConsensus
from kvstore.storage.patience import PATIENCE, Patience
from kvstore.storage.wrapped import BlobBelow

_memories: dict[str, Storage] = {}
_memory_blobs: dict[str, Blob] = {}
_SCHEMES = ("file", "memory", "s3", "gs", "az")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]*", re.ASCII)
_WITH_ACCOUNT: Final = ("abfs", "abfss", "wasb", "wasbs")
"""Schemes in which a container stands before the `@` of an account."""
_SAFE: Final = "/-._~!$&'()*+,;=:@"
"""Characters that stand for themselves in the path of a URL, beside letters and digits."""


class StorageAddress(NamedTuple):
    """An address, taken apart. `scheme` is "file" for a path too, and `path` is then as it was
    given; of another URL it is the path below the bucket, decoded, without outer slashes."""

    scheme: str
    host: str
    path: str

    @property
    def is_file(self) -> bool:
        """Whether it names a place in a file system."""
        return self.scheme == "file"

    @property
    def url(self) -> str:
        """The one URL of this address, percent-encoded. A path of files is made absolute."""
        if self.is_file:
            return "file://" + quote(os.fsencode(os.path.abspath(self.path)), safe=_SAFE)
        below = "/" + quote(self.path, safe=_SAFE) if self.path else ""
        return f"{self.scheme}://{self.host}{below}"

    def below(self, path: str) -> StorageAddress:
        """The address of `path`, whose characters stand for themselves, below this one."""
        return self._replace(path=f"{self.path}/{path}" if self.path else path)


def parse_address(url: str | os.PathLike[str]) -> StorageAddress:
    """Take a path or a URL apart.

    Raises `UsageError` for a text that is empty, or neither, and for a URL that object stores,
    files and memory could take for different places: with a `#`, a `?`, a backslash, a control
    character, an empty step, `.` or `..`, a user, or a `%` that escapes nothing.
    """
    text = address_text(url)
    if not text:  # not the working directory: an unset variable in a script
        raise UsageError("the address of the storage is empty", "give a path or a URL")
    scheme, colon, rest = text.partition(":")
    scheme = scheme.lower()
    if not colon or not (is_url(text) or scheme in _SCHEMES):
        if "\0" in text:
            raise UsageError(f"the path {text!r} holds a zero byte", "pass another path")
        require_no_home(text)
        return StorageAddress("file", "", text)
    if not rest.startswith("//") and not (scheme == "file" and rest.startswith("/")):
        known = scheme if scheme in _SCHEMES else "s3"
        raise UsageError(
            f"{text!r} is neither a URL nor a path",
            f"write a URL as {known}://..., or ./{text} for a directory of that name",
        )
    host, _, path = rest[2:].partition("/") if rest.startswith("//") else ("", "", rest[1:])
    if "@" in host and scheme not in _WITH_ACCOUNT:
        # The text is not shown: what stands before the @ is a secret.
        raise UsageError(
            f"the URL of {scheme}://{host.rpartition('@')[2]} has a user or a password",
            "leave them out, and pass options= or the provider's environment variables",
        )
    if "#" in rest or "?" in rest:
        raise UsageError(
            f"{text!r} has a # or a ?, with which the path of a URL ends",
            "write # as %23 and ? as %3F where a name has them; options go into options=",
        )
    if _CONTROL.search(rest) is not None:
        raise UsageError(f"{text!r} has a control character", "remove it from the URL")
    if _ESCAPE.search(rest) is not None:
        raise UsageError(f"{text!r} has a % that escapes no character", "write it as %25")
    if scheme == "file":
        if host not in ("", "localhost"):
            raise UsageError(f"{text!r} names a host", "write file:///absolute/path")
        decoded = "/" + unquote(path, errors="surrogateescape")
        if decoded.startswith("/~"):
            require_no_home(decoded[1:])
        if "\0" in decoded:
            raise UsageError(f"{text!r} holds a zero byte", "pass another path")
        return StorageAddress("file", "", decoded)
    return StorageAddress(scheme, _host(text, scheme, host), _steps(text, path))


def _host(text: str, scheme: str, host: str) -> str:
    """The bucket or the server of a URL. Raises `UsageError`."""
    if scheme in ("http", "https"):
        if host and " " not in host:
            return host
    elif all(_BUCKET.fullmatch(part) for part in host.split("@", 1)):
        return host
    raise UsageError(
        f"{text!r} names no {'server' if scheme in ('http', 'https') else 'bucket'}",
        f"write {scheme}://bucket/path; a bucket's name has letters, digits, '.', '_' and '-'",
    )


def _steps(text: str, path: str) -> str:
    """The path of a URL, decoded. Raises `UsageError` for a path that could lead elsewhere."""
    try:
        steps = [unquote(step, errors="strict") for step in path.rstrip("/").split("/")]
        for step in steps:
            step.encode()
    except UnicodeError as error:
        raise UsageError(f"{text!r} is no text in UTF-8: {error}", "check the URL") from error
    if steps == [""]:
        return ""
    for step in steps:
        if step in ("", ".", ".."):
            raise UsageError(
                f"{text!r} has the step {step!r} in its path", "write the path without it"
            )
        if _CONTROL.search(step) is not None or "/" in step or "\\" in step:
            raise UsageError(
                f"{text!r} has a backslash, an escaped slash or a control character in its path",
                "choose another name",
            )
    return "/".join(steps)


def open_storage(
    url: str | os.PathLike[str], *, patience: Patience = PATIENCE, **options: Any
) -> Storage:
    """Open the storage that `url` names; nothing is created before the first write.

    `patience` says how long calls are repeated after failures that may pass.

    Raises `UsageError` for an address that is empty or not understood.
    """
    address = parse_address(url)
    if address.is_file:
        return _files(address.path, options, patience)
    if address.scheme == "memory":
        fresh = Storage(MemoryBlob(), MemoryConsensus())
        return _memories.setdefault(address.url, fresh)
    # Imported late, here and below: local files need no client of object stores.
    from kvstore.storage.object_store import open_object_store

    return Storage(*open_object_store(address.url, patience=patience, **options))


def is_gone(url: str, *, seconds: float) -> bool | None:
    """Whether nothing is left of a storage at `url`; None where that is not known: it is in the
    memory of a process, or does not answer within `seconds`."""
    if url.startswith("memory:"):
        return None
    try:
        found = open_storage(url, patience=Patience(seconds))
        return found.blob.patience.over(lambda: next(iter(found.blob.list()), None)) is None
    except KVStoreError:
        return None


def open_blob(
    url: str | os.PathLike[str], *, patience: Patience = PATIENCE, **options: Any
) -> Blob:
    """The blobs directly below `url`: objects whose names other programs can foretell.

    Blobs of `memory://name/path` are also seen below `memory://name`. Raises as `open_storage`.
    """
    address = parse_address(url)
    if address.is_file:
        if options:
            raise UsageError(
                f"local files take no options, not {', '.join(sorted(options))}",
                "leave them out, or pass a URL",
            )
        return FileBlob(os.path.abspath(address.path), patience=patience)
    if address.scheme == "memory":
        blob = _memory_blobs.setdefault(address.host, MemoryBlob())
        # The names of blobs have few characters: the others are escaped, by `=` instead of `%`.
        names = quote(address.path, safe="/-._").replace("~", "%7E").replace("%", "=")
        return BlobBelow(blob, names)
    from kvstore.storage.object_store import open_object_blob

    return open_object_blob(address.url, patience=patience, **options)


def fetch_object(url: str, file: BinaryIO, progress: OnProgress) -> None:
    """Write the bytes of the object at `url` to `file`, all of one version of the object.
    `progress` is called with the bytes so far, as a `WorkCount`.

    Raises `UsageError` for an address that is not understood, in the memory of a process, or where
    nothing is; `StorageError` if the object is replaced meanwhile; else as the storage does.
    """
    address = parse_address(url)
    if address.scheme == "memory":
        raise UsageError(f"{url} lies in the memory of a process", "pass a file, or another URL")
    from kvstore.storage.object_store import write_object

    below, _, name = address.path.rpartition("/")
    write_object(address._replace(path=below).url, name, address.url, file, progress)


def require_address(url: str | os.PathLike[str]) -> str:
    """A path as it was given, or the one form of a URL. Raises as `parse_address`."""
    address = parse_address(url)
    return os.fspath(url) if address.is_file and not is_url(os.fspath(url)) else address.url


def address_text(url: object) -> str:
    """`url` as text, if it is a text or a path. Raises `UsageError`."""
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(text, str):
        raise UsageError(
            f"the address of the storage must be a text or a path, not {type(url).__name__}",
            "give a path or a URL",
        )
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the address of the storage is no text: {error}", "give a path or a URL"
        ) from error
    return text


def require_options(options: object) -> Mapping[str, Any]:
    """The options of an object store, none for None. Raises `UsageError`, which does not show them:
    some are secrets."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise UsageError(f"options must be a mapping, not {type(options).__name__}", "pass a dict")
    for name in options:
        if not isinstance(name, str):
            raise UsageError(f"the name of an option must be a text, not {name!r}", "pass a str")
    return options


def public_address(url: str | os.PathLike[str]) -> str:
    """`url` as it is shown and stored: a path is made absolute. It never has a user or a password,
    because `parse_address` refuses them; of a text that is refused only the scheme is told."""
    text = os.fspath(url)
    if not text:
        return ""
    try:
        address = parse_address(text)
    except UsageError:  # no URL: the name of a given storage
        return f"{text.partition('://')[0]}://"
    return address.url if is_url(text) else os.path.abspath(text)


def file_path(url: str) -> str:
    """The path that a `file:` URL names. Raises as `parse_address`."""
    return parse_address(url).path


def _files(path: str, options: dict[str, Any], patience: Patience) -> Storage:
    if options:
        raise UsageError(
            f"local files take no options, not {', '.join(sorted(options))}",
            "leave them out, or pass a URL",
        )
    root = os.path.abspath(path)
    blob = FileBlob(os.path.join(root, "blob"), patience=patience)
    return Storage(blob, FileConsensus(f"{root}/consensus", patience=patience))
