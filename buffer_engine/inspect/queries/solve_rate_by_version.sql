-- Share solved and mean reward by the weights that sampled the rows.
SELECT
  run_id,
  partition,
  model_version,
  count(*) AS rows,
  count(reward) AS rewarded,
  avg(solved::INT) AS solve_rate,
  avg(reward) AS reward_mean
FROM experiences
GROUP BY run_id, partition, model_version
ORDER BY run_id, partition, model_version
