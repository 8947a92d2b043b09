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

    learning_rate: float = Field(default=1e-5, gt=0, description="after the warm-up, before the schedule's fall")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), description="decay of the running means of the gradient and of its square"
    )
    weight_decay: float = Field(
        default=0.0, ge=0, description="share of every weight taken off per step, times the learning rate"
    )
    epsilon: float = Field(default=1e-8, gt=0, description="added to the root of the mean squared gradient")
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="gradients are scaled down to it; null: off")
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear rise to learning_rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="course of the rate after the warm-up"
    )
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

    rank: int = Field(default=16, gt=0, description="inner width of each adapter")
    alpha: float = Field(default=32.0, gt=0, description="the adapter's output is scaled by alpha / rank")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of the adapter's input dropped in training")
    target: Literal["all-linear"] | tuple[str, ...] = Field(
        default="all-linear", description="every linear layer but the output, or names of modules"
    )


class CheckpointConfig(ComponentConfig):
    """When the loop saves a checkpoint and how many it keeps."""

    every_steps: int = Field(default=10, gt=0, description="optimizer steps between checkpoints")
    keep: int = Field(default=3, gt=0, description="newest checkpoints that stay on the disk")


class TokenStatsConfig(ComponentConfig):
    """When a step's numbers are kept token by token, in table `token_stats`: 13 bytes a token, 17 with entropies."""

    every_steps: int = Field(gt=0, description="optimizer steps from one recorded step to the next")


class TorchTrainerConfig(ComponentConfig):
    """Full fine-tuning or LoRA of a Hugging Face causal language model on one device."""

    type: Literal["torch"] = "torch"
    model: str = Field(description="name of the model in the specification")
    algorithm: Annotated[SerializeAsAny[AlgorithmConfig], component(ALGORITHMS)] = Field(
        default=GRPOConfig(), description="the objective: grpo or sft"
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="logits are divided by it before log-probs are taken, of the reference too; that of the explorer",
    )
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="AdamW and its learning rate")
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
    lora: LoraConfig | None = Field(default=None, description="train adapters only; null: all weights")
    gradient_checkpointing: bool = Field(default=False, description="recompute activations: less memory, more time")
    logit_chunk: int = Field(default=1024, gt=0, description="trained tokens whose vocabulary row exists at once")
    recompute_old_logprobs: bool = Field(
        default=False, description="take the ratio against the trainer's own log-probs, not the sampler's stored ones"
    )
    ratio_gate: float | None = Field(
        default=0.2, gt=0, description="most mean |ratio − 1| on the first on-policy step; null: report only"
    )
    entropy: bool = Field(default=False, description="report the policy's entropy on trained tokens")
    token_stats: TokenStatsConfig | None = Field(
        default=None,
        description="record log-probs, ratios, advantages (and with `entropy` entropies) of every token; null: off",
    )
    read: ReadPolicy = Field(
        default_factory=lambda: ReadPolicy.model_validate({}), description="which rows a batch takes from the store"
    )
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="when to save, and how many to keep")
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
