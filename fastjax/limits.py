"""Limits on settings and files, against mistakes and attacks on memory and time.

The limits of JSON stand in `convert.strict_json`.
"""

MAX_SETTINGS_BYTES = 2**17
"""Bytes of a YAML file with settings, which is parsed in about a second."""

MAX_INTEGER = 2**32 - 1
"""The largest whole number among the settings: seeds have 32 bits, and nothing is counted further."""

MAX_MAGNITUDE = 3e38
"""The largest other number among the settings: float32 and bfloat16 hold it."""

MAX_STEPS = 10_000_000
"""Steps of a run, whose learning rates are all computed beforehand."""

MAX_ROW_TOKENS = 2**24
"""Tokens of a row."""

MAX_ROWS = 2**16
"""Rows of a batch on a device, and portions of a step."""

MAX_STEP_TOKENS = 2**26
"""Tokens of a step on a device: a batch of so many takes 1 GiB on the host."""

MAX_RANK = 2**16
"""The rank of an adapter."""

MAX_LINE_BYTES = 2**26
"""Bytes of a line of JSON lines or CSV, and of a field of CSV."""

MAX_YAML_VALUES = 100_000
"""Values and keys of a YAML text, those of an alias counted wherever it stands."""
