"""A real model end to end: QLoRA on GSM8K, and the same answers from every place where the result can be used.

    python3 scripts/measure_real_model.py train --model FOLDER --data train.jsonl --output runs/real
    python3 scripts/measure_real_model.py compare --model FOLDER --data train.jsonl --output runs/real

FOLDER is SmolLM2-135M-Instruct in Hugging Face format, or another model with a chat template. The data are JSON lines
with `question` and `answer`, of which the last 500 are held out.

`train` is `fastjax train` with an adapter over the model in 4 bits, on the device that JAX finds; further arguments go
to it. `compare` needs torch, peft, bitsandbytes, accelerate and gguf, and runs on a CPU in float32. Held-out questions
are answered greedily by

- fastjax: `fastjax generate` over the base in 4 bits;
- peft: the lines that a report shows for a run in float32, over what bitsandbytes brings into 4 bits and decodes;
- merged: `fastjax convert merge --base_in_nf4`, in transformers;
- gguf: `fastjax convert gguf --type f32` of that folder, in llama.cpp, where llama-cpp-python is installed in this
  Python or in that of --llama_python; left out otherwise.

The answers are compared token for token. Where two part, they must part at a tie: two tokens whose logits differ by
less than 1e-4 in both. Each place runs in a process of its own.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HELD_OUT = 500
TIE = 1e-4
"""Largest difference of two logits that float32 may take for the other order."""
SETTINGS: dict[str, Any] = {
    "model": {"max_seq_length": 1024, "load_in_4bit": True, "dtype": "bfloat16", "use_gradient_checkpointing": False},
    "lora": {"r": 16, "lora_alpha": 16},
    "optimizer": {"learning_rate": 5e-4, "lr_scheduler_type": "cosine", "warmup_ratio": 0.03},
    "training": {"per_device_train_batch_size": 8, "num_train_epochs": 3, "logging_steps": 50},
    "output": {"overwrite_output_dir": True},
}


def fastjax(*arguments: object, device: str | None = None) -> str:
    """A command's standard output; its messages go to this script's."""
    platform = {} if device is None else {"JAX_PLATFORMS": device}
    command = [sys.executable, "-m", "fastjax", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | platform, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def train(arguments: argparse.Namespace, others: Sequence[str]) -> None:
    """Write data and settings, run, and print the cost."""
    import yaml

    folder = arguments.output
    lines = arguments.data.read_text(encoding="utf-8").splitlines()
    for name, part in (("train", lines[:-HELD_OUT]), ("held_out", lines[-HELD_OUT:])):
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for row in map(json.loads, part):
                turns = {"user": row["question"], "assistant": row["answer"]}
                messages = [{"role": role, "content": content} for role, content in turns.items()]
                file.write(json.dumps({"messages": messages}) + "\n")
    settings = {section: dict(values) for section, values in SETTINGS.items()}
    settings["model"]["model_name"] = str(arguments.model)
    settings["data"] = {"train": str(folder / "train.jsonl"), "eval": str(folder / "held_out.jsonl")}
    settings["data"]["cache_dir"] = str(folder / "cache")
    settings["output"]["output_dir"] = str(folder / "run")
    (folder / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    start = time.perf_counter()
    command = [sys.executable, "-m", "fastjax", "train", "--config", str(folder / "run.yaml"), *others]
    subprocess.run(command, cwd=ROOT, check=True)
    seconds = time.perf_counter() - start
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    (held_out,) = [row["eval_loss"] for row in rows if "eval_loss" in row]
    tokens = sum(row["num_tokens"] for row in steps)
    print(
        f"{len(steps)} steps, {tokens:,} tokens; {steps[-1]['seconds']:.1f} s of training, {seconds:.1f} s of the "
        f"whole command; loss {steps[0]['loss']:.4f} at first, held out {held_out:.4f} at last; "
        f"{(steps[-1]['memory_bytes'] or 0) / 2**30:.2f} GiB"
    )


def compare(arguments: argparse.Namespace) -> bool:
    """Answer in every place and print the differences; returns whether all are acceptable."""
    folder, new = arguments.output, arguments.new_tokens
    adapter = arguments.adapter or folder / "run" / "adapter"
    rows = [json.loads(line) for line in arguments.data.read_text(encoding="utf-8").splitlines()[-HELD_OUT:]]
    chosen = random.Random(0).sample(rows, arguments.questions)
    questions = [" ".join(row["question"].split()) for row in chosen]  # a prompt is a line of the file
    (folder / "questions.txt").write_text("".join(question + "\n" for question in questions), encoding="utf-8")
    _in_process("prompts", arguments.model, adapter, questions, folder / "prompts.json")
    if not (folder / "merged").exists() or arguments.again:
        fastjax("convert", "merge", arguments.model, adapter, folder / "merged", "--base_in_nf4", "--dtype", "float32",
                "--force")  # fmt: skip
        fastjax("convert", "gguf", folder / "merged", folder / "merged.gguf", "--type", "f32", "--force")
    places = {"peft": (arguments.model, adapter), "merged": (folder / "merged",), "gguf": (folder / "merged.gguf",)}
    for name, inputs in places.items():
        python = arguments.llama_python if name == "gguf" else sys.executable
        if name == "gguf" and subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode:
            print(f"gguf: left out, {python} has no llama-cpp-python")
            continue
        if arguments.again or not (folder / f"{name}.json").exists():
            _in_process(name, *inputs, folder / "prompts.json", new, folder / f"{name}.json", python=python)
    present = [name for name in places if (folder / f"{name}.json").exists()]
    others = [folder / f"{name}.json" for name in present]
    _in_process("own", arguments.model, adapter, folder / "prompts.json", new, others, folder / "fastjax.json")
    command = ("generate", "--model", arguments.model, "--load_in_4bit", "--adapter", adapter, "--dtype", "float32")
    command += ("--file", folder / "questions.txt", "--json", "--max_new_tokens", new)
    printed = [json.loads(line) for line in fastjax(*command, device="cpu").splitlines()]
    own = json.loads((folder / "fastjax.json").read_text())
    assert [row["prompt"] for row in printed] == questions
    assert [row["answer"] for row in printed] == own["texts"], "fastjax generate prints the tokens that are compared"
    stops = json.loads((folder / "prompts.json").read_text())["stops"]
    right = True
    for name in present:
        answers = json.loads((folder / f"{name}.json").read_text())["answers"]
        right &= _report(name, own["answers"], answers, own["gaps"][str(folder / f"{name}.json")], stops)
    right_numbers = sum(_number(text) == _number(row["answer"]) for text, row in zip(own["texts"], chosen, strict=True))
    print(f"fastjax: {right_numbers} of {len(chosen)} end with the right number")
    return right


def _number(text: str) -> str | None:
    """The number at the end of a GSM8K answer, after ####."""
    match = re.search(r"#### *(-?[\d,.]+)", text)
    return match[1].replace(",", "").rstrip(".") if match else None


