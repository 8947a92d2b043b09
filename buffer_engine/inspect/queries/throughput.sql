-- Rows and tokens explored and trained, and tokens per second of both, by step.
WITH rates AS (
  SELECT
    run_id,
    step,
    max(value) FILTER (WHERE name = 'explore/tokens_per_second') AS explore_tokens_per_second,
    max(value) FILTER (WHERE name = 'train/tokens_per_second') AS train_tokens_per_second
  FROM metrics
  GROUP BY run_id, step
),
sampled AS (
  SELECT run_id, explore_step AS step, count(*) AS rollouts, sum(token_count)::BIGINT AS sampled_tokens
  FROM experiences
  WHERE partition = 'train'
  GROUP BY ALL
),
trained AS (
  SELECT run_id, step, sum(rows)::BIGINT AS trained_rows, sum(trained_tokens)::BIGINT AS trained_tokens
  FROM batches
  WHERE status = 'committed'
  GROUP BY ALL
)
SELECT
  run_id,
  step,
  rollouts,
  sampled_tokens,
  explore_tokens_per_second,
  trained_rows,
  trained_tokens,
  train_tokens_per_second
FROM rates
FULL JOIN sampled USING (run_id, step)
FULL JOIN trained USING (run_id, step)
ORDER BY run_id, step
