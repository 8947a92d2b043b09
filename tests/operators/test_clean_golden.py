"""Operators that mend text, on texts small enough to mend by hand."""

from __future__ import annotations

import re

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_rows import apply, config, details, frame, message, reasons
from pydantic import ValidationError

from operators.clean.pii import PII, iban, luhn
from operators.frame import MESSAGES


def mended(kind: str, *texts: str | None, **fields: object) -> list[str | None]:
    rows = frame({"response": texts, "prompt": ["What is 2+2?"] * len(texts)}, {"response": pl.String})
    return apply(kind, rows, **{"columns": ["response"], **fields}).columns["response"].to_list()


def test_replace_pattern_applies_its_rules_in_order():
    rules = [{"pattern": r"(\d)", "new": "<$1>"}, {"pattern": "<1>", "new": "$1", "literal": True}]
    assert mended("replace_pattern", "a1b2", "", None, rules=rules) == ["a$1b<2>", "", None]
    assert mended("replace_pattern", "aaa", rules=[{"pattern": "a"}]) == [""]
    with pytest.raises(ValidationError, match="not a regular expression"):
        config("replace_pattern", rules=[{"pattern": "("}])


def test_a_mender_rewrites_imported_dialogues_only_and_leaves_tools_alone():
    dialogue = [message("user", "a"), message("tool", "a"), message("assistant", None), message("assistant", "a")]
    rows = frame(
        {
            "response": ["a", "a", "x", ""],
            "messages": [dialogue, dialogue, [message("assistant", "x")], []],
            "made_by": ["import", "explorer", "import", "import"],
            "mean_logprob": [None, None, None, None],
        },
        {"messages": MESSAGES, "mean_logprob": pl.Float64()},
    )
    result = apply("replace_pattern", rows, columns=["response"], rewrite=True, rules=[{"pattern": "a", "new": "b"}])
    assert result.columns["response"].to_list() == ["b", "b", "x", ""]
    assert reasons(result) == {0: "replaced"}
    assert result.added is not None
    assert result.added.to_dicts() == [{"parent": 0, "messages": [*dialogue[:3], message("assistant", "b")]}]
    with pytest.raises(ValidationError, match="columns are prompt and response, not 'note'"):
        config("replace_pattern", columns=["note"], rewrite=True, rules=[{"pattern": "a"}])


def test_trim_boilerplate_takes_echo_and_phrases_from_both_ends():
    chatty = "What is 2+2? Sure! Here is the answer: It is 4. I hope this helps! Let me know if you need more."
    refusal = "As an AI language model, I cannot do that."
    assert mended("trim_boilerplate", chatty, refusal, "4. Sure, fine", None) == ["It is 4.", "", "4. Sure, fine", None]
    sound = ["I can't see more than 4.", "I cannot be sure, but 4.", "I'm sure."]
    assert mended("trim_boilerplate", *sound) == sound
    assert mended("trim_boilerplate", "What is 2+2? 4", echo=False) == ["What is 2+2? 4"]
    assert mended("trim_boilerplate", "OK OK 4 end", prefixes=["OK"], suffixes=["end"]) == ["4"]


@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "closed"),
    [
        ("<think> a </think> 4", "a", "4", True),
        ("so: <think>a</think>4", "a", "so: 4", True),
        ("4", None, "4", True),
        ("x <think>a", "a", "x", False),
        ("a</think> b", None, "a</think> b", True),
        ("<think></think>", "", "", True),
        ("<think>a</think>b</think> c", "a</think>b", "c", True),
        ("<think>a\nb</think>\n\n4", "a\nb", "4", True),
        (None, None, None, True),
    ],
)
def test_extract_reasoning_splits_at_the_tags(text, reasoning, answer, closed):
    rows = frame({"response": [text]}, {"response": pl.String})
    result = apply("extract_reasoning", rows, unclosed="reject")
    assert result.columns["reasoning"].to_list() == [reasoning]
    assert result.columns["answer"].to_list() == [answer]
    assert reasons(result) == ({} if closed else {0: "unclosed"})


