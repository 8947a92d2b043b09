-- Current value of every metric at every step; of repeated records the newest counts.
--   value: the number; null when undefined at this step
--   recorded_at: when the counting record was made
SELECT
  run_id,
  step,
  name,
  arg_max({'value': value}, {'at': recorded_at, 'place': row_order}).value AS value,
  max(recorded_at) AS recorded_at
FROM raw.metrics
GROUP BY run_id, step, name
ORDER BY run_id, name, step
