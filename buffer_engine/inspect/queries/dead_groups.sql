-- Groups without a learning signal: rejected by a group filter for want of spread in the column that it judges (rejected_by, reason, spread), or with equal total rewards (reward_equal); either can be without the other.
WITH flat AS (
  SELECT DISTINCT
    run_id,
    group_id,
    operator,
    reason,
    -- Group filters write the deviation that they saw into the detail; a lone member has none.
    try_cast(regexp_extract(detail, '^std ([^ ]+) of ', 1) AS DOUBLE) AS spread
  FROM drops
  WHERE reason IN ('all_equal', 'low_std', 'singleton')
)
SELECT
  groups.run_id,
  groups.group_id,
  groups.model_version,
  groups.size,
  flat.operator AS rejected_by,
  flat.reason,
  flat.spread,
  coalesce(groups.size > 1 AND groups.reward_min = groups.reward_max, false) AS reward_equal,
  groups.reward_mean,
  CASE
    WHEN groups.solved_share = 1 THEN 'all solved'
    WHEN groups.solved_share = 0 THEN 'none solved'
    WHEN groups.solved_share IS NOT NULL THEN 'some solved'
  END AS kind,
  groups.status,
  groups.task_id
FROM groups
LEFT JOIN flat USING (run_id, group_id)
WHERE groups.partition = 'train' AND (flat.operator IS NOT NULL OR reward_equal)
ORDER BY groups.run_id, groups.model_version, groups.group_id, flat.operator
