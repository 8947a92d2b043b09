"""The torch trainer: full fine-tuning or LoRA of a Hugging Face model on one device.

Its random generator is its own: drawing numbers elsewhere in the process changes nothing here, so a resumed run goes
on exactly as the uninterrupted one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from buffer_engine.errors import NonFiniteLossError, RowTooLongError, SchemaError, TrainingError
from buffer_engine.extras import require
from buffer_engine.identity import stable_seed
from buffer_engine.weights import WeightVersion
from trainers.algorithms.base import Algorithm, Needs
from trainers.algorithms.grpo import GRPOConfig
from trainers.base import LogProbs, StepReport, TrainBatch
from trainers.collate import BatchArrays, collate
from trainers.losses.kl import kl_estimate
from trainers.packing import PackedBatch, check_lengths, pack
from trainers.registry import ALGORITHMS
from trainers.token_stats import TokenRecord
from trainers.torch_checkpoint import load_checkpoint, save_checkpoint, save_weights
from trainers.torch_config import TorchTrainerConfig
from trainers.torch_forward import ForwardSettings, check_model, computes_bfloat16, token_logprobs
from trainers.torch_model import TrainableModel, load_model
from trainers.torch_optimizer import Optimizer, learning_rate
from trainers.torch_step import StepSums, accumulate

if TYPE_CHECKING:
    from torch import Tensor


class TorchTrainer:
    """Implements `trainers.base.Trainer`; every optimizer step takes one batch."""

    Config: ClassVar[type[TorchTrainerConfig]] = TorchTrainerConfig

    def __init__(self, config: TorchTrainerConfig, model_directory: Path, *, seed: int) -> None:
        """Load the model from `model_directory` (a Hugging Face folder).

        Raises:
            ModelError: the folder is missing, incomplete, or holds a model that cannot be trained here.
            MissingExtraError: torch, transformers or peft is not installed.
        """
        torch = require("torch", "torch")
        self._config = config
        self._algorithm: Algorithm[Any] = ALGORITHMS.load(config.algorithm.type)(config.algorithm)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = self._device()
        self._bfloat16 = config.precision == "bfloat16" or (config.precision == "auto" and computes_bfloat16(device))
        if self._bfloat16 and not computes_bfloat16(device):
            logging.getLogger("buffer_engine.trainers").warning(
                "precision is bfloat16 and this processor emulates it: float32 (or auto) is several times faster here"
            )
        self._generators: dict[str, Tensor] = {}
        with torch.random.fork_rng(devices=self._gpu_indices(device)):
            torch.manual_seed(stable_seed("trainer", seed))
            self._model = self._load(model_directory, adapters=True)
            check_model(self._model, packed=config.attention == "packed")
            self._remember_generators()
        self._optimizer = Optimizer(config.optimizer, self._model.trainable())
        self._reference: TrainableModel | None = None
        if self._algorithm.needs.reference and config.lora is None:
            self._reference = self._load(model_directory, adapters=False)
            self._reference.model.requires_grad_(False)
            self._reference.model.eval()
        self._steps = 0
        self._gate_passed = False
        self._penalised: str | None = None

    # ---- training

    def train_step(self, batch: TrainBatch) -> StepReport:
        """One optimizer step; see `Trainer.train_step`.

        Rows whose advantages are all 0 have no gradient and are not computed (unless a KL term pulls on them), but
        they count in the denominators, so the loss is the same.

        Raises:
            SchemaError: rows lack what the algorithm needs, or hold ids that are not in the model's vocabulary.
            NonFiniteLossError, RowTooLongError, TrainingError: as `Trainer.train_step`.
        """
        started = time.perf_counter()
        arrays = collate(batch.rows, self._algorithm.needs)
        self._check(batch, arrays)
        denominators = self._algorithm.denominators(arrays.trained_tokens)
        computed = self._rows_with_gradient(arrays)
        packs = self._pack(arrays, computed)
        rate = learning_rate(self._config.optimizer, self._steps + 1)
        recorded = self._config.token_stats
        record = TokenRecord(arrays) if recorded is not None and batch.step % recorded.every_steps == 0 else None
        with self._session(training=True):
            try:
                sums = accumulate(
                    self._model,
                    self._algorithm,
                    arrays,
                    packs,
                    denominators,
                    self._settings(entropy=self._config.entropy),
                    model_version=batch.model_version,
                    recompute_old_logprobs=self._config.recompute_old_logprobs,
                    reference=self._reference_logprobs if self._loss_uses_reference() else None,
                    batch_id=batch.batch_id,
                    record=record,
                )
                norm = self._optimizer.gradient_norm()
                if not np.isfinite(norm):
                    raise NonFiniteLossError(
                        f"batch {batch.batch_id}: the gradient's norm is {norm} while the loss is {sums.loss}; weights "
                        "are unchanged. Lower learning_rate, or look for extreme log-ratios in the batch."
                    )
                self._gate(batch, sums)
                self._optimizer.step(rate)
            finally:
                self._optimizer.clear()
        self._steps += 1
        seconds = time.perf_counter() - started
        tokens = int(arrays.lengths[computed].sum())
        return StepReport(
            {
                **sums.metrics(),
                "grad_norm": norm,
                "learning_rate": rate,
                "trained_tokens": float(denominators.tokens),
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "computed_rows": float(len(computed)),
                "skipped_rows": float(len(arrays.weights) - len(computed)),
                "micro_batches": float(len(packs)),
            },
            token_stats=None if record is None else record.table(),
        )

    def log_probs(self, batch: TrainBatch) -> LogProbs:
        """Log-probabilities under the current weights at `temperature`, without gradient; see `Trainer.log_probs`."""
        return LogProbs(self._all_logprobs(collate(batch.rows), self._model))

    def reference_log_probs(self, batch: TrainBatch) -> LogProbs:
        """As `log_probs`, under the weights that training started from.

        Raises:
            TrainingError: the algorithm has no KL term, so no reference is kept.
        """
        if not self._algorithm.needs.reference:
            raise TrainingError("no reference weights are kept: the algorithm has no `kl`")
        if self._reference is not None:
            return LogProbs(self._all_logprobs(collate(batch.rows), self._reference))
        with self._model.without_adapters():
            return LogProbs(self._all_logprobs(collate(batch.rows), self._model))

    def kl_penalties(self, batch: TrainBatch) -> pa.DoubleArray:
        """What `kl: {place: reward}` takes off each row's reward: coefficient · Σ_t KL estimate, one float64 per row.

        The estimate compares the sampler's stored log-probs with the reference on trained tokens. Subtract it from
        the rewards, then compute the advantages; `train_step` of the same batch_id refuses to run before this call.

        Raises:
            TrainingError: the algorithm has no KL term in the reward.
            SchemaError: a trained token has no log-prob.
        """
        import torch

        kl = self._config.algorithm.kl if isinstance(self._config.algorithm, GRPOConfig) else None
        if kl is None or kl.place != "reward":
            raise TrainingError("the algorithm has no `kl` with `place: reward`: there is no penalty to compute")
        arrays = collate(batch.rows, Needs(logprobs=True))
        reference = self.reference_log_probs(batch).values.flatten().to_numpy(zero_copy_only=False)
        chosen = arrays.trained
        estimates = kl_estimate(
            torch.from_numpy(arrays.logprobs[chosen]).double(),
            torch.from_numpy(reference[chosen]).double(),
            kl.estimator,
        ).numpy()
        penalties = np.bincount(arrays.row_of_token[chosen], weights=estimates, minlength=len(arrays.weights))
        self._penalised = batch.batch_id
        return pa.array(kl.coefficient * penalties)

    # ---- weights

    def save_weights(self, directory: Path) -> None:
        """Write a Hugging Face folder, adapters merged; see `Trainer.save_weights`."""
        save_weights(directory, self._model)

    def weights(self, version: int) -> WeightVersion:
        """The current weights in memory, as the plain model names them.

        Full fine-tuning: the trained tensors themselves, which the next step changes in place, so a receiver that
        outlives the step must copy. LoRA: adapted matrices are new tensors (base + delta), the others are shared.
        """
        return WeightVersion(version=version, tensors=self._model.weights())

    def save_checkpoint(self, directory: Path) -> None:
        """Write weights, optimizer, generators and counters; see `Trainer.save_checkpoint`."""
        save_checkpoint(
            directory,
            model=self._model,
            optimizer=self._optimizer,
            generators=self._generators,
            state={"steps": self._steps, "gate_passed": self._gate_passed},
        )

    def load_checkpoint(self, directory: Path) -> None:
        """Continue from `save_checkpoint`, bit for bit.

        Raises:
            TrainingError: the checkpoint is incomplete or does not belong to this model; nothing was changed.
        """
        generators, state = load_checkpoint(directory, model=self._model, optimizer=self._optimizer)
        self._generators = generators
        self._steps = int(state["steps"])
        self._gate_passed = bool(state["gate_passed"])
        self._penalised = None

    # ---- parts

    def _load(self, directory: Path, *, adapters: bool) -> TrainableModel:
        config = self._config
        model = load_model(
            directory,
            attention=config.attention,
            lora=config.lora if adapters else None,
            checkpointing=config.gradient_checkpointing and adapters,
        )
        model.model.to(self._device())
        return model

    def _check(self, batch: TrainBatch, arrays: BatchArrays) -> None:
        if not arrays.trained.any():
            raise TrainingError(f"batch {batch.batch_id} has no token to train: every loss_mask is false")
        self._check_tokens(arrays)
        if self._algorithm.needs.reward_penalty and self._penalised != batch.batch_id:
            raise TrainingError(
                f"batch {batch.batch_id}: `kl: {{place: reward}}` is configured, but kl_penalties was not called for "
                "this batch, so its advantages lack the penalty"
            )

    def _check_tokens(self, arrays: BatchArrays) -> None:
        """Rows fit the budget and the context, and their ids are the model's."""
        vocabulary = int(self._model.model.get_input_embeddings().weight.shape[0])
        strange = np.flatnonzero((arrays.token_ids < 0) | (arrays.token_ids >= vocabulary))
        if len(strange):
            at = int(strange[0])
            row = int(arrays.row_of_token[at])
            raise SchemaError(
                f"batch: {arrays.name(row)} has id {arrays.token_ids[at]} at token {at - arrays.offsets[row]} and the "
                f"model's vocabulary is {vocabulary}: the row was made with another tokenizer"
            )
        check_lengths(arrays, self._config.token_budget)
        context = getattr(self._model.model.config, "max_position_embeddings", None)
        if context is not None and int(arrays.lengths.max()) > context:
            row = int(arrays.lengths.argmax())
            raise RowTooLongError(
                f"{arrays.name(row)} has {arrays.lengths[row]} tokens and the model's context is {context}: "
                "drop long rows with a length_filter"
            )

    def _rows_with_gradient(self, arrays: BatchArrays) -> npt.NDArray[np.int64]:
        counts = arrays.trained_tokens
        if self._algorithm.skips_zero_advantage:
            counts = arrays.count(arrays.trained & (arrays.advantages != 0.0))
        return np.flatnonzero((counts > 0) & (arrays.weights != 0.0))

    def _pack(self, arrays: BatchArrays, rows: npt.NDArray[np.int64]) -> list[PackedBatch]:
        config = self._config
        return pack(
            arrays,
            token_budget=config.token_budget,
            rows=rows,
            padded=config.attention != "packed",
            share_prompts=config.share_prompts,
        )

    def _settings(self, *, entropy: bool = False) -> ForwardSettings:
        config = self._config
        return ForwardSettings(
            packed=config.attention == "packed",
            bfloat16=self._bfloat16,
            logit_chunk=config.logit_chunk,
            recompute=config.gradient_checkpointing,
            temperature=config.temperature,
            entropy=entropy,
        )

    def _gate(self, batch: TrainBatch, sums: StepSums) -> None:
        """Refuse the first on-policy step when the trainer and the sampler disagree about the same weights."""
        deviation = sums.metrics().get("ratio_deviation")
        limit = self._config.ratio_gate
        if self._gate_passed or deviation is None:
            return
        if limit is not None and not deviation <= limit:
            raise TrainingError(
                f"batch {batch.batch_id}: on rows sampled with these very weights the mean |ratio − 1| is "
                f"{deviation:.4g}, above ratio_gate {limit:g}; weights are unchanged. Check that the explorer and the "
                "trainer load the same folder, that rows were sampled at the trainer's temperature "
                f"({self._config.temperature:g}) and without top-p or top-k, that ids were not re-encoded, and that "
                "the precisions are close; or set a higher ratio_gate."
            )
        self._gate_passed = True

    def _loss_uses_reference(self) -> bool:
        needs = self._algorithm.needs
        return needs.reference and not needs.reward_penalty

    def _reference_logprobs(self, batch: PackedBatch) -> Tensor:
        import torch

        with torch.no_grad():
            if self._reference is not None:
                return token_logprobs(self._reference, batch, self._settings())[0]
            with self._model.without_adapters(), _evaluating(self._model):
                return token_logprobs(self._model, batch, self._settings())[0]

    def _all_logprobs(self, arrays: BatchArrays, model: TrainableModel) -> pa.ListArray:
        """Log-probs of every token but the first of each row, ragged."""
        import torch

        self._check_tokens(arrays)
        first = np.zeros(len(arrays.token_ids), dtype=np.bool_)
        first[arrays.offsets[:-1][arrays.lengths > 0]] = True
        everything = replace(arrays, trained=~first)
        values = np.zeros(len(first), dtype=np.float32)
        with self._session(training=False), torch.no_grad(), _evaluating(model):
            for batch in self._pack(everything, np.flatnonzero(arrays.lengths > 1)):
                values[batch.source] = token_logprobs(model, batch, self._settings())[0].cpu().numpy()
        return pa.ListArray.from_arrays(pa.array(arrays.offsets.astype(np.int32)), pa.array(values, mask=first))

    def _device(self) -> str:
        import torch

        if self._config.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self._config.device

    @staticmethod
    def _gpu_indices(device: str) -> list[int]:
        import torch

        return [torch.cuda.current_device()] if device == "cuda" else []

    def _remember_generators(self) -> None:
        import torch

        self._generators = {"cpu": torch.get_rng_state()}
        if self._device() == "cuda":
            self._generators["cuda"] = torch.cuda.get_rng_state()

    @contextmanager
    def _session(self, *, training: bool) -> Generator[None]:
        """Run with the trainer's generator and determinism; both are as before for the rest of the process after."""
        import torch

        memory: Any = torch.utils.deterministic
        before, fill = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
        with torch.random.fork_rng(devices=self._gpu_indices(self._device())):
            torch.set_rng_state(self._generators["cpu"])
            if "cuda" in self._generators:
                torch.cuda.set_rng_state(self._generators["cuda"])
            torch.use_deterministic_algorithms(self._config.deterministic)
            # Filling new memory is for finding bugs; nothing here reads what it did not write.
            memory.fill_uninitialized_memory = False
            self._model.model.train(training)
            try:
                yield
                if training:
                    self._remember_generators()
            finally:
                memory.fill_uninitialized_memory = fill
                torch.use_deterministic_algorithms(before)


@contextmanager
def _evaluating(model: TrainableModel) -> Generator[None]:
    """Without dropout inside the block."""
    training = model.model.training
    model.model.eval()
    try:
        yield
    finally:
        model.model.train(training)