def _report(name: str, own: list[dict], others: list[dict], gaps: dict[str, float], stops: list[int]) -> bool:
    """Print the equal answers and where the others part; returns whether at most one in fifty does, at a tie."""
    ties, parted = 0, 0
    for number, (ours, theirs) in enumerate(zip(own, others, strict=True)):
        place = _parts(ours["tokens"], theirs["tokens"])
        if place is None:
            continue
        parted += 1
        # The other place's two likeliest tokens must be the two candidates.
        candidate = _at(ours["tokens"], place)
        second, gap = theirs["second"][place]
        theirs_gap = gap if second in (stops if candidate is None else [candidate]) else float("inf")
        tie = max(gaps[str(number)], theirs_gap) < TIE
        ties += tie
        print(
            f"{name}: question {number}, token {place}: {candidate} and {_at(theirs['tokens'], place)}, logits "
            f"{gaps[str(number)]:.2e} apart in fastjax, {theirs_gap:.2e} in {name}{'' if tie else ': NO TIE'}"
        )
    tokens = sum(len(answer["tokens"]) for answer in own)
    print(f"{name}: {len(own) - parted} of {len(own)} answers equal fastjax's token for token ({tokens:,} tokens)")
    return parted == ties and parted <= max(1, len(own) // 50)


def _parts(one: Sequence[int], two: Sequence[int]) -> int | None:
    """The first place where two answers differ; None where they are equal."""
    if one == two:
        return None
    return next(
        (i for i, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), min(len(one), len(two))
    )


def _at(tokens: Sequence[int], place: int) -> int | None:
    """The token there; None where the answer has ended."""
    return tokens[place] if place < len(tokens) else None


def _in_process(name: str, *values: object, python: str = sys.executable) -> None:
    """Run one of PARTS on a CPU in a process of its own."""
    arguments = json.dumps(values, default=str)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    start = time.perf_counter()
    subprocess.run([python, __file__, "part", name, arguments], env=environment, check=True)
    print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)


