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
  run_id,
  partition,
  group_id,
  any_value(task_id) AS task_id,
  min(explore_step) AS explore_step,
  min(model_version) AS model_version,
  max(group_size) AS group_size,
  count(*) AS size,
  count(DISTINCT sample_index) AS samples,
  count(*) FILTER (WHERE status = 'kept') AS kept,
  count(*) FILTER (WHERE status = 'rejected') AS rejected,
  count(*) FILTER (WHERE status = 'held') AS held,
  count(*) FILTER (WHERE status = 'new') AS new,
  count(error) AS errors,
  count(*) FILTER (WHERE uses > 0) AS trained,
  avg(reward) AS reward_mean,
  stddev_pop(reward) AS reward_std,
  min(reward) AS reward_min,
  max(reward) AS reward_max,
  avg(solved::INT) AS solved_share,
  CASE
    WHEN count(*) FILTER (WHERE status IN ('new', 'held')) > 0
      OR count(DISTINCT sample_index) < max(group_size) THEN 'incomplete'
    WHEN count(*) FILTER (WHERE status = 'kept') = 0 THEN 'rejected'
    WHEN partition <> 'train'
      OR run_id NOT IN (SELECT run_id FROM raw.models UNION SELECT run_id FROM raw.batch_state) THEN 'kept'
    WHEN count(*) FILTER (WHERE status = 'kept' AND uses = 0) = 0 THEN 'trained'
    WHEN count(*) FILTER (WHERE reserved_by IS NOT NULL) > 0 THEN 'reserved'
    ELSE 'ready'
  END AS status
FROM derived.experiences
GROUP BY run_id, partition, group_id
