"""Routing of tokens to experts: choice, order by expert, weighted sum, balance."""

from pallas_kernels.moe_routing.api import (
    Load,
    Order,
    RouterSettings,
    Routing,
    combine,
    load_balancing_loss,
    measure_load,
    route,
    sort_by_expert,
    z_loss,
)

__all__ = [
    "Load",
    "Order",
    "RouterSettings",
    "Routing",
    "combine",
    "load_balancing_loss",
    "measure_load",
    "route",
    "sort_by_expert",
    "z_loss",
]
