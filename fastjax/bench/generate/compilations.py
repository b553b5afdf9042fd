"""The programs that are compiled while something runs, as JAX tells of them."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


@dataclasses.dataclass
class Compilations:
    """Programs so far.

    Attributes:
        count: their number; one that is read back from JAX's cache counts.
        seconds: of lowering and compiling, or reading back; tracing is left out.
    """

    count: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def counted() -> Iterator[Compilations]:
    """Count the programs that are compiled in the block, of all threads."""
    found = Compilations()

    def heard(event: str, duration_secs: float, **_: str | int) -> None:
        if event in (_COMPILED, _LOWERED):
            found.count += event == _COMPILED
            found.seconds += duration_secs

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