def test_extract_reasoning_knows_that_the_template_has_opened_the_tag():
    rows = frame({"response": ["a</think> b", "abc", "<think>a</think>b"]})
    result = apply("extract_reasoning", rows, opened_by_template=True, unclosed="mask", into=["thought", "said"])
    assert result.columns["thought"].to_list() == ["a", "abc", "a"]
    assert result.columns["said"].to_list() == ["b", "", "b"]
    assert result.verdicts is not None
    assert result.verdicts.select("row", "verdict").rows() == [(1, "mask")]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("# Title\n\nSome **bold**, *it*, __b__ and ~~no~~", "Title\n\nSome bold, it, b and no"),
        ("- one\n  * two\n1. three", "one\n  two\n1. three"),
        ("> quoted\n\n---\nnext", "quoted\n\n\nnext".replace("\n\n\n", "\n\n")),
        ("[link](http://x.y) ![image](z.png)", "link image"),
        ("2 * 3 * 4 = 24 and snake_case_name", "2 * 3 * 4 = 24 and snake_case_name"),
        ("`**kept**` and **gone**", "`**kept**` and gone"),
        ("```py\n# kept\nx<y\n```\n# gone", "```py\n# kept\nx<y\n```\ngone"),
        ("<p>Hello &amp; <b>you</b></p><script>bad()</script><br>there", "Hello & you\nthere"),
        ("a < b and c > d", "a < b and c > d"),
        ("x<sub>2</sub> <!-- note -->< 3", "x2 < 3"),
        ("  plain  \n\n\n\n text", "  plain  \n\n\n\n text"),
        (None, None),
    ],
)
def test_strip_markup_leaves_the_text(text, plain):
    assert mended("strip_markup", text) == [plain]


def test_strip_markup_can_take_the_fences_too():
    assert mended("strip_markup", "```py\n# no\n```\n`x`", keep_code=False) == ["# no\n\nx"]
    assert mended("strip_markup", "<b>**x**</b>", forms=["html"]) == ["**x**"]


def test_fix_mojibake_repairs_what_is_broken_and_nothing_else():
    pytest.importorskip("ftfy")
    broken = ["schÃ¶n", "â€œquotedâ€\x9d", "æ—¥æœ¬èªž", "ÐŸÑ€Ð¸Ð²ÐµÑ‚"]
    assert mended("fix_mojibake", *broken) == ["schön", "“quoted”", "日本語", "Привет"]
    sound = ["schön", "naïve Ñandú", "“quoted” &amp; ﬁ", "Привет", None]
    assert mended("fix_mojibake", *sound) == sound


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(min_codepoint=0xA1, max_codepoint=0x24F), min_size=2, max_size=20))
def test_no_mojibake_that_ftfy_repairs_escapes_the_prefilter(text):
    ftfy = pytest.importorskip("ftfy")
    broken = text.encode().decode("latin-1")
    assert mended("fix_mojibake", broken) == [ftfy.fix_encoding(broken)]


def test_luhn_and_iban_check_what_their_standards_say():
    # 4111…1, 16 digits: every second one from the left doubled gives 8 + 7·2, the other eight 8·1; 30 in all
    assert luhn("4111 1111 1111 1111")
    assert not luhn("4111 1111 1111 1112")
    assert not luhn("0000000000000000")
    assert iban("DE89 3704 0044 0532 0130 00")
    assert iban("GB82WEST12345698765432")
    assert not iban("GB82WEST12345698765433")
    assert not iban("DE89 3704 0044 0532 0130 001")


