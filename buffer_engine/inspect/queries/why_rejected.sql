-- Rejections by operator and reason, with one example each.
SELECT
  run_id,
  operator,
  reason,
  count(*) AS rows,
  round(count(*) / sum(count(*)) OVER (PARTITION BY run_id), 4) AS share,
  min(experience_id) AS example,
  arg_min(detail, experience_id) AS example_detail
FROM drops
GROUP BY run_id, operator, reason
ORDER BY run_id, rows DESC, operator, reason
