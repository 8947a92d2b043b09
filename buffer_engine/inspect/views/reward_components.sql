-- Newest value of every component, gathered per rollout.
--   components: list of {name, value, weight, version, source, author}, by name
--   by_name: map from name to value
WITH newest AS (
  SELECT experience_id, name, value, weight, version, source, author FROM scores WHERE is_current
)
SELECT
  experience_id,
  list({
    'name': name, 'value': value, 'weight': weight, 'version': version, 'source': source, 'author': author
  } ORDER BY name) AS components,
  map_from_entries(list({'k': name, 'v': value} ORDER BY name)) AS by_name
FROM newest
GROUP BY experience_id
