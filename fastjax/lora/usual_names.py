"""Llama's names of projections for models that hold these otherwise: Phi's fused matrices, experts as parameters.

Settings that are written for any model list them: Unsloth splits fused matrices as it loads, and PEFT 0.21 reads the
projections of experts in `target_modules` as the parameters that hold them.
"""

import dataclasses

from convert.model.config import ModelConfig
from fastjax.lora.settings import LoraSettings
from fastjax.lora.sites import module_names, parameters

#: Llama's name → fused module, and the end of the name of experts' matrices.
_HELD = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("qkv_proj", None)),
    **dict.fromkeys(("gate_proj", "up_proj"), ("gate_up_proj", "experts.gate_up_proj")),
    "down_proj": (None, "experts.down_proj"),
}


def with_usual_names(settings: LoraSettings, config: ModelConfig) -> tuple[LoraSettings, str | None]:
    """Settings by the names that a model has, where Llama's stand for them.

    Args:
        settings: of a fresh adapter.
        config: the model's.

    Returns:
        The settings, and a sentence about names that were replaced; None: none were.
    """
    listed = settings.target_modules
    if listed is None or isinstance(listed, str):
        return settings, None
    known, experts = module_names(config), parameters(config)
    modules, told, matrices = [], {}, list(settings.target_parameters or ())
    for name in listed:
        fused, matrix = _HELD.get(name, (None, None))
        found = sorted({"mlp." + one.rpartition(".mlp.")[2] for one in experts if matrix and one.endswith(matrix)})
        if name in known or not (fused in known or found):
            modules.append(name)
        elif fused in known:
            modules, told[name] = [*modules, fused], fused
        else:
            matrices, told[name] = [*matrices, *found], " and ".join(found)
    if not told:
        return settings, None
    said = ", ".join(f"{name} is {held}" for name, held in told.items())
    chosen = dataclasses.replace(
        settings,
        target_modules=list(dict.fromkeys(modules)),
        target_parameters=list(dict.fromkeys(matrices)) or None,
    )
    return chosen, f"target_modules: {said} in this model, whose adapter is on the whole of it"
