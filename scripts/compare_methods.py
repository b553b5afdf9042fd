"""Full fine-tuning, LoRA and QLoRA on one data set: curves, throughput and memory in one table and one plot.

A Llama of about 100 million parameters with random weights learns one half of the data by full fine-tuning; from that
checkpoint LoRA and QLoRA learn the other half; a held-out part scores all three. Every run is a process of its own, so
that its peak of device memory is its own.

    python3 scripts/compare_methods.py --data train.jsonl --tokenizer FOLDER --output runs/compare --plot compare.png

The data are JSON lines with `messages`, or with `question` and `answer`.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import random
import statistics
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ ('Question: ' if m.role == 'user' else 'Answer: ') + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer: ' }}{% endif %}"
)
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


def split(file: Path, folder: Path, held_out: int) -> dict[str, str]:
    """Two halves and a held-out part of the rows, as chat data; returns their files."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows.append(
            row.get("messages")
            or [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        )
    random.Random(0).shuffle(rows)
    rest, middle = rows[held_out:], (len(rows) - held_out) // 2
    files = {}
    for name, part in (("held_out", rows[:held_out]), ("first", rest[:middle]), ("second", rest[middle:])):
        files[name] = str(folder / f"{name}.jsonl")
        Path(files[name]).write_text("".join(json.dumps({"messages": row}) + "\n" for row in part), encoding="utf-8")
    return files


def make_base(tokenizer_folder: str, folder: str) -> None:
    """A folder with random weights and the tokenizer, which gets a chat template."""
    from fastjax.data import load_tokenizer
    from fastjax.language_model import FastLanguageModel

    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    vocab_size = -(-len(tokenizer) // 64) * 64
    model = FastLanguageModel.from_config(
        MODEL | {"vocab_size": vocab_size}, full_finetuning=True, tokenizer=tokenizer, random_state=0
    )
    model.save_pretrained(folder)


def run(name: str, settings: dict) -> dict:
    """One training run and its figures."""
    import jax

    from fastjax.runs.fine_tune import fine_tune
    from fastjax.training import config as sections

    config = sections.TrainConfig(
        model=sections.ModelSection(**settings["model"]),
        data=sections.DataSection(**settings["data"]),
        output=sections.OutputSection(**settings["output"]),
        lora=sections.LoraSection(**settings.get("lora", {})),
        optimizer=sections.OptimizerConfig(**settings["optimizer"]),
        training=sections.TrainingSection(**settings["training"]),
        parallel=sections.ParallelSection(**settings.get("parallel", {})),
    )
    result = fine_tune(config)
    device = jax.devices()[0]
    return {
        "method": name,
        "device": device.device_kind,
        "folder": str(result.folder),
        "peak_gib": (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30,
    }


def in_process(function, *arguments):
    """A function's result from a fresh process."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments).result()


def plot(results: list[dict], file: Path, title: str) -> None:
    """Training and held-out loss of the three runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), gridspec_kw={"width_ratios": [1, 1]})
    for axis, names in ((left, ("full",)), (right, ("lora", "qlora"))):
        for result in results:
            if result["method"] not in names:
                continue
            train = [(r["step"], r["loss"]) for r in result["rows"] if "loss" in r]
            held = [(r["step"], r["eval_loss"]) for r in result["rows"] if "eval_loss" in r]
            style = "--" if result["method"] == "qlora" else "-"
            (line,) = axis.plot(
                *zip(*train, strict=True), style, alpha=0.5, linewidth=1, label=f"{result['method']}, training"
            )
            axis.plot(
                *zip(*held, strict=True), "o" + style, color=line.get_color(), label=f"{result['method']}, held out"
            )
        axis.set_xlabel("step")
        axis.set_ylabel("loss (nats a target token)")
        axis.legend()
        axis.grid(alpha=0.3)
    left.set_title("full fine-tuning from random weights, first half")
    right.set_title("LoRA and QLoRA from that checkpoint, second half")
    figure.suptitle(title)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True, help="folder with a tokenizer")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--plot", type=Path, help="PNG to write")
    parser.add_argument("--title", help="of the plot; default: the data file's name")
    parser.add_argument("--epochs", type=float, default=10, help="of full fine-tuning")
    parser.add_argument("--adapter-epochs", type=float, default=4)
    parser.add_argument("--batch", type=int, default=16, help="rows of 2,048 tokens a step")
    parser.add_argument("--held-out", type=int, default=400, help="examples")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    files = split(arguments.data, arguments.output, arguments.held_out)
    base = str(arguments.output / "base")
    in_process(make_base, arguments.tokenizer, base)

    def settings(name: str, half: str, model: dict, learning_rate: float, epochs: float) -> dict:
        return {
            "model": {"max_seq_length": 2048, "use_gradient_checkpointing": False} | model,
            "data": {"train": files[half], "eval": files["held_out"], "loss_on": "all"},
            "output": {"output_dir": str(arguments.output / name), "overwrite_output_dir": True},
            "optimizer": {"learning_rate": learning_rate, "warmup_ratio": 0.05, "weight_decay": 0.01},
            "training": {
                "per_device_train_batch_size": arguments.batch,
                "num_train_epochs": epochs,
                "eval_steps": 10,
                "logging_steps": 20,
            },
        }

    full = {"model_name": base, "full_finetuning": True, "load_in_4bit": False}
    results = [in_process(run, "full", settings("full", "first", full, 1e-3, arguments.epochs))]
    trained = results[0]["folder"]
    for name, four_bit in (("lora", False), ("qlora", True)):
        adapted = settings(
            name, "second", {"model_name": trained, "load_in_4bit": four_bit}, 1e-3, arguments.adapter_epochs
        )
        adapted["lora"] = {"r": 16, "lora_alpha": 32}
        results.append(in_process(run, name, adapted))
    for result in results:
        file = Path(result["folder"]).parent / "metrics.jsonl"
        result["rows"] = [json.loads(line) for line in file.read_text().splitlines()]
    (arguments.output / "results.json").write_text(json.dumps(results))
    if arguments.plot:
        title = arguments.title or arguments.data.name
        plot(results, arguments.plot, f"{title} packed to 2,048 tokens, {results[0]['device']}")
    print(f"{'method':8} {'held-out loss: first':>22} {'last':>8} {'tokens/s':>10} {'peak GiB':>9}")
    for result in results:
        held = [row["eval_loss"] for row in result["rows"] if "eval_loss" in row]
        speed = statistics.median(row["tokens_per_second"] for row in result["rows"] if row.get("tokens_per_second"))
        line = f"{result['method']:8} {held[0]:22.4f} {held[-1]:8.4f} {speed:10,.0f} {result['peak_gib']:9.2f}"
        print(line)


if __name__ == "__main__":
    main()
