"""Names of trainers, algorithms and advantages; nothing is imported until one is used."""

from __future__ import annotations

from buffer_engine.registry import Registry

TRAINERS = Registry(
    kind="trainer",
    group="trainers",
    builtin={"torch": "trainers.torch_trainer:TorchTrainer"},
)

ALGORITHMS = Registry(
    kind="algorithm",
    group="algorithms",
    builtin={
        "grpo": "trainers.algorithms.grpo:GRPO",
        "sft": "trainers.algorithms.sft:SFT",
    },
)

ADVANTAGES = Registry(
    kind="advantage",
    group="advantages",
    builtin={
        "constant": "trainers.advantages.constant:ConstantAdvantage",
        "group": "trainers.advantages.group:GroupAdvantage",
        "rloo": "trainers.advantages.rloo:RlooAdvantage",
    },
)
