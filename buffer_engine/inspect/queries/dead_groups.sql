-- Groups whose rewards are all equal: they carry no gradient.
SELECT
  run_id,
  group_id,
  model_version,
  size,
  reward_mean,
  CASE WHEN solved_share = 1 THEN 'all solved' WHEN solved_share = 0 THEN 'none solved' ELSE 'all equal' END AS kind,
  status,
  task_id
FROM groups
WHERE size > 1 AND reward_min = reward_max AND partition = 'train'
ORDER BY run_id, model_version, group_id
