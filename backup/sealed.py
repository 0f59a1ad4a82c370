"""Encryption of a collection: AES-256-GCM around any blob and consensus, manifests included.

    encryption.json   { "format": 1, "kdf": "scrypt" | "none", "n", "r", "p", "salt",
                        "wrapped": hex of nonce 12 | data key encrypted by the key of the user }
    sealed blob    := | "KVE1" | nonce prefix 8 | chunk ... |
    chunk          := up to 64 KiB of plain bytes, encrypted | tag 16 |
                      nonce = prefix | number u32;  also authenticated: name, number, whether last
    sealed version := | nonce 12 | data, encrypted | tag 16 |    also authenticated: key, seqno

A random data key encrypts everything. The user's passphrase (through scrypt, RFC 7914) or key file
only wraps that key, so a wrong passphrase is known at once. A ranged read decrypts only the chunks
that it touches. Chunks are numbered and the last one is marked, so they cannot be swapped, dropped
or cut off unseen (the STREAM construction of Hoang, Reyhanitabar, Rogaway and Vizar, 2015).

Names, sizes and times of blobs are not encrypted.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from kvstore.backup.shard.state.codec import PUT_BACK
from kvstore.base.paths import require_absolute
from kvstore.codec.json import JsonObject, read_object
from kvstore.errors import Argument, CorruptionError, FormatVersionError, KVStoreError, UsageError
from kvstore.limits import (
    KEY_RECORD_BYTES_MAX,
    SCRYPT_BYTES_MAX,
    SCRYPT_COST_MAX,
    SCRYPT_N,
    SEALED_CHUNK_BYTES,
    SEALED_HEADS_MAX,
)
from kvstore.storage.contract import (
    Blob,
    BlobInfo,
    Cas,
    Consensus,
    Versioned,
    put_retrying,
    sweep,
)

KEY_RECORD: Final = "encryption.json"
KEY_FORMAT: Final = 1
KEY_BYTES: Final = 32

_PUT_BACK = "put back a copy of it: nothing can be read without"
_MAGIC = b"KVE1"
_PREFIX_BYTES = 8
_HEADER_BYTES = len(_MAGIC) + _PREFIX_BYTES
_TAG_BYTES = 16
_KEY_FILE_BYTES_MAX = 256
"""64 hex digits, and the white space around them."""
_NONCE_BYTES = 12
_CHUNK = SEALED_CHUNK_BYTES + _TAG_BYTES


class Secret:
    """The user's secret: a passphrase, or the bytes of a key file."""

    def __init__(
        self, *, passphrase: str | None = None, key_file: str | Path | None = None
    ) -> None:
        if (passphrase is None) == (key_file is None):
            raise UsageError(
                "an encrypted collection needs a passphrase or a key file, not both",
                "pass one of them",
            )
        self._passphrase = passphrase
        self._key = None if key_file is None else _read_key_file(Path(key_file))

    @classmethod
    def given(
        cls, passphrase: str | None, key_file: str | os.PathLike[str] | None
    ) -> Secret | None:
        """The secret that a caller gave, if any."""
        if passphrase is None and key_file is None:
            return None
        if passphrase is not None and not isinstance(passphrase, str):
            raise UsageError(
                f"the passphrase must be a text, not {type(passphrase).__name__}", "decode it"
            )
        path = None if key_file is None else require_absolute(key_file, name="key_file")
        return cls(passphrase=passphrase, key_file=path)

    def make_record(self, data_key: bytes) -> bytes:
        """The key record from which this secret gets `data_key` again.

        Raises `UsageError` for an empty passphrase.
        """
        if self._passphrase == "":
            raise UsageError("the passphrase is empty", "set it: anyone can open what it encrypts")
        fields: dict[str, Any] = {"format": KEY_FORMAT, "kdf": "none"}
        if self._passphrase is not None:
            salt = secrets.token_bytes(16)
            fields |= {"kdf": "scrypt", "n": SCRYPT_N, "r": 8, "p": 1, "salt": salt.hex()}
        nonce = secrets.token_bytes(_NONCE_BYTES)
        wrapped = nonce + AESGCM(self._wrapping_key(fields)).encrypt(nonce, data_key, b"key")
        return json.dumps({**fields, "wrapped": wrapped.hex()}).encode()

    def open_record(self, record: bytes, where: str) -> bytes:
        """The data key of `record`.

        Raises `UsageError` if another secret made the record, `CorruptionError` if it is damaged.
        """
        fields = _read_record(record, f"{where}/{KEY_RECORD}")
        if (fields["kdf"] == "scrypt") != (self._passphrase is not None):
            wanted = "a passphrase" if fields["kdf"] == "scrypt" else "a key file"
            raise UsageError(f"{where} is encrypted by {wanted}", f"pass {wanted}")
        wrapped = fields.hexed("wrapped")
        try:
            key = AESGCM(self._wrapping_key(fields))
            return key.decrypt(wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], b"key")
        except InvalidTag as error:
            raise UsageError(
                f"the key does not open {where}", "pass the one it was made with"
            ) from error

    def _wrapping_key(self, fields: Mapping[str, Any]) -> bytes:
        if self._key is not None:
            return self._key
        assert self._passphrase is not None
        salt = bytes.fromhex(fields["salt"])
        return _derived(self._passphrase, salt, fields["n"], fields["r"], fields["p"])


