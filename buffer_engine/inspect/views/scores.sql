-- Every version of every reward component, exactly as stored, and which version counts now.
--   is_current: true for the highest version of the component
SELECT
  scores.*,
  version = max(version) OVER (PARTITION BY experience_id, name) AS is_current
FROM raw.scores AS scores
