-- One line per token of every rollout.
--   position: 0-based place in the sequence
--   sampled: the policy sampled it and it may train
--   logprob: behaviour log-probability in nats; null where nothing was sampled
--   advantage: the row's advantage in its newest batch; null on tokens that do not train and for per-token advantages
--   token_text: text of the token; null unless a vocabulary was given
--   token_id: id exactly as sampled or rendered
WITH newest AS (
  SELECT rows.experience_id, arg_max({'value': rows.advantage}, batches.step) AS advantage
  FROM raw.batch_rows AS rows
  JOIN raw.batches AS batches USING (batch_id)
  GROUP BY rows.experience_id
),
unfolded AS (
  SELECT
    experience_id, run_id, group_id, partition, model_version,
    generate_subscripts(token_ids, 1) - 1 AS position,
    unnest(token_ids) AS token_id,
    unnest(loss_mask) AS sampled,
    unnest(logprobs) AS logprob
  FROM raw.rollouts
)
SELECT
  unfolded.*,
  CASE WHEN sampled THEN newest.advantage.value END AS advantage,
  vocabulary.text AS token_text
FROM unfolded
LEFT JOIN newest USING (experience_id)
LEFT JOIN raw.vocabulary AS vocabulary USING (token_id)
