"""Rematerialisation: blocks of layers under their policy, and the compiler's options that it needs."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from fastjax.errors import ConfigError
from fastjax.execution.policies import POLICIES, offloads
from fastjax.parallel.gather import everything_but_gathered
from fastjax.residuals import LAYER_INPUT

#: Of the steps that offload from layers called one by one: copies between device and host that are far apart stay so.
#: Without the fences XLA moves them together, and everything is on the device again.
_FENCES = {
    "xla_gpu_experimental_scheduler_memory_fencing_threshold_bytes": 1 << 20,
    "xla_gpu_experimental_scheduler_memory_fencing_slack_windows": 1,
}
#: Of the steps whose scans gather frozen weights, or activations along `tensor`. XLA takes a gather to be as quick as
#: the link at its best, and begins it so late that a part of it is hidden; with fixed costs it begins several kernels
#: ahead.
_GATHERS_EARLY = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_analytical_sol_latency_estimator": False,
}
#: Of the steps that offload: no CUDA graphs, whose nodes run one after another, copies between device and host too.
_NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 2**31 - 1}


def checkpointed(
    block: Callable[..., Any], remat: str, *, scanned: bool, gathers: bool = False, moves: bool = True
) -> Callable[..., Any]:
    """A block of layers with its rematerialisation.

    Args:
        block: pure, its first argument the layer's input.
        remat: a name of `POLICIES`.
        scanned: whether it is a scan's body, whose iterations are apart already.
        gathers: whether it gathers weights of other devices, which no policy keeps.
        moves: whether what the policy offloads goes to the host; False: the caller sends it there.
    """
    policy = POLICIES[remat]
    if policy is not None and not moves:
        policy = policy._replace(
            kept=(*policy.kept, *(name for name in policy.offloaded if name != LAYER_INPUT)), offloaded=()
        )
    if policy is None:
        if not gathers:
            return block
        return jax.checkpoint(block, policy=everything_but_gathered, prevent_cse=not scanned)
    if not policy.offloaded:
        keep = jax.checkpoint_policies.save_only_these_names(*policy.kept) if policy.kept else None
        return jax.checkpoint(block, policy=keep, prevent_cse=not scanned)
    move = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(policy.kept),
        names_which_can_be_offloaded=list(policy.offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def named(x: Any, *rest: Any) -> Any:
        return block(checkpoint_name(x, LAYER_INPUT), *rest)

    return jax.checkpoint(named, policy=move, prevent_cse=not scanned)


def compiler_options(graphdef: nnx.GraphDef, *, gathers: bool = False) -> dict[str, Any]:
    """XLA's options that a decoder's policy needs.

    Args:
        graphdef: of the decoder.
        gathers: whether its layers gather frozen weights or activations from other devices.

    Raises:
        ConfigError: all layers are called one by one and offload, which needs jax 0.11.
    """
    facts: dict[str, Any] = {
        name: getattr(leaf, "value", None) for name, leaf in graphdef.attributes if name in ("executor", "plan")
    }
    offloading = [stack for stack in facts["plan"] if offloads(facts["executor"].policy(stack.start))]
    single = [stack for stack in offloading if stack.count == 1]
    if not offloading:
        return dict(_GATHERS_EARLY) if gathers and any(stack.count > 1 for stack in facts["plan"]) else {}
    if not single:
        return dict(_NO_GRAPHS)
    if jax.__version_info__ < (0, 11):
        if len(single) < len(facts["plan"]):
            return dict(_NO_GRAPHS)
        raise ConfigError(
            f"layer_loop: expected 'scan' where activations are offloaded, got layers one by one; with jax "
            f"{jax.__version__} XLA brings the copies back to the device (jax 0.11 does not)"
        )
    return {**_NO_GRAPHS, **_FENCES}
