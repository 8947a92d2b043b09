-- How many rows were trained at which age, in weight versions.
SELECT
  run_id,
  staleness,
  count(*) AS rows,
  count(DISTINCT batch_id) AS batches,
  round(count(*) / sum(count(*)) OVER (PARTITION BY run_id), 4) AS share
FROM staleness
WHERE batch_status = 'committed'
GROUP BY run_id, staleness
ORDER BY run_id, staleness
