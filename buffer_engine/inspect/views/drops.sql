-- Every rejection with its reason and the prompt that was lost.
--   status: where the rollout stands now; a later release may have brought it back
--   prompt: text of the last user message
SELECT
  decisions.run_id,
  decisions.pass_id,
  decisions.position,
  decisions.operator,
  decisions.reason,
  decisions.detail,
  decisions.ref_id,
  decisions.experience_id,
  experiences.group_id,
  experiences.partition,
  experiences.model_version,
  experiences.status,
  experiences.prompt,
  decisions.decided_at
FROM raw.decisions AS decisions
LEFT JOIN experiences USING (experience_id)
WHERE decisions.verdict = 'reject'
