"""Addresses of a catalog and of segments: what they must say, and that no secret comes out of them again."""

from __future__ import annotations

from pathlib import Path

import pytest

from buffer_engine.errors import StoreError
from buffer_engine.store import open_store
from buffer_engine.store.addresses import AddressError, CatalogAddress, SegmentsAddress, remembered

CATALOG = "postgresql://me@db.example:5433/rl?schema=demo"
SEGMENTS = "s3://bucket/a/b?endpoint_override=host%3A9000&scheme=http"


def test_an_address_of_a_catalog_is_read_and_written_without_its_password() -> None:
    address = CatalogAddress.parse("postgresql://me:se'cret@db.example:5433/rl?schema=demo&sslmode=require")
    assert (address.host, address.port, address.database, address.user) == ("db.example", 5433, "rl", "me")
    assert (address.schema, address.password) == ("demo", "se'cret")
    assert str(address) == "postgresql://me@db.example:5433/rl?sslmode=require&schema=demo"
    assert address.conninfo() == (
        r"host='db.example' port='5433' dbname='rl' user='me' password='se\'cret' sslmode='require'"
    )
    assert CatalogAddress.parse(str(address)).schema == "demo"
    socket = CatalogAddress.parse("postgresql:///rl?host=/run/postgresql&schema=demo")
    assert socket.conninfo() == "host='/run/postgresql' dbname='rl'"
    assert CatalogAddress.parse(str(socket)) == socket


def test_an_address_of_segments_is_read_and_written_without_its_keys() -> None:
    address = SegmentsAddress.parse("s3://key:se%2Fcret@bucket/a/b/?scheme=http&endpoint_override=host:9000")
    assert (address.bucket, address.prefix, address.access_key, address.secret_key) == (
        "bucket", "a/b", "key", "se/cret",
    )  # fmt: skip
    assert str(address) == SEGMENTS
    assert address.place == "s3://bucket/a/b"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mysql://host/db?schema=s", "'mysql' is not a kind of catalog.*write postgresql://"),
        ("postgresl://host/db?schema=s", "'postgresl' is not a kind of catalog.*did you mean 'postgresql'"),
        ("host/db", "is no address; write postgresql://"),
        ("/var/lib/catalog", "is no address"),
        ("postgresql://host/db", r"it names no schema.*add \?schema=NAME"),
        ("postgresql://host/db?schema=a-b", "names schema 'a-b'.*letters, digits and _"),
        ("postgresql://host/?schema=s", "it names no database"),
        ("postgresql://host/db?schema=s&sslmod=require", "unknown option 'sslmod'; did you mean 'sslmode'"),
        ("postgresql://host:x/db?schema=s", "cannot be read"),
    ],
)
def test_what_is_no_address_of_a_catalog_is_refused_with_what_to_write(text: str, said: str) -> None:
    with pytest.raises(AddressError, match=said):
        CatalogAddress.parse(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s3a://bucket/a", "'s3a' is not a kind of segments.*did you mean 's3'"),
        ("gs://bucket/a", "'gs' is not a kind of segments"),
        ("s3://bucket", "it names no prefix"),
        ("s3:///a", "it names no bucket"),
        ("s3://bucket/a?endpoint=h", "unknown option 'endpoint'; did you mean 'endpoint_override'"),
        ("s3://bucket/a?scheme=ftp", "neither http nor https"),
        ("s3://bucket/a?request_timeout=soon", "no number of seconds"),
    ],
)
def test_what_is_no_address_of_segments_is_refused_with_what_to_write(text: str, said: str) -> None:
    with pytest.raises(AddressError, match=said):
        SegmentsAddress.parse(text)


def test_a_refusal_does_not_repeat_a_secret() -> None:
    for parse, text in (
        (CatalogAddress.parse, "postgresql://me:hidden@host/db"),
        (SegmentsAddress.parse, "s3://key:hidden@bucket"),
    ):
        with pytest.raises(AddressError) as refusal:
            parse(text)
        assert "hidden" not in str(refusal.value)


def test_a_folder_whose_memory_is_damaged_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text('{"catalog": ')
    with pytest.raises(StoreError, match=r"store\.json: it should say where the store lies.*remove it and open"):
        open_store(tmp_path)
    assert remembered(tmp_path / "other") is None


def test_a_wrong_address_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(AddressError):
        open_store(tmp_path / "s", catalog=CATALOG.replace("?schema=demo", ""))
    assert not (tmp_path / "s").exists()
