"""Hugging Face transformers with bitsandbytes, and Unsloth, at the steady decoding, each in a process of its own.

Both load a folder of random values in NF4 and continue static prompts greedily with `generate`, Unsloth with adapters
and `for_inference`, transformers without. Their time is from the first token of all rows to the last one.
"""

import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fastjax.bench.generate.settings import GenerateSettings
from fastjax.bench.peer_models import ENVIRONMENT
from fastjax.bench.step.build import adapted_modules
from fastjax.bench.timing import Row
from fastjax.generation.options import STEPS

#: Tokens of the prompts and answers that warm up.
_WARM = 32, 4
_DEVIATION = 0.02


class Peer(NamedTuple):
    """Another library.

    Attributes:
        name: for the table.
        packages: that it takes.
        adapters: whether it is measured with adapters, or without.
    """

    name: str
    packages: tuple[str, ...]
    adapters: bool

    @property
    def label(self) -> str:
        """Name and version."""
        return f"{self.name} {importlib.metadata.version(self.packages[0])}"


PEERS = (Peer("transformers", ("transformers", "bitsandbytes", "torch"), False), Peer("Unsloth", ("unsloth",), True))


def why_not(peer: Peer, settings: GenerateSettings) -> str | None:
    """The reason that a library is not measured; None: it is.

    Args:
        peer: the library.
        settings: of the measurement.
    """
    from convert.families.mapping import read_config

    missing = [name for name in peer.packages if importlib.util.find_spec(name) is None]
    reasons = {
        f"not installed ({', '.join(missing)})": bool(missing),
        "mixtures of experts are not in NF4 there": read_config(settings.hf_config).moe is not None,
        f"measured in bfloat16 alone, not in {settings.dtype}": settings.dtype not in (None, "bfloat16"),
        "measured with adapters alone": peer.adapters and not any(settings.r),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def measure_peer(peer: Peer, settings: GenerateSettings, folder: Path) -> Iterator[Row]:
    """Load a folder and decode each number of rows.

    Args:
        peer: the library.
        settings: of the measurement.
        folder: of the model, in NF4.

    Yields:
        A row of figures for each number of rows, or of the `reason` that there is none.
    """
    os.environ.update(ENVIRONMENT)
    os.chdir(folder)  # Unsloth writes what it compiles into the working directory
    r = next(filter(None, settings.r)) if peer.adapters else 0
    labels: Row = {"case": "decode", "jax": jax.__version__, "r": r, "layer_loop": None, "cache_dtype": None}
    model = None
    for rows in sorted(settings.rows):
        try:
            model = model or (_unsloth(settings, folder, r) if peer.adapters else _transformers(folder))
            found = _decoded(model, settings, rows)
        except Exception as error:  # whatever another library raises is a line of the table
            found = {"reason": f"{type(error).__name__}: {error}"[:300]}
        yield {**labels, "rows": rows, **found}


def _transformers(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16, device_map={"": device})


def _unsloth(settings: GenerateSettings, folder: Path, r: int) -> Any:
    import torch
    from unsloth import FastLanguageModel  # pyright: ignore[reportMissingImports]

    from convert.families.mapping import read_config

    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(folder),
        max_seq_length=settings.longest,
        dtype=torch.bfloat16,
        load_in_4bit=True,
        local_files_only=True,
    )
    modules = adapted_modules(read_config(settings.hf_config), "all")
    model = FastLanguageModel.get_peft_model(
        model, r=r, lora_alpha=r, lora_dropout=0, bias="none", target_modules=modules, random_state=3407
    )
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=_DEVIATION)
    FastLanguageModel.for_inference(model)
    return model


def _decoded(model: Any, settings: GenerateSettings, rows: int) -> Row:
    """The speed of rows that all decode, after a warm-up with short ones."""
    import torch

    matrices = sum(getattr(weight, "quant_state", None) is not None for weight in model.parameters())
    if not matrices:
        raise RuntimeError("expected weights in 4 bits, got none")
    on_gpu = model.device.type == "cuda"
    _continued(model, settings.hf_config["vocab_size"], rows, *_WARM)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    prompt, new = settings.prompt + STEPS, settings.new
    seconds, prefill = _continued(model, settings.hf_config["vocab_size"], rows, prompt, new)
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "dtype": "bfloat16",
        "tokens_per_second": rows * (new - 1) / seconds,
        "milliseconds": 1e3 * seconds / (new - 1),
        "context": prompt + new / 2,
        "prefill_tokens_per_second": rows * prompt / prefill,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "reason": None,
    }


def _continued(model: Any, vocabulary: int, rows: int, prompt: int, new: int) -> tuple[float, float]:
    """Seconds of the tokens after the first one, and until it."""
    import torch
    from transformers import LogitsProcessorList

    wait = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    reached: list[float] = []

    def look(tokens: Any, logits: Any) -> Any:
        if not reached:
            wait()
            reached.append(time.perf_counter())
        return logits

    tokens = torch.randint(0, vocabulary, (rows, prompt), device=model.device)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "use_cache": True, "pad_token_id": 3}
    with torch.inference_mode():
        wait()
        start = time.perf_counter()
        found = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            logits_processor=LogitsProcessorList([look]),
            **options,
        )
        wait()
        end = time.perf_counter()
    if found.shape[1] != prompt + new:
        raise RuntimeError(f"expected {new} new tokens, got {found.shape[1] - prompt}")
    return end - reached[0], reached[0] - start
