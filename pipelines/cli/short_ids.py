"""Ids as short as a reader can type them: beginnings that no other id of the store shares."""

from __future__ import annotations

from collections.abc import Iterable

from buffer_engine.inspect import Inspection

SHORTEST = 6


def short_ids(inspection: Inspection, ids: Iterable[str | None]) -> dict[str, str]:
    """Id → beginning of at least six letters, all of one length, that `show` takes for this id alone.

    Ids that are the beginning of others stay whole: no shorter text would be unique.
    """
    wanted = sorted({each for each in ids if each is not None})
    length, longest = SHORTEST, max(map(len, wanted), default=0)
    while length < longest:
        [found] = inspection.rows(
            "WITH ids AS (SELECT experience_id AS id FROM raw.rollouts UNION SELECT group_id FROM raw.rollouts), "
            "heads AS (SELECT left(id, $length) AS head, count(*) AS ids FROM ids GROUP BY head) "
            "SELECT count(*) AS shared FROM heads "
            "WHERE heads.ids > 1 AND head IN (SELECT left(unnest($wanted), $length))",
            {"wanted": wanted, "length": length},
        )
        if found["shared"] == 0:
            break
        length += 1
    return {each: each[:length] for each in wanted}
