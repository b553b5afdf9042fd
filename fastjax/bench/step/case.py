"""The settings of a measurement, and named sets of them; no JAX."""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from fastjax.bench.step.presets import preset_config
from fastjax.errors import ConfigError

if TYPE_CHECKING:
    from convert.model.config import ModelConfig
    from fastjax.parallel import MeshShape

#: Method -> the formats that its base's weights may have, the usual one first.
METHODS = {"qlora": ("nf4", "mxfp4"), "lora": ("16bit",), "full": ("16bit",)}
#: What adapters are on: the attention's projections; or every projection, a mixture's experts included.
ADAPTERS = ("all", "attention")
OPTIMIZERS = ("adamw", "adamw_16bit", "adamw_8bit")
#: Those whose moments may lie in the host's memory.
OFFLOADED = ("adamw", "adamw_8bit")
PARAM_DTYPES = ("bfloat16", "float32")
#: Dtype → times the rounding of bfloat16, as float16 has three bits more and float32 sixteen, and what is added for
#: sums in another order.
ROUNDING = {"bfloat16": (1.0, 0.0), "float16": (2.0**-3, 0.0), "float32": (2.0**-16, 1e-5)}
#: What documents are made rows by: packing; one a row, padded to the row's tokens, or to the longest of the batch.
FILLS = ("packed", "padded", "longest")


class Layout(NamedTuple):
    """The part of a case that a regime sets.

    Attributes:
        batch: rows.
        seq: tokens a row.
        checkpointing: as of `StepCase`.
        layer_loop: as of `StepCase`.
    """

    batch: int
    seq: int
    checkpointing: str
    layer_loop: str


#: Name -> what is measured: the fastest step, one in little memory, and long rows.
REGIMES = {
    "speed": (Layout(4, 2048, "projections", "unroll"), Layout(4, 2048, "projections", "scan")),
    "small": (Layout(4, 2048, "offload_projections", "scan"), Layout(4, 2048, "full", "scan")),
    "long": (Layout(1, 16384, "offload_projections", "scan"), Layout(1, 65536, "offload_attention", "scan")),
}


