"""pyarrow is compiled and ships no annotations: every name in it is Any to a type checker."""

from typing import Any

def __getattr__(name: str) -> Any: ...
