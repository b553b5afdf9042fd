"""The tokenizer of a loaded model: transformers' generic one, whose batches notebooks use as they stand.

`tokenizer(…, return_tensors="pt").to("cuda")` needs PyTorch in transformers. Where that is not installed the arrays are
NumPy's, and `to` leaves them where they are: `generate` takes ids from the host. A batch is its array of ids too, as
`apply_chat_template` gave one in transformers 4. Importing this module imports transformers.
"""

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import BatchEncoding
from transformers import PreTrainedTokenizerFast as Generic

from convert.errors import shown
from fastjax.errors import ConfigError


class HostTensor(np.ndarray):
    """A NumPy array with the methods of a tensor that move it."""

    def to(self, *device: Any, **settings: Any) -> "HostTensor":
        """The array itself, which stays in the host's memory.

        Args:
            device: any.
            settings: any.
        """
        del device, settings
        return self

    cpu = cuda = detach = to

    def numpy(self) -> np.ndarray:
        """The array without these methods."""
        return self.view(np.ndarray)


class TokenBatch(BatchEncoding):
    """transformers' BatchEncoding: a mapping of arrays; its shape, its items and slices are those of `input_ids`."""

    @property
    def shape(self) -> Any:
        """That of `input_ids`."""
        return self.data["input_ids"].shape

    def __getitem__(self, item: Any) -> Any:
        ids: Any = self.data.get("input_ids")
        return ids[item] if hasattr(ids, "shape") and not isinstance(item, str) else super().__getitem__(item)

    def to(self, device: Any, **settings: Any) -> "TokenBatch":
        """Move PyTorch's tensors, where PyTorch has the device; what else there is stays in the host's memory.

        Args:
            device: of PyTorch's.
            settings: of PyTorch's.
        """
        torch = sys.modules.get("torch")
        if torch is not None and (torch.cuda.is_available() or not str(device).startswith("cuda")):
            super().to(device, **settings)
        return self


class PreTrainedTokenizerFast(Generic):
    """transformers' generic tokenizer, by the name that every version of transformers reads."""

    def __call__(self, *texts: Any, **settings: Any) -> Any:
        """Encode texts, as transformers does; without a pad token the EOS is padding.

        Args:
            texts: as there.
            settings: as there; images, videos and audio: None.

        Raises:
            ConfigError: images, videos or audio.
        """
        if not settings.get("padding") or self.pad_token is not None:
            return super().__call__(*texts, **settings)
        self.pad_token = self.eos_token
        try:
            return super().__call__(*texts, **settings)
        finally:
            self.pad_token = None

    def _encode_plus(self, *texts: Any, return_tensors: Any = None, **settings: Any) -> TokenBatch:
        """Encode texts for `tokenizer(…)` and `encode`; "pt" without PyTorch gives `HostTensor`."""
        for name in ("images", "videos", "audio"):
            if settings.pop(name, None) is not None:
                raise ConfigError(f"tokenizer: {name}: expected none, got some; a text model reads texts")
        on_host = return_tensors == "pt" and importlib.util.find_spec("torch") is None
        settings["return_tensors"] = "np" if on_host else return_tensors
        batch = super()._encode_plus(*texts, **settings)
        data = {key: value.view(HostTensor) if on_host else value for key, value in batch.data.items()}
        return TokenBatch(data, batch.encodings, n_sequences=batch.n_sequences)

    def apply_chat_template(self, conversation: Any, *tools: Any, **settings: Any) -> Any:
        """Render a conversation, as transformers does; contents in parts of text are joined.

        Args:
            conversation: as there.
            tools: as there.
            settings: as there.

        Raises:
            ConfigError: parts of another kind, or no chat template.
        """
        if not self.chat_template and not settings.get("chat_template"):
            raise ConfigError(
                f"the tokenizer in {self.name_or_path} has no chat template; get_chat_template(tokenizer, …) sets one"
            )
        return super().apply_chat_template(_joined(conversation), *tools, **settings)


def _joined(conversation: Any) -> Any:
    """A conversation, or a batch of them, with each content as one text."""
    if isinstance(conversation, Mapping):
        content = conversation.get("content")
        if not isinstance(content, list):
            return conversation
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise ConfigError(f"content: expected texts, or parts of type text, got {shown(part, 80)}")
        return {**conversation, "content": "".join(part["text"] for part in content)}
    return [_joined(part) for part in conversation] if isinstance(conversation, list | tuple) else conversation
