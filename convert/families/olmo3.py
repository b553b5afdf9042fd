"""OLMo 3: OLMo 2 with windows in three of four layers and rotary positions by layer type."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import NOT_COMPARED, Family
from convert.families.olmo2 import CONSTANTS
from convert.families.windows import windows
from convert.model.reader import Reader
from convert.model.rope import read_ropes
from convert.model.spec import ATTENTION_GROUPS


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    mixers = windows(get, fields, lambda number: (number + 1) % 4 != 0, required=True, local_rope=True)
    return {**read_ropes(get, fields), **mixers}


OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    # rope_theta beside the settings belongs to full-attention layers alone
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5, "rope_local_base_freq": 5e5},
    switches={"attention_bias": ATTENTION_GROUPS},
    constants=CONSTANTS,
    read=_read,
    gguf=NOT_COMPARED,
)
