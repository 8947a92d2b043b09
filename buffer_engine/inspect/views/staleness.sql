-- How old the weights that sampled a row were when a batch used it; one line per batch row.
--   batch_model_version: weights that the optimizer step started from
--   rollout_model_version: oldest weights that sampled a token of the row; null when no model did
--   staleness: difference of the two, in versions
--   batch_status: reserved | prepared | committed | released
--   step: optimizer step of the batch
--   position: 0-based position in the batch
SELECT
  batches.run_id,
  batches.step,
  rows.batch_id,
  rows.position,
  rows.experience_id,
  rows.group_id,
  state.status AS batch_status,
  batches.model_version AS batch_model_version,
  rollouts.model_version AS rollout_model_version,
  batches.model_version - rollouts.model_version AS staleness
FROM raw.batch_rows AS rows
JOIN raw.batches AS batches USING (batch_id)
LEFT JOIN raw.batch_state AS state USING (batch_id)
LEFT JOIN raw.rollouts AS rollouts USING (experience_id)
