"""AdamW steps equal torch's and PEFT's, option by option: same weights, adapters, batches and dropout masks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.checkpoint import open_checkpoint
from fastjax.language_model import FastLanguageModel
from fastjax.lora.dropout import drop
from fastjax.training.optimizers import OptimizerConfig, make_optimizer
from fastjax.training.step import init_state, make_train_step
from tests.support import tiny

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
torch_llama = pytest.importorskip("tests.support.torch_llama")
pytestmark = [pytest.mark.torch, *torch_llama.NOTES_OF_PEFT]

STEPS = 10
LOSS_TOLERANCE = 1e-4  # float32, losses of 4 to 6
ADAPTER_TOLERANCE = 1e-3  # relative, Frobenius, a tensor: Adam divides by gradients' roots, which amplifies rounding

PLAIN = OptimizerConfig(learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=0.0)
SCHEDULED = OptimizerConfig(learning_rate=2e-2, warmup_steps=4, weight_decay=0.1, max_grad_norm=0.5)
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BOTH = ["embed_tokens", "lm_head"]


def case(*, tied=False, optimizer=PLAIN, accumulation=1, layer_loop="scan", **options):
    options = {"r": 4, "lora_alpha": 8, "target_modules": SEVEN, **options}
    return {
        "tied": tied,
        "optimizer": optimizer,
        "accumulation": accumulation,
        "layer_loop": layer_loop,
        "options": options,
    }


CASES = {
    "plain": case(),
    "target_modules all-linear": case(target_modules="all-linear"),
    "init_lora_weights false": case(init_lora_weights=False),
    "init_lora_weights orthogonal": case(init_lora_weights="orthogonal"),
    "init_lora_weights gaussian": case(init_lora_weights="gaussian"),
    "bias none": case(bias="none"),
    "plain, scheduled and clipped": case(optimizer=SCHEDULED, accumulation=2),
    "unrolled": case(layer_loop="unroll", optimizer=SCHEDULED),
    "r and lora_alpha": case(r=3, lora_alpha=10),
    "target_modules subset": case(target_modules=["q_proj", "down_proj"]),
    "target_modules expression": case(target_modules=r".*layers\.[02]\.(self_attn\.[kv]|mlp\.up)_proj"),
    "use_rslora": case(use_rslora=True),
    "use_dora": case(use_dora=True, optimizer=SCHEDULED),
    "rank_pattern": case(rank_pattern={"k_proj": 2, r"layers\.1\.mlp\.down_proj": 6}),
    "alpha_pattern": case(alpha_pattern={"layers.0.self_attn.v_proj": 3, "up_proj": 20}),
    "layers_to_transform": case(layers_to_transform=[0, 2]),
    "one layer to transform": case(layers_to_transform=1),
    "modules_to_save embed_tokens": case(modules_to_save=["embed_tokens"]),
    "modules_to_save lm_head": case(modules_to_save=["lm_head"]),
    "modules_to_save both": case(modules_to_save=BOTH, optimizer=SCHEDULED),
    "modules_to_save embed_tokens, tied": case(tied=True, modules_to_save=["embed_tokens"]),
    "modules_to_save lm_head, tied": case(tied=True, modules_to_save=["lm_head"]),
    "modules_to_save both, tied": case(tied=True, modules_to_save=BOTH),
    "modules_to_save embed_tokens, kept tied": case(
        tied=True, modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    "modules_to_save lm_head, kept tied": case(tied=True, modules_to_save=["lm_head"], ensure_weight_tying=True),
    "modules_to_save both, kept tied": case(tied=True, modules_to_save=BOTH, ensure_weight_tying=True),
    "adapter on embed_tokens": case(target_modules=["q_proj", "embed_tokens"]),
    "adapter on lm_head": case(target_modules=["q_proj", "lm_head"]),
    "adapters on both, tied": case(tied=True, target_modules=["q_proj", *BOTH]),
    "adapter on embed_tokens, head saved": case(target_modules=["v_proj", "embed_tokens"], modules_to_save=["lm_head"]),
    "use_dora on both": case(target_modules=["o_proj", *BOTH], use_dora=True),
    "lora_dropout": case(lora_dropout=0.3, target_modules=[*SEVEN, *BOTH]),
    "lora_dropout, use_dora": case(lora_dropout=0.3, target_modules=[*SEVEN, "lm_head"], use_dora=True),
    "everything": case(  # scales up to 10: at a higher rate torch in float32 strays from torch in float64 as well
        optimizer=dataclasses.replace(SCHEDULED, learning_rate=4e-3),
        accumulation=2,
        target_modules=[*SEVEN, "lm_head"],
        modules_to_save=["embed_tokens"],
        use_rslora=True,
        use_dora=True,
        rank_pattern={"k_proj": 2},
        alpha_pattern={"up_proj": 20},
        layers_to_transform=[1, 2],
        lora_dropout=0.2,
        init_lora_weights=False,
    ),
}


#: Where steps differ in more than the batch and the arrays: the optimizer's memory and schedule, dropout's keys, tied
#: arrays, DoRA's norms of what has moved. Elsewhere three steps reach every array: A has no gradient until B has moved.
TEN = (
    "plain",
    "plain, scheduled and clipped",
    "use_dora",
    "modules_to_save both",
    "modules_to_save both, kept tied",
    "adapters on both, tied",
    "lora_dropout",
    "everything",
)


#: One of each mechanism; "everything" has the others' ranks, scales, layers and dropout, schedule and clipping, and
#: "all-linear" is in test_families.py.
TELLING = (
    *("init_lora_weights orthogonal", "modules_to_save lm_head, tied"),
    *("modules_to_save both, kept tied", "adapters on both, tied", "use_dora on both", "everything"),
)


@pytest.mark.exhaustive(*TELLING)
@pytest.mark.parametrize("name", CASES)
def test_steps(name, tmp_path):
    case, steps = CASES[name], STEPS if name in TEN else 3
    config = tiny.config(tie_word_embeddings=case["tied"])
    arrays = tiny.arrays(config)
    torch.manual_seed(7)
    reference = peft.get_peft_model(
        torch_llama.build(config, arrays), peft.LoraConfig(task_type="CAUSAL_LM", **case["options"])
    )
    reference.save_pretrained(tmp_path / "start")
    model = tiny.model(tmp_path, config, layer_loop=case["layer_loop"])
    model = FastLanguageModel.load_adapter(model, tmp_path / "start")

    trained = compare_steps(case, config, model, reference, steps=steps)

    reference.save_pretrained(tmp_path / "theirs")
    trained.save_pretrained(tmp_path / "ours")
    start, theirs, ours = (read_tensors(tmp_path / part) for part in ("start", "theirs", "ours"))
    compare_tensors(start, theirs, ours)


@pytest.mark.exhaustive("True")
@pytest.mark.parametrize("tied", [False, True])
def test_ten_steps_of_full_finetuning(tied, tmp_path):
    full = case(tied=tied, optimizer=SCHEDULED, accumulation=1 + tied)
    config = tiny.config(tie_word_embeddings=tied)
    arrays = tiny.arrays(config)
    reference = torch_llama.build(config, arrays)
    model = tiny.model(tmp_path, config, full_finetuning=True)
    trained = compare_steps(full, config, model, reference)
    trained.save_pretrained(tmp_path / "ours")
    checkpoint = open_checkpoint(tmp_path / "ours")
    theirs = {name: reference.state_dict()[name].numpy() for name in arrays}
    compare_tensors(arrays, theirs, {name: checkpoint.read(name) for name in checkpoint.names})


FIFTY = OptimizerConfig(learning_rate=2e-3, warmup_steps=5, weight_decay=0.1)


@pytest.mark.exhaustive(by="test_steps, test_ten_steps_of_full_finetuning")
@pytest.mark.parametrize("full", [False, True])
def test_fifty_steps_in_float32(full, tmp_path):
    """As precise as float32 is: the losses of fifty steps, 4 to 6, within 1e-5."""
    config = tiny.config(tie_word_embeddings=False)
    arrays = tiny.arrays(config)
    fifty = case(optimizer=FIFTY)
    torch.manual_seed(7)
    reference = torch_llama.build(config, arrays)
    model = tiny.model(tmp_path, config, full_finetuning=full)
    if not full:
        reference = peft.get_peft_model(reference, peft.LoraConfig(task_type="CAUSAL_LM", **fifty["options"]))
        reference.save_pretrained(tmp_path / "start")
        model = FastLanguageModel.load_adapter(model, tmp_path / "start")
    compare_steps(fifty, config, model, reference, count=50, tolerance=1e-5)


def compare_steps(case, config, model, reference, *, count=STEPS, steps=None, tolerance=LOSS_TOLERANCE):
    """Train both for `steps` of `count`, losses and gradients' norms equal at each; our model after the last."""
    batches = tiny.batches(config, steps or count, accumulation=case["accumulation"])
    settings: OptimizerConfig = case["optimizer"]
    optimizer = optimizer_of(settings, count)
    state = init_state(model.trainable, optimizer, jax.random.key(11))
    key = jax.random.wrap_key_data(np.asarray(jax.random.key_data(state.key)))
    step = step_of(model.graphdef, optimizer, model.trainable_filter)

    masks = Masks(case["options"].get("lora_dropout", 0.0), key)
    torch_llama.set_lora_dropout(reference, masks.module)
    reference.train()
    update = torch_optimizer(reference, settings, count)
    losses = []
    for number, batch in enumerate(batches):
        masks.step(number)
        expected, norm = update(batch, masks)
        state, metrics = step(state, model.frozen, batch)
        assert abs(float(metrics["loss"]) - expected) < tolerance, f"step {number}"
        assert abs(float(metrics["grad_norm"]) - norm) < 1e-3 * norm, f"step {number}"
        assert int(metrics["num_targets"]) == int((batch.targets != -100).sum())
        losses.append(expected)
    assert len(losses) < STEPS or min(losses[-5:]) < losses[0] - 0.05, (
        "nothing was learnt: the comparison would prove little"
    )
    return model.replace(trainable=state.trainable)


