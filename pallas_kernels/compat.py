"""The one place that knows how supported JAX versions differ (0.10.2 and 0.11)."""

import jax

JAX_VERSION: tuple[int, ...] = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
