-- Current reward of every rollout that has a score.
--   reward: sum of weight x value over the newest version of each component with a weight other than 0; null when a value
--     is missing, no component counts, or the rollout has an error
--   solved: the component with the greatest weight reached 1 (with several: all of them); null where the reward is
--   components: how many components count
--   missing: how many of them have no value
SELECT * FROM derived.rewards
