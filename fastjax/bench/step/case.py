"""The settings of a measured step, and named sets of them; no JAX."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastjax.bench.options import DTYPES, option
from fastjax.bench.presets import PRESETS, preset_config
from fastjax.errors import ConfigError
from fastjax.execution.options import LoadOptions
from fastjax.training.config.qat import NAMED

if TYPE_CHECKING:
    from convert.model.config import ModelConfig
    from fastjax.parallel import MeshShape

#: Method → the formats that its base's weights may have, the usual one first.
METHODS = {"qlora": ("nf4", "mxfp4"), "lora": ("16bit",), "full": ("16bit",)}


def several(default: Any, help: str, **how: Any) -> Any:
    """A field of which the command line takes several values, a case for each; by itself only the default."""
    return option(default, f"{help}; a case for each", nargs="+", **how)


@dataclasses.dataclass(frozen=True)
class StepCase:
    """A measured step: the options of `fastjax bench step`, whose help describes them."""

    preset: str = option("llama3-8b", "shape of the model", choices=tuple(PRESETS))
    batch: int = option(4, "rows; on a mesh of each part along data, fsdp and expert, as in training")
    seq: int = option(2048, "tokens a row")
    checkpointing: str = several("projections", "what the backward pass recomputes, as use_gradient_checkpointing")
    layer_loop: str = several("scan", "of the layers", choices=("scan", "unroll"))
    method: str = option("qlora", "full: every weight is trained; lora follows from --weights", choices=tuple(METHODS))
    weights: str = option(
        "nf4", "of the base; mxfp4: a mixture's experts alone; 16bit", choices=("nf4", "mxfp4", "16bit")
    )
    rank: int = option(16, "of the adapters")
    adapters: str = option("all", "on every projection, experts included, or attention's", choices=("all", "attention"))
    optimizer: str = option("adamw", "of the step", choices=("adamw", "adamw_16bit", "adamw_8bit"))
    param_dtype: str = option(
        "float32", "of what is trained; bfloat16 with --method full", choices=("bfloat16", "float32")
    )
    dtype: str | None = option(None, "of the computation; nothing: by the device", choices=DTYPES)
    steps: int = option(10, "timed steps")
    warmup: int = option(3, "steps before these")
    attention: str | None = several(None, "implementation of attention; nothing: the model's own choice")
    lengths: tuple[int, ...] | None = option(
        None, "rows packed of documents of these lengths: .npy, or a number a line", type=Path, metavar="FILE"
    )
    layers: int | None = option(None, "the preset's first ones alone", metavar="N")
    offload_embedding: bool = option(False, "the table of embeddings in the host's memory")
    offload_layers: bool = option(False, "the frozen matrices of scanned layers there")
    offload_optimizer: bool = option(False, "AdamW's moments of matrices there")
    mlp_chunk: int | None = option(None, "tokens that an MLP computes at a time", metavar="N")
    mesh: "MeshShape | None" = several(None, "devices: one, or sizes of axes as in fsdp=2,tensor=2")
    compiler_options: tuple[str, ...] = several((), "XLA's options, NAME=VALUE,NAME=VALUE, or none")
    base_compute: str | None = option(
        None, "all of the frozen matrices' products in float8, or the gradients'", choices=("float8", "float8_backward")
    )
    qat: str | None = option(None, "quantisation-aware training", choices=tuple(NAMED))
    seed: int = option(3407, "of the adapters' first values", type=int)

    @property
    def hf_config(self) -> dict[str, Any]:
        """The config.json of the model, with positions for its rows.

        Raises:
            ConfigError: layers or weights that the preset does not have.
        """
        config = preset_config(self.preset, self.layers, self.weights)
        if "max_position_embeddings" in config:
            config["max_position_embeddings"] = max(config["max_position_embeddings"], self.seq)
        return config

    @property
    def config(self) -> "ModelConfig":
        """The model's."""
        from convert.families.mapping import read_config

        return read_config(self.hf_config)

    @property
    def options(self) -> LoadOptions:
        """The base's load options; all of its arrays are on the device."""
        return LoadOptions(
            max_seq_length=self.seq,
            dtype=self.dtype,  # pyright: ignore[reportArgumentType]
            param_dtype=self.param_dtype,  # pyright: ignore[reportArgumentType]
            load_in_4bit=self.weights != "16bit",
            base_compute=self.base_compute,  # pyright: ignore[reportArgumentType]
            full_finetuning=self.method == "full",
            use_gradient_checkpointing=self.checkpointing,
            mlp_chunk=self.mlp_chunk or "auto",
            layer_loop=self.layer_loop,  # pyright: ignore[reportArgumentType]
        )

    @property
    def devices(self) -> int:
        """Their number."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def step_rows(self) -> int:
        """Rows of all devices."""
        return self.batch * (1 if self.mesh is None else self.mesh.replicas)

    def plain(self, **changes: Any) -> "StepCase":
        """One device's case of the same numbers, computed in the plainest way.

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
    def model(self) -> str:
        """The preset, and its layers where they are not all."""
        return self.preset if self.layers is None else f"{self.preset}, {self.layers} layers"

    @property
    def trained(self) -> str:
        """The method, the format of the base's weights, and what is trained."""
        base = {"qlora": f"QLoRA, {self.weights.upper()}", "lora": "LoRA", "full": f"full, {self.param_dtype}"}
        parts = [base[self.method] + (f" in {self.base_compute}" if self.base_compute else "")]
        if self.method != "full":
            parts.append(f"r={self.rank}" + (" on attention" if self.adapters == "attention" else ""))
        if self.optimizer != "adamw":
            parts.append(self.optimizer)
        if self.qat is not None:
            parts.append(f"QAT {self.qat}")
        return ", ".join(parts)

    @property
    def rows(self) -> str:
        """Rows × tokens, of one part of a mesh."""
        return f"{self.batch}×{self.seq:,}" + (" packed" if self.lengths else "")

    @property
    def kept(self) -> str:
        """The policy of rematerialisation, the arrays in the host's memory and a given chunk, in words."""
        there = {
            "embedding": self.offload_embedding,
            "layers": self.offload_layers,
            "moments": self.offload_optimizer,
        }
        held = [f"{name} on the host" for name, given in there.items() if given]
        chunk = [] if self.mlp_chunk is None else [f"MLP by {self.mlp_chunk:,}"]
        return ", ".join(filter(None, (self.checkpointing, *held, *chunk)))

    @property
    def xla_options(self) -> dict[str, str | bool]:
        """XLA's options by name."""
        pairs = (option.split("=", 1) for option in self.compiler_options)
        return {name: {"true": True, "false": False}.get(value.lower(), value) for name, value in pairs}


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
