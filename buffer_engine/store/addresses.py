"""Where a store's catalog and segments lie when not in its folder: addresses, checked, and remembered without secrets.

`catalog`: `postgresql://user@host:port/database?schema=NAME`, one schema per store.
`segments`: `s3://bucket/prefix?endpoint_override=host:port&scheme=http&region=NAME&request_timeout=SECONDS`.

Passwords and keys come from the environment (PGPASSWORD, PGPASSFILE, AWS_ACCESS_KEY_ID …); one that is written into an
address is used and never saved or shown.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from buffer_engine.errors import StoreError, did_you_mean
from buffer_engine.store.faults import explained
from buffer_engine.store.layout import ADDRESSES

_CATALOG_FORM = "postgresql://user@host:port/database?schema=NAME"
_SEGMENTS_FORM = "s3://bucket/prefix?endpoint_override=host:port&scheme=http&region=NAME"
_CATALOG_OPTIONS = ("schema", "sslmode", "sslrootcert", "sslcert", "sslkey", "host", "target_session_attrs")
_SEGMENTS_OPTIONS = ("endpoint_override", "scheme", "region", "request_timeout")


class AddressError(StoreError):
    """An address cannot be one; `fix` says what to write."""

    def __init__(self, said: str, fix: str) -> None:
        super().__init__(f"{said}; {fix}")
        self.said = said
        self.fix = fix


@dataclass(frozen=True, slots=True)
class CatalogAddress:
    """A PostgreSQL database and the schema in it that is one store's catalog."""

    host: str
    port: int | None
    database: str
    user: str
    schema: str
    options: tuple[tuple[str, str], ...] = ()
    password: str | None = None

    @classmethod
    def parse(cls, text: str) -> CatalogAddress:
        """Read an address.

        Raises:
            AddressError: it is none.
        """
        url = _split("catalog", text, ("postgresql", "postgres"), _CATALOG_FORM)
        options = _options("catalog", url, _CATALOG_OPTIONS)
        schema = options.pop("schema", "")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,62}", schema):
            said = f"it names schema {schema!r}" if schema else "it names no schema"
            raise AddressError(
                f"catalog {_shown(url)!r}: {said}, and each store has one of its own in the database",
                "add ?schema=NAME (letters, digits and _)",
            )
        database = unquote(url.path.lstrip("/"))
        if not database:
            raise AddressError(f"catalog {_shown(url)!r}: it names no database", f"write {_CATALOG_FORM}")
        return cls(
            host=options.pop("host", "") or url.hostname or "", port=url.port, database=database,
            user=unquote(url.username or ""), schema=schema, options=tuple(sorted(options.items())),
            password=None if url.password is None else unquote(url.password),
        )  # fmt: skip

    def __str__(self) -> str:
        """The address without a password."""
        where = quote(self.user) + "@" if self.user else ""
        folder = self.host.startswith("/")
        where += ("" if folder else self.host) + (f":{self.port}" if self.port else "")
        options = {**({"host": self.host} if folder else {}), **dict(self.options), "schema": self.schema}
        return f"postgresql://{where}/{quote(self.database)}?{urlencode(options)}"

    def conninfo(self) -> str:
        """What libpq connects with; what is not given comes from its environment variables."""
        parts: dict[str, str | int | None] = {
            "host": self.host, "port": self.port, "dbname": self.database, "user": self.user,
            "password": self.password, **dict(self.options),
        }  # fmt: skip
        escaped = {name: str(value).replace("\\", r"\\").replace("'", r"\'") for name, value in parts.items() if value}
        return " ".join(f"{name}='{value}'" for name, value in escaped.items())