def _read_record(record: bytes, place: str) -> JsonObject:
    """The fields of a key record, all present, with a cost that a record of ours could have."""
    try:
        fields = read_object(record, where=place, bytes_max=KEY_RECORD_BYTES_MAX)
        version = fields.integer("format")
        if version != KEY_FORMAT:
            raise FormatVersionError(place, found=version, supported=KEY_FORMAT)
        if (kdf := fields.text("kdf")) not in ("scrypt", "none"):
            raise fields.damaged(f"its key is derived by {kdf[:20]!r}")
        if kdf == "scrypt":
            _require_cost(fields)
        if len(fields.hexed("wrapped")) != _NONCE_BYTES + KEY_BYTES + _TAG_BYTES:
            raise fields.damaged("its wrapped key has another length")
    except CorruptionError as error:
        raise CorruptionError(place, f"no key record: {error.problem}", _PUT_BACK) from error
    return fields


def _require_cost(fields: JsonObject) -> None:
    """Refuse absurd work factors of scrypt before they take any memory."""
    n, r, p = (fields.integer(name, least=1) for name in ("n", "r", "p"))
    if n < 2 or n & n - 1:
        raise fields.damaged(f"its work factor {n} is no power of two")
    if 128 * n * r > SCRYPT_BYTES_MAX or n * r * p > SCRYPT_COST_MAX:
        raise fields.damaged(f"its work factors n={n}, r={r}, p={p} are beyond all values in use")
    if not 8 <= len(fields.hexed("salt")) <= 64:
        raise fields.damaged("its salt has another length")


