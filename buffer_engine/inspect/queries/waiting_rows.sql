-- Kept rows that no batch has trained, by group, and what they wait for.
SELECT
  run_id,
  group_id,
  model_version,
  kept - trained AS rows,
  CASE
    WHEN held > 0 THEN format('{} held siblings', held)
    WHEN new > 0 THEN format('{} siblings not curated', new)
    WHEN samples < group_size THEN format('{} missing siblings', group_size - samples)
    WHEN status = 'reserved' THEN 'its batch'
    ELSE 'a batch'
  END AS waits_for
FROM groups
WHERE partition = 'train' AND kept > trained
  -- Without a trainer kept rows are the result and wait for nothing.
  AND run_id IN (SELECT run_id FROM raw.models UNION SELECT run_id FROM raw.batch_state)
ORDER BY run_id, model_version, group_id
