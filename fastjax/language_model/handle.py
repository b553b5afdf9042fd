"""The object that `FastLanguageModel` gives: one name for a model whose value training replaces.

A `LanguageModel` is a value, and functions of it return new ones. Unsloth's and PEFT's users hold one object instead,
train it, and save the same object. A handle is that object: whatever is asked of it, its current value answers, and a
trainer puts the trained value in the old one's place.
"""

from typing import TYPE_CHECKING, Any

from fastjax.language_model.model import LanguageModel

if TYPE_CHECKING:

    class ModelHandle(LanguageModel):
        """As type checkers see it: it has all that a `LanguageModel` has."""

        value: LanguageModel

        def __init__(self, value: LanguageModel, origin: "ModelHandle | None" = None): ...

        def become(self, value: LanguageModel) -> None:
            """Take a value in the place of the present one."""

else:

    class ModelHandle:
        """A model by reference: attributes and methods are those of `value`, a `LanguageModel`.

        Attributes:
            value: the current model, to keep it as it is now.
        """

        __slots__ = ("_origin", "value")

        def __init__(self, value: LanguageModel, origin: "ModelHandle | None" = None):
            """Hold a model.

            Args:
                value: the model; of a handle its value.
                origin: the handle that this one was made from, which becomes what this one does, as PEFT's adapters
                    are part of the model that they were added to.
            """
            self.value = value_of(value)
            self._origin = origin

        def __getattr__(self, name: str) -> Any:
            if name in ModelHandle.__slots__:  # an object that is being copied has none yet
                raise AttributeError(name)
            return getattr(self.value, name)

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *dir(self.value)})

        def __repr__(self) -> str:
            return repr(self.value)

        def become(self, value: LanguageModel) -> None:
            """Take a value in the place of the present one, here and where this handle was made from.

            Args:
                value: the model; the greatest length of a row stays each handle's own.
            """
            self.value = value.replace(max_seq_length=self.value.max_seq_length)
            if self._origin is not None:
                self._origin.become(value)


def value_of(model: LanguageModel) -> LanguageModel:
    """The model itself, of a handle its current value.

    Args:
        model: either.
    """
    return model.value if isinstance(model, ModelHandle) else model


def handle_of(model: LanguageModel) -> ModelHandle:
    """The handle itself, of a model a new one.

    Args:
        model: either.
    """
    return model if isinstance(model, ModelHandle) else ModelHandle(model)
