"""The object that `FastLanguageModel` gives: one name for a model whose value training replaces.

A `LanguageModel` is a value, and functions of it return new ones. Unsloth's and PEFT's users hold one object instead,
train it, and save the same object. A handle is that object: it has its value's fields, the functions of a model are its
methods, and a trainer puts the trained value in the old one's place.
"""

from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel
from fastjax.generation.face import generate, stream
from fastjax.generation.text import answers
from fastjax.language_model import adapters
from fastjax.language_model.hub import push_to_hub, push_to_hub_gguf, push_to_hub_merged
from fastjax.language_model.logits import logits
from fastjax.language_model.other_names import MODEL
from fastjax.language_model.rewards import rewards, with_score_head
from fastjax.language_model.saving import save_pretrained, save_pretrained_gguf, save_pretrained_merged
from fastjax.language_model.variants import with_start

#: To type checkers a handle is a model, since it has all that a model has.
_Model = LanguageModel if TYPE_CHECKING else object


class ModelHandle(_Model):
    """A model by reference: fields and methods of `value`, a `LanguageModel`, and functions of it as methods.

    Attributes:
        value: the current model, to keep it as it is now.
    """

    __slots__ = ("_origin", "value")
    value: LanguageModel

    def __init__(self, value: LanguageModel, origin: "ModelHandle | None" = None):
        """Hold a model.

        Args:
            value: the model; of a handle its value.
            origin: the handle that this one was made from, which becomes what this one does, as PEFT's adapters are
                part of the model that they were added to.
        """
        self.value = value_of(value)
        self._origin = origin

    generate = generate
    stream = stream
    answers = answers
    logits = logits
    rewards = rewards
    with_score_head = with_score_head
    with_start = with_start
    save_pretrained = save_pretrained
    save_pretrained_merged = save_pretrained_merged
    save_pretrained_gguf = save_pretrained_gguf
    push_to_hub = push_to_hub
    push_to_hub_merged = push_to_hub_merged
    push_to_hub_gguf = push_to_hub_gguf

    @property
    def device(self) -> str:
        """Where `generate` takes token ids from: "cpu", for a tensor's `to`, wherever the weights are."""
        return "cpu"

    def save_lora(self, folder: str | Path, tokenizer: Any = None) -> Path:
        """Write the adapter; see `save_pretrained`.

        Args:
            folder: created.
            tokenizer: saved in place of the model's own; None: that.

        Raises:
            ConfigError: there is none.
        """
        if self.value.lora is None:
            raise ConfigError("save_lora: expected a model with an adapter, got one without; use save_pretrained")
        return save_pretrained(self.value, folder, tokenizer)

    def load_adapter(self, folder: str | Path, **settings: Any) -> "ModelHandle":
        """Attach the adapter of a PEFT folder to this model itself; see `adapters.load_adapter`.

        Args:
            folder: as there.
            settings: as there.

        Returns:
            This handle.
        """
        self.become(adapters.load_adapter(self.value, folder, **settings))
        return self

    def for_inference(self, **others: Any) -> "ModelHandle":
        """The handle itself: a model trains and generates as it is.

        Args:
            others: keywords of Unsloth's and PyTorch's, which change nothing here.
        """
        del others
        return self

    for_training = for_inference
    eval = for_inference

    def train(self, mode: bool = True) -> "ModelHandle":
        """The handle itself, as `for_inference`.

        Args:
            mode: changes nothing here.
        """
        del mode
        return self

    @property
    def is_adapted(self) -> bool:
        """Whether it came of a handle by adding an adapter, and is not that one."""
        return self._origin is not None

    def print_trainable_parameters(self) -> None:
        """Print how many parameters are trained, as PEFT does."""
        trained, every = self.num_parameters()
        print(f"trainable params: {trained:,} || all params: {every:,} || trainable%: {trained / every:.4%}"[:-1])

    def replace(self, **changes: Any) -> "ModelHandle":
        """A handle of the same model with other fields, for instance `trainable` after training."""
        return ModelHandle(self.value.replace(**changes))

    def become(self, value: LanguageModel) -> None:
        """Take a value in the place of the present one, here and where this handle was made from.

        Args:
            value: the model; the greatest length of a row stays each handle's own.
        """
        self.value = value_of(value).with_options(max_seq_length=self.value.max_seq_length)
        if self._origin is not None:
            self._origin.become(value)

    def __getattr__(self, name: str) -> Any:
        if name in ModelHandle.__slots__:  # an object that is being copied has none yet
            raise AttributeError(name)
        if name in MODEL:
            raise AttributeError(f"model.{name} is not served; use {MODEL[name]}")
        method = vars(LanguageModel).get(name)  # a handle's gives another handle
        return MethodType(method, self) if isinstance(method, FunctionType) else getattr(self.value, name)

    def __call__(self, *values: Any, **named: Any) -> None:
        """Refused: a model is no function of a batch; `logits` is one of token ids."""
        raise AttributeError(f"model(…) is not served; use {MODEL['forward']}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.value)})

    def __repr__(self) -> str:
        return repr(self.value)


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
