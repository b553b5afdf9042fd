"""The options of loading a model: what is computed, in what it is held, and how it is executed.

Declared, explained and checked here alone. The section `model` of a run's settings is this class with the model's name,
and `FastLanguageModel` takes its fields as keywords; all else takes the object.
"""

import dataclasses
import re
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Interval, MinLen, Predicate

from fastjax.errors import ConfigError
from fastjax.execution.policies import POLICIES
from fastjax.limits import MAX_ROW_TOKENS
from fastjax.options import checked, full_name
from fastjax.options.kinds import Count

Options = TypeVar("Options", bound="LoadOptions")

_POLICY = re.compile(rf"auto|({'|'.join(POLICIES)})(:[0-9]{{1,6}})?")

Length = Annotated[int, Interval(ge=2, le=MAX_ROW_TOKENS)]
DType = Literal["bfloat16", "float16", "float32"]
Recompute = Annotated[
    bool | Annotated[str, Predicate(lambda text: _POLICY.fullmatch(text) is not None)],
    f"true or false or one of auto, {', '.join(POLICIES)}, or NAME:k for the first k layers",
]
"""The operations that the backward pass computes again."""
NewToken = Annotated[Any, Predicate(lambda token: isinstance(getattr(token, "content", token), str)), "strings"]
"""A text, or a `tokenizers.AddedToken`."""

#: Fields that change how a step is executed or checked, and nothing that it computes or keeps.
EXECUTION = (
    *("use_gradient_checkpointing", "offload_embedding", "offload_layers", "mlp_chunk", "layer_loop"),
    "allow_nonfinite",
)


