-- What each operator did, over all curation passes of a run, in pipeline order; position -1 is the intake.
--   passes: curation passes summed up
--   type: operator type
SELECT
  run_id,
  position,
  operator,
  any_value(type) AS type,
  count(*) AS passes,
  sum(rows_in)::BIGINT AS rows_in,
  sum(kept)::BIGINT AS kept,
  sum(rejected)::BIGINT AS rejected,
  sum(held)::BIGINT AS held,
  sum(masked)::BIGINT AS masked,
  sum(added)::BIGINT AS added,
  sum(scored)::BIGINT AS scored,
  sum(nulls)::BIGINT AS nulls,
  sum(errors)::BIGINT AS errors,
  sum(cpu_seconds) AS cpu_seconds,
  sum(wall_seconds) AS wall_seconds
FROM raw.operator_runs
GROUP BY run_id, position, operator
ORDER BY run_id, position, operator
