-- Tokens and seconds of exploration and training by step, and their quotients; the line of a run whose step is null is the whole run: all tokens over all seconds. Computed tokens are those of the rows with a gradient, prompts included; trained tokens are the sampled ones that the loss counts.
WITH measured AS (
  SELECT
    run_id,
    step,
    max(value) FILTER (WHERE name = 'explore/tokens') AS sampled,
    max(value) FILTER (WHERE name = 'explore/seconds') AS explore_seconds,
    max(value) FILTER (WHERE name = 'train/seconds') AS train_seconds,
    max(value) FILTER (WHERE name = 'train/trained_tokens') AS trained,
    -- The trainer records this count only as a rate.
    max(value) FILTER (WHERE name = 'train/tokens_per_second') * train_seconds AS computed
  FROM metrics
  WHERE name LIKE 'explore/%' OR name LIKE 'train/%'
  GROUP BY run_id, step
),
rollouts AS (
  SELECT run_id, explore_step AS step, count(*) AS rollouts
  FROM raw.rollouts
  WHERE partition = 'train' AND explore_step IS NOT NULL
  GROUP BY ALL
),
trained AS (
  SELECT run_id, step, sum(rows)::BIGINT AS trained_rows
  FROM batches
  WHERE status = 'committed'
  GROUP BY ALL
)
SELECT
  run_id,
  step,
  sum(rollouts)::BIGINT AS rollouts,
  sum(sampled)::BIGINT AS sampled_tokens,
  sum(explore_seconds) AS explore_seconds,
  -- A quotient takes only steps that know both of its parts.
  sum(sampled) FILTER (WHERE explore_seconds > 0)
    / sum(explore_seconds) FILTER (WHERE sampled IS NOT NULL) AS sampled_per_second,
  sum(trained_rows)::BIGINT AS trained_rows,
  sum(trained)::BIGINT AS trained_tokens,
  sum(computed)::BIGINT AS computed_tokens,
  sum(train_seconds) AS train_seconds,
  sum(trained) FILTER (WHERE train_seconds > 0)
    / sum(train_seconds) FILTER (WHERE trained IS NOT NULL) AS trained_per_second,
  sum(computed) FILTER (WHERE train_seconds > 0)
    / sum(train_seconds) FILTER (WHERE computed IS NOT NULL) AS computed_per_second
FROM measured
FULL JOIN rollouts USING (run_id, step)
FULL JOIN trained USING (run_id, step)
GROUP BY GROUPING SETS ((run_id, step), (run_id))
ORDER BY run_id, step NULLS LAST