@lru_cache(maxsize=4)
def _derived(passphrase: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    """Derive a key. Slow by design (0.1 s), so keys are cached: some processes open a collection
    for every task."""
    # The bytes of the environment variable, also where they are not UTF-8.
    phrase = passphrase.encode("utf-8", "surrogateescape")
    return Scrypt(salt=salt, length=KEY_BYTES, n=n, r=r, p=p).derive(phrase)


class DataKey:
    """The key of a collection's data. A new collection gets its key with its first write."""

    def __init__(self, blob: Blob, secret: Secret, where: str) -> None:
        self._blob = blob
        self._secret = secret
        self._where = where
        self._cipher: AESGCM | None = None

    def opened(self) -> AESGCM:
        """The cipher of the data. Raises `UsageError` if the secret is wrong or there is no key."""
        if self._cipher is None:
            record = self._record()
            if record is None:
                raise self._without_record()
            self._cipher = AESGCM(self._secret.open_record(record, self._where))
        return self._cipher

    def made(self) -> AESGCM:
        """The cipher of the data, with a new key if there is none yet."""
        if self._cipher is None and self._record() is None:
            made = self._secret.make_record(secrets.token_bytes(KEY_BYTES))
            try:
                put_retrying(self._blob, KEY_RECORD, made)
            except UsageError:
                # Blobs are written once: two scripts that make the collection at once read one key.
                if self._record() is None:
                    raise
        return self.opened()

    def _record(self) -> bytes | None:
        return self._blob.patience.over(lambda: self._blob.get(KEY_RECORD))

    def _without_record(self) -> KVStoreError:
        """The error for a collection without a key record."""
        over = self._blob.patience.over
        some = over(lambda: next(iter(self._blob.list()), None))
        if some is not None:
            head = over(lambda: self._blob.get_range(some.name, start=0, length=len(_MAGIC)))
            if head == _MAGIC:
                where = f"{self._where}/{KEY_RECORD}"
                return CorruptionError(where, "it is gone, and holds the key", _PUT_BACK)
        return UsageError(
            f"{self._where} is not encrypted",
            (
                "open it without a passphrase (KVSTORE_PASSPHRASE) and without ",
                Argument("key_file"),
            ),
        )


def unlock(blob: Blob, secret: Secret | None, where: str) -> DataKey | None:
    """The data key of the collection in `blob`; None for one that is not encrypted.

    Raises `UsageError` if the secret is missing or wrong, or if a secret is given for a collection
    that is not encrypted.
    """
    record = blob.patience.over(lambda: blob.get(KEY_RECORD))
    if secret is None:
        if record is not None:
            raise UsageError(
                f"{where} is encrypted",
                (
                    "pass its passphrase (the shell reads KVSTORE_PASSPHRASE), or its ",
                    Argument("key_file"),
                ),
            )
        return None
    key = DataKey(blob, secret, where)
    if record is not None or blob.patience.over(lambda: next(iter(blob.list()), None)) is not None:
        key.opened()
    return key


class SealedBlob:
    """A blob whose bytes are encrypted; sizes and ranges count the plain bytes."""

    def __init__(self, blob: Blob, key: DataKey) -> None:
        self.patience = blob.patience
        self._blob = blob
        self._key = key
        self._heads: OrderedDict[str, tuple[bytes, int]] = OrderedDict()

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """See `Blob.put`. Encryption is random, so a retry is recognised by the plain bytes."""
        try:
            self._blob.put(name, self._seal(name, data), durable=durable)
        except UsageError:
            if self.get(name) != data:
                raise

    def get(self, name: str) -> bytes | None:
        """See `Blob.get`. Raises `CorruptionError` if the bytes were not put under this name."""
        sealed = self._blob.get(name)
        if sealed is None:
            return None
        prefix = _prefix(name, sealed)
        body = memoryview(sealed)[_HEADER_BYTES:]
        count = _chunk_count(len(body))
        pieces = (
            self._open(name, prefix, number, bytes(body[number * _CHUNK :][:_CHUNK]), count)
            for number in range(count)
        )
        return b"".join(pieces)

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        """See `Blob.get_range`. Decrypts the chunks that the range touches.

        The first range of a blob takes two requests more, for its size and its nonce.
        """
        head = self._head(name)
        if head is None:
            return None
        prefix, size = head
        end = min(start + length, size)
        if start >= end:
            return b""
        first, last = start // SEALED_CHUNK_BYTES, (end - 1) // SEALED_CHUNK_BYTES
        body = self._blob.get_range(
            name, start=_HEADER_BYTES + first * _CHUNK, length=(last - first + 1) * _CHUNK
        )
        if body is None:
            return None
        count = max(-(-size // SEALED_CHUNK_BYTES), 1)
        plain = b"".join(
            self._open(name, prefix, first + index, body[index * _CHUNK :][:_CHUNK], count)
            for index in range(last - first + 1)
        )
        offset = first * SEALED_CHUNK_BYTES
        return plain[start - offset : end - offset]

    def _head(self, name: str) -> tuple[bytes, int] | None:
        """The nonce prefix and the plain size of a blob, which never change."""
        known = self._heads.get(name)
        if known is not None:
            return known
        size = self.size(name)
        header = self._blob.get_range(name, start=0, length=_HEADER_BYTES)
        if size is None or header is None:
            return None
        self._heads[name] = _prefix(name, header), size
        if len(self._heads) > SEALED_HEADS_MAX:
            self._heads.popitem(last=False)
        return self._heads[name]

    def size(self, name: str) -> int | None:
        """See `Blob.size`."""
        sealed = self._blob.size(name)
        return None if sealed is None else _plain_size(sealed)

    def delete(self, name: str) -> int | None:
        """See `Blob.delete`."""
        sealed = self._blob.delete(name)
        return None if sealed is None else _plain_size(sealed)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """See `Blob.list`. The key record is not listed."""
        for info in self._blob.list(prefix):
            if info.name != KEY_RECORD:
                yield BlobInfo(info.name, _plain_size(info.size))

    def sweep(self, *, before_ns: int) -> int:
        """See `FileBlob.sweep`."""
        return sweep(self._blob, before_ns=before_ns)

    def _seal(self, name: str, data: bytes) -> bytes:
        cipher, prefix = self._key.made(), secrets.token_bytes(_PREFIX_BYTES)
        count = max(-(-len(data) // SEALED_CHUNK_BYTES), 1)
        chunks = [_MAGIC + prefix]
        for number in range(count):
            plain = data[number * SEALED_CHUNK_BYTES : (number + 1) * SEALED_CHUNK_BYTES]
            nonce = prefix + number.to_bytes(4, "big")
            chunks.append(cipher.encrypt(nonce, plain, _context(name, number, count)))
        return b"".join(chunks)

    def _open(self, name: str, prefix: bytes, number: int, chunk: bytes, count: int) -> bytes:
        nonce = prefix + number.to_bytes(4, "big")
        try:
            return self._key.opened().decrypt(nonce, chunk, _context(name, number, count))
        except InvalidTag as error:
            raise CorruptionError(
                f"blob {name}", f"chunk {number} does not decrypt", PUT_BACK
            ) from error


class SealedConsensus:
    """A consensus whose data is encrypted; keys and sequence numbers are not."""

    def __init__(self, consensus: Consensus, key: DataKey) -> None:
        self._consensus = consensus
        self._key = key

    def head(self, key: str) -> Versioned | None:
        """See `Consensus.head`."""
        found = self._consensus.head(key)
        return None if found is None else self._open(key, found)

    def compare_and_set(self, key: str, *, expected: int | None, new: Versioned) -> Cas:
        """See `Consensus.compare_and_set`."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        context = f"{key}\0{new.seqno}".encode()
        data = nonce + self._key.made().encrypt(nonce, new.data, context)
        return self._consensus.compare_and_set(
            key, expected=expected, new=Versioned(new.seqno, data)
        )

    def scan(self, key: str, *, start: int, limit: int) -> list[Versioned]:
        """See `Consensus.scan`."""
        found = self._consensus.scan(key, start=start, limit=limit)
        return [self._open(key, version) for version in found]

    def truncate(self, key: str, seqno: int) -> int | None:
        """See `Consensus.truncate`."""
        return self._consensus.truncate(key, seqno)

    def list_keys(self) -> list[str]:
        """See `Consensus.list_keys`."""
        return self._consensus.list_keys()

    def _open(self, key: str, version: Versioned) -> Versioned:
        nonce, sealed = version.data[:_NONCE_BYTES], version.data[_NONCE_BYTES:]
        cipher = self._key.opened()
        try:
            plain = cipher.decrypt(nonce, sealed, f"{key}\0{version.seqno}".encode())
        except (InvalidTag, ValueError) as error:  # ValueError: a nonce that is cut short
            where = f"version {version.seqno} of {key}"
            raise CorruptionError(where, "it does not decrypt", PUT_BACK) from error
        return Versioned(version.seqno, plain)


def _context(name: str, number: int, count: int) -> bytes:
    return f"{name}\0{number}\0{int(number == count - 1)}".encode()


def _prefix(name: str, sealed: bytes) -> bytes:
    if sealed[: len(_MAGIC)] != _MAGIC or len(sealed) < _HEADER_BYTES:
        raise CorruptionError(f"blob {name}", "it is not an encrypted blob", PUT_BACK)
    return sealed[len(_MAGIC) : _HEADER_BYTES]


def _chunk_count(body: int) -> int:
    return max(-(-body // _CHUNK), 1)


def _plain_size(sealed: int) -> int:
    body = sealed - _HEADER_BYTES
    return max(body - _chunk_count(body) * _TAG_BYTES, 0)


def _read_key_file(path: Path) -> bytes:
    """32 bytes, or 64 hex digits."""
    try:
        with path.open("rb") as file:
            content = file.read(_KEY_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"key file {path} cannot be read: {error}", "check the path") from error
    if len(content) == KEY_BYTES:
        return content
    try:
        key = bytes.fromhex(content[:_KEY_FILE_BYTES_MAX].decode().strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(f"key file {path} holds no key", "put 32 bytes or 64 hex digits in it")
    return key