@dataclasses.dataclass(frozen=True)
class StepCase:
    """Settings of the measurement.

    Attributes:
        preset: a key of PRESETS.
        batch: rows; on a mesh those of each part of it that has rows of its own, as in training.
        seq: tokens a row.
        checkpointing: what the backward pass recomputes, as `use_gradient_checkpointing`.
        layer_loop: "scan" or "unroll".
        method: a key of METHODS.
        weights: of the base: "nf4", "mxfp4" (experts, the rest in 16 bits) or "16bit".
        rank: of the adapters.
        adapters: one of ADAPTERS.
        optimizer: one of OPTIMIZERS.
        param_dtype: of what is trained.
        dtype: of the computation; None: by the device.
        steps: timed steps.
        warmup: steps before these.
        attention: its implementation; None: the model's own choice.
        lengths: of documents that fill the rows; None: rows of one document.
        fill: one of FILLS, for documents.
        layers: the preset's first ones alone; None: all.
        offload_embedding: whether the table of embeddings lies in the host's memory.
        offload_layers: whether the matrices of the layers do.
        offload_optimizer: whether the optimizer's moments of matrices do.
        mlp_chunk: tokens that an MLP computes at a time; None: "auto".
        mesh: of several devices; None: one.
        compiler_options: XLA's for the step, NAME=VALUE each.
        base_compute: dtype of the frozen matrices' products, "float8"; None: `dtype`.
        qat: the scheme of quantisation-aware training, a key of `training.config.qat.NAMED`; None: none.
        seed: of the adapters' first values.
    """

    preset: str
    batch: int
    seq: int
    checkpointing: str
    layer_loop: str
    method: str = "qlora"
    weights: str = "nf4"
    rank: int = 16
    adapters: str = "all"
    optimizer: str = "adamw"
    param_dtype: str = "float32"
    dtype: str | None = None
    steps: int = 10
    warmup: int = 3
    attention: str | None = None
    lengths: tuple[int, ...] | None = None
    fill: str = "packed"
    layers: int | None = None
    offload_embedding: bool = False
    offload_layers: bool = False
    offload_optimizer: bool = False
    mlp_chunk: int | None = None
    mesh: "MeshShape | None" = None
    compiler_options: tuple[str, ...] = ()
    base_compute: str | None = None
    qat: str | None = None
    seed: int = 3407

    @property
    def hf_config(self) -> dict[str, Any]:
        """The config.json of the model.

        Raises:
            ConfigError: layers or weights that the preset does not have.
        """
        return preset_config(self.preset, self.layers, self.weights)

    @property
    def config(self) -> "ModelConfig":
        """The model's."""
        from convert.families.mapping import read_config

        return read_config(self.hf_config)

    @property
    def devices(self) -> int:
        """Their number."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def step_rows(self) -> int:
        """Rows of all devices."""
        return self.batch * (1 if self.mesh is None else self.mesh.replicas)

    def plain(self, **changes: Any) -> "StepCase":
        """The same model and rows on one device, without what changes how a step computes but not what.

        Args:
            **changes: fields that are given other values.
        """
        settings: dict[str, Any] = {"batch": self.step_rows, "checkpointing": "", "layer_loop": "", "mesh": None}
        settings |= {"attention": None, "mlp_chunk": None, "compiler_options": ()}
        settings |= dict.fromkeys(("offload_embedding", "offload_layers", "offload_optimizer"), False)
        return dataclasses.replace(self, **(settings | changes))

    @property
    def where(self) -> str:
        """The mesh."""
        return "one device" if self.mesh is None else str(self.mesh)

    @property
    def options(self) -> dict[str, str | bool]:
        """XLA's options by name."""
        pairs = (option.split("=", 1) for option in self.compiler_options)
        return {name: {"true": True, "false": False}.get(value.lower(), value) for name, value in pairs}

    @property
    def full(self) -> bool:
        """Whether every weight is trained."""
        return self.method == "full"

    @property
    def model(self) -> str:
        """The preset, and its layers where they are not all."""
        return self.preset if self.layers is None else f"{self.preset}, {self.layers} layers"

    @property
    def trained(self) -> str:
        """The method, the format of the base's weights, and what is trained."""
        base = {"qlora": f"QLoRA, {self.weights.upper()}", "lora": "LoRA", "full": f"full, {self.param_dtype}"}
        parts = [base[self.method] + (f" in {self.base_compute}" if self.base_compute else "")]
        if not self.full:
            parts.append(f"r={self.rank}" + (" on attention" if self.adapters == "attention" else ""))
        if self.optimizer != "adamw":
            parts.append(self.optimizer)
        if self.qat is not None:
            parts.append(f"QAT {self.qat}")
        return ", ".join(parts)

    @property
    def rows(self) -> str:
        """Rows × tokens, of one part of a mesh."""
        tokens = "longest" if self.lengths and self.fill == "longest" else f"{self.seq:,}"
        return f"{self.batch}×{tokens}" + (f" {self.fill}" if self.lengths and self.fill != "longest" else "")

    @property
    def kept(self) -> str:
        """What the backward pass recomputes, and `apart`."""
        return ", ".join(filter(None, (self.checkpointing, self.apart)))

    @property
    def apart(self) -> str:
        """What lies in the host's memory whatever is recomputed, and a chunk that is given."""
        there = {
            "embedding": self.offload_embedding,
            "layers": self.offload_layers,
            "moments": self.offload_optimizer,
        }
        held = [f"{name} on the host" for name, given in there.items() if given]
        chunk = [] if self.mlp_chunk is None else [f"MLP by {self.mlp_chunk:,}"]
        return ", ".join([*held, *chunk])


def resolve_method(method: str | None, weights: str | None) -> tuple[str, str]:
    """Method and weights, where one or both are given: the one follows from the other.

    Args:
        method: a key of METHODS, or None.
        weights: of the base, or None.

    Raises:
        ConfigError: weights that the method does not have.
    """
    if method is None:
        method = next(name for name, formats in METHODS.items() if weights is None or weights in formats)
    if weights is None:
        return method, METHODS[method][0]
    if weights not in METHODS[method]:
        expected = " or ".join(METHODS[method])
        raise ConfigError(f"bench step: --weights: expected {expected} with --method {method}, got {weights}")
    return method, weights
