"""The section `parallel`: the devices of a run along each axis of its mesh."""

import dataclasses
from typing import Literal

from fastjax.training.config.checks import check_section, expect


@dataclasses.dataclass(frozen=True)
class ParallelSection:
    """The devices of a run, by what they split; their product is the number of devices.

    Attributes:
        data: copies of the model, each with its own rows. Of data and fsdp, those that are auto take the devices that
            the other sizes leave: data, if the model fits on one device or fsdp has a size, else fsdp.
        fsdp: devices that share one copy of the weights, each with its own rows; a layer is gathered where it is used.
        expert: devices that share one copy of a mixture's experts; auto is 1.
        context: devices that share a row's tokens; auto is 1.
        tensor: devices that share each layer's heads and features; auto is 1.
        gradient_exchange: how gradients travel between copies of the model that nothing else is split over; below
            float32, what is rounded off is added to the next step's.
    """

    data: int | Literal["auto"] = "auto"
    fsdp: int | Literal["auto"] = "auto"
    expert: int | Literal["auto"] = "auto"
    context: int | Literal["auto"] = "auto"
    tensor: int | Literal["auto"] = "auto"
    gradient_exchange: Literal["float32", "bfloat16", "int8", "int4"] = "float32"

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that are given, by the name of their axis."""
        return {name: size for name, size in vars(self).items() if isinstance(size, int)}

    def __post_init__(self) -> None:
        check_section("parallel", self)
        for name, size in self.sizes.items():
            expect(f"parallel.{name}", size, size >= 1, "at least 1, or auto")
