-- What every training batch saw at every token, exactly as stored.
SELECT * FROM raw.token_stats
