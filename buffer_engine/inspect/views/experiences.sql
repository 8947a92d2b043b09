-- One line per rollout with its task, current reward and fate: the view to start with.
--   prompt: text of the last user message; empty when there is none
--   response: text of the last assistant message; empty when there is none
--   token_count: sampled tokens: those that may train
--   total_tokens: prompt and sampled tokens
--   status: new | kept | rejected | held
--   fate: failed | rejected | held | new | trained | reserved | waiting (kept, free to train) | kept (other partitions,
--     and runs without a trainer)
--   rejected_by: operator of the newest rejection; null unless rejected
--   reason, detail: why it was rejected; null unless rejected
--   uses: committed batches that trained the row
--   trained_step: last committed optimizer step; null when never trained
--   staleness: versions between sampling and the last committed batch; null when never trained
--   solved: whether the heaviest component reached 1; see `rewards`
--   task_info_json: JSON object of the task: gold answer, metadata
--   info_json: JSON object of the row: what workflow or import added
--   reward: current reward; see `rewards` for when it is null
SELECT
  facts.experience_id,
  facts.run_id,
  facts.partition,
  facts.task_id,
  facts.taskset,
  facts.group_id,
  facts.group_size,
  facts.attempt,
  facts.sample_index,
  facts.turn_index,
  facts.explore_step,
  facts.model_version,
  facts.made_by,
  facts.parent_id,
  coalesce(list_filter(payload.messages, lambda message: message.role = 'user')[-1].content, '') AS prompt,
  coalesce(list_filter(payload.messages, lambda message: message.role = 'assistant')[-1].content, '') AS response,
  facts.token_count,
  facts.total_tokens,
  facts.prompt_length,
  facts.stop_reason,
  facts.eos_sampled,
  facts.truncated,
  facts.error,
  facts.reward,
  facts.solved,
  facts.status,
  facts.fate,
  facts.rejected_by,
  facts.reason,
  facts.detail,
  facts.uses,
  facts.reserved_by,
  facts.trained_step,
  facts.staleness,
  facts.sequence,
  task_payload.info_json AS task_info_json,
  payload.info_json,
  facts.created_at
FROM derived.experiences AS facts
LEFT JOIN payload.rollouts AS payload USING (experience_id)
LEFT JOIN (
  SELECT task_id, any_value(info_json) AS info_json FROM payload.tasks GROUP BY task_id
) AS task_payload USING (task_id)
