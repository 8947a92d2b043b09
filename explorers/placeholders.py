"""`{name}` in a template: plain substitution, without the attribute access and formatting of `str.format`.

`{{` and `}}` stand for braces. Anything in braces that is not a name (JSON, code) stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_PATTERN = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")


def placeholders(template: str) -> frozenset[str]:
    """Names that the template asks for."""
    return frozenset(match[1] for match in _PATTERN.finditer(template) if match[1] is not None)


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The template with its names replaced; text as it is, everything else as JSON.

    Raises:
        KeyError: a name has no value.
    """

    def replacement(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        value = values[match[1]]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return _PATTERN.sub(replacement, template)
