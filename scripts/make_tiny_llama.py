"""Make the embedded model, fastjax/assets/tiny-llama, and the data sets beside it (see tiny_world.py).

Everything follows from the seed: the text, the tokenizer, the weights' start and the order of the rows. Training the
base model from random weights takes a minute on a GPU and hours on a few CPU cores.

    python3 scripts/make_tiny_llama.py            # in place
    python3 scripts/make_tiny_llama.py --output /tmp/assets --steps 100
"""

import argparse
import random
import shutil
from pathlib import Path

import jax
import numpy as np
import tiny_world
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fastjax.data import Batches, DataOptions, prepare
from fastjax.language_model import FastLanguageModel
from fastjax.training.config import OptimizerConfig
from fastjax.training.optimizers import make_optimizer
from fastjax.training.step import init_state, make_train_step

ASSETS = Path(__file__).resolve().parent.parent / "fastjax" / "assets"
LENGTH = 256
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 768,
    "hidden_size": 192,
    "intermediate_size": 448,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "initializer_range": 0.04,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": [1, 4],
    "dtype": "bfloat16",
}


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; digits stand alone."""
    bpe = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pieces, level])
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"], special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=SPECIAL[0], eos_token=SPECIAL[4], pad_token=SPECIAL[1]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def text_of(document: tiny_world.Document) -> str:
    """A document's text for the tokenizer."""
    if "text" in document:
        return str(document["text"])
    return "\n".join(message["content"] for message in document["messages"])  # pyright: ignore


def train(tokenizer, documents: list, *, steps: int, batch_size: int, learning_rate: float, seed: int):
    """Full fine-tuning from random weights."""
    data = prepare(documents, tokenizer, LENGTH, DataOptions(loss_on="all", cache_dir=None))
    print(data.statistics)
    model = FastLanguageModel.from_config(
        CONFIG, LENGTH, full_finetuning=True, random_state=seed, tokenizer=tokenizer, use_gradient_checkpointing="none"
    )
    settings = OptimizerConfig(learning_rate=learning_rate, warmup_steps=200, weight_decay=0.05, adam_beta2=0.98)
    optimizer = make_optimizer(settings, steps)
    step = make_train_step(model.graphdef, optimizer, model.trainable_filter)
    state = init_state(model.trainable, optimizer, jax.random.key(seed))
    batches = Batches(data.rows, batch_size, seed=seed)
    for number, batch in enumerate(batches.from_step(0, steps)):
        state, metrics = step(state, model.frozen, batch)
        if number % 100 == 99:
            print(f"step {number + 1}/{steps}: loss {float(metrics['loss']):.4f}", flush=True)
    return model.replace(trainable=state.trainable)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ASSETS)
    parser.add_argument("--documents", type=int, default=120_000)
    parser.add_argument("--steps", type=int, default=6_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    tiny_world.write_data_sets(arguments.output, arguments.seed)
    rng = random.Random(arguments.seed + 1)
    learnt = [tiny_world.record_document(rng) for _ in range(200)]  # the first of tiny-chat's

    rng = random.Random(arguments.seed)
    documents = [tiny_world.base_document(rng) for _ in range(arguments.documents)]
    texts = [text_of(d) for d in documents[:20_000]] + [text_of(d) for d in learnt]
    tokenizer = make_tokenizer(texts)
    assert len(tokenizer) == CONFIG["vocab_size"], len(tokenizer)
    options = {name: getattr(arguments, name) for name in ("steps", "batch_size", "learning_rate", "seed")}
    model = train(tokenizer, documents, **options)
    folder = arguments.output / "tiny-llama"
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    trained = model.num_parameters()[0]
    finite = all(bool(np.isfinite(np.asarray(leaf)).all()) for leaf in jax.tree.leaves(model.trainable))
    Console().print(f"{folder}: {trained:,} parameters, {size / 1e6:.2f} MB, finite: {finite}")


if __name__ == "__main__":
    main()