@checked("")
class LoadOptions:
    """How a model is loaded, held and executed."""

    max_seq_length: Length | None = None
    """length of a row, in tokens; null: 2048, or the model's limit if that is less."""
    dtype: DType | None = None
    """dtype of the computation; null: bfloat16 on a GPU (float16 before Ampere), float32 on a CPU. float16 brings
    dynamic loss scaling, float32 means float32 in every product; a quantised base keeps the values that its format
    decodes to."""
    param_dtype: DType = "float32"
    """dtype of the trained arrays."""
    float32_modules: list[str] | None = None
    """modules whose weights and computation stay in float32 whatever dtype says, by name or by the end of it: norm,
    lm_head, layers.0.mlp."""
    load_in_4bit: bool = True
    """hold the frozen weights of the layers in NF4 (QLoRA)."""
    base_compute: Literal["float8", "float8_backward"] | None = None
    """float8: the products of the layers' frozen matrices, forward and to their inputs, are computed in float8_e4m3fn,
    both operands rounded to it with a scale a row, on an NVIDIA GPU of compute capability 8.9 or more: a step is a
    third to a half faster, at some cost in loss; adapters, attention and head stay as dtype says, which is bfloat16
    then. float8_backward: those to their inputs alone; outputs are as without, gradients rounded. null: as dtype."""
    full_finetuning: bool = False
    """train every weight instead of an adapter."""
    unfrozen_parameters: Annotated[list[str], MinLen(1)] | None = None
    """with full_finetuning: the weights that are trained, the others stay: regular expressions for the beginnings of
    names in the folder's files, in which a layer may count from the end, as model.layers.-1.; null: every weight."""
    new_tokens: list[NewToken] | None = None
    """tokens to add to the vocabulary; embedding and head grow with them, by rows that start as the mean of the
    others."""
    special_tokens_map: dict[Literal["bos_token", "eos_token", "unk_token", "pad_token"], str] | None = None
    """the tokenizer's special tokens by their role, such as {eos_token: "<|im_end|>"}, each a token that it has or one
    of new_tokens; saved with it. null: the folder's."""
    rope_scaling: dict[str, Any] | None = None
    """replaces the scaling of the rotary positions, for longer contexts, as config.json has it: {rope_type: yarn,
    factor: 4.0}; default, linear, dynamic, yarn, longrope or llama3, the factor counted from the length that the model
    was pretrained on."""
    use_gradient_checkpointing: Recompute = "auto"
    """the backward pass recomputes: none: nothing; false or projections: the operations between the projections and the
    attention; attention: all but the attention; true or full: all but the layers' inputs; offload, offload_attention:
    as full and attention, with what is kept in the host's memory; offload_projections: the MLP, and what lies between
    the projections and the attention, with the same there; projections:8: the first eight layers by projections, the
    others by full (by offload after offload_attention:8). auto: of all but none the fastest that the GPU has memory
    for, full on a CPU; a resumed run keeps its choice."""
    offload_embedding: bool = False
    """hold the table of embeddings in the host's memory, where it is frozen and not the head's too: 1 GiB of the GPU's
    for Llama 3 8B, against a few milliseconds a step."""
    offload_layers: bool = False
    """hold the matrices of the layers in the host's memory, where they are frozen and the layers are scanned. The GPU
    has those of two layers at a time, and fetches all of them twice a step, beside its products: 35 GB of a 70B model
    in NF4, 0.7 seconds over PCIe 5."""
    mlp_chunk: Count | Literal["auto"] | None = "auto"
    """tokens that an MLP computes at a time, forward and backward, so that it takes memory for so many alone (a tiled
    MLP). auto: 2048 where a GPU has 16384 tokens or more at a time and the backward pass recomputes the MLP anyway;
    null: all. Mixtures of experts compute all."""
    allow_nonfinite: bool = False
    """let NaN and infinity in the base's or the adapter's weights through instead of refusing them by the tensor's
    name; a matrix that is quantised is refused with any."""
    layer_loop: Literal["scan", "unroll"] = "scan"
    """scan over the layers (compile time independent of depth) or unroll them (a few percent faster)."""

    def __post_init__(self) -> None:
        unrolled = "" if self.layer_loop == "scan" else "layer_loop: unroll"
        trained = "full_finetuning: true" if self.full_finetuning else ""
        narrow = "" if self.dtype in (None, "bfloat16") else f"dtype: {self.dtype}"
        frozen = "; a 4-bit weight is frozen and only an adapter can be trained over it"
        rules = (
            ("offload_embedding", trained, ""),
            ("offload_layers", trained or unrolled, ""),
            ("base_compute", trained or narrow, ""),
            ("load_in_4bit", trained, frozen),
        )
        if self.unfrozen_parameters is not None and not self.full_finetuning:
            where = full_name(self, "unfrozen_parameters")
            raise ConfigError(f"{where}: expected null without {full_name(self, 'full_finetuning')}: true, got some")
        for name, beside, reason in rules:
            value = getattr(self, name)
            if value and beside:
                expected, got = ("false", "true") if value is True else ("null", value)
                beside = full_name(self, beside)
                raise ConfigError(f"{full_name(self, name)}: expected {expected} with {beside}, got {got}{reason}")

    @classmethod
    def for_inference(cls, *, in_nf4: bool = False, **others: Any) -> "LoadOptions":
        """Options of a model that computes and is not trained: it keeps the formats of its folder.

        Args:
            in_nf4: quantise matrices of more bits to NF4 nevertheless.
            others: further fields.
        """
        return cls(load_in_4bit=in_nf4, **others)

    def settled(self, **fields: Any) -> "LoadOptions":
        """The options of a model that is in memory.

        Args:
            fields: that the folder and the device have decided.
        """
        tokens = None if self.new_tokens is None else list(map(str, self.new_tokens))
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(LoadOptions)}
        policy = "auto" if self.use_gradient_checkpointing == "auto" else self.remat
        return LoadOptions(**{**given, "new_tokens": tokens, "use_gradient_checkpointing": policy, **fields})

    @property
    def in_nf4(self) -> bool:
        """Whether matrices of more than 4 bits are quantised to NF4 as they are read."""
        return self.load_in_4bit

    def without_chunks(self: Options) -> Options:
        """Leave out a given number of tokens that an MLP computes at a time."""
        return dataclasses.replace(self, mlp_chunk=None) if isinstance(self.mlp_chunk, int) else self

    @property
    def scans(self) -> bool:
        """Whether equal layers are scanned."""
        return self.layer_loop == "scan"

    @property
    def remat(self) -> str:
        """The policy of rematerialisation, as `policies.policy_of` takes it, until a run chooses another one."""
        names = {True: "full", False: "projections", "auto": "full"}
        return names.get(self.use_gradient_checkpointing, str(self.use_gradient_checkpointing))
