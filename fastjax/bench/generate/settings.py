"""The settings of a measured generation: the options of `fastjax bench generate`; no JAX."""

import argparse
import dataclasses
import re
from typing import TYPE_CHECKING, Any

from fastjax.bench.options import DTYPES, option
from fastjax.bench.presets import PRESETS, preset_config
from fastjax.errors import ConfigError
from fastjax.generation.options import STEPS

if TYPE_CHECKING:
    from fastjax.execution.options import LoadOptions

#: What can be measured, in the order in which it is.
PARTS = ("decode", "prefill", "log_probs", "requests")


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a rank, or 0 for no adapters, got {text[:80]}")
    return int(text)


def _prompts(text: str) -> str:
    if re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,6}", text) is None:
        raise argparse.ArgumentTypeError(f"expected PROMPTSxTOKENS such as 8x1024, got {text[:80]}")
    return text


@dataclasses.dataclass(frozen=True)
class GenerateSettings:
    """Settings of the measurement."""

    preset: str = option("llama3-8b", "shape of the model, in NF4", choices=tuple(PRESETS))
    layers: int | None = option(None, "the preset's first ones alone", metavar="N")
    rows: tuple[int, ...] = option((1, 32, 256), "answers that are decoded together; a case for each")
    r: tuple[int, ...] = option((16,), "rank of adapters on all projections, 0: none; a case for each", type=_rank)
    context: int = option(1024, "tokens that a decoded one attends to, in the mean")
    new: int = option(128, "tokens of each answer that are timed")
    cache_dtype: tuple[str, ...] = option((), "of keys and values; nothing: the computation's; a case for each")
    layer_loop: tuple[str, ...] = option(
        ("unroll",), "of the layers, scan or unroll; a case for each", choices=("scan", "unroll")
    )
    dtype: str | None = option(None, "of the computation; nothing: by the device", choices=DTYPES)
    prefill: str = option("8x1024", "prompts and their tokens", type=_prompts, metavar="NxM")
    requests: int = option(512, "of different lengths, with the most rows; uniform within --prompts and --answers")
    prompts: tuple[int, int] = option((32, 2048), "fewest and most tokens of their prompts", nargs=2)
    answers: tuple[int, int] = option((16, 1024), "fewest and most tokens of their answers", nargs=2)
    tokens: int | None = option(
        None, "of prompts and answers in the cache for --requests; nothing: as many as fit", metavar="N"
    )
    parts: tuple[str, ...] = option(PARTS, "what is measured", choices=PARTS)

    def __post_init__(self) -> None:
        for name in ("prompts", "answers"):
            least, most = getattr(self, name)
            if least > most:
                raise ConfigError(f"bench generate: --{name}: expected the fewest tokens first, got {least} {most}")
        if self.new >= self.context:
            raise ConfigError(f"bench generate: --new: expected fewer than --context {self.context}, got {self.new}")

    @property
    def hf_config(self) -> dict[str, Any]:
        """The config.json of the model.

        Raises:
            ConfigError: layers that the preset does not have.
        """
        return preset_config(self.preset, self.layers, "nf4")

    @property
    def prompt(self) -> int:
        """Tokens of the prompts before the steady decoding, which begins with the second call of it."""
        return max(1, self.context - self.new // 2 - STEPS)

    @property
    def prefilled(self) -> tuple[int, int]:
        """Prompts of the prefill, and the tokens of each."""
        prompts, tokens = self.prefill.split("x")
        return int(prompts), int(tokens)

    @property
    def longest(self) -> int:
        """The most tokens of a row."""
        decoded = self.prompt + self.budget
        return max(decoded, self.prefilled[1] + 1, self.context + 1, self.prompts[1] + self.answers[1])

    @property
    def budget(self) -> int:
        """The most tokens of an answer of the steady decoding: some come before those that are timed, some after."""
        return self.new + 8 * STEPS

    @property
    def caches(self) -> tuple[str | None, ...]:
        """Dtypes of the cache."""
        return self.cache_dtype or (None,)

    @property
    def model(self) -> str:
        """The preset, and its layers where they are not all."""
        return self.preset if self.layers is None else f"{self.preset}, {self.layers} layers"

    def load_options(self, layer_loop: str) -> "LoadOptions":
        """The options of loading the model.

        Args:
            layer_loop: "scan" or "unroll".
        """
        from fastjax.execution.options import LoadOptions

        return LoadOptions(
            max_seq_length=self.longest,
            dtype=self.dtype,  # pyright: ignore[reportArgumentType]
            layer_loop=layer_loop,  # pyright: ignore[reportArgumentType]
        )
