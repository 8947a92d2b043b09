"""strip_markup: the text of HTML and Markdown."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import ClassVar, Literal

import polars as pl
from pydantic import Field

from operators.base import Cost
from operators.mending import MendConfig, Mender

_FENCE = re.compile(r"(?ms)^[ ]{0,3}(`{3,}|~{3,})[^\n]*\n(.*?)(?:^[ ]{0,3}\1[`~]*[ \t]*$|\Z)")
_SPAN = re.compile(r"(?<!`)(?:``((?:[^`\n]|`(?!`))+)``|`([^`\n]+)`)(?!`)")
_MARKDOWN = (
    (re.compile(r"(?m)^[ ]{0,3}#{1,6}[ \t]+"), ""),
    (re.compile(r"(?m)^[ ]{0,3}(?:\*[ \t]*){3,}$|^[ ]{0,3}(?:-[ \t]*){3,}$|^[ ]{0,3}(?:_[ \t]*){3,}$"), ""),
    (re.compile(r"(?m)^[ ]{0,3}(?:>[ ]?)+"), ""),
    (re.compile(r"(?m)^([ \t]*)[*+-][ \t]+"), r"\1"),
    (re.compile(r"!\[([^\[\]\n]*)\]\([^()\n]*\)"), r"\1"),
    (re.compile(r"\[([^\[\]\n]+)\]\([^()\n]*\)"), r"\1"),
    (re.compile(r"(?<![\w*])(\*{1,3})(?=\S)([^*\n]+?)(?<=\S)\1(?![\w*])"), r"\2"),
    (re.compile(r"(?<![\w_])(_{1,3})(?=\S)([^_\n]+?)(?<=\S)\1(?![\w_])"), r"\2"),
    (re.compile(r"~~(?=\S)([^~\n]+?)(?<=\S)~~"), r"\1"),
)
_BLOCKS = re.compile(
    "address|article|aside|blockquote|br|d[dlt]|div|figure|footer|form|h[1-6]|header|hr|li|main|nav|[ou]l|p|pre|section|"
    "table|t[dhr]"
)
_UNSEEN = frozenset(("script", "style", "template", "noscript"))
# A tag has a name right after its bracket: `a < b > c` is no HTML.
_TAG = re.compile(r"</?[A-Za-z][^<>]*>|<!--|<!DOCTYPE|&(?:[A-Za-z]+|#\d+|#x[0-9A-Fa-f]+);", re.IGNORECASE)


class StripMarkupConfig(MendConfig):
    """Which markup goes."""

    forms: tuple[Literal["html", "markdown"], ...] = Field(
        ("html", "markdown"), min_length=1, description="html: tags, comments and entities; markdown: its marks"
    )
    keep_code: bool = Field(
        True, description="leave fenced blocks and code between backticks as they are; else only their fences go"
    )


class StripMarkup(Mender[StripMarkupConfig]):
    """Turns HTML and Markdown into plain text, for the operators after it.

    html: tags and comments go, a block element begins a new line, entities become characters, and nothing of script and
    style stays. A bracket without a tag name behind it is text, so formulas keep theirs. markdown: marks of headings,
    emphasis, strike-through, bullets, quotes and rulers go, links and images leave their text; numbers of lists, tables
    and line breaks stay. Code is left alone unless `keep_code` is false. More than two line ends become two. Text
    without markup is returned as it was, blanks included. Null stays null.
    """

    Config = StripMarkupConfig
    cost: ClassVar[Cost] = "python"

    def mend(self, texts: pl.Series) -> pl.Series:
        """Strip the texts that hold any mark; others are not looked at."""
        suspects = texts.str.contains(r"[<&*_#>`~\[+-]").fill_null(False)
        changed = [self._stripped(text) for text in texts.filter(suspects)]
        return texts.scatter(suspects.arg_true(), changed) if changed else texts.cast(pl.String)

    def _stripped(self, text: str) -> str:
        # Code is cut out first, so that nothing inside it is taken for markup.
        parts: list[str] = []
        place = 0
        for match in _FENCE.finditer(text):
            parts += [self._prose(text[place : match.start()]), match.group() if self.config.keep_code else match[2]]
            place = match.end()
        return "".join((*parts, self._prose(text[place:])))

    def _prose(self, text: str) -> str:
        parts: list[str] = []
        place = 0
        kept: list[str] = []
        for match in _SPAN.finditer(text):
            parts += [text[place : match.start()], f"\0{len(kept)}\0"]
            kept.append(match.group() if self.config.keep_code else match[1] or match[2])
            place = match.end()
        if "\0" in text:  # the stand-in for code is in the text itself: leave spans of code to the rules
            plain, kept = text, []
        else:
            plain = "".join((*parts, text[place:]))
        for form in self.config.forms:
            plain = _without_html(plain) if form == "html" else _without_markdown(plain)
        for index, code in enumerate(kept):
            plain = plain.replace(f"\0{index}\0", code)
        return plain


def _without_markdown(text: str) -> str:
    stripped = text
    for pattern, replacement in _MARKDOWN:
        stripped = pattern.sub(replacement, stripped)
    return stripped if stripped == text else re.sub(r"\n{3,}", "\n\n", stripped)


def _without_html(text: str) -> str:
    if not _TAG.search(text):
        return text
    # The parser reads `<` before a letter as a tag that never ends; what is no whole tag is made text first.
    safe = re.sub(r"<(?!/?[A-Za-z][^<>]*>|!--|!DOCTYPE)", "&lt;", text, flags=re.IGNORECASE)
    reader = _Reader()
    reader.feed(safe)
    reader.close()
    lines = "\n".join(line.strip(" \t") for line in "".join(reader.parts).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")


class _Reader(HTMLParser):
    """Collects the text of HTML."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._unseen = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _UNSEEN:
            self._unseen += 1
        elif _BLOCKS.fullmatch(tag):
            self._break()

    def handle_endtag(self, tag: str) -> None:
        if tag in _UNSEEN:
            self._unseen = max(0, self._unseen - 1)
        elif _BLOCKS.fullmatch(tag):
            self._break()

    def handle_data(self, data: str) -> None:
        if not self._unseen:
            self.parts.append(data)

    def _break(self) -> None:
        if self.parts and not self.parts[-1].endswith("\n"):
            self.parts.append("\n")
