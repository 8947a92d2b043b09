"""What an explorer can be built from, by name; nothing is imported until it is used."""

from __future__ import annotations

from buffer_engine.registry import Registry

TASKSETS = Registry(
    kind="task set",
    group="tasksets",
    builtin={
        "champ": "explorers.tasksets.champ:ChampTaskset",
        "evals": "explorers.tasksets.evals:EvalsTaskset",
        "human_eval": "explorers.tasksets.human_eval:HumanEvalTaskset",
        "jsonl": "explorers.tasksets.rows:JsonlTaskset",
        "parquet": "explorers.tasksets.rows:ParquetTaskset",
        "reasoning_gym": "explorers.tasksets.reasoning_gym:ReasoningGymTaskset",
    },
)
WORKFLOWS = Registry(
    kind="workflow",
    group="workflows",
    builtin={
        "multi_turn": "explorers.workflows.multi_turn:MultiTurn",
        "single_turn": "explorers.workflows.single_turn:SingleTurn",
    },
)
MODELS = Registry(
    kind="model",
    group="models",
    builtin={
        "scripted": "explorers.models.scripted:ScriptedEngine",
        "transformers": "explorers.models.transformers_model:TransformersEngine",
    },
)
