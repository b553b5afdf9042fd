"""The section `parallel`: the devices of a run along each axis of its mesh."""

from typing import Literal

from fastjax.options import checked
from fastjax.options.kinds import Count

Devices = Count | Literal["auto"]


@checked("parallel")
class ParallelSection:
    """The devices of a run, by what they split; their product is the number of devices."""

    data: Devices = "auto"
    """copies of the model, each with its own rows. Of data and fsdp, those that are auto take the devices that the
    other sizes leave: data, if the model fits on one device or fsdp has a size, else fsdp."""
    fsdp: Devices = "auto"
    """devices that share one copy of the weights, each with its own rows; a layer is gathered where it is used."""
    expert: Devices = "auto"
    """devices that share one copy of a mixture's experts; auto is 1."""
    context: Devices = "auto"
    """devices that share a row's tokens; auto is 1."""
    tensor: Devices = "auto"
    """devices that share each layer's heads and features; auto is 1."""
    gradient_exchange: Literal["float32", "bfloat16", "int8", "int4"] = "float32"
    """how gradients travel between copies of the model that nothing else is split over; below float32, what is rounded
    off is added to the next step's."""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that are given, by the name of their axis."""
        return {name: size for name, size in vars(self).items() if isinstance(size, int)}
