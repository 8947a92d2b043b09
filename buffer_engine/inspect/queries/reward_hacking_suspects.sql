-- Rows that earn a reward in a doubtful way: unsolved yet paid like solved ones, cut off, or one reply to many tasks.
WITH paid AS (
  SELECT run_id, experience_id, task_id, model_version, reward, solved, truncated, prompt, response
  FROM experiences
  WHERE reward > 0
),
usual AS (
  SELECT run_id, avg(reward) AS solved_reward FROM paid WHERE solved GROUP BY run_id
),
repeated AS (
  SELECT run_id, response, count(DISTINCT task_id) AS tasks
  FROM paid
  GROUP BY run_id, response
  HAVING tasks >= 3
),
suspected AS (
  SELECT
    paid.*,
    list_filter(
      [
        CASE WHEN NOT solved AND reward >= solved_reward THEN 'unsolved but paid like solved' END,
        CASE WHEN truncated THEN 'cut off' END,
        CASE WHEN repeated.tasks IS NOT NULL THEN format('same reply to {} tasks', repeated.tasks) END
      ],
      lambda why: why IS NOT NULL
    ) AS why
  FROM paid
  LEFT JOIN usual USING (run_id)
  LEFT JOIN repeated USING (run_id, response)
)
SELECT run_id, experience_id, model_version, reward, array_to_string(why, '; ') AS why, prompt, response
FROM suspected
WHERE len(why) > 0
ORDER BY run_id, len(why) DESC, reward DESC, experience_id
