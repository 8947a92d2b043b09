-- Every reservation and training batch with its manifest.
--   status: reserved | prepared | committed | released
--   rows: rows in the manifest; rows reserved before there is one
--   groups: distinct groups
--   staleness_max: greatest age of a row in versions
--   reward_mean: mean of the rewards that the step used
--   advantage_mean, advantage_min, advantage_max: over the rows' advantages; null for per-token ones
--   prepared_at: when the manifest was written
SELECT
  coalesce(state.run_id, manifest.run_id) AS run_id,
  coalesce(manifest.step, state.step) AS step,
  coalesce(state.batch_id, manifest.batch_id) AS batch_id,
  state.status,
  manifest.model_version,
  manifest.algorithm,
  coalesce(manifest.rows, state.rows) AS rows,
  used.groups,
  manifest.trained_tokens,
  used.reward_mean,
  used.advantage_mean,
  used.advantage_min,
  used.advantage_max,
  used.staleness_max,
  manifest.config_hash,
  manifest.code_commit,
  manifest.reader_json,
  manifest.rng_json,
  state.reserved_at,
  manifest.created_at AS prepared_at,
  state.committed_at
FROM raw.batch_state AS state
FULL JOIN raw.batches AS manifest ON manifest.batch_id = state.batch_id
LEFT JOIN (
  SELECT
    rows.batch_id,
    count(DISTINCT rows.group_id) AS groups,
    avg(rows.reward) AS reward_mean,
    avg(rows.advantage) AS advantage_mean,
    min(rows.advantage) AS advantage_min,
    max(rows.advantage) AS advantage_max,
    max(ages.staleness) AS staleness_max
  FROM raw.batch_rows AS rows
  LEFT JOIN staleness AS ages USING (batch_id, position)
  GROUP BY rows.batch_id
) AS used ON used.batch_id = manifest.batch_id
