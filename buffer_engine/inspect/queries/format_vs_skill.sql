-- Form and skill by weight version: share of replies that ended, were parsable, were right, and were right when parsable.
WITH form AS (
  SELECT
    experience_id,
    max(value) FILTER (WHERE name = 'ended') AS ended,
    max(value) FILTER (WHERE name = 'parsable') AS parsable
  FROM scores
  WHERE is_current AND name IN ('ended', 'parsable')
  GROUP BY experience_id
),
judged AS (
  SELECT
    experiences.run_id,
    experiences.partition,
    experiences.model_version,
    coalesce(ended, eos_sampled::INT::DOUBLE) AS ended,
    parsable,
    solved::INT AS solved
  FROM experiences
  LEFT JOIN form USING (experience_id)
  WHERE error IS NULL
)
SELECT
  run_id,
  partition,
  model_version,
  count(*) AS rows,
  avg(ended) AS ended,
  avg(parsable) AS parsable,
  avg(solved) AS solved,
  avg(solved) FILTER (WHERE parsable >= 1) AS right_when_parsable
FROM judged
GROUP BY run_id, partition, model_version
ORDER BY run_id, partition, model_version
