"""Tiny random Llamas, folders and batches; every config field that changes the mathematics is off its default."""

import atexit
import functools
import itertools
import json
import math
import shutil
import tempfile
import zlib
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, models

from convert.families import family_for
from convert.hub import fetch
from convert.model.spec import VECTORS
from convert.model.tensors import tensors_of
from fastjax.data.batches import Batch
from fastjax.execution.opening import open_folder
from fastjax.execution.options import LoadOptions
from fastjax.execution.stacks import layer_of
from fastjax.language_model import FastLanguageModel
from fastjax.language_model.adapters import attach_adapter
from fastjax.lora.export import export_adapters
from fastjax.lora.tables import shares_whole_table
from fastjax.models.decoder import lm_logits
from tests.support.folders import write_checkpoint

#: Wavelengths of D = 16 and this base lie on all three sides of the two bounds (8 and 32 positions).
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 6.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 192,
    "initializer_range": 0.15,
    "rms_norm_eps": 3e-2,
    "rope_parameters": ROPE,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
    "pretraining_tp": 2,
    "use_cache": False,
    "bos_token_id": 3,
    "eos_token_id": 4,
    "pad_token_id": 100,
}


def config(**changes):
    return {**CONFIG, **changes}


def opened(folder, **options):
    """A folder that is open, and the options of loading it."""
    options = LoadOptions(**options)
    return open_folder(fetch(folder), options), options


def text_config(config):
    """The text model's part of a config."""
    return family_for(config).text_config(config)


def arrays(config, seed=0):
    """Checkpoint names to float32 arrays: no norm is one, no bias zero."""
    rng = np.random.default_rng(seed)
    found = {}
    scale = text_config(config)["initializer_range"]
    for tensor in tensors_of(family_for(config).specs(config)).values():
        noise = rng.standard_normal(tensor.shape)
        if tensor.weights[0].kind in ("norm", "scale"):
            value = 1 + 0.2 * noise
        else:
            value = noise * (0.2 if tensor.weights[0].kind in VECTORS else scale)
        found[tensor.name] = np.asarray(value, np.float32)
    return found


def write_folder(folder, config, tensors, **options):
    """A model folder with a tokenizer of one word a token."""
    write_checkpoint(folder, tensors.items(), config, **options)
    write_tokenizer(folder, text_config(config))
    return folder


def write_tokenizer(folder, config):
    words = {f"w{number}": number for number in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def write_fp8_folder(folder, config, block, seed=0):
    """A model folder with its layers' matrices in FP8, one scale a block; the scales differ by powers of two."""
    tensors, rng = arrays(config, seed), np.random.default_rng(seed)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        matrix = tensors[name]
        blocks = [math.ceil(size / side) for size, side in zip(matrix.shape, block, strict=True)]
        scales = np.exp2(rng.integers(-7, -4, blocks)).astype(np.float32)
        whole = np.kron(scales, np.ones(block, np.float32))[: matrix.shape[0], : matrix.shape[1]]
        tensors[name] = (matrix / whole).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    settings = {"quant_method": "fp8", "weight_block_size": list(block)}
    return write_folder(folder, {**config, "quantization_config": settings}, tensors)


def model(folder, config, seed=0, **options):
    """Our model with the weights of `arrays`, through a folder; float32 and not quantised unless the options say so."""
    if not (folder / "config.json").exists():
        write_folder(folder, config, arrays(config, seed))
    longest = min(128, json.loads((folder / "config.json").read_text()).get("index_topk", 128))
    options = {"dtype": "float32", "load_in_4bit": False, "max_seq_length": longest, **options}
    return FastLanguageModel.from_pretrained(folder, **options)[0]


def adapted(base, seed=0, **options):
    """The model with an adapter whose arrays are all random, the same for every arrangement of the layers."""
    fresh = FastLanguageModel.get_peft_model(base, **{"r": 4, **options})
    tied = shares_whole_table(fresh.lora, fresh.config)
    arrays = export_adapters(fresh.trainable, fresh.plan, tied)
    for path, array in arrays.items():
        rng = np.random.default_rng([seed, zlib.crc32(path.encode())])
        arrays[path] = array + 0.05 * rng.standard_normal(array.shape).astype(np.float32)
    if tied:
        arrays["lm_head.modules_to_save.weight"] = arrays["embed_tokens.modules_to_save.weight"]
    return attach_adapter(base, fresh.lora, arrays, jax.random.key(0))


def by_layer(tree, plan):
    """A model's arrays with one entry a layer, whatever their arrangement."""
    runs = [[tree["layers"].get(r, {}).get(p, {}) for p in range(run.period)] for r, run in enumerate(plan)]
    layers = [layer_of(runs, plan, index) for index in range(sum(run.period * run.count for run in plan))]
    return {**tree, "layers": layers}


@functools.cache
def shared_folder(**changes):
    """A folder of `CONFIG` with changes, written once a process."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-llama-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    changed = config(**changes)
    return write_folder(folder, changed, arrays(changed))


def documents(config, lengths, seed=0):
    """Random documents; never with the padding token, to whose embedding torch gives no gradient."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, config["vocab_size"] - 1, length).astype(np.int32) for length in lengths]


def rows(documents, width, *, learnt=None):
    """Documents, several a row, as the four arrays of a batch [rows, width]; padding at the end.

    Args:
        documents: For each row its documents.
        width: Tokens a row.
        learnt: (row, document, place) -> whether the token that follows is a target; None: all are.
    """
    shape = (len(documents), width)
    tokens, targets = np.zeros(shape, np.int32), np.full(shape, -100, np.int32)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, inside in enumerate(documents):
        start = 0
        for number, document in enumerate(inside):
            end = start + len(document)
            tokens[row, start:end] = document
            targets[row, start : end - 1] = document[1:]
            segments[row, start:end] = number + 1
            positions[row, start:end] = np.arange(len(document))
            for place in range(len(document)):
                if learnt is not None and not learnt(row, number, place):
                    targets[row, start + place] = -100
            start = end
    return tokens, targets, segments, positions


def batches(config, count, *, accumulation=1, width=40, seed=0):
    """Batches of two packed rows a microbatch, with padding, and with uneven numbers of targets."""
    lengths = [[(17, 20), (9, 4, 25)], [(38,), (11, 11)]]
    made = []
    for number in range(count):
        parts = []
        for part in range(accumulation):
            seeds = itertools.count(1000 * seed + 100 * number + 10 * part)
            inside = [documents(config, row, next(seeds)) for row in lengths[part % 2]]
            parts.append(rows(inside, width, learnt=lambda row, document, place: (place + document) % 5 > 0 or not row))
        made.append(Batch(*(np.stack(arrays) for arrays in zip(*parts, strict=True))))
    return made


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef, trainable, frozen, tokens, positions, segment_ids):
    decoder = nnx.merge(graphdef, trainable, frozen)
    return lm_logits(decoder.lm_head, decoder(tokens, positions, segment_ids))


def logits(model, tokens, positions=None, segment_ids=None):
    """Logits of a model, float32 numpy [B, S, V]."""
    tokens = np.asarray(tokens, np.int32)
    if positions is None:
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return np.asarray(
        _logits(model.graphdef, model.trainable, model.frozen, tokens, positions, segment_ids), np.float32
    )
