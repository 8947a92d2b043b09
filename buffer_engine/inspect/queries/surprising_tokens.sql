-- The 100 sampled tokens that the policy found least likely, with what the newest recorded step thought of them (trainer.token_stats); token_text needs --tokenizer with a folder or a packaged model (smollm2-135m).
SELECT
  run_id, experience_id, position, token_id, token_text, logprob, exp(logprob) AS probability, advantage, model_version,
  stats_step, old_logprob, ratio, entropy
FROM tokens
WHERE sampled AND logprob IS NOT NULL
ORDER BY logprob, experience_id, position
LIMIT 100
