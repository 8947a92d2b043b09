-- See view `rewards`; worked out once per version.
WITH counting AS (
  SELECT rollouts.run_id, rollouts.error, experience_id, name, value, weight
  FROM scores
  JOIN raw.rollouts AS rollouts USING (experience_id)
  WHERE is_current AND weight <> 0
),
-- A penalty never rises above 0: it cannot be what is solved, however heavy it is.
ranked AS (
  SELECT
    run_id,
    name,
    max(value) AS best,
    max(weight) = max(max(weight)) OVER (PARTITION BY run_id) AS is_heaviest
  FROM counting
  GROUP BY run_id, name
),
goals AS (
  SELECT run_id, name, true AS is_goal FROM ranked WHERE is_heaviest AND best > 0
)
SELECT
  experience_id,
  any_value(counting.run_id) AS run_id,
  CASE WHEN any_value(error) IS NULL AND count(value) = count(*) THEN fsum(weight * value) END AS reward,
  CASE
    WHEN any_value(error) IS NULL AND count(value) = count(*)
    THEN coalesce(bool_and(value >= 1) FILTER (WHERE is_goal), false)
  END AS solved,
  count(*) AS components,
  count(*) - count(value) AS missing
FROM counting
LEFT JOIN goals USING (run_id, name)
GROUP BY experience_id
