"""MLIR contexts that are used for several programs, as JAX 0.11 does by itself: a twentieth of all tests' time."""

import threading

from jax._src.interpreters import mlir

from pallas_kernels.compat import JAX_VERSION

#: As often as JAX 0.11 uses one: what a context interns lives as long as it does.
USES = 10


class _Contexts(threading.local):
    """Of each thread the last context, and how many programs it has yet to serve."""

    def __init__(self, make):
        self.make, self.left = make, 0

    def __call__(self):
        if not self.left:
            self.context, self.left = self.make(), USES
        self.left -= 1
        return self.context


def install() -> None:
    """Let JAX 0.10 do so too."""
    if JAX_VERSION < (0, 11):
        mlir.make_ir_context = _Contexts(mlir.make_ir_context)
