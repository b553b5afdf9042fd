"""How a decoder's layers are executed: one record, made once, that turns into transforms of blocks of layers."""

import dataclasses
from typing import Any, TypeVar

from jaxtyping import Array, Float, Int

from convert.model.config import ModelConfig
from fastjax.errors import ConfigError
from fastjax.execution.blocks import stack_blocks
from fastjax.execution.chunks import CHUNK, Chunk, check_chunk
from fastjax.execution.host_table import take_rows
from fastjax.execution.loop import run_layers, run_steps
from fastjax.execution.options import LoadOptions
from fastjax.execution.policies import policy_of
from fastjax.models.context import Context, Sums
from fastjax.models.decoder import Decoder
from fastjax.models.executor import Executor
from fastjax.models.layer import apply_layers, step_layers
from fastjax.parallel import in_order, own_tokens

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Execution(Executor):
    """How a decoder is executed: on the ambient mesh, and with its arrays where they lie.

    Attributes:
        remat: the policy of rematerialisation, as `policies.policy_of` takes it.
        scans: whether there is a loop over equal layers.
        chunk: tokens that an MLP computes at a time, as `chunks.chunk_size` takes it.
    """

    remat: str = "none"
    scans: bool = True
    chunk: Chunk = None

    @classmethod
    def of(cls, options: LoadOptions, config: ModelConfig) -> "Execution":
        """The execution that options ask for.

        Args:
            options: of loading the model.
            config: the model's.

        Raises:
            ConfigError: chunks that the model does not have.
        """
        return cls(options.remat, options.scans, check_chunk(options.mlp_chunk, config))

    def __str__(self) -> str:
        """The execution in words."""
        chunk = {None: "whole", "auto": "by chunks in long rows"}.get(self.chunk, f"by {self.chunk} tokens")
        return f"layers {'scanned' if self.scans else 'unrolled'}, rematerialisation {self.remat}, MLPs {chunk}"

    def without_chunks(self, setting: str) -> "Execution":
        """Leave out chunks of MLPs, which a setting does not have.

        Raises:
            ConfigError: chunks of some length are asked for.
        """
        if isinstance(self.chunk, int):
            raise ConfigError(f"{CHUNK}: expected auto or null with {setting}, got {self.chunk}")
        return dataclasses.replace(self, chunk=None)

    def policy(self, index: int) -> str:
        """The policy of a layer."""
        return policy_of(self.remat, index)

    def own_tokens(self, arrays: T) -> T:
        """A device's parts of the rows along `context`."""
        return own_tokens(arrays)

    def in_order(self, hidden: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        """Hidden states in the order of the rows."""
        return in_order(hidden)

    def look_up(self, table: Float[Array, "V E"], tokens: Int[Array, "B S"]) -> Float[Array, "B S E"]:
        """Rows of a table, which may be in the host's memory or split over devices."""
        return take_rows(table, tokens)

    def run(self, model: Decoder, x: Float[Array, "B S E"], context: Context) -> tuple[Float[Array, "B S E"], Sums]:
        """All layers on whole rows, as `Executor.run`."""
        blocks = stack_blocks(model, x, apply_layers, self.policy, self.chunk)
        return run_layers(model.plan, blocks, x, context, policy_of=self.policy)

    def step(
        self, model: Decoder, x: Float[Array, "B S E"], context: Context, states: list[Any]
    ) -> tuple[Float[Array, "B S E"], list[Any]]:
        """All layers on new tokens, as `Executor.step`; there is no backward pass."""
        return run_steps(model.plan, stack_blocks(model, x, step_layers, self.policy, None), x, context, states)
