-- One line per run: how far it came.
--   model_version: newest weights that exist; null without a trainer
--   steps: committed optimizer steps
--   explored_rounds: loop steps whose exploration made train rows
--   curation_passes: passes of the operators
--   has_trainer: whether weights or batches were ever recorded
--   solve_rate_first, solve_rate_last: earliest and newest metric eval/.../solve_rate; null before an evaluation
--   started_at, last_written_at: first and last moment a rollout, batch or metric was written
--   rollouts: rows of all partitions
--   eval_rollouts: rows of partition eval
--   errors: failed rows
--   kept, rejected, held: rows by status
--   trained: rows that a committed batch used
--   run_id: run
WITH moments AS (
  SELECT run_id, created_at AS moment FROM raw.rollouts
  UNION ALL SELECT run_id, created_at FROM raw.models
  UNION ALL SELECT run_id, created_at FROM raw.batches
  UNION ALL SELECT run_id, recorded_at FROM raw.metrics
),
spans AS (
  SELECT run_id, min(moment) AS started_at, max(moment) AS last_written_at FROM moments GROUP BY run_id
),
counts AS (
  SELECT
    rollouts.run_id,
    count(*) AS rollouts,
    count(rollouts.error) AS errors,
    count(*) FILTER (WHERE rollouts.partition = 'eval') AS eval_rollouts,
    count(*) FILTER (WHERE status = 'kept') AS kept,
    count(*) FILTER (WHERE status = 'rejected') AS rejected,
    count(*) FILTER (WHERE status = 'held') AS held,
    count(*) FILTER (WHERE uses > 0) AS trained
  FROM raw.rollouts AS rollouts
  LEFT JOIN raw.rollout_state AS state USING (experience_id)
  GROUP BY rollouts.run_id
),
explored AS (
  SELECT run_id, count(DISTINCT explore_step) AS explored_rounds
  FROM raw.rollouts
  WHERE partition = 'train'
  GROUP BY run_id
),
curated AS (
  SELECT run_id, count(DISTINCT pass_id) AS curation_passes FROM raw.operator_runs GROUP BY run_id
),
training_runs AS (
  SELECT run_id FROM raw.models UNION SELECT run_id FROM raw.batch_state
),
weights AS (
  SELECT run_id, max(version) AS model_version FROM raw.models GROUP BY run_id
),
committed AS (
  SELECT run_id, count(*) AS steps FROM raw.batch_state WHERE status = 'committed' GROUP BY run_id
),
solving AS (
  SELECT run_id, arg_min(value, step) AS solve_rate_first, arg_max(value, step) AS solve_rate_last
  FROM metrics
  WHERE name LIKE 'eval/%/solve_rate'
  GROUP BY run_id
)
SELECT
  spans.run_id,
  weights.model_version,
  coalesce(committed.steps, 0) AS steps,
  coalesce(explored.explored_rounds, 0) AS explored_rounds,
  coalesce(curated.curation_passes, 0) AS curation_passes,
  spans.run_id IN (FROM training_runs) AS has_trainer,
  coalesce(counts.rollouts, 0) AS rollouts,
  coalesce(counts.eval_rollouts, 0) AS eval_rollouts,
  coalesce(counts.errors, 0) AS errors,
  coalesce(counts.kept, 0) AS kept,
  coalesce(counts.rejected, 0) AS rejected,
  coalesce(counts.held, 0) AS held,
  coalesce(counts.trained, 0) AS trained,
  solving.solve_rate_first,
  solving.solve_rate_last,
  spans.started_at,
  spans.last_written_at
FROM spans
LEFT JOIN counts USING (run_id)
LEFT JOIN explored USING (run_id)
LEFT JOIN curated USING (run_id)
LEFT JOIN weights USING (run_id)
LEFT JOIN committed USING (run_id)
LEFT JOIN solving USING (run_id)
ORDER BY spans.started_at, spans.run_id
