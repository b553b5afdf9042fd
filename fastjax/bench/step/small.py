"""The small step that stands for a case beside the reference: every setting of the case, on a part of its sizes.

It has the first layers (so many that a loop over them repeats, of each policy where there are two), two rows of more,
and documents, padding and chunks in the case's proportions. What changes no loss and no gradient is left out: cases
with one small step need one comparison, and those that differ by what the reference does not have share a reference.
"""

import dataclasses

from convert.model.config import ModelConfig
from fastjax.bench.step.build import filled
from fastjax.bench.step.case import StepCase
from fastjax.execution.chunks import chunk_places
from fastjax.execution.policies import check_policy, policy_of
from fastjax.execution.stacks import plan_layers
from fastjax.parallel import MeshShape

#: Repetitions of the layers' period: a first, one between, and a last.
_REPEATS = 3
_ROWS = 2
#: Tokens of all rows of a replica; of a mixture fewer, and those of all replicas, since plain XLA multiplies every row
#: by every expert.
_TOKENS, _TOKENS_OF_MIXTURES = 2048, 512
#: Chunks of a row where the case has chunks.
_CHUNKS = 4


def small_step(case: StepCase) -> StepCase:
    """The small step of a case; equal for cases that one comparison serves.

    Args:
        case: the settings.

    Raises:
        ConfigError: a policy or rows that there are not.
    """
    config = case.config
    shape = case.mesh or MeshShape()
    layers, policy, looped = _layers(case, config)
    rows = min(case.batch, _ROWS)
    tokens = _TOKENS if config.moe is None else _TOKENS_OF_MIXTURES // shape.replicas
    seq = min(case.seq, tokens // rows) // shape.token_parts * shape.token_parts
    small = dataclasses.replace(
        case,
        layers=layers,
        checkpointing=policy,
        batch=rows,
        seq=seq,
        # a token and its target at least
        lengths=case.lengths and tuple(max(2, min(length, case.seq) * seq // case.seq) for length in case.lengths),
        offload_layers=case.offload_layers and looped,
        optimizer="adamw",
        offload_optimizer=False,
        steps=1,
        warmup=1,
    )
    return dataclasses.replace(small, mlp_chunk=_chunk(case, small, config))


def reference_step(small: StepCase) -> StepCase:
    """The settings of a small step's reference: the same model and rows on one device, with nothing special.

    Args:
        small: of `small_step`.
    """
    return small.plain(checkpointing="none", layer_loop="unroll")


def _layers(case: StepCase, config: ModelConfig) -> tuple[int, str, bool]:
    """The number of layers, their policy, and whether some are scanned where the case's are."""
    count, period = config.num_hidden_layers, plan_layers(config.layers, "scan")[0].period
    name, colon, first = check_policy(case.checkpointing).partition(":")
    ahead = min(int(first), count) if colon else count
    span = period * _REPEATS
    if config.moe is not None and period > 1:
        # One period for both policies: after four layers of gpt-oss rounding to bfloat16 alone makes other gradients,
        # since other experts are chosen.
        span = period // 2 if 0 < ahead < count else period
    kept = min(ahead, span), min(count - ahead, span)
    policy = f"{name}:{kept[0]}" if all(kept) else policy_of(case.checkpointing, 0)

    def scanned(layers: int, remat: str) -> bool:
        kinds = [(config.layers[index], policy_of(remat, index)) for index in range(layers)]
        return any(stack.count > 1 for stack in plan_layers(kinds, "scan"))

    looped = scanned(sum(kept), policy) or not scanned(count, case.checkpointing)  # the model refuses what has no loop
    return sum(kept), policy, looped


def _chunk(case: StepCase, small: StepCase, config: ModelConfig) -> int | None:
    """Tokens of the MLP's chunks, where the case has some."""
    shape = case.mesh or MeshShape()
    if case.qat is not None or shape.tensor > 1 or all(config.mixtures):
        return case.mlp_chunk  # there are no chunks, and none may be asked for
    rows = case.batch, filled(case)[0].seq // shape.context, config.hidden_size
    policies = {policy_of(case.checkpointing, index) for index in range(config.num_hidden_layers)}
    if all(chunk_places(case.mlp_chunk or "auto", rows, policy) is None for policy in policies):
        return None
    return small.batch * -(-filled(small)[0].seq // (shape.context * _CHUNKS))
