-- Reward, held-out solve rate, reply length and loss by step.
SELECT
  run_id,
  step,
  max(value) FILTER (WHERE name = 'explore/reward_mean') AS reward_mean,
  max(value) FILTER (WHERE name = 'explore/reward_std') AS reward_std,
  avg(value) FILTER (WHERE name LIKE 'eval/%/solve_rate') AS heldout_solve_rate,
  max(value) FILTER (WHERE name = 'explore/response_tokens') AS response_tokens,
  max(value) FILTER (WHERE name = 'explore/ended') AS ended,
  max(value) FILTER (WHERE name = 'train/loss') AS loss,
  max(value) FILTER (WHERE name = 'train/grad_norm') AS grad_norm
FROM metrics
GROUP BY run_id, step
ORDER BY run_id, step
