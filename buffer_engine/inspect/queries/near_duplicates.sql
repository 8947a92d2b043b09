-- The 100 pairs of siblings whose replies are most alike: at least 0.8 of their three-word sequences in common (Jaccard).
WITH replies AS (
  SELECT
    run_id, group_id, experience_id, response, fate,
    string_split_regex(lower(trim(response)), '\s+') AS words
  FROM experiences
  WHERE error IS NULL AND trim(response) <> ''
),
-- A reply of one or two words is one sequence.
cut AS (
  SELECT
    * EXCLUDE (words),
    list_distinct(list_transform(
      range(1, greatest(len(words) - 1, 2)), lambda place: array_to_string(words[place:place + 2], ' ')
    )) AS pieces
  FROM replies
),
pairs AS (
  SELECT
    one.run_id,
    one.group_id,
    one.experience_id,
    other.experience_id AS sibling_id,
    len(list_intersect(one.pieces, other.pieces)) AS shared,
    shared / (len(one.pieces) + len(other.pieces) - shared) AS similarity,
    one.fate,
    other.fate AS sibling_fate,
    one.response,
    other.response AS sibling_response
  FROM cut AS one
  JOIN cut AS other
    ON other.run_id = one.run_id AND other.group_id = one.group_id AND other.experience_id > one.experience_id
)
SELECT * EXCLUDE (shared)
FROM pairs
WHERE similarity >= 0.8
ORDER BY similarity DESC, run_id, group_id, experience_id, sibling_id
LIMIT 100