@pytest.mark.parametrize(
    ("text", "redacted", "count"),
    [
        ("mail bob.smith@example.co.uk!", "mail [EMAIL]!", 1),
        ("call +49 170 1234567, (030) 1234567 or 555-123-4567", "call [PHONE], [PHONE] or [PHONE]", 3),
        ("card 4111 1111 1111 1111, not 4111 1111 1111 1112", "card [CARD], not 4111 1111 1111 1112", 1),
        ("IBAN DE89 3704 0044 0532 0130 00.", "IBAN [IBAN].", 1),
        ("192.168.1.77 or 2001:db8::1, not 127.0.0.1 or 999.1.1.1", "[IP] or [IP], not 127.0.0.1 or 999.1.1.1", 2),
        ("api_key = 'aB3dE5fG7hJ9kL1m'", "api_key = '[PASSWORD]'", 1),
        ("password: aaaaaaaaaaaaaaaa", None, 0),
        ("a token classification_head, bearer independently, token 123456789012", None, 0),
        ("on 01-02-2024 03:04 and 02.03.2024 12", None, 0),
        ("key ghp_abcdefghijklmnopqrstuvwxyz0123456789 end", "key [TOKEN] end", 1),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx", "[PRIVATE_KEY]\nx", 1),
        ("born 1999-01-02 at 12:30:45; 12345678; 3.1415926535; v1.2.3", None, 0),
        ("", None, 0),
        (None, None, 0),
    ],
)
def test_redact_pii_puts_typed_placeholders(text, redacted, count):
    result = apply("redact_pii", frame({"response": [text]}, {"response": pl.String}), columns=["response"])
    assert result.columns["response"].to_list() == [text if redacted is None else redacted]
    assert result.scores["redact_pii"].to_list() == [count]


def test_redact_pii_counts_each_type_and_can_hash_or_reject():
    rows = frame({"response": ["a@b.de c@d.de", "a@b.de", "none"]})
    counted = apply("redact_pii", rows, id="pii", columns=["response"], types=["email", "ip"], counts=True)
    assert {name: values.to_list() for name, values in counted.scores.items()} == {
        "pii": [2.0, 1.0, 0.0], "pii_email": [2.0, 1.0, 0.0], "pii_ip": [0.0, 0.0, 0.0],
    }  # fmt: skip
    hashed = apply("redact_pii", rows, columns=["response"], mode="hash", salt="s").columns["response"]
    first, second = re.findall(r"\[EMAIL:([0-9a-f]{8})\]", hashed[0])
    assert hashed[1] == f"[EMAIL:{first}]"
    assert first != second
    dropped = apply("redact_pii", rows, columns=["response"], mode="drop")
    assert reasons(dropped) == {0: "pii", 1: "pii"}
    assert details(dropped) == {0: "2 email", 1: "1 email"}
    with pytest.raises(ValidationError, match="needs a salt"):
        config("redact_pii", mode="hash")


PIECES = st.sampled_from(
    ["4111", "1111", " ", "-", ".", ":", "(0", ")", "+49", "@", "a", "b.de", "DE89", "370400440532", "013000", "::",
     "1", "/home/", "api_key", "=", "ghp_", "é", "٣", "\n", "'", "C:\\Users\\"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=14).map("".join))
def test_every_find_is_in_a_text_that_the_hint_lets_through(text):
    for kind, rule in PII.items():
        if any(rule.holds(found[0]) for found in rule.pattern.finditer(text)):
            assert pl.select(pl.lit(text).str.contains(rule.hint)).item(), kind


def test_a_metric_beside_may_not_take_a_name_that_is_taken():
    from buffer_engine.errors import ConfigError
    from operators.plan import compile_operators

    redact = config("redact_pii", id="pii", types=["email"], counts=True)
    other = config("length_filter", id="pii_email", max=3)
    with pytest.raises(ConfigError, match="scores 'pii_email', a name that is taken"):
        compile_operators([redact, other], available={})
    with pytest.raises(ConfigError, match="scores 'pii_email', a name that is taken"):
        compile_operators([redact], available={"pii_email": pl.String()})


def test_a_score_beside_an_operators_own_is_a_metric_without_weight():
    from operators.engine import run_operators
    from operators.plan import compile_operators

    plan = compile_operators(
        [config("redact_pii", id="pii", columns=["response"], types=["email"], counts=True, weight=-1.0)], available={}
    )
    rows = frame({"response": ["a@b.de"], "error": [None]}, {"error": pl.String})
    result = run_operators(plan, rows, seed=1, step=1, model_version=1, pass_id="p", run_id="r")
    found = {row["name"]: (row["value"], row["weight"]) for row in result.scores.to_pylist()}
    assert found == {"pii": (1.0, -1.0), "pii_email": (1.0, None)}
