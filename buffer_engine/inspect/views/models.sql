-- Weight versions, exactly as stored.
SELECT * FROM raw.models
