-- What failed: rollouts by kind of error, and operators by the rows they failed on.
SELECT
  run_id,
  'rollout' AS source,
  split_part(error, ':', 1) AS kind,
  count(*) AS count,
  min(experience_id) AS example,
  arg_min(error, experience_id) AS message
FROM experiences
WHERE error IS NOT NULL
GROUP BY ALL
UNION ALL
SELECT run_id, 'operator', operator, errors, NULL, NULL
FROM funnel
WHERE errors > 0
ORDER BY run_id, source DESC, count DESC, kind
