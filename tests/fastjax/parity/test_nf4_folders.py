"""4-bit folders that transformers and bitsandbytes write: our logits are those of the weights they decode to."""

import numpy as np
import pytest

from fastjax.language_model import FastLanguageModel
from fastjax.quantization import NF4Weight
from tests.support import tiny

torch = pytest.importorskip("torch")
bitsandbytes = pytest.importorskip("bitsandbytes")
torch_llama = pytest.importorskip("tests.support.torch_llama")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, *torch_llama.NOTES_OF_PEFT]

CONFIG = tiny.config(num_hidden_layers=2, hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
#: What a "dynamic" folder leaves in 16 bits; the head is always left.
KEPT = ["lm_head", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.v_proj"]


def write_with_bitsandbytes(folder, *, nested, kept=("lm_head",)):
    """A bitsandbytes folder and the torch model that holds what it decodes to, bfloat16 values in float32."""
    arrays = tiny.arrays(CONFIG)
    plain = torch_llama.build(CONFIG, arrays).to(torch.bfloat16)
    plain.save_pretrained(folder / "plain")
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        llm_int8_skip_modules=list(kept),
    )
    quantized = transformers.LlamaForCausalLM.from_pretrained(
        folder / "plain", dtype=torch.bfloat16, quantization_config=settings, device_map="cpu"
    )
    quantized.save_pretrained(folder / "packed")
    tiny.write_tokenizer(folder / "packed", CONFIG)
    decoded = {}
    modules = dict(quantized.named_modules())
    for name in arrays:
        module = modules[name.rpartition(".")[0]]
        value = getattr(module, name.rpartition(".")[2])
        if isinstance(module, bitsandbytes.nn.Linear4bit) and name.endswith(".weight"):
            value = bitsandbytes.functional.dequantize_4bit(value.data, value.quant_state)
            assert value.dtype == torch.bfloat16
        decoded[name] = value.detach().float().numpy().reshape(arrays[name].shape)
    return folder / "packed", torch_llama.build(CONFIG, decoded)


@pytest.mark.exhaustive("uniform-False", "dynamic-True")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kept", [("lm_head",), KEPT], ids=["uniform", "dynamic"])
def test_logits_of_a_bitsandbytes_folder(tmp_path, kept, nested):
    packed, reference = write_with_bitsandbytes(tmp_path, nested=nested, kept=kept)
    model, _ = FastLanguageModel.from_pretrained(packed, dtype="float32")
    leaves = [leaf for leaf in _leaves(model.frozen) if isinstance(leaf, NF4Weight)]
    assert leaves and all((leaf.nested_absmax is not None) == nested for leaf in leaves)
    tokens, _, segments, positions = tiny.rows([tiny.documents(CONFIG, (40,)), tiny.documents(CONFIG, (13, 22))], 40)
    expected = torch_llama.logits(reference, tokens, positions, segments)
    found = tiny.logits(model, tokens, positions, segments)
    np.testing.assert_allclose(found[segments > 0], expected[segments > 0], rtol=0, atol=1e-4)


def test_qlora_steps_equal_pefts_over_the_decoded_weights(tmp_path):
    """Five AdamW steps with DoRA on a nested 4-bit base, against torch with the weights that bitsandbytes decodes."""
    import jax
    import optax
    import peft

    from fastjax.training.step import init_state, make_train_step

    packed, reference = write_with_bitsandbytes(tmp_path, nested=True, kept=KEPT)
    options = {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": "all-linear"}
    torch.manual_seed(1)
    theirs = peft.get_peft_model(reference, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    theirs.save_pretrained(tmp_path / "start")
    base, _ = FastLanguageModel.from_pretrained(packed, dtype="float32")
    model = FastLanguageModel.load_adapter(base, tmp_path / "start")
    update = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    optimizer = optax.adamw(1e-2, weight_decay=0.0)
    state = init_state(model.trainable, optimizer, jax.random.key(0))
    step = make_train_step(model.graphdef, optimizer, model.trainable_filter)
    for batch in tiny.batches(CONFIG, 5):
        expected = torch_llama.backward(theirs, batch)
        update.step()
        update.zero_grad()
        state, metrics = step(state, model.frozen, batch)
        assert abs(float(metrics["loss"]) - expected) < 1e-4


def _leaves(tree):
    import jax

    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, NF4Weight))
