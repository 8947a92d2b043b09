"""Configuration of the torch trainer."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from buffer_engine.config import ComponentConfig, SerializeAsAny, component
from buffer_engine.store.base import ReadPolicy
from trainers.algorithms.base import AlgorithmConfig
from trainers.algorithms.grpo import GRPOConfig
from trainers.registry import ALGORITHMS


class OptimizerConfig(ComponentConfig):
    """AdamW, and the course of its learning rate."""

    learning_rate: float = Field(default=1e-5, gt=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    epsilon: float = Field(default=1e-8, gt=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="gradients are scaled down to it; null: off")
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear rise to learning_rate")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int | None = Field(default=None, gt=0, description="steps after which linear and cosine are at 0")

    @model_validator(mode="after")
    def _a_falling_schedule_has_an_end(self) -> Self:
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule {self.schedule} needs total_steps, after which the rate is 0")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(f"total_steps ({self.total_steps}) must be above warmup_steps ({self.warmup_steps})")
        return self


class LoraConfig(ComponentConfig):
    """Low-rank adapters beside frozen weights."""

    rank: int = Field(default=16, gt=0)
    alpha: float = Field(default=32.0, gt=0, description="the adapter's output is scaled by alpha / rank")
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target: Literal["all-linear"] | tuple[str, ...] = Field(
        default="all-linear", description="every linear layer but the output, or names of modules"
    )


class CheckpointConfig(ComponentConfig):
    """When the loop saves a checkpoint and how many it keeps."""

    every_steps: int = Field(default=10, gt=0)
    keep: int = Field(default=3, gt=0)


class TorchTrainerConfig(ComponentConfig):
    """Full fine-tuning or LoRA of a Hugging Face causal language model on one device."""

    type: Literal["torch"] = "torch"
    model: str = Field(description="name of the model in the specification")
    algorithm: Annotated[SerializeAsAny[AlgorithmConfig], component(ALGORITHMS)] = GRPOConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    token_budget: int = Field(default=2048, gt=0, description="most tokens in one forward and backward pass")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="of the arithmetic (weights and optimizer are always float32); auto: bfloat16 where the device "
        "computes it in hardware, which many processors do not: there it is several times slower than float32",
    )
    attention: Literal["packed", "eager"] = Field(
        default="packed", description="packed: rows end to end; eager: padded rows, for models packed refuses"
    )
    share_prompts: bool = Field(
        default=True, description="compute the prompt that rows of a group have in common once (packed attention only)"
    )
    lora: LoraConfig | None = None
    gradient_checkpointing: bool = Field(default=False, description="recompute activations: less memory, more time")
    logit_chunk: int = Field(default=1024, gt=0, description="trained tokens whose vocabulary row exists at once")
    recompute_old_logprobs: bool = Field(
        default=False, description="take the ratio against the trainer's own log-probs, not the sampler's stored ones"
    )
    ratio_gate: float | None = Field(
        default=0.2, gt=0, description="most mean |ratio − 1| on the first on-policy step; null: report only"
    )
    entropy: bool = Field(default=False, description="report the policy's entropy on trained tokens")
    read: ReadPolicy = Field(default_factory=lambda: ReadPolicy.model_validate({}))
    checkpoint: CheckpointConfig = CheckpointConfig()
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: a GPU where there is one")
    deterministic: bool = Field(default=True, description="refuse operations whose result may differ between runs")
    threads: int | None = Field(default=None, gt=0, description="processor threads; null: torch's own choice")

    @model_validator(mode="after")
    def _off_policy_needs_own_logprobs(self) -> Self:
        algorithm = self.algorithm
        if isinstance(algorithm, GRPOConfig) and algorithm.off_policy is not None and not self.recompute_old_logprobs:
            raise ValueError(
                "algorithm.off_policy corrects between the sampler's and the trainer's own log-probs: "
                "it needs recompute_old_logprobs: true"
            )
        return self
