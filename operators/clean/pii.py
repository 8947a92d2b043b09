"""What counts as personal data or a secret: one pattern a kind, and a check where a pattern alone would guess.

Two engines read the patterns: Polars finds the texts that may hold one at all, Python finds the places in those few.
`hint` is therefore written in the syntax of both and matches every text in which `pattern` finds something.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

PiiKind = Literal["private_key", "token", "password", "email", "iban", "card", "ip", "phone", "path"]


@dataclass(frozen=True, slots=True)
class PiiPattern:
    """One kind of thing to find.

    Attributes:
        hint: regular expression of a text that may hold one; looser than the pattern.
        pattern: where it is; the group `value`, if there is one, is what goes, else the whole match.
        holds: whether a match really is one.
    """

    hint: str
    pattern: re.Pattern[str]
    holds: Callable[[str], bool] = lambda _: True


def luhn(text: str) -> bool:
    """Whether the digits of `text` are a card number: 13 to 19 of them, not all equal, with a right check digit."""
    digits = [int(char) for char in text if char.isdigit()]
    if not 13 <= len(digits) <= 19 or len(set(digits)) == 1:
        return False
    doubled = [2 * digit - 9 if digit > 4 else 2 * digit for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


_IBAN_LENGTHS = {
    country: length
    for length, countries in {
        15: "NO", 16: "BE", 18: "DK FI FO GL NL", 19: "MK SI", 20: "AT BA EE KZ LT LU XK", 21: "CH HR LI LV",
        22: "BG BH CR DE GB GE IE ME RS VA", 23: "AE GI IL IQ TL", 24: "AD CZ ES MD PK RO SA SE SK TN VG",
        25: "PT", 26: "IS TR", 27: "FR GR IT MC MR SM", 28: "AL AZ CY DO GT HU LB PL BY SV", 29: "BR EG PS QA UA",
        30: "JO KW MU", 31: "MT SC", 32: "LC",
    }.items()
    for country in countries.split()
}  # fmt: skip


def iban(text: str) -> bool:
    """Whether `text` is an IBAN: its country's length and the remainder 1 of ISO 13616."""
    compact = re.sub(r"[\s-]", "", text).upper()
    if _IBAN_LENGTHS.get(compact[:2]) != len(compact):
        return False
    moved = compact[4:] + compact[:4]
    return int("".join(str(int(char, 36)) for char in moved)) % 97 == 1


def address(text: str) -> bool:
    """Whether `text` is an IP address of a machine somewhere: not 0.0.0.0, and not a version number like 1.2.3.4."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (found.is_unspecified or found.is_loopback)


_DATE = re.compile(
    r"(?<![0-9])(?:[0-9]{4}([-./ ])[0-9]{1,2}\1[0-9]{1,2}|[0-9]{1,2}([-./ ])[0-9]{1,2}\2[0-9]{4})(?![0-9])"
)


def phone(text: str) -> bool:
    """Whether the digits of `text` may be a telephone number: 8 to 15 of them (E.164), and no date among them."""
    digits = sum(char.isdigit() for char in text)
    dated = text[0] not in "+(" and _DATE.search(text) is not None
    return 8 <= digits <= 15 and not dated


def random_looking(text: str) -> bool:
    """Whether `text` is a secret rather than words: letters and digits, and over 3 bits of entropy a character."""
    if not (any(char.isdigit() for char in text) and any(char.isalpha() for char in text)):
        return False
    counts = [text.count(char) / len(text) for char in set(text)]
    return -sum(share * math.log2(share) for share in counts) > 3.0


_TOKENS = (
    r"gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{60,255}|glpat-[A-Za-z0-9_-]{20,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{35}|xox[abeoprs]-[A-Za-z0-9-]{10,250}"
    r"|sk-(?:ant-|proj-)?[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{30,}|npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{50,}"
    r"|[sr]k_(?:live|test)_[A-Za-z0-9]{16,}|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"
)
_NAMES = r"(?:api[_-]?key|secret(?:[_-]?key)?|access[_-]?(?:key|token)|auth[_-]?token|bearer|token|passw(?:or)?d|pwd)"

PII: dict[PiiKind, PiiPattern] = {
    "private_key": PiiPattern(
        r"-----BEGIN [A-Z ]*PRIVATE KEY",
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL),
    ),
    "token": PiiPattern(_TOKENS, re.compile(rf"(?<![A-Za-z0-9_-])(?:{_TOKENS})")),
    "password": PiiPattern(
        rf"(?i){_NAMES}",
        re.compile(
            rf"(?i)(?<![a-z]){_NAMES}[\"']?(?:[ \t]{{0,4}}[:=][ \t]{{0,4}}|[ \t]{{1,4}})[\"']?"
            r"(?P<value>[A-Za-z0-9+/_.~!@#$%^&*-]{12,}={0,2})"
        ),
        random_looking,
    ),
    "email": PiiPattern(
        r"[^\s@]@[^\s@]",
        re.compile(
            r"(?<![A-Za-z0-9.!#$%&'*+/=?^_`{|}~-])[A-Za-z0-9][A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{0,63}"
            r"@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9])"
        ),
    ),
    "iban": PiiPattern(
        r"[A-Z]{2}[0-9]{2}",
        re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}[0-9]{2}(?:[ -]?[A-Z0-9]{4}){2,7}(?:[ -]?[A-Z0-9]{1,3})?(?![A-Za-z0-9])"),
        iban,
    ),
    "card": PiiPattern(
        r"(?:[0-9][ -]?){13}", re.compile(r"(?<![0-9.])(?<![0-9][ -])[0-9](?:[ -]?[0-9]){12,18}(?![ -]?[0-9])"), luhn
    ),
    "ip": PiiPattern(
        r"[0-9]\.[0-9]|:[0-9A-Fa-f]{0,4}:",
        re.compile(
            r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w]|\.[0-9])"
            r"|(?<![\w:])(?:[0-9A-Fa-f]{1,4}:|:(?=:)){2,7}(?::?[0-9A-Fa-f]{1,4}|:)(?![\w:])"
        ),
        address,
    ),
    "phone": PiiPattern(
        r"(?:[0-9][ ().-]{0,2}){8}",
        re.compile(
            r"(?<![\w.+-])"
            r"(?:\+[0-9]{1,3}[ .-]?(?:\([0-9]{1,4}\)[ .-]?)?|\([0-9]{2,5}\)[ .-]?|0[0-9]{1,4}[ .-](?=[0-9]))"
            r"[0-9]{2,5}(?:[ .-]?[0-9]{2,5}){1,4}(?![\w]|[.-][0-9])"
            r"|(?<![\w.+-])[0-9]{3}[.-][0-9]{3}[.-][0-9]{4}(?![\w]|[.-][0-9])"
        ),
        phone,
    ),
    "path": PiiPattern(
        r"/home/|/Users/|\\Users\\",
        re.compile(r"(?:(?<![\w/])/(?:home|Users)/|[A-Za-z]:\\Users\\)(?P<value>[^\s/\\:*?\"'<>|]+)"),
    ),
}
"""Every kind in the order in which it is looked for; what one kind has taken, the next does not see."""
