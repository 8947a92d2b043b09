-- Every version of every reward component, exactly as stored, and which version counts now.
--   is_current: true for the highest version of the component
-- Few components are ever scored again: looking those up costs less than comparing all.
WITH superseding AS (
  SELECT experience_id, name, max(version) AS version FROM raw.scores WHERE version > 1 GROUP BY experience_id, name
)
SELECT
  scores.*,
  scores.version = coalesce(superseding.version, 1) AS is_current
FROM raw.scores AS scores
LEFT JOIN superseding ON superseding.experience_id = scores.experience_id AND superseding.name = scores.name
