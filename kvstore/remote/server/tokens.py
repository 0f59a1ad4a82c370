"""Tokens: who may call a server, what they may do, and with which keys.

    # a token file: one token a line
    admin                 5d8f0c...
    read,write flights/   77a1e2...

The rights of a token come first; `write` includes `read`, and `admin` includes both. A key prefix
may follow, percent-encoded. The secret is last.

Invariants
1. A secret is compared by its digest, in constant time, with every token of the server.
2. No secret stands in an error, in a log, in `repr` or in an answer.
3. A token with a prefix reads and writes keys with this prefix only.
4. Without tokens only callers of this machine are served, and no browser: a web page of a stranger
   could make it call.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final

from kvstore.base.span import Span, prefix_end
from kvstore.errors import AccessDeniedError, UsageError, printable
from kvstore.remote.protocol import unquoted
from kvstore.remote.verbs import ADMIN, READ, WRITE

_INCLUDED: Final = {
    READ: frozenset({READ}),
    WRITE: frozenset({READ, WRITE}),
    ADMIN: frozenset({READ, WRITE, ADMIN}),
}
_SECRET: Final = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
"""A bearer token (RFC 6750) of some length: a short one can be guessed."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights of a caller, and the keys that they are for."""

    rights: frozenset[str]
    prefix: bytes = b""

    def require(self, right: str) -> None:
        """Raise `AccessDeniedError` without the right."""
        if right not in self.rights:
            raise AccessDeniedError(
                f"a call that needs the right {right!r}",
                f"the token has {', '.join(sorted(self.rights))}",
                "ask the owner of the server for a token with this right",
            )

    def require_whole(self, what: str) -> None:
        """Raise `AccessDeniedError` for a token with a prefix: `what` concerns all keys."""
        if self.prefix:
            raise AccessDeniedError(
                what,
                f"the token is for keys that begin with {printable(self.prefix)}",
                "use a token without a prefix",
            )

    def require_key(self, key: bytes) -> bytes:
        """`key`, if the caller may use it."""
        if not key.startswith(self.prefix):
            self._refuse(f"key {printable(key)}")
        return key

    def require_keys(self, keys: list[bytes]) -> list[bytes]:
        """`keys`, if the caller may use each of them."""
        if self.prefix:
            for key in keys:
                self.require_key(key)
        return keys

    def span(self, span: Span) -> Span:
        """`span`, if the caller may use all of it. All keys become the keys of the prefix."""
        if not self.prefix:
            return span
        mine = Span.of_prefix(self.prefix)
        if span == Span():
            return mine
        end = prefix_end(self.prefix)
        if span.start < mine.start or (end is not None and (span.end is None or span.end > end)):
            self._refuse(f"the span from {printable(span.start)}")
        return span

    def _refuse(self, what: str) -> None:
        raise AccessDeniedError(
            what,
            f"the token is for keys that begin with {printable(self.prefix)}",
            "pass keys with this prefix",
        )


WHOLE: Final = Grant(_INCLUDED[ADMIN])
"""Everything: the access of callers of this machine, where a server has no tokens."""


@dataclass(frozen=True, slots=True)
class Token:
    """A secret with its rights: `read`, `write` and `admin`, each of which includes the ones
    before. With `prefix` the token is good for keys that begin with it."""

    secret: str = field(repr=False)
    rights: Iterable[str] = (READ,)
    prefix: bytes = b""

    @property
    def access(self) -> Grant:
        """The access of its bearer. Raises `UsageError` for a bad secret or an unknown right."""
        if not isinstance(self.secret, str) or not _SECRET.fullmatch(self.secret):
            raise UsageError(
                "a token's secret has 16 to 512 letters, digits or characters of -._~+/=",
                "make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
            )
        rights: frozenset[str] = frozenset()
        for right in [self.rights] if isinstance(self.rights, str) else self.rights:
            if right not in _INCLUDED:
                raise UsageError(f"right {right!r}", f"pass some of {', '.join(_INCLUDED)}")
            rights |= _INCLUDED[right]
        if not isinstance(self.prefix, bytes):
            raise UsageError("the prefix of a token must be bytes", "encode it")
        return Grant(rights, self.prefix)


class Tokens:
    """The tokens of one server."""

    def __init__(self, tokens: Iterable[Token]) -> None:
        """Raises `UsageError` for anything but tokens. The error does not show a secret."""
        given = list(tokens) if isinstance(tokens, Iterable) else [tokens]
        for token in given:
            if not isinstance(token, Token):
                raise UsageError(
                    f"tokens has a {type(token).__name__}",
                    "pass a list of kvstore.server.Token",
                )
        self._known = [(_digest(token.secret), token.access) for token in given]
        if not self._known:
            raise UsageError("a server with an empty list of tokens", "pass tokens, or None")

    def to_fields(self) -> list[tuple[str, list[str], str]]:
        """The tokens for another process of this server: digests in the place of secrets."""
        return [
            (digest.hex(), sorted(grant.rights), grant.prefix.hex())
            for digest, grant in self._known
        ]

    @classmethod
    def of_fields(cls, fields: Iterable[tuple[str, list[str], str]]) -> Tokens:
        """The tokens that `to_fields` wrote."""
        tokens = cls.__new__(cls)
        tokens._known = [
            (bytes.fromhex(digest), Grant(frozenset(rights), bytes.fromhex(prefix)))
            for digest, rights, prefix in fields
        ]
        return tokens

    def access(self, authorization: bytes) -> Grant:
        """The access of a caller by the header `Authorization: Bearer <secret>`. Raises
        `AccessDeniedError` for a missing and an unknown token. Costs 2 us, and 0.3 us a token."""
        scheme, _, secret = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not secret:
            raise AccessDeniedError(
                "the call", "it has no token", "send Authorization: Bearer <token>, or pass token="
            )
        found: Grant | None = None
        digest = sha256(secret.strip()).digest()
        for known, access in self._known:
            if hmac.compare_digest(known, digest):
                found = access
        if found is None:
            raise AccessDeniedError(
                "the call", "the server does not know the token", "ask its owner for another"
            )
        return found

    def __repr__(self) -> str:
        return f"<{len(self._known)} tokens>"


def read_tokens(path: str | os.PathLike[str]) -> list[Token]:
    """The tokens of a file. Raises `UsageError` that names the line, and if other users of the
    machine may read the file."""
    file = Path(path)
    try:
        with file.open("rb") as opened:
            if stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & 0o077:
                raise UsageError(f"other users may read {file}", f"run: chmod 600 {file}")
            lines = opened.read().decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"token file {file}: {error}", "check the path") from error
    found: list[Token] = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) not in (2, 3):
            raise UsageError(
                f"line {number} of token file {file}", "write: rights, an optional prefix, secret"
            )
        prefix = unquoted(words[1].encode()) if len(words) == 3 else b""
        token = Token(words[-1], tuple(words[0].split(",")), prefix)
        try:
            _ = token.access
        except UsageError as error:
            where = f"line {number} of token file {file}: {error.what}"
            raise UsageError(where, error.remedy) from error
        found.append(token)
    return found


def _digest(secret: str) -> bytes:
    return sha256(secret.encode()).digest()
