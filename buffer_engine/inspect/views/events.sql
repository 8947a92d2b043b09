-- Counted oddities, exactly as stored.
SELECT * FROM raw.events
