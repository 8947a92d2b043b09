-- Token sequences exactly as stored, one row each.
SELECT * FROM raw.rollouts