@dataclass(frozen=True, slots=True)
class SegmentsAddress:
    """A bucket of an S3-compatible object store and the prefix below which one store's segments lie."""

    bucket: str
    prefix: str
    options: tuple[tuple[str, str], ...] = ()
    access_key: str | None = None
    secret_key: str | None = None

    @classmethod
    def parse(cls, text: str) -> SegmentsAddress:
        """Read an address.

        Raises:
            AddressError: it is none.
        """
        url = _split("segments", text, ("s3",), _SEGMENTS_FORM)
        bucket = url.netloc.rpartition("@")[2]
        prefix = unquote(url.path).strip("/")
        if not bucket or not prefix:
            missing = "bucket" if not bucket else "prefix"
            raise AddressError(f"segments {_shown(url)!r}: it names no {missing}", f"write {_SEGMENTS_FORM}")
        options = _options("segments", url, _SEGMENTS_OPTIONS)
        if not re.fullmatch(r"\d+(\.\d+)?", options.get("request_timeout", "20")):
            said = f"segments {_shown(url)!r}: request_timeout {options['request_timeout']!r} is no number of seconds"
            raise AddressError(said, "write request_timeout=20, say")
        if options.get("scheme", "https") not in ("http", "https"):
            said = f"segments {_shown(url)!r}: scheme {options['scheme']!r} is neither http nor https"
            raise AddressError(said, "write scheme=http for a server without TLS, or leave it out")
        keys = (url.username, url.password)
        return cls(
            bucket, prefix, tuple(sorted(options.items())),
            *(None if key is None else unquote(key) for key in keys),
        )  # fmt: skip

    def __str__(self) -> str:
        """The address without keys."""
        options = f"?{urlencode(self.options)}" if self.options else ""
        return f"s3://{self.bucket}/{quote(self.prefix)}{options}"

    @property
    def place(self) -> str:
        """Bucket and prefix, which are the same for every machine; endpoints may differ."""
        return f"s3://{self.bucket}/{self.prefix}"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Of one store; None: in the store's own folder.

    Attributes:
        store_id: what the shared catalog calls itself, so that another one at the same address is noticed.
    """

    catalog: CatalogAddress | None = None
    segments: SegmentsAddress | None = None
    store_id: str | None = None

    @classmethod
    def parse(cls, catalog: str | None, segments: str | None) -> Addresses:
        """Read both.

        Raises:
            AddressError: one of them is none.
        """
        return cls(
            None if catalog is None else CatalogAddress.parse(catalog),
            None if segments is None else SegmentsAddress.parse(segments),
        )

    @property
    def elsewhere(self) -> bool:
        """Whether anything lies outside of the folder."""
        return self.catalog is not None or self.segments is not None


def remembered(root: Path) -> Addresses | None:
    """What the folder remembers; None when it remembers nothing, as a store does that is all in its folder.

    Raises:
        StoreError: the file cannot be read.
    """
    path = root / ADDRESSES
    with explained(path, "read where the store lies"):
        if not path.exists():
            return None
        text = path.read_text(encoding="utf-8")
    try:
        given: dict[str, Any] = json.loads(text)
        return replace(Addresses.parse(given["catalog"], given["segments"]), store_id=given["store"])
    except (ValueError, KeyError, TypeError, AddressError) as error:
        raise StoreError(
            f"{path}: it should say where the store lies and cannot be read ({error}); remove it and open the store "
            "with catalog= and segments= again"
        ) from error


def remember(root: Path, addresses: Addresses) -> None:
    """Have the folder remember, without passwords and keys."""
    path = root / ADDRESSES
    given = {
        "catalog": None if addresses.catalog is None else str(addresses.catalog),
        "segments": None if addresses.segments is None else str(addresses.segments),
        "store": addresses.store_id,
    }
    with explained(path, "remember where the store lies"):
        root.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{ADDRESSES}.{os.getpid()}.partial")
        with open(partial, "w", encoding="utf-8") as file:
            file.write(json.dumps(given, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)


def same_place(one: Addresses, other: Addresses) -> bool:
    """Whether both mean one store; passwords, keys, endpoints and connection options may differ."""
    return (
        (one.catalog is None) == (other.catalog is None)
        and (one.segments is None) == (other.segments is None)
        and (one.catalog is None or other.catalog is None or _store_of(one.catalog) == _store_of(other.catalog))
        and (one.segments is None or other.segments is None or one.segments.place == other.segments.place)
    )


def _store_of(address: CatalogAddress) -> tuple[str, str]:
    return address.database, address.schema


def _split(what: str, text: str, schemes: Iterable[str], form: str) -> SplitResult:
    known = list(schemes)
    try:
        url = urlsplit(text)
        _ = url.port if what == "catalog" else None
    except ValueError as error:
        raise AddressError(f"{what}: the address cannot be read ({error})", f"write {form}") from error
    if url.scheme not in known:
        if not url.scheme or len(url.scheme) == 1 or "://" not in text:
            raise AddressError(f"{what}: {_shown(url)!r} is no address", f"write {form}")
        hint = did_you_mean(url.scheme, known)
        fix = hint if hint.startswith("did") else f"write {form}"
        raise AddressError(f"{what}: {url.scheme!r} is not a kind of {what} that a store can have", fix)
    return url


def _options(what: str, url: SplitResult, known: Iterable[str]) -> dict[str, str]:
    options = dict(parse_qsl(url.query, keep_blank_values=True))
    for name in options:
        if name not in known:
            raise AddressError(f"{what} {_shown(url)!r}: unknown option {name!r}", did_you_mean(name, known))
    return options


def _shown(url: SplitResult) -> str:
    """The address without what stands between the slashes and `@`, where secrets are."""
    return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
