-- Rows whose components (weighted or not) lie at least 0.5 apart: one says good, another bad.
SELECT
  experiences.run_id,
  experience_id,
  max(value) - min(value) AS spread,
  arg_max(name, {'value': value, 'name': name}) AS highest,
  max(value) AS highest_value,
  arg_min(name, {'value': value, 'name': name}) AS lowest,
  min(value) AS lowest_value,
  any_value(prompt) AS prompt,
  any_value(response) AS response
FROM scores
JOIN experiences USING (experience_id)
WHERE is_current AND value IS NOT NULL
GROUP BY experiences.run_id, experience_id
HAVING spread >= 0.5
ORDER BY spread DESC, experience_id
