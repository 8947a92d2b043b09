-- Siblings that played one task together, over all fates.
--   model_version: oldest weights among the siblings
--   size: rows present
--   samples: distinct siblings present
--   errors: failed rows; they have no reward
--   reward_mean, reward_std, reward_min, reward_max: over rows with a reward; the deviation is that of the population
--   solved_share: share of the rows with a reward that are solved
--   status: incomplete (siblings missing or without a final verdict) | rejected (nothing kept) | trained (every kept row
--     was) | reserved | ready | kept (partitions that do not train, and runs without a trainer)
--   kept, rejected, held, new: rows by status
--   trained: rows that a committed batch used
SELECT
  rollouts.run_id,
  rollouts.partition,
  rollouts.group_id,
  any_value(rollouts.task_id) AS task_id,
  min(rollouts.explore_step) AS explore_step,
  min(rollouts.model_version) AS model_version,
  max(rollouts.group_size) AS group_size,
  count(*) AS size,
  count(DISTINCT rollouts.sample_index) AS samples,
  count(*) FILTER (WHERE state.status = 'kept') AS kept,
  count(*) FILTER (WHERE state.status = 'rejected') AS rejected,
  count(*) FILTER (WHERE state.status = 'held') AS held,
  count(*) FILTER (WHERE state.status = 'new') AS new,
  count(rollouts.error) AS errors,
  count(*) FILTER (WHERE state.uses > 0) AS trained,
  avg(reward) AS reward_mean,
  stddev_pop(reward) AS reward_std,
  min(reward) AS reward_min,
  max(reward) AS reward_max,
  avg(solved::INT) AS solved_share,
  CASE
    WHEN count(*) FILTER (WHERE state.status IN ('new', 'held')) > 0
      OR count(DISTINCT rollouts.sample_index) < max(rollouts.group_size) THEN 'incomplete'
    WHEN count(*) FILTER (WHERE state.status = 'kept') = 0 THEN 'rejected'
    WHEN rollouts.partition <> 'train'
      OR rollouts.run_id NOT IN (SELECT run_id FROM raw.models UNION SELECT run_id FROM raw.batch_state) THEN 'kept'
    WHEN count(*) FILTER (WHERE state.status = 'kept' AND state.uses = 0) = 0 THEN 'trained'
    WHEN count(*) FILTER (WHERE state.reserved_by IS NOT NULL) > 0 THEN 'reserved'
    ELSE 'ready'
  END AS status
FROM raw.rollouts AS rollouts
LEFT JOIN raw.rollout_state AS state USING (experience_id)
LEFT JOIN rewards USING (experience_id)
GROUP BY rollouts.run_id, rollouts.partition, rollouts.group_id
