-- One line per message of every rollout.
--   position: 0-based place in the dialogue
--   media_count: attachments of the message
--   media: their references: sha256:ID of stored ones, else whatever was written; null when there are none
--   role, content: who said what
--   tool_calls: JSON text; null when there is none
--   tool_call_id: call that a tool's message answers; null otherwise
WITH unfolded AS (
  SELECT
    experience_id, run_id, group_id, partition, model_version,
    generate_subscripts(messages, 1) - 1 AS position,
    unnest(messages) AS message
  FROM raw.rollouts
)
SELECT
  experience_id, run_id, group_id, partition, model_version, position,
  message.role AS role,
  message.content AS content,
  message.tool_calls AS tool_calls,
  message.tool_call_id AS tool_call_id,
  len(message.media) AS media_count,
  message.media AS media
FROM unfolded
