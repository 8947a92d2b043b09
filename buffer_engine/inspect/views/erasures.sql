-- Rollouts whose payload a retention rule took away, exactly as stored.
SELECT * FROM raw.erasures
