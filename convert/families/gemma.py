"""Gemma 1, 2 and 3, the text half of Gemma 3 with a vision tower included."""

from convert.families.blocks import ATTENTION, MLP, QK_NORM, family, norm
from convert.families.table import Family, Ignored, nested

_BIASES = {"attention_bias": ("qkv_bias", "o_bias")}
_AROUND_MLP = (
    norm("post_attention_layernorm"),
    norm("pre_feedforward_layernorm"),
    MLP,
    norm("post_feedforward_layernorm"),
)

GEMMA = family(
    "gemma",
    norm("input_layernorm"),
    ATTENTION,
    norm("post_attention_layernorm"),
    MLP,
    defaults={"tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 16},
    switches=_BIASES,
)
GEMMA2 = family(
    "gemma2",
    norm("input_layernorm"),
    ATTENTION,
    *_AROUND_MLP,
    defaults={"tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 4},
    switches=_BIASES,
)
GEMMA3_TEXT = family(
    "gemma3_text",
    norm("input_layernorm"),
    ATTENTION,
    QK_NORM,
    *_AROUND_MLP,
    # The text halves on the Hub leave out what is as in the 4B model.
    defaults={
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    switches=_BIASES,
)


def _with_vision_tower(files: dict[str, str], beside: str, others: tuple[Family, ...] = ()) -> Family:
    """Gemma 3 as `Gemma3ForConditionalGeneration` has it, with the names that a checkpoint gives its parts."""
    reason = "of the vision tower; only text is trained"
    names = (rf"{beside}vision_tower\..*", rf"{beside}multi_modal_projector\..*")
    return nested(
        GEMMA3_TEXT,
        model_type="gemma3",
        files=files,
        modules={"model.": "model.language_model."},
        ignored=tuple(Ignored(name, reason, copied=True) for name in names),
        beside=("model.multi_modal_projector", "model.vision_tower"),
        others=others,
    )


#: As the classes of transformers have been called since 4.52; files on the Hub keep the earlier names.
_BY_CLASS = _with_vision_tower({"model.": "model.language_model.", "lm_head": "lm_head"}, r"model\.")
GEMMA3 = _with_vision_tower(
    {"model.": "language_model.model.", "lm_head": "language_model.lm_head"}, "", others=(_BY_CLASS,)
)
