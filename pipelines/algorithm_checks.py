"""Checks of what the sections mean together: which stages there are, and whether their rows suit the algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from operators.base import ScoreOperatorConfig
from pipelines.findings import Findings, as_written
from pipelines.spec import Spec
from pipelines.yaml_text import PathParts
from trainers.registry import ALGORITHMS

_ALGORITHM = "what the algorithm needs of its rows"


def check_stages(spec: Spec, found: Findings) -> None:
    """What the sections together mean: which stages there are, and whether rows can reach them."""
    explorer, trainer, evaluate = spec.explorer, spec.trainer, spec.loop.evaluate
    if spec.loop.mode == "async":
        found.problem(("loop", "mode"), "async exploration is not available yet", "write `mode: sync`")
    if explorer is None and not spec.imports and found.sound("explorer", "imports"):
        nothing = "no explorer and no imports: only rows already in the store are used"
        found.warn((), nothing, "add `explorer:` or `imports:`")
    if evaluate is not None and explorer is None and found.sound("explorer"):
        found.problem(
            ("loop", "evaluate"), "evaluation plays tasks and there is no explorer to play them", "add `explorer:`"
        )
    if evaluate is not None and trainer is None and found.sound("trainer"):
        found.warn(("loop", "evaluate"), "without a trainer every evaluation measures the same weights")
    used = {source.model for source in spec.imports.values()} | ({explorer.model} if explorer is not None else set())
    if len(used) > 1:
        names = ", ".join(sorted(used))
        found.problem(
            ("imports",), f"explorer and imports use different models ({names})", "one run has one tokenizer: name one"
        )
    trained = getattr(trainer, "model", None)
    if explorer is not None and trained is not None and trained != explorer.model:
        mine, other = spec.models.get(explorer.model), spec.models.get(trained)
        if mine is not None and other is not None and getattr(mine, "path", None) != getattr(other, "path", None):
            found.problem(
                ("trainer", "model"),
                f"the trainer trains {trained!r} and the explorer plays {explorer.model!r}, which are different "
                "weights: what is trained could not be given to the explorer",
                "name the same model in both",
            )
    _needs(spec, found, imported_only=explorer is None and bool(spec.imports) and found.sound("explorer"))


def _needs(spec: Spec, found: Findings, *, imported_only: bool) -> None:
    """What the algorithm needs of its rows, as far as it does not depend on operators."""
    needs = algorithm_needs(spec)
    found.skip(_ALGORITHM, found.unsound("trainer.algorithm"))
    if needs is None or not found.sound("trainer.algorithm"):
        return
    name = needs.algorithm
    at: PathParts = ("trainer", "algorithm")
    if needs.logprobs:
        wrong = found.unsound("explorer.sampling", "trainer.temperature")
        found.skip(_ALGORITHM, wrong)
        if not wrong:
            _distribution(spec, found, name)
    if needs.logprobs and imported_only:
        found.problem(
            at,
            f"{name} needs the log-probabilities of the model that sampled a row; imported rows have none",
            "add `explorer:`, or use an algorithm for offline rows such as sft",
        )
    elif needs.groups and imported_only:
        found.problem(at, f"{name} compares the rows of a group; imported rows have no groups", "add `explorer:`")
    if needs.groups and spec.explorer is not None and spec.explorer.group_size == 1:
        found.problem(
            ("explorer", "group_size"),
            f"{name} compares the rows of a group, and group_size is {spec.explorer.group_size}",
            "write 2 or more; 8 is usual",
        )


def _distribution(spec: Spec, found: Findings, algorithm: str) -> None:
    """The log-probs that the sampler stores are compared with the trainer's: both must be of one distribution."""
    if spec.explorer is None:
        return
    sampling, trained = spec.explorer.sampling, getattr(spec.trainer, "temperature", None)
    drawn = as_written(sampling.temperature)
    at: PathParts = ("explorer", "sampling")
    if sampling.temperature == 0:
        why = f"greedy sampling has no exploration, and its log-probs are raw: {algorithm} cannot learn from it"
        found.problem((*at, "temperature"), why, "write a temperature above 0; 1.0 is usual")
    elif trained is not None and trained != sampling.temperature:
        found.problem(
            (*at, "temperature"),
            f"rows are sampled at temperature {drawn} and trained at {as_written(trained)}: {algorithm} would "
            "compare log-probs of different distributions",
            f"write `trainer: {{temperature: {drawn}}}`",
        )
    for key, cuts, off in (("top_p", sampling.top_p < 1, 1.0), ("top_k", sampling.top_k > 0, 0)):
        if cuts and sampling.temperature > 0:
            said = f"stored log-probs describe the distribution that {key} truncated: {algorithm}'s ratio is biased"
            found.warn((*at, key), said, f"write {off} for training; evaluation has its own sampling")


@dataclass(frozen=True, slots=True)
class AlgorithmNeeds:
    """What the algorithm, its advantage included, needs of the rows it trains on."""

    algorithm: str
    reward: bool
    logprobs: bool
    groups: bool


def algorithm_needs(spec: Spec) -> AlgorithmNeeds | None:
    """The needs of the trainer's algorithm; None when nothing is trained or the trainer declares no algorithm."""
    config: Any = getattr(spec.trainer, "algorithm", None)
    if config is None:
        return None
    needs = ALGORITHMS.load(config.type)(config).needs
    return AlgorithmNeeds(config.type, needs.reward, needs.logprobs, needs.groups)


def workflow_scores(spec: Spec) -> tuple[tuple[str, ...], bool]:
    """Components that the workflow is said to give, and whether rows may come with a reward from it.

    Shipped workflows give no scores of their own accord; what a plug-in's workflow gives is not known here, so it gets
    the benefit of the doubt.
    """
    if spec.explorer is None:
        return (), False
    workflow = spec.explorer.workflow
    weights = workflow.score_weights
    return tuple(weights), "." in workflow.type or any(
        weight != 0 and weight is not None for weight in weights.values()
    )


def check_reward(spec: Spec, found: Findings) -> None:
    """An algorithm that learns from rewards needs a component that counts."""
    needs = algorithm_needs(spec)
    if (
        needs is None
        or not needs.reward
        or not found.sound("trainer.algorithm")
        or found.draft.removed_operators()
        or workflow_scores(spec)[1]
    ):
        return
    if spec.explorer is None and not spec.imports:
        return  # rows of an earlier run have their scores
    if any(problem.path == "trainer.algorithm" for problem in found.problems):
        return  # the algorithm does not fit these rows at all
    scores = [config for config in spec.operators if isinstance(config, ScoreOperatorConfig)]
    if any(config.weight != 0 for config in scores):
        return
    if scores:
        names = ", ".join(repr(config.name) for config in scores)
        message = f"{needs.algorithm} needs a reward, and every score operator ({names}) has weight 0"
        found.problem(("trainer", "algorithm"), message, "give one of them a weight above 0")
    else:
        found.problem(
            ("trainer", "algorithm"),
            f"{needs.algorithm} needs a reward, and no operator writes a score",
            "add a score operator, for example regex_or_exact_match; `buffer-engine operators` lists them",
        )
