"""Cohere's Command R7B and A: Command R with three windowed layers in four, and rotary positions in these alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from convert.families.cohere import COHERE, NUMBERS
from convert.families.gguf import Architecture
from convert.families.windows import windows
from convert.model.layers import Attention
from convert.model.reader import Reader
from convert.model.spec import ATTENTION_GROUPS


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    period = get.integer("sliding_window_pattern")
    width = fields["hidden_size"] // fields["num_attention_heads"]
    if fields["head_dim"] != width:
        raise get.wrong("head_dim", f"{width}, the width over the heads, which transformers takes")
    found = windows(get, fields, lambda number: (number + 1) % period != 0, required=True)
    return {"mixers": tuple(one if one.sliding_window else Attention(rope=None) for one in found["mixers"])}


COHERE2 = dataclasses.replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    defaults={**COHERE.defaults, "rope_theta": 1e4, "sliding_window": 4096, "sliding_window_pattern": 4},
    switches={"attention_bias": ATTENTION_GROUPS},
    read=_read,
    neutral={  # of published files; transformers ignores them
        **{"layer_switch": (4,), "order_of_interleaved_layers": ("local_attn_first",), "rotary_pct": (1,)},
        **{"position_embedding_type": ("rope_gptj",), "use_gated_activation": (True,), "use_parallel_block": (True,)},
        **{"use_embedding_sharing": (True,), "use_parallel_embedding": (True, False)},
    },
    gguf=Architecture(
        "COHERE2",
        square=True,
        period=4,
        position_free=4,
        numbers=NUMBERS,
        scaling_named=True,
    ),
)
