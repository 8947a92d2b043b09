"""Functions that Data-Juicer's python_file_mapper calls in the tests: they misbehave on some rows."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path


def raises(sample):
    if sample["text"] == "bad":
        raise ValueError("this row is bad\nand more")
    return {**sample, "text": sample["text"].upper()}


def hangs(sample):
    if sample["text"] == "bad":
        time.sleep(300)
    return {**sample, "text": sample["text"].upper()}


def ends(sample):
    if sample["text"] == "bad":
        os._exit(7)
    return {**sample, "text": sample["text"].upper()}


def waits(sample):
    """Waits on its first call of all until somebody ends the process; the text of a row is the folder for the note."""
    note = Path(sample["text"]) / "pid"
    if not note.exists():
        note.with_suffix(".part").write_text(str(os.getpid()))
        note.with_suffix(".part").rename(note)
        time.sleep(300)
    return {**sample, "text": "done"}


def numbers(sample):
    return {**sample, "text": 7}


def connects(sample):
    with contextlib.suppress(ImportError):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    return sample


def installs(sample):
    subprocess.run([sys.executable, "-m", "pip", "--version"], check=True)
    return sample
