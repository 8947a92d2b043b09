-- See view `experiences`: all of it that needs no payload, worked out once per version.
WITH rejections AS (
  SELECT experience_id, arg_max({'operator': operator, 'reason': reason, 'detail': detail}, row_order) AS last
  FROM raw.decisions
  WHERE verdict = 'reject'
  GROUP BY experience_id
),
trainings AS (
  SELECT experience_id, arg_max(staleness, step) AS staleness
  FROM staleness
  WHERE batch_status = 'committed'
  GROUP BY experience_id
),
-- A trainer records its first weights before anything is explored; without one, kept rows wait for nothing.
training_runs AS (
  SELECT run_id FROM raw.models UNION SELECT run_id FROM raw.batch_state
)
SELECT
  rollouts.experience_id,
  rollouts.run_id,
  rollouts.partition,
  rollouts.task_id,
  tasks.taskset,
  rollouts.group_id,
  rollouts.group_size,
  rollouts.attempt,
  rollouts.sample_index,
  rollouts.turn_index,
  rollouts.explore_step,
  rollouts.model_version,
  rollouts.made_by,
  rollouts.parent_id,
  rollouts.token_count,
  rollouts.total_tokens,
  rollouts.prompt_length,
  rollouts.stop_reason,
  rollouts.eos_sampled,
  rollouts.truncated,
  rollouts.error,
  rewards.reward,
  rewards.solved,
  state.status,
  CASE
    WHEN rollouts.error IS NOT NULL THEN 'failed'
    WHEN state.uses > 0 THEN 'trained'
    WHEN state.status <> 'kept' THEN state.status
    WHEN state.reserved_by IS NOT NULL THEN 'reserved'
    WHEN rollouts.partition = 'train' AND training_runs.run_id IS NOT NULL THEN 'waiting'
    ELSE state.status
  END AS fate,
  CASE WHEN state.status = 'rejected' THEN rejections.last.operator END AS rejected_by,
  CASE WHEN state.status = 'rejected' THEN rejections.last.reason END AS reason,
  CASE WHEN state.status = 'rejected' THEN rejections.last.detail END AS detail,
  state.uses,
  state.reserved_by,
  state.trained_step,
  trainings.staleness,
  state.sequence,
  rollouts.created_at
FROM derived.rollouts AS rollouts
LEFT JOIN raw.tasks AS tasks USING (task_id)
LEFT JOIN raw.rollout_state AS state USING (experience_id)
LEFT JOIN derived.rewards AS rewards USING (experience_id)
LEFT JOIN rejections USING (experience_id)
LEFT JOIN trainings USING (experience_id)
LEFT JOIN training_runs ON training_runs.run_id = rollouts.run_id
