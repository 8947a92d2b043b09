-- Mean reward by reply length, in doubling ranges of tokens.
WITH sized AS (
  SELECT run_id, token_count, truncated, reward, solved FROM experiences WHERE error IS NULL
)
SELECT
  run_id,
  CASE WHEN token_count < 1 THEN 0 ELSE (2 ** floor(log2(token_count)))::BIGINT END AS tokens_from,
  CASE WHEN token_count < 1 THEN 0 ELSE (2 ** (floor(log2(token_count)) + 1))::BIGINT - 1 END AS tokens_to,
  count(*) AS rows,
  avg(reward) AS reward_mean,
  avg(solved::INT) AS solve_rate,
  avg(truncated::INT) AS truncated_share
FROM sized
GROUP BY run_id, tokens_from, tokens_to
ORDER BY run_id, tokens_from
