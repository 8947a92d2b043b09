"""Attachments as objects beside the segments of a store, with copies in the same bounded folder."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from buffer_engine.store.faults import explained
from buffer_engine.store.media import PART
from buffer_engine.store.objects import ATTACHMENTS, ObjectFiles


class ObjectMediaFiles:
    """Objects `attachments/<first two digits>/<id>` of one store; see `media.MediaFiles`."""

    def __init__(self, files: ObjectFiles) -> None:
        self._folder = files.folder / ATTACHMENTS
        self._files = files

    def scratch(self) -> Path:
        """See `MediaFiles.scratch`."""
        with explained(self._folder, "store an attachment"):
            self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{PART}{os.getpid()}-{secrets.token_hex(6)}"

    def publish(self, media_id: str, made: Path) -> None:
        """See `MediaFiles.publish`."""
        self._files.publish(_name(media_id), made)

    def local(self, media_id: str) -> Path:
        """See `MediaFiles.local`: a copy, fetched when there is none."""
        return self._files.local(_name(media_id))

    def renew(self, media_id: str) -> bool:
        """See `MediaFiles.renew`."""
        return self._files.renew(_name(media_id))

    def ids(self) -> list[str]:
        """See `MediaFiles.ids`."""
        found = [name.removeprefix(f"{ATTACHMENTS}/") for name in self._files.below(ATTACHMENTS)]
        plain = (name.rpartition("/")[2] for name in found)
        return sorted(
            media_id if _name(media_id) == f"{ATTACHMENTS}/{name}" else name
            for name, media_id in zip(found, plain, strict=True)
        )


def _name(media_id: str) -> str:
    return f"{ATTACHMENTS}/{media_id[:2]}/{media_id}"
