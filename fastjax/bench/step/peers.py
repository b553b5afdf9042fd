"""Unsloth at a case's step, in a process of its own: models in a folder, random values, its own settings.

The folder is written first, in 16 bits or as bitsandbytes' NF4, so that loading is the peer's own and counts in its
peak. Rows, ranks, optimizer and dtypes are the case's: adapters in float32 under autocast, PyTorch's fused AdamW. Where
the case recomputes products it offloads the layers' inputs ("unsloth"), else it keeps everything.
"""

import dataclasses
import importlib.util
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from fastjax.bench.peer_models import ENVIRONMENT, write_peer_model
from fastjax.bench.step.build import adapted_modules, make_batch
from fastjax.bench.step.case import StepCase
from fastjax.bench.step.measure import StepResult
from fastjax.bench.torch_peers import import_module
from fastjax.training.flops import matrix_parameters, step_flops

_RATE = 1e-4
#: Policies that recompute no product; beside the others stands its offloading of the layers' inputs.
_KEEPING = ("none", "projections")


def why_not(case: StepCase) -> str | None:
    """The reason that Unsloth is not measured at a case; None: it is.

    Args:
        case: the settings.
    """
    usual = "bfloat16" if case.method == "full" else "float32"
    reasons = {
        "not installed": importlib.util.find_spec("unsloth") is None,
        "measured on one device alone": case.mesh is not None,
        "a mixture's adapters are on other modules there": case.config.moe is not None,
        "rows of several documents are prepared otherwise there": case.lengths is not None,
        f"measured in bfloat16 alone, not in {case.dtype}": case.dtype not in (None, "bfloat16"),
        f"what it trains is in {usual}, not in {case.param_dtype}": case.param_dtype != usual,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def cases_of(cases: Sequence[StepCase]) -> list[StepCase]:
    """The cases that differ for it, with its own name of what it recomputes and nothing else in the host's memory.

    Args:
        cases: this project's; those of several devices have none.
    """
    alone = [case for case in cases if case.mesh is None]
    recomputed = [("none" if case.checkpointing in _KEEPING else "unsloth", case) for case in alone]
    return list(dict.fromkeys(case.plain(checkpointing=name) for name, case in recomputed))


def measure_unsloth(case: StepCase) -> StepResult:
    """Write a folder, load it, time the steps.

    Args:
        case: of `cases_of`.
    """
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="fastjax-bench-") as folder:
        os.chdir(folder)  # it writes what it compiles into the working directory
        try:
            chosen = write_peer_model(Path(folder), case.hf_config, nf4=case.weights == "nf4")
            return _measure(case, chosen)
        except Exception as error:  # whatever another library raises is a line of the table
            return StepResult("", jax.__version__, error=f"{type(error).__name__}: {error}"[:300])
        finally:
            os.chdir("/")


def _load(case: StepCase, folder: Path) -> Any:
    import torch
    from unsloth import FastLanguageModel  # pyright: ignore[reportMissingImports]

    recomputed = "unsloth" if case.checkpointing == "unsloth" else False
    form = {"qlora": "load_in_4bit", "lora": "load_in_16bit", "full": "full_finetuning"}[case.method]
    options = {"load_in_4bit": False} | {form: True}
    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(folder),
        max_seq_length=case.seq,
        dtype=torch.bfloat16,
        use_gradient_checkpointing=recomputed,
        local_files_only=True,
        **options,
    )
    if case.method != "full":
        modules = adapted_modules(case.config, case.adapters)
        model = FastLanguageModel.get_peft_model(
            model,
            r=case.rank,
            lora_alpha=16,
            lora_dropout=0,
            bias="none",
            target_modules=modules,
            use_gradient_checkpointing=recomputed,
            random_state=3407,
        )
    FastLanguageModel.for_training(model, use_gradient_checkpointing=recomputed)
    return model


def _measure(case: StepCase, folder: Path) -> StepResult:
    model = _load(case, folder)
    import torch  # Unsloth sets up PyTorch's allocator as it is imported

    config = case.config
    matrices = sum(spec.kind == "matrix" for spec in config.specs)
    packed = sum(getattr(weight, "quant_state", None) is not None for weight in model.parameters())
    if packed != (expected := matrices if case.weights == "nf4" else 0):
        # it goes on in 16 bits where bitsandbytes cannot be used
        raise RuntimeError(f"expected {expected} weights in 4 bits, got {packed}")
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if case.optimizer == "adamw_8bit":
        optimizer = import_module("bitsandbytes").optim.AdamW8bit(trained, lr=_RATE)
    else:
        optimizer = torch.optim.AdamW(trained, lr=_RATE, weight_decay=0.0, fused=True)
    tokens = torch.from_numpy(make_batch(case, config.vocab_size).tokens[0]).long().cuda()

    seconds, losses = [], []
    for _ in range(case.warmup + case.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=case.method != "full"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    values = [float(loss) for loss in losses]
    result = StepResult(torch.cuda.get_device_name(), jax.__version__, dtype="bfloat16", losses=values)
    if not all(map(math.isfinite, values)):
        return dataclasses.replace(result, fault=f"loss {values[-1]}")
    count = sum(weight.numel() for weight in trained)
    trained_numbers: dict[str, Any] = {"adapter_parameters": count}
    if case.method == "full":
        trained_numbers = {"trained_parameters": matrix_parameters(config)}
    median, rows = statistics.median(seconds[case.warmup :]), case.batch * case.seq
    flops = step_flops(config, tokens=rows, document_length=case.seq, **trained_numbers)
    return dataclasses.replace(
        result,
        step_seconds=median,
        tokens_per_second=rows / median,
        model_tflops_per_second=flops / median / 1e12,
        peak_bytes=torch.cuda.max_memory_allocated(),
    )
