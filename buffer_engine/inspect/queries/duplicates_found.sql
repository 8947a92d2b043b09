-- Rows rejected or held because they repeat something, beside what they repeat.
SELECT
  decisions.run_id,
  decisions.operator,
  decisions.reason,
  decisions.experience_id,
  decisions.ref_id,
  mine.prompt,
  mine.response,
  theirs.response AS ref_response
FROM decisions
JOIN experiences AS mine USING (experience_id)
LEFT JOIN experiences AS theirs ON theirs.experience_id = decisions.ref_id
WHERE decisions.ref_id IS NOT NULL AND decisions.verdict IN ('reject', 'hold')
ORDER BY decisions.run_id, decisions.operator, decisions.experience_id
