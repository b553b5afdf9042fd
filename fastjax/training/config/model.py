"""The sections `model` and `lora`: the arguments of `FastLanguageModel.from_pretrained` and `.get_peft_model`."""

import dataclasses
import re
from typing import Any, Literal

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.execution.policies import POLICIES
from fastjax.limits import MAX_RANK, MAX_ROW_TOKENS
from fastjax.lora.settings import LoraSettings
from fastjax.training.config.checks import check_section, expect


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """The base model and how it is held.

    Attributes:
        model_name: folder of the base model in Hugging Face format, or its name on the hub, org/model or
            org/model@revision; the run keeps the commit that it took.
        max_seq_length: length of a row, in tokens.
        dtype: dtype of the computation; null: bfloat16 on a GPU (float16 before Ampere), float32 on a CPU. float16
            brings dynamic loss scaling, float32 means float32 in every product; a quantised base keeps the values that
            its format decodes to.
        param_dtype: dtype of the trained arrays.
        float32_modules: modules whose weights and computation stay in float32 whatever dtype says, by name or by the
            end of it: norm, lm_head, layers.0.mlp.
        load_in_4bit: hold the frozen weights of the layers in NF4 (QLoRA).
        base_compute: float8: the products of the layers' frozen matrices, forward and to their inputs, are computed in
            float8_e4m3fn, both operands rounded to it with a scale a row, on an NVIDIA GPU of compute capability 8.9 or
            more: a step is a third to a half faster, at some cost in loss; adapters, attention and head stay as dtype
            says, which is bfloat16 then. null: as dtype.
        full_finetuning: train every weight instead of an adapter.
        new_tokens: tokens to add to the vocabulary; embedding and head grow with them, by rows that start as the mean
            of the others.
        rope_scaling: replaces the scaling of the rotary positions, for longer contexts, as config.json has it:
            {rope_type: yarn, factor: 4.0}; default, linear, dynamic, yarn, longrope or llama3, the factor counted from
            the length that the model was pretrained on.
        use_gradient_checkpointing: the backward pass recomputes: none: nothing; false or projections: the operations
            between the projections and the attention; attention: all but the attention; true or full: all but the
            layers' inputs; offload, offload_attention: as full and attention, with what is kept in the host's memory;
            offload_projections: the MLP, and what lies between the projections and the attention, with the same there;
            projections:8: the first eight layers by projections, the others by full (by offload after
            offload_attention:8). auto: of all but none the fastest that the GPU has memory for, full on a CPU; a
            resumed run keeps its choice.
        offload_embedding: hold the table of embeddings in the host's memory, where it is frozen and not the head's too:
            1 GiB of the GPU's for Llama 3 8B, against a few milliseconds a step.
        offload_layers: hold the matrices of the layers in the host's memory, where they are frozen and the layers are
            scanned. The GPU has those of two layers at a time, and fetches all of them twice a step, beside its
            products: 35 GB of a 70B model in NF4, 0.7 seconds over PCIe 5.
        mlp_chunk: tokens that an MLP computes at a time, forward and backward, so that it takes memory for so many
            alone (a tiled MLP). auto: 2048 where a GPU has 16384 tokens or more at a time and the backward pass
            recomputes the MLP anyway; null: all. Mixtures of experts compute all.
        allow_nonfinite: let NaN and infinity in the base's or the adapter's weights through instead of refusing them by
            the tensor's name; a matrix that is quantised is refused with any.
        layer_loop: scan over the layers (compile time independent of depth) or unroll them (a few percent faster).
    """

    model_name: str
    max_seq_length: int = 2048
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    param_dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    float32_modules: list[str] | None = None
    load_in_4bit: bool = True
    base_compute: Literal["float8"] | None = None
    full_finetuning: bool = False
    new_tokens: list[str] | None = None
    rope_scaling: dict[str, Any] | None = None
    use_gradient_checkpointing: bool | str = "auto"
    offload_embedding: bool = False
    offload_layers: bool = False
    mlp_chunk: int | Literal["auto"] | None = "auto"
    allow_nonfinite: bool = False
    layer_loop: Literal["scan", "unroll"] = "scan"

    def __post_init__(self) -> None:
        check_section("model", self)
        expect("model.max_seq_length", self.max_seq_length, self.max_seq_length >= 2, "at least 2")
        policy = self.use_gradient_checkpointing
        if isinstance(policy, str) and not re.fullmatch(rf"auto|({'|'.join(POLICIES)})(:[0-9]{{1,6}})?", policy):
            raise ConfigError(
                f"model.use_gradient_checkpointing: expected true or false or one of auto, {', '.join(POLICIES)}, "
                f"or NAME:k for the first k layers, got {shown(policy, 80)}"
            )
        for name in ("offload_embedding", "offload_layers"):
            if getattr(self, name) and self.full_finetuning:
                raise ConfigError(f"model.{name}: expected false with model.full_finetuning: true, got true")
        if self.offload_layers and self.layer_loop != "scan":
            raise ConfigError("model.offload_layers: expected false with model.layer_loop: unroll, got true")
        if self.base_compute is not None and (self.full_finetuning or self.dtype not in (None, "bfloat16")):
            beside = "full_finetuning: true" if self.full_finetuning else f"dtype: {self.dtype}"
            raise ConfigError(f"model.base_compute: expected null with model.{beside}, got {self.base_compute}")
        chunk = self.mlp_chunk
        expect("model.mlp_chunk", chunk, chunk is None or chunk == "auto" or chunk >= 1, "of at least 1")
        fits = self.max_seq_length <= MAX_ROW_TOKENS
        expect("model.max_seq_length", self.max_seq_length, fits, f"of at most {MAX_ROW_TOKENS}")
        if self.full_finetuning and self.load_in_4bit:
            raise ConfigError(
                "model.load_in_4bit: expected false with model.full_finetuning: true, got true; "
                "a 4-bit weight is frozen and only an adapter can be trained over it"
            )


@dataclasses.dataclass(frozen=True)
class AdapterStart:
    """Where the adapter comes from.

    Attributes:
        adapter: folder of a PEFT adapter to start from, or its name on the hub; it brings its own settings, so no
            other key but lora_dropout may stand beside it.
    """

    adapter: str | None = None


@dataclasses.dataclass(frozen=True)
class LoraSection(LoraSettings, AdapterStart):
    """The adapter, with PEFT's names and meanings."""

    def __post_init__(self) -> None:
        check_section("lora", self)
        expect("lora.r", self.r, self.r >= 1, "at least 1")
        expect("lora.r", self.r, self.r <= MAX_RANK, f"of at most {MAX_RANK}")
        ranks = list((self.rank_pattern or {}).values())
        expect("lora.rank_pattern", ranks, all(1 <= r <= MAX_RANK for r in ranks), f"with ranks from 1 to {MAX_RANK}")
        expect("lora.random_state", self.random_state, self.random_state >= 0, "in [0, 2^32)")
        dropout = self.lora_dropout
        expect("lora.lora_dropout", dropout, dropout is None or 0 <= dropout < 1, "in [0, 1)")
        if self.adapter is not None:
            others = [f for f in dataclasses.fields(self) if f.name not in ("adapter", "lora_dropout")]
            changed = [field.name for field in others if getattr(self, field.name) != field.default]
            if changed:
                raise ConfigError(
                    f"lora.adapter: expected no settings beside an adapter to start from, which has its own, got "
                    f"{', '.join(f'lora.{name}' for name in changed)}"
                )
