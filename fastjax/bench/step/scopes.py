"""The part of the model that an instruction of the compiled step belongs to, and the pass that it is in.

XLA keeps the scopes under which JAX traced an instruction (`jax.named_scope`) in its metadata, a fusion those of its
result; the trace names the instruction that a kernel is of.
"""

import re

_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*? metadata=\{[^}]*?op_name="([^"]*)"', re.MULTILINE)
#: Scope -> what it is called, from the innermost out.
_PARTS = {
    "optimizer": "optimizer",
    "attention": "attention",
    "mlp": "mlp",
    "head": "head",
    "embed": "embed",
    "layers": "layers, other",
    "jvp": "loss",
}


def scopes(program: str) -> dict[str, str]:
    """Instruction -> part and pass, "attention, backward".

    Args:
        program: the compiled step's text.
    """
    return {name: _scope(path) for name, path in _INSTRUCTION.findall(program)}


def _scope(path: str) -> str:
    words = set(re.findall(r"\w+", path))
    part = next((called for scope, called in _PARTS.items() if scope in words), None)
    if part is None or part == "optimizer":
        return part or "other"
    if "rematted_computation" in words:
        return f"{part}, recomputed"
    return f"{part}, {'backward' if 'transpose(' in path else 'forward'}"
