"""The model card of a language model's folder: `convert.card` with the lines that load the weights over their base."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convert.card import Card
from convert.trained_over import TrainedOver
from fastjax.execution.language_model import LanguageModel
from fastjax.training.config import ModelSection
from fastjax.training.report.usage import usage


def model_card(model: LanguageModel, name: str) -> Card:
    """The card of what `save_pretrained` writes of a model.

    Args:
        model: one of which something is trained.
        name: of the folder.
    """
    over = model.base
    base = _base_name(model, over)
    kind = "A model, every weight of which was trained" if model.lora is None else "A PEFT adapter, trained"
    told = "a base that is not known" if over is None else f"`{base}`{over.told.removeprefix(base)}"
    about = f"{kind}{' from' if model.lora is None else ' over'} {told}, by fastjax."
    library = "transformers" if model.lora is None else "peft"
    use = _use(model, name, base) if base else ()
    tags = ("transformers",) if model.lora is not None else ()
    return Card(base.partition("@")[0], library, [about], model.lora, model.training, use, model.folder, tags)


def gguf_card(model: LanguageModel, files: Sequence[Path]) -> Card:
    """The card beside GGUF files.

    Args:
        model: that they are of.
        files: of one folder, each beside its Modelfile.
    """
    card = model_card(model, files[0].stem)
    names = ", ".join(f"`{file.name}`" for file in files)
    about = [*card.about, "", f"For llama.cpp, Ollama and LM Studio, the whole model in {names}."]
    file = files[0]
    name, modelfile = file.stem.lower(), file.with_suffix(".Modelfile").name
    commands = (
        shlex.join(["llama-server", "-m", file.name, "--jinja"]),
        f"{shlex.join(['ollama', 'create', name, '-f', modelfile])} && {shlex.join(['ollama', 'run', name])}",
    )
    return card._replace(library="gguf", about=about, use=[("bash", "\n".join(commands))], tags=("gguf",))


def _base_name(model: LanguageModel, over: TrainedOver | None) -> str:
    """The base as `from_pretrained` takes it; "": it is not known."""
    if over is not None:
        return over.name if over.revision is None else f"{over.name}@{over.revision}"
    return str((model.lora and model.lora.base_model_name_or_path) or model.folder or "")


def _use(model: LanguageModel, name: str, base: str) -> list[tuple[str, str]]:
    """The code of a card."""
    fields = dataclasses.fields(model.options)
    options: dict[str, Any] = {field.name: getattr(model.options, field.name) for field in fields}
    options["dtype"] = None  # each machine's own
    section = ModelSection(model_name=base, **options)
    ways = usage(
        section, name, model.hf_config, str(model.dtype), scores=model.config.scored, called=name.rpartition("/")[2]
    )
    language = "python" if model.config.scored else "bash"
    return [(language, ways.own), ("python", ways.python), *([("bash", ways.servers)] if ways.servers else [])]