_OPTIMIZERS = {}


def optimizer_of(settings, count):
    """Equal settings share an optimizer; they hold a list, so they are known by their repr."""
    return _OPTIMIZERS.setdefault((repr(settings), count), make_optimizer(settings, count))


@functools.lru_cache(maxsize=8)
def step_of(graphdef, optimizer, trainable_filter):
    """Cases that differ in their numbers only share a compilation."""
    return make_train_step(graphdef, optimizer, trainable_filter)


def torch_optimizer(model, settings: OptimizerConfig, count):
    """What make_optimizer means, spelled with torch and transformers."""
    from transformers import get_constant_schedule, get_cosine_schedule_with_warmup

    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plain = [p for name, p in named if any(word in name for word in settings.no_decay)]
    matrices = [p for name, p in named if not any(word in name for word in settings.no_decay)]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": plain, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
    )
    if settings.lr_scheduler_type == "constant":
        schedule = get_constant_schedule(optimizer)
    else:
        schedule = get_cosine_schedule_with_warmup(optimizer, settings.warmup_steps, count)

    def update(batch, masks):
        loss = torch_llama.backward(model, batch, each=masks.microbatch)
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in named], settings.max_grad_norm or float("inf"))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss, float(norm)

    return update


class Masks:
    """The dropout masks that our step draws, for torch's modules."""

    def __init__(self, rate, key):
        self.rate, self.key = rate, key

    def step(self, number):
        self.of_step = jax.random.fold_in(self.key, number)

    def microbatch(self, number):
        self.of_microbatch = jax.random.fold_in(self.of_step, number)

    def module(self, name):
        """The replacement of one adapter's dropout; nothing is dropped in evaluation mode."""
        if not self.rate:
            return torch.nn.Identity()
        masks, draw = self, jax.jit(drop, static_argnums=(2, 3))
        parts = name.split(".")
        layer = int(parts[parts.index("layers") + 1]) if "layers" in parts else None

        class Masked(torch.nn.Module):
            def forward(self, x):
                if not self.training:
                    return x
                key = masks.of_microbatch if layer is None else jax.random.fold_in(masks.of_microbatch, layer)
                mask = draw(jnp.ones(x.shape, jnp.float32), key, parts[-1], masks.rate)
                return x * torch.from_numpy(np.array(mask))

        return Masked()


def read_tensors(folder):
    from safetensors.numpy import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    return {name: array for name, array in tensors.items() if not name.endswith("base_layer.weight")}


def compare_tensors(start, theirs, ours):
    assert set(theirs) == set(ours)
    for name, expected in theirs.items():
        size = np.linalg.norm(expected)
        assert np.linalg.norm(ours[name] - expected) < ADAPTER_TOLERANCE * size, name
        assert np.linalg.norm(start[name] - expected) > 2 * ADAPTER_TOLERANCE * size, f"{name} has not moved"
