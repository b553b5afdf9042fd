"""Layers with Gated DeltaNet in place of attention: their settings in config.json and their tensors."""

from convert.errors import unexpected
from convert.families.family import IGNORED, Ignored
from convert.model.layers import Attention, GatedDelta
from convert.model.paths import WeightPath
from convert.model.reader import FULL, Reader
from convert.model.spec import Row, layer_row

LINEAR = "linear_attention"
_BLOCK = GatedDelta.block
INPUT, GATES, OUT = f"{_BLOCK}.qkvz", f"{_BLOCK}.ba", f"{_BLOCK}.out"
#: transformers' values of absent fields.
DEFAULTS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
#: Fields that transformers ignores -> the values of its computation.
NEUTRAL = {
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "mamba_ssm_dtype": ("float32",),
    "mlp_only_layers": ([], None),
}
WITH_PREDICTOR = (*IGNORED, Ignored(r"mtp\..*", "of the module that predicts further tokens", copied=True))
#: Fields about that module.
OF_PREDICTOR = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})


def projection(part: str, out: str, into: str, group: str) -> Row:
    """A matrix [out, in] of the block."""
    return layer_row(f"{_BLOCK}.{part}.weight", out, into, kind="matrix", group=group)


def _vector(part: str) -> Row:
    name = f"{_BLOCK}.{part}"
    return Row(f"model.layers.{{i}}.{name}", WeightPath(0, _BLOCK, part), ("G",), "decay")


def taps(part: str, channels: str) -> Row:
    """Weights of the convolution."""
    return layer_row(f"{_BLOCK}.{part}.weight", channels, "1", "C", kind="taps")


DECAY = (_vector("dt_bias"), _vector("A_log"))
#: Tensors of the recurrence itself: the convolution, its decay, and the scale of its output.
RECURRENT = (
    taps("conv1d", "2J*P+G*U"),
    *DECAY,
    layer_row(f"{_BLOCK}.norm.weight", "U", kind="scale"),
)
#: Projections of its input apart, as in Qwen 3.5, or interleaved, as in Qwen 3 Next.
APART = (
    projection("in_proj_qkv", "2J*P+G*U", "E", INPUT),
    projection("in_proj_z", "G*U", "E", INPUT),
    projection("in_proj_b", "G", "E", GATES),
    projection("in_proj_a", "G", "E", GATES),
    *RECURRENT,
    projection("out_proj", "E", "G*U", OUT),
)
INTERLEAVED = (
    projection("in_proj_qkvz", "2J*P+2G*U", "E", INPUT),
    projection("in_proj_ba", "2G", "E", GATES),
    *RECURRENT,
    projection("out_proj", "E", "G*U", OUT),
)


def layers_of(get: Reader, layers: int, delta: GatedDelta) -> tuple[Attention | GatedDelta, ...]:
    """The mixer of each layer: `layer_types`, or attention in every `full_attention_interval`-th.

    Args:
        get: the config.json.
        layers: number of layers.
        delta: the settings of the others.

    Raises:
        ConvertError: a list of another length or with other names.
    """
    types, interval = get.value("layer_types"), get.integer("full_attention_interval")
    if types is None:
        types = [FULL if (number + 1) % interval == 0 else LINEAR for number in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(kind in (FULL, LINEAR) for kind in types):
        raise get.wrong("layer_types", f"{layers} of {FULL} and {LINEAR}")
    return tuple(Attention() if kind == FULL else delta for kind in types)


def read_delta(get: Reader, *, interleaved: bool = False, **defaults: int) -> GatedDelta:
    """The settings of the recurrence.

    Args:
        get: the config.json.
        interleaved: as of `GatedDelta`.
        defaults: values of absent fields and nulls, by name, which the family has not.

    Raises:
        ConvertError: a size is missing or wrong, or the heads of values are no multiple of those of keys.
    """
    heads, sizes = (
        [get.integer(name, defaults.get(name)) for name in (f"linear_{of.format(part)}" for part in ("key", "value"))]
        for of in ("num_{}_heads", "{}_head_dim")
    )
    keys, values = heads
    if values % keys:
        raise get.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads, {keys}")
    delta = GatedDelta(
        *(*heads, *sizes),
        taps=get.integer("linear_conv_kernel_dim"),
        activation=get.activation("hidden_act"),
        interleaved=interleaved,
    )
    for name, size in delta.sizes.items():
        if size >= 2**31:
            raise unexpected(get.where, "linear_num_value_heads", f"a width below 2³¹ ({name})", size)
    return delta
