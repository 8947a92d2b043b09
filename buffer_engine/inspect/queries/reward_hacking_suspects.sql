-- Rows where reward may part from skill: unsolved yet paid like solved ones, one unsolved reply well paid on 3 tasks, or one reply counted as right for 3 different gold answers.
-- A right answer is no suspect because it was cut off, nor because many tasks have the same right answer.
WITH paid AS (
  SELECT
    run_id, experience_id, task_id, model_version, reward, solved, prompt, response,
    coalesce(task_info_json ->> '$.answer', task_info_json ->> '$.gold') AS gold
  FROM experiences
  WHERE reward > 0
),
usual AS (
  SELECT
    run_id,
    avg(reward) FILTER (WHERE solved) AS solved_reward,
    greatest(median(reward) FILTER (WHERE NOT solved), avg(reward) FILTER (WHERE solved) / 2) AS well_paid
  FROM experiences
  WHERE reward IS NOT NULL
  GROUP BY run_id
),
-- A reply that collects components other than the answer on task after task. The usual pay of a failure (for its form,
-- say) is no trick: only more than that, and more than half of what solving pays, counts.
farmed AS (
  SELECT paid.run_id, response, count(DISTINCT task_id) AS tasks
  FROM paid
  JOIN usual USING (run_id)
  WHERE NOT solved AND reward > well_paid AND response <> ''
  GROUP BY paid.run_id, response
  HAVING tasks >= 3
),
-- The scorer says yes to one text although the gold answers disagree: it can be fooled.
fooled AS (
  SELECT run_id, response, count(DISTINCT gold) AS golds
  FROM paid
  WHERE solved
  GROUP BY run_id, response
  HAVING golds >= 3
),
suspected AS (
  SELECT
    paid.*,
    list_filter(
      [
        CASE WHEN NOT solved AND reward >= solved_reward THEN 'unsolved but paid like solved' END,
        CASE
          WHEN NOT solved AND reward > well_paid AND farmed.tasks IS NOT NULL
          THEN format('same unsolved reply well paid on {} tasks', farmed.tasks)
        END,
        CASE
          WHEN solved AND fooled.golds IS NOT NULL THEN format('same reply right for {} gold answers', fooled.golds)
        END
      ],
      lambda why: why IS NOT NULL
    ) AS why
  FROM paid
  LEFT JOIN usual USING (run_id)
  LEFT JOIN farmed USING (run_id, response)
  LEFT JOIN fooled USING (run_id, response)
)
SELECT run_id, experience_id, model_version, reward, array_to_string(why, '; ') AS why, prompt, response
FROM suspected
WHERE len(why) > 0
ORDER BY run_id, len(why) DESC, reward DESC, experience_id
