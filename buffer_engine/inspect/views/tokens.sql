-- One line per token of every rollout, with what the newest recorded step saw there.
--   position: 0-based place in the sequence
--   sampled: the policy sampled it and it may train
--   logprob: behaviour log-probability in nats; null where nothing was sampled
--   advantage: the advantage recorded for the token, else the row's in its newest batch; null on tokens that do not train
--   token_text: text of the token; null unless a vocabulary was given
--   token_id: id exactly as sampled or rendered
--   stats_step: newest optimizer step that recorded the row token by token; null: none did
--   trained: whether the token was part of that step's loss; null without a recorded step
--   old_logprob: log-probability (nats) under the weights before that step; null where not computed
--   ratio: probability under those weights over the behaviour policy's; null where not computed
--   entropy: entropy (nats) of the choice of this token; null where not computed
WITH newest AS (
  SELECT rows.experience_id, arg_max({'value': rows.advantage}, batches.step) AS advantage
  FROM raw.batch_rows AS rows
  JOIN raw.batches AS batches USING (batch_id)
  GROUP BY rows.experience_id
),
-- Steps count in each run, and a rollout is trained by its own: the highest is the newest.
recorded AS (
  SELECT experience_id, max(step) AS step FROM raw.token_stats GROUP BY experience_id
),
unfolded AS (
  SELECT
    rollouts.experience_id, rollouts.run_id, rollouts.group_id, rollouts.partition, rollouts.model_version,
    stats.step AS stats_step,
    generate_subscripts(rollouts.token_ids, 1) - 1 AS position,
    unnest(rollouts.token_ids) AS token_id,
    unnest(rollouts.loss_mask) AS sampled,
    unnest(rollouts.logprobs) AS logprob,
    unnest(stats.trained) AS trained,
    unnest(stats.old_logprobs) AS old_logprob,
    unnest(stats.ratios) AS ratio,
    unnest(stats.entropies) AS entropy,
    unnest(stats.advantages) AS own_advantage
  FROM raw.rollouts AS rollouts
  LEFT JOIN recorded USING (experience_id)
  LEFT JOIN raw.token_stats AS stats
    ON stats.experience_id = rollouts.experience_id AND stats.step = recorded.step
)
SELECT
  unfolded.* EXCLUDE (stats_step, trained, old_logprob, ratio, entropy, own_advantage),
  coalesce(unfolded.own_advantage, CASE WHEN sampled THEN newest.advantage.value END) AS advantage,
  vocabulary.text AS token_text,
  unfolded.stats_step,
  unfolded.trained,
  unfolded.old_logprob,
  unfolded.ratio,
  unfolded.entropy
FROM unfolded
LEFT JOIN newest USING (experience_id)
LEFT JOIN raw.vocabulary AS vocabulary USING (token_id)