def write_prompts(model: str, adapter: str, questions: list[str], file: str) -> None:
    """Write the questions in the chat template, as in `fastjax generate`, and the stop tokens."""
    from fastjax.data import Encoder
    from fastjax.data.tokenizer import load_tokenizer, own_tokenizer

    encoder = Encoder(own_tokenizer(adapter) or load_tokenizer(model))
    prompts = [encoder.encode_prompt([{"role": "user", "content": question}]) for question in questions]
    Path(file).write_text(json.dumps({"prompts": prompts, "stops": encoder.stop_tokens()}))


def answer_with_fastjax(model: str, adapter: str, prompts: str, new: int, others: list[str], file: str) -> None:
    """Answers in tokens and in words, and the candidates' gap in logits where another place differs."""
    import jax
    import numpy as np
    from flax import nnx

    from fastjax.generation.options import GenerationOptions
    from fastjax.generation.text import answers as answers_of
    from fastjax.language_model import FastLanguageModel
    from fastjax.models.decoder import lm_logits

    given = json.loads(Path(prompts).read_text())
    own, _ = FastLanguageModel.from_pretrained(model, dtype="float32", load_in_4bit=True)
    own = FastLanguageModel.load_adapter(own, adapter)
    options = GenerationOptions(max_new_tokens=new, stop_tokens=given["stops"])
    answers = [list(one.token_ids) for [one] in answers_of(own, given["prompts"], options, ignore_eos=True)]

    @jax.jit
    def logits(trainable, frozen, tokens):
        decoder = nnx.merge(own.graphdef, trainable, frozen)
        positions = jax.numpy.arange(tokens.shape[1], dtype=jax.numpy.int32)[None]
        return lm_logits(decoder.lm_head, decoder(tokens, positions, jax.numpy.ones_like(tokens)))[0]

    gaps: dict[str, dict[int, float]] = {}
    for other in others:
        theirs = [row["tokens"] for row in json.loads(Path(other).read_text())["answers"]]
        gaps[other] = {}
        for number, pair in enumerate(zip(answers, theirs, strict=True)):
            place = _parts(*pair)
            if place is None:
                continue
            tokens = [*given["prompts"][number], *answers[number][:place]]
            padded = np.zeros((1, -(-len(tokens) // 64) * 64), np.int32)  # a causal model does not see what follows
            padded[0, : len(tokens)] = tokens
            last = np.asarray(logits(own.trainable, own.frozen, padded))[len(tokens) - 1]
            ends = max(last[stop] for stop in given["stops"])
            one, two = (ends if token is None else last[token] for token in (_at(side, place) for side in pair))
            gaps[other][number] = abs(float(one) - float(two))
    assert own.tokenizer is not None
    texts = [str(own.tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]
    found = {"answers": [{"tokens": answer} for answer in answers], "texts": texts, "gaps": gaps}
    Path(file).write_text(json.dumps(found))


def answer_with_peft(model: str, adapter: str, prompts: str, new: int, file: str) -> None:
    """By the report's code for a run in float32."""
    from convert.files import read_json
    from fastjax.training.config import ModelSection
    from fastjax.training.report import usage

    lines = usage(ModelSection(model), Path(adapter), read_json(Path(model) / "config.json"), "float32").python
    print(lines, file=sys.stderr)
    names: dict[str, Any] = {}
    exec(lines, names)
    _answer_with_torch(names["model"], prompts, new, file)


def answer_with_transformers(folder: str, prompts: str, new: int, file: str) -> None:
    """A plain folder, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    _answer_with_torch(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), prompts, new, file)


def _answer_with_torch(model: Any, prompts: str, new: int, file: str) -> None:
    """Greedy answers of a batch that is padded on the left."""
    import torch

    given = json.loads(Path(prompts).read_text())
    width = max(map(len, given["prompts"]))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in given["prompts"]])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in given["prompts"]])
    state: dict[str, Any] = {"past": None, "mask": mask}

    def step(tokens: Any) -> Any:
        positions = (state["mask"].cumsum(1) - 1).clip(min=0)[:, -tokens.shape[1] :]
        with torch.no_grad():
            inputs = {"input_ids": tokens, "attention_mask": state["mask"], "position_ids": positions}
            out = model(**inputs, past_key_values=state["past"], use_cache=True, logits_to_keep=1)
        state["past"] = out.past_key_values
        state["mask"] = torch.cat([state["mask"], torch.ones_like(state["mask"][:, :1])], dim=1)
        return out.logits[:, -1]

    model.eval()
    logits = step(tokens)
    assert logits.dtype == torch.float32, logits.dtype
    rows: list[dict[str, list]] = [{"tokens": [], "second": []} for _ in given["prompts"]]
    done = [False] * len(rows)
    for _ in range(new):
        values, ids = logits.topk(2)
        for number, row in enumerate(rows):
            done[number] = done[number] or _take(row, ids[number].tolist(), values[number].tolist(), given["stops"])
        if all(done):
            break
        logits = step(ids[:, :1])
    Path(file).write_text(json.dumps({"answers": rows}))


def answer_with_llama_cpp(gguf: str, prompts: str, new: int, file: str) -> None:
    """One question after the other; keys and values in float32, and no flash attention, which rounds them."""
    import llama_cpp  # pyright: ignore[reportMissingImports]
    import numpy as np

    given = json.loads(Path(prompts).read_text())
    context = -(-(max(map(len, given["prompts"])) + new) // 256) * 256
    options = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
    model = llama_cpp.Llama(gguf, n_ctx=context, n_threads=os.cpu_count(), logits_all=True, verbose=False, **options)
    rows = []
    for prompt in given["prompts"]:
        row: dict[str, list] = {"tokens": [], "second": []}
        model.reset()
        model.eval(prompt)
        for _ in range(new):
            logits = model.scores[model.n_tokens - 1]
            two = np.argpartition(-logits, 2)[:2]
            two = two[np.argsort(-logits[two], kind="stable")]
            if _take(row, two.tolist(), logits[two].tolist(), given["stops"]):
                break
            model.eval(two[:1].tolist())
        rows.append(row)
    Path(file).write_text(json.dumps({"answers": rows}))


def _take(row: dict[str, list], tokens: Sequence[int], logits: Sequence[float], stops: Sequence[int]) -> bool:
    """Add the likelier of two tokens and the other one to an answer; returns whether it has ended."""
    row["second"].append([tokens[1], logits[0] - logits[1]])
    if tokens[0] in stops:
        return True
    row["tokens"].append(tokens[0])
    return False


PARTS: dict[str, Callable[..., None]] = {
    "prompts": write_prompts,
    "own": answer_with_fastjax,
    "peft": answer_with_peft,
    "merged": answer_with_transformers,
    "gguf": answer_with_llama_cpp,
}


def main() -> None:
    if sys.argv[1:2] == ["part"]:
        PARTS[sys.argv[2]](*json.loads(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "compare"))
    parser.add_argument("--model", type=Path, required=True, help="folder of the base model, in 16 bits")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--output", type=Path, required=True, help="folder for everything that is written")
    parser.add_argument("--adapter", type=Path, help="compare: default: the run's in --output")
    parser.add_argument("--questions", type=int, default=50, help="compare: held-out questions")
    parser.add_argument("--new_tokens", type=int, default=128, help="compare: of an answer at most")
    parser.add_argument("--llama_python", default=sys.executable, help="compare: a Python with llama-cpp-python")
    parser.add_argument("--again", action="store_true", help="compare: answer again where answers lie in --output")
    arguments, others = parser.parse_known_args()
    for name in ("model", "data", "output", "adapter"):
        if getattr(arguments, name) is not None:
            setattr(arguments, name, getattr(arguments, name).absolute())
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.what == "train":
        train(arguments, others)
    elif others:
        parser.error(f"compare: unknown: {' '.join(others)}")
    elif not compare(arguments):
        sys.exit("answers differ")


if __name__ == "__main__":
    main()
