-- Things to attempt, exactly as stored.
SELECT * FROM raw.tasks
