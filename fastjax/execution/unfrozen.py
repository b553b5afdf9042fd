"""Full fine-tuning of a part of a model: the other arrays as constants of the decoder."""

from flax import nnx

from convert.model.paths import WeightPath
from fastjax.lora.params import Constant
from fastjax.models.decoder import Decoder
from fastjax.models.leaves import Leaf, leaf_at


def freeze(decoder: Decoder, frozen: frozenset[WeightPath]) -> None:
    """Make arrays of a decoder constants.

    Args:
        decoder: changed in place; the layers of a stack agree on what is frozen.
        frozen: the paths of `models.module_names.frozen_arrays`.
    """
    if not frozen:
        return
    places = [
        (module, name, variable, leaf_at((*path, name)))
        for path, module in nnx.iter_graph(decoder)
        if isinstance(module, nnx.Module)
        for name, variable in vars(module).items()
        if isinstance(variable, nnx.Param)
    ]
    # A table that is the head's too is one variable at both.
    constants = {
        id(variable): Constant(variable[...]) for *_, variable, leaf in places if _path(leaf, decoder) in frozen
    }
    for module, name, variable, _ in places:
        if id(variable) in constants:
            setattr(module, name, constants[id(variable)])


def _path(leaf: Leaf, decoder: Decoder) -> WeightPath:
    """An array's path; of a stack that of its first layer."""
    path = WeightPath.parse(".".join(leaf.keys))
    if leaf.stack is None or leaf.position is None:
        return path
    return path.in_layer(decoder.plan[leaf.stack].start + leaf.position)
