-- Books that must balance at every moment, also while a run is writing: no row is lost, doubled or invented.
--   check_name: which equation
--   scope: partition or operator that it is about
--   expected, found: the two sides
--   balanced: whether they are equal
--   detail: the terms
WITH arrived AS (
  SELECT run_id, partition, count(*) AS rows FROM raw.rollouts GROUP BY ALL
),
committed_rows AS (
  SELECT rows.experience_id, count(*) AS uses
  FROM raw.batch_rows AS rows
  JOIN raw.batch_state AS state USING (batch_id)
  WHERE state.status = 'committed'
  GROUP BY rows.experience_id
),
standing AS (
  SELECT
    rollouts.run_id,
    rollouts.partition,
    count(*) FILTER (WHERE status = 'new') AS new,
    count(*) FILTER (WHERE status = 'kept') AS kept,
    count(*) FILTER (WHERE status = 'rejected') AS rejected,
    count(*) FILTER (WHERE status = 'held') AS held,
    count(*) FILTER (WHERE status = 'kept' AND committed_rows.uses > 0) AS trained,
    count(*) FILTER (WHERE status = 'kept' AND state.uses = 0 AND reserved_by IS NOT NULL) AS reserved,
    count(*) FILTER (WHERE status = 'kept' AND state.uses = 0 AND reserved_by IS NULL) AS waiting,
    coalesce(sum(state.uses), 0)::BIGINT AS uses,
    coalesce(sum(committed_rows.uses), 0)::BIGINT AS committed
  FROM raw.rollout_state AS state
  JOIN raw.rollouts AS rollouts USING (experience_id)
  LEFT JOIN committed_rows USING (experience_id)
  GROUP BY ALL
),
training_runs AS (
  SELECT run_id FROM raw.models UNION SELECT run_id FROM raw.batch_state
),
judged AS (
  SELECT run_id, pass_id, operator, count(*) AS verdicts
  FROM raw.decisions
  WHERE verdict IN ('reject', 'hold')
  GROUP BY ALL
),
passes AS (
  SELECT
    runs.run_id,
    runs.position,
    runs.operator,
    sum(rows_in)::BIGINT AS rows_in,
    sum(kept)::BIGINT AS kept,
    sum(rejected)::BIGINT AS rejected,
    sum(held)::BIGINT AS held,
    coalesce(sum(judged.verdicts), 0)::BIGINT AS verdicts,
    count(*) FILTER (WHERE rows_in <> kept + rejected + held) AS leaking,
    count(*) FILTER (WHERE rejected + held <> coalesce(judged.verdicts, 0)) AS unexplained
  FROM raw.operator_runs AS runs
  LEFT JOIN judged USING (run_id, pass_id, operator)
  GROUP BY ALL
)
SELECT
  run_id, 'rollouts = new + kept + rejected + held' AS check_name, partition AS scope,
  arrived.rows AS expected,
  coalesce(new + kept + rejected + held, 0) AS found,
  expected = found AS balanced,
  format('new {} + kept {} + rejected {} + held {}', new, kept, rejected, held) AS detail
FROM arrived
LEFT JOIN standing USING (run_id, partition)
UNION ALL
SELECT
  run_id, 'kept = trained + reserved + waiting', partition, kept, trained + reserved + waiting,
  kept = trained + reserved + waiting,
  format('trained {} + reserved {} + waiting to train {}', trained, reserved, waiting)
FROM standing
WHERE partition = 'train' AND run_id IN (FROM training_runs)
UNION ALL
SELECT
  run_id, 'kept without a trainer = not trained', partition, kept, waiting, kept = waiting,
  format('kept {}: the run has no trainer; trained {}, reserved {}', kept, trained, reserved)
FROM standing
WHERE partition = 'train' AND run_id NOT IN (FROM training_runs)
UNION ALL
SELECT
  run_id, 'held-out kept = not trained', partition, kept, waiting, kept = waiting,
  format('kept {}: held-out rows never train; trained {}, reserved {}', kept, trained, reserved)
FROM standing
WHERE partition <> 'train'
UNION ALL
SELECT
  run_id, 'uses = rows of committed batches', partition, committed, uses, committed = uses,
  format('{} rows in committed manifests, {} uses counted', committed, uses)
FROM standing
UNION ALL
SELECT
  run_id, 'rows in = kept + rejected + held', operator, rows_in, kept + rejected + held, leaking = 0,
  format('kept {} + rejected {} + held {}; passes that differ: {}', kept, rejected, held, leaking)
FROM passes
UNION ALL
SELECT
  run_id, 'rejected + held = decisions', operator, rejected + held, verdicts, unexplained = 0,
  format('rejected {} + held {}; passes that differ: {}', rejected, held, unexplained)
FROM passes
ORDER BY ALL
