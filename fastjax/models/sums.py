"""Sums over the layers beside the residual stream, such as the loads of routers."""

from jaxtyping import Array, Float

#: By name; none: an empty dictionary, which compiles to nothing.
Sums = dict[str, Float[Array, "..."]]


def added(left: Sums, right: Sums) -> Sums:
    """The sums of both; a name may be missing on either side.

    Args:
        left: of some layers.
        right: of other layers.
    """
    return left | {name: left[name] + value if name in left else value for name, value in right.items()}
