"""The whole LoRA or QLoRA train step, AdamW included, of a model of a known shape with random weights.

Every case runs in a fresh process, because a device's peak memory cannot be reset. Weights are drawn and quantised on
the device, layer by layer. Rows are full and one document each, or packed with documents of the lengths in a file. The
time of a step is the median over steps that each end with the device idle; compiling is timed apart.
"""

import concurrent.futures
import dataclasses
import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from fastjax.bench.attention.cases import packed
from fastjax.bench.results import make_table, show
from fastjax.data.batches import Batch
from fastjax.language_model import FastLanguageModel
from fastjax.training.flops import attended_length, flops_per_token
from fastjax.training.optimizers import OptimizerConfig, make_optimizer
from fastjax.training.step import init_state, make_train_step
from pallas_kernels.attention import attention_implementation

_LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
}
PRESETS: dict[str, dict[str, Any]] = {
    "llama3-8b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "llama1b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "initializer_range": 0.02,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "tiny": _LLAMA
    | {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
}


@dataclasses.dataclass(frozen=True)
class StepCase:
    """Settings of the measurement.

    Attributes:
        preset: a key of PRESETS.
        batch: rows.
        seq: tokens a row.
        rank: of the adapters, on all projections, a mixture's experts included.
        checkpointing: "full", "projections" or "none".
        layer_loop: "scan" or "unroll".
        dtype: of the computation; None: by the device.
        steps: timed steps.
        warmup: steps before these.
        attention: its implementation; None: the model's own choice.
        lengths: of documents, packed into the rows; None: rows of one document.
        layers: instead of the preset's; None: all.
        weights: "nf4", or "16bit".
    """

    preset: str
    batch: int
    seq: int
    rank: int
    checkpointing: str
    layer_loop: str
    dtype: str | None
    steps: int
    warmup: int
    attention: str | None = None
    lengths: tuple[int, ...] | None = None
    layers: int | None = None
    weights: str = "nf4"


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Result of a case; `error` alone is set where the device had not enough memory.

    Attributes:
        device: its name.
        jax: version.
        dtype: of the computation.
        step_seconds: median.
        tokens_per_second: of the median step.
        model_tflops_per_second: `flops_per_token` of the step's tokens over the median step.
        compile_seconds: tracing, lowering and compiling.
        peak_bytes: the allocator's peak in this process; None where the device keeps no count.
        step_bytes: arguments and temporaries of the step by the compiler's plan.
        losses: of every step, warm-up included.
        error: its message.
    """

    device: str
    jax: str
    dtype: str | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    model_tflops_per_second: float | None = None
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    step_bytes: int | None = None
    losses: Sequence[float] = ()
    error: str | None = None


def measure(case: StepCase) -> StepResult:
    """Build the model, compile the step, time it.

    Args:
        case: the settings.
    """
    device = jax.devices()[0]
    try:
        return _measure(case, device)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return StepResult(device.device_kind, jax.__version__, error="out of memory")


def _measure(case: StepCase, device: Any) -> StepResult:
    config = PRESETS[case.preset] | ({} if case.layers is None else {"num_hidden_layers": case.layers})
    model = FastLanguageModel.from_config(
        config,
        max_seq_length=case.seq,
        dtype=case.dtype,
        load_in_4bit=case.weights == "nf4",
        use_gradient_checkpointing=case.checkpointing,
        layer_loop=case.layer_loop,  # pyright: ignore[reportArgumentType]
    )
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if model.config.moe else None
    model = FastLanguageModel.get_peft_model(model, r=case.rank, target_parameters=experts)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-4), case.warmup + case.steps)
    state = init_state(model.trainable, optimizer, jax.random.key(0))
    frozen = model.frozen
    documents = None if case.lengths is None else packed(case.lengths, case.batch, case.seq)
    batch = _batch(case, model.config.vocab_size, documents)

    start = time.perf_counter()
    step = make_train_step(model.graphdef, optimizer, model.trainable_filter)
    with attention_implementation(case.attention):
        compiled = step.lower(state, frozen, batch).compile()  # pyright: ignore[reportFunctionMemberAccess]
    compile_seconds = time.perf_counter() - start

    seconds, losses = [], []
    for _ in range(case.warmup + case.steps):
        start = time.perf_counter()
        state, metrics = compiled(state, frozen, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
        losses.append(float(metrics["loss"]))
    median = statistics.median(seconds[case.warmup :])
    tokens = case.batch * case.seq if documents is None else sum(map(sum, documents))
    length = case.seq if documents is None else attended_length([n for row in documents for n in row])
    flops = tokens * flops_per_token(model.config, model.trainable, length)
    plan = compiled.memory_analysis()
    return StepResult(
        device=device.device_kind,
        jax=jax.__version__,
        dtype=str(model.dtype),
        step_seconds=median,
        tokens_per_second=tokens / median,
        model_tflops_per_second=flops / median / 1e12,
        compile_seconds=compile_seconds,
        peak_bytes=(device.memory_stats() or {}).get("peak_bytes_in_use"),
        step_bytes=None if plan is None else plan.argument_size_in_bytes + plan.temp_size_in_bytes,
        losses=losses,
    )


def _batch(case: StepCase, vocab_size: int, documents: Sequence[Sequence[int]] | None) -> Batch:
    """Random rows of one document or several, the last place of each without a target."""
    shape = (1, case.batch, case.seq)
    tokens = np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)
    targets = np.full(shape, -100, np.int32)
    targets[..., :-1] = tokens[..., 1:]
    positions = np.array(np.broadcast_to(np.arange(case.seq, dtype=np.int32), shape))
    if documents is None:
        return Batch(tokens, targets, None, positions)  # pyright: ignore[reportArgumentType]  # None: whole rows
    segments = np.zeros(shape, np.int32)
    for row, lengths in enumerate(documents):
        ends = np.cumsum(lengths)
        segments[0, row, : ends[-1]] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        positions[0, row, : ends[-1]] -= np.repeat(ends - lengths, lengths)
        targets[0, row, ends - 1] = -100
        targets[0, row, ends[-1] :] = -100
    return Batch(tokens, targets, segments, positions)


def run(cases: Sequence[StepCase], output: Path | None = None, console: Console | None = None) -> list[StepResult]:
    """Measure each case in a process of its own, show a table, write a file.

    Args:
        cases: the settings of each.
        output: JSON file for cases and results; None: no file.
        console: for the table.

    Returns:
        The results, in the order of the cases.
    """
    console = console or Console()
    results = []
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for case in cases:
            with console.status(f"{case.preset} {case.checkpointing} {case.layer_loop} {case.attention or ''}"):
                results.append(pool.submit(measure, case).result())
    _show(console, cases, results)
    if output is not None:
        rows = [dataclasses.asdict(case) | dataclasses.asdict(r) for case, r in zip(cases, results, strict=True)]
        output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        console.print(f"written to {output}", highlight=False)
    return results


def _show(console: Console, cases: Sequence[StepCase], results: Sequence[StepResult]) -> None:
    first, found = cases[0], results[0]
    rows = f"{first.batch}×{first.seq}{' packed' if first.lengths else ''}"
    method = "QLoRA" if first.weights == "nf4" else "LoRA"
    layers = "" if first.layers is None else f", {first.layers} layers"
    title = f"{method} step · {first.preset}{layers} · {rows} · r={first.rank} · {found.device} · jax {found.jax}"
    counted = any(result.peak_bytes is not None for result in results)
    memory = "peak GiB" if counted else "plan GiB"
    numbers = ("step ms", "tokens/s", "TFLOP/s", "compile s", memory, "loss")
    words = ["remat", "loop"] + ["attention"] * any(case.attention for case in cases)
    table, reasons = make_table(title, words, numbers), []
    for case, result in zip(cases, results, strict=True):
        cells = [case.checkpointing, case.layer_loop, case.attention or ""][: len(words)]
        if result.step_seconds is None or not result.losses:
            reasons.append((" ".join(filter(None, cells)), result.error))
            continue
        held = result.peak_bytes if counted else result.step_bytes
        cells += [
            f"{result.step_seconds * 1e3:,.1f}",
            f"{result.tokens_per_second:,.0f}",
            f"{result.model_tflops_per_second:,.2f}",
            f"{result.compile_seconds:.1f}",
            "-" if held is None else f"{held / 2**30:.2f}",
            f"{result.losses[-1]:.3f}",
        ]
        table.add_row(*cells)
    show(console, table, reasons)
