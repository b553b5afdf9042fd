"""One layer's arrays and adapters, made into the modules that its mixer and its feed-forward part consist of."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from convert.model.config import ModelConfig
from convert.model.layers import Layer
from convert.model.paths import WeightPath
from fastjax.models.layout import array_at
from fastjax.models.norms import Norm
from fastjax.models.projection import Projection


class LayerInputs(NamedTuple):
    """The arrays and settings that a layer is built of.

    Attributes:
        config: the model's.
        index: the layer's number.
        weights: its tree of arrays.
        adapters: its adapters by path.
        float32: paths of its float32 modules.
        base_compute: of its frozen matrices (`Precision.base_compute`).
    """

    config: ModelConfig
    index: int
    weights: Mapping[str, Any]
    adapters: Mapping[str, Any]
    float32: Collection[str] = ()
    base_compute: str | None = None

    @property
    def layer(self) -> Layer:
        """The layer's kind."""
        return self.config.layers[self.index]

    @property
    def groups(self) -> Collection[str]:
        """Names of its groups of projections."""
        return self.config.groups(self.index)

    def projection(self, name: str) -> Projection:
        """The projections of a group, such as "mlp.down"."""
        group = self.config.groups(self.index)[name]
        modules = {part: WeightPath(None, group.block, part, "") for part, _ in group.parts}
        lora = {part: self.adapters[module] for part, module in modules.items() if module in self.adapters}
        wide = [part for part, module in modules.items() if module in self.float32]
        bias = array_at(self.weights, group.path.with_leaf("bias")) if group.bias else None
        return Projection(
            group.parts, array_at(self.weights, group.path), bias, lora, wide, base_compute=self.base_compute
        )

    def norm(self, part: str, block: str = "", eps: float | None = None) -> Norm:
        """A normalisation of a block; "": of the layer. It has no scale where the family's table has none.

        Args:
            part: its name.
            block: the block's.
            eps: its own; None: the model's.
        """
        inside = self.weights[block] if block else self.weights
        return Norm(self.config, inside.get(part, {}), WeightPath(None, block, part, "") in self.float32, eps)
