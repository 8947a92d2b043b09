-- How far trainer and sampler are apart at each recorded step: ratios, share of tokens whose ratio leaves 0.8 … 1.2, entropy (needs trainer.token_stats).
SELECT
  run_id,
  step,
  count(*) AS rows,
  sum(tokens) AS tokens,
  sum(ratio_sum) / nullif(sum(ratios_known), 0) AS ratio_mean,
  max(ratio_max) AS ratio_max,
  min(ratio_min) AS ratio_min,
  sum(outside) / nullif(sum(ratios_known), 0) AS outside_share,
  sum(entropy_sum) / nullif(sum(entropies_known), 0) AS entropy_mean
FROM (
  SELECT
    run_id,
    step,
    len(list_filter(trained, lambda one: one)) AS tokens,
    list_sum(ratios) AS ratio_sum,
    list_count(ratios) AS ratios_known,
    list_max(ratios) AS ratio_max,
    list_min(ratios) AS ratio_min,
    len(list_filter(ratios, lambda one: one < 0.8 OR one > 1.2)) AS outside,
    list_sum(entropies) AS entropy_sum,
    list_count(entropies) AS entropies_known
  FROM token_stats
)
GROUP BY run_id, step
ORDER BY run_id, step
