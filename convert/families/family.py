"""A family of models, as data.

config.json and `ModelConfig` both ways, tensors and their names, ignored names, refused fields, llama.cpp's support. A
new family is one file with one of these. Defaults are transformers' where they differ from Llama's; one mapping serves
every reader of the config.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from convert.errors import ConvertError, unexpected
from convert.families.gguf import Architecture
from convert.families.mixture import PROJECTIONS, Mixture
from convert.model.layers import MLP as DENSE
from convert.model.layers import MOE, Attention, Layer, Mixer
from convert.model.paths import EMBEDDING, EXPERTS, HEAD, SCORE, WeightPath
from convert.model.reader import Reader
from convert.model.spec import (
    APART,
    ATTENTION,
    FUSED_ATTENTION,
    FUSED_MLP,
    INTERLEAVED,
    LINEAR,
    MLP,
    PLAIN_MLP,
    QK_NORMS,
    SINKS,
    Row,
    WeightSpec,
    dimensions,
    fill_table,
    head_flag,
    norm,
    qk_norm_flag,
    table,
)
from convert.model.tensors import TensorSpec, tensors_of

Config = Mapping[str, Any]
#: `Family.gguf` where the architecture has a name in llama.cpp, but its graph has not been looked at yet.
NOT_COMPARED = "its files have not been compared with llama.cpp"


@dataclasses.dataclass(frozen=True)
class Ignored:
    """An ignored checkpoint name.

    Attributes:
        pattern: Regular expression for the whole name, with ``{layers}`` for the number of layers.
        reason: The reason, in words.
        when: The config's flag for the rule; None for always.
        same_as: Path of the tensor that it must equal byte for byte; None for unchecked.
        copied: Whether derived folders get the tensor unchanged.
    """

    pattern: str
    reason: str
    when: str | None = None
    same_as: str | None = None
    copied: bool = False


_FREQUENCIES = "computed from config.json's RoPE settings"
IGNORED = (
    Ignored(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", _FREQUENCIES),
    Ignored(r"(model\.)?rotary_emb\.inv_freq", _FREQUENCIES),
    Ignored(r"lm_head\.weight", "a copy of the tied embeddings", when="tied", same_as=f"{EMBEDDING}.weight"),
)

#: The layers behind the last one.
FURTHER_TOKENS = Ignored(r"model\.layers\.{layers}\..*", "of the module that predicts further tokens", copied=True)
_TIED = "tie_word_embeddings"
_MERGED = ".experts.gate_up_proj"
#: Before the names of a text model's modules inside another model, in versions of transformers.
_INSIDE = re.compile(r"(?:model\.)?language_model\.(?:model\.)?")
_EXPERT = re.compile(r"model\.layers\.(\d{1,9})\.\w{1,99}\.experts\.(\d{1,9})\.(\w{1,99})")
_CAUSAL, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        model_type: ``model_type`` in config.json.
        architecture: Its class in transformers.
        defaults: Defaults of config.json's fields, where they differ from Llama's.
        names: Field of `ModelConfig` -> its name in config.json, where they differ.
        numbers: Further fields of `ModelConfig`, numbers or null -> their names in config.json.
        switches: Flags of config.json -> the groups of projections that get a bias, or a `qk_norm_flag`.
        constants: Fields of `ModelConfig` common to the family.
        mixers: (reader, number of layers) -> the mixer of each; None: all are attention, with windows and rotary
            positions as `read` has them.
        rows: The weights of mixers other than attention, and of activations; those of attention's block are in the
            place of its own.
        final_norm: Kind of the final normalisation's scale: "norm", or "scale", without the family's offset.
        norm_leaves: Arrays of normalisations: "weight", and "bias" of LayerNorms that have one; none of those without a
            scale.
        mixture: Its mixtures of experts; None: all layers are dense.
        read: (reader, fields so far) -> computed fields of `ModelConfig`.
        neutral: Field -> its values without effect; others are refused.
        gguf: The architecture in llama.cpp; a sentence where there is none.
        section: Key of config.json with the text model's fields; None: the top level.
        parts: Part of a path -> its name in files, where they differ.
        starts: Prefix of tensor names in the text model's own checkpoints -> prefix in these.
        modules: Prefix of tensor names -> prefix of module names in transformers and PEFT, where they differ.
        ignored: Names to ignore.
        classifier: Its class in transformers with one score a text for a head; "": named as `architecture` is; None:
            there is none.
        beside: Modules outside the text model, by their names in transformers.
        others: The same family under other names in files, from other versions of the libraries.
        texts: ``model_type`` of the text model -> the family with that one, where there are several; the first is that
            of a config.json that names none.
    """

    model_type: str
    architecture: str
    defaults: Config = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    switches: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mixers: Callable[[Reader, int], tuple[Mixer, ...]] | None = None
    rows: tuple[Row, ...] = ()
    final_norm: str = "norm"
    norm_leaves: tuple[str, ...] = ("weight",)
    mixture: Mixture | None = None
    read: Callable[[Reader, Mapping[str, Any]], dict[str, Any]] = _nothing
    neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    gguf: Architecture | str = "llama.cpp has no such architecture"
    section: str | None = None
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    starts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: tuple[Ignored, ...] = IGNORED
    classifier: str | None = ""
    beside: tuple[str, ...] = ()
    others: "tuple[Family, ...]" = ()
    texts: "Mapping[str, Family]" = dataclasses.field(default_factory=dict)

    def name(self, field: str) -> str:
        """A field's name in config.json."""
        return self.names.get(field, {"norm_eps": "rms_norm_eps"}.get(field, field))

    @functools.cached_property
    def table(self) -> tuple[Row, ...]:
        """The model's tensors in order, from the constants that `ModelConfig` has as well."""
        has, leaves = self.constants, self.norm_leaves
        before, after = has.get("attention_norms", ("input_layernorm", None))
        before_mlp, after_mlp = has.get("mlp_norms", ("post_attention_layernorm", None))
        fused = has.get("fused", ())
        qk_norm = _norms(QK_NORMS[has.get("qk_norm")], leaves)
        switched = {flag for flags in self.switches.values() for flag in flags}
        optional = tuple(
            row._replace(when=qk_norm_flag(how))
            for how, rows in QK_NORMS.items()
            if qk_norm_flag(how) in switched
            for row in _norms(rows, leaves)
        )
        mlp = FUSED_MLP if "mlp" in fused else MLP if has.get("gated", True) else PLAIN_MLP
        if self.mixture is not None:
            dense = tuple(row._replace(ffn=DENSE) for row in mlp) if self.mixture.dense else ()
            mlp = (*dense, *self.mixture.rows())
        only = Attention.block if "recurrent_norms" in has else None

        def around(name: str | None) -> tuple[Row, ...]:
            return tuple(row._replace(mixer=only) for row in norm(name, leaves)) if name else ()

        attention = FUSED_ATTENTION if "self_attn" in fused else ATTENTION[has.get("attention_gate")]
        if any(row.path.block == Attention.block for row in self.rows):
            attention = ()
        rows = table(
            around(before),
            attention,
            qk_norm or optional,
            SINKS if has.get("attention_sinks") else (),
            self.rows,
            around(after),
            around(before_mlp if before_mlp != before else None),
            mlp,
            around(after_mlp),
            final=norm("norm", leaves, kind=self.final_norm),
        )
        return tuple(row._replace(name=_begun(self._part_name(row), self.starts)) for row in rows)

    def _part_name(self, row: Row) -> str:
        named = self.parts.get(row.path.part)
        return row.name if named is None else row.name.replace(f".{row.path.part}.", f".{named}.")

    def named_as(self, names: Iterable[str]) -> "Family":
        """The family, or the one of `others` or with merged experts, whose layer names a checkpoint has."""
        names = list(names)
        if any(name.endswith(_MERGED) for name in names):
            return self.in_memory
        for family in self.others:
            start = next(row.name for row in family.table if row.path.layer is not None).partition("{i}")[0]
            if any(name.startswith(start) for name in names):
                return family
        return self

    def scored(self, config: Config) -> dict[str, Any]:
        """A config.json of the same model with one score a text in the place of its logits, as a reward model has it.

        Args:
            config: Contents of config.json.

        Raises:
            ConvertError: transformers has no such class of the family.
        """
        if self.classifier is None:
            raise ConvertError(
                f"model_type: expected one with a class for scores ({_CLASSIFIER}) in transformers, got "
                f"{self.model_type}, which has none"
            )
        architecture = self.classifier or self.architecture.replace(_CAUSAL, _CLASSIFIER)
        fields = {name: value for name, value in config.items() if name != "num_labels"}
        return fields | {"architectures": [architecture], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}

    @functools.cached_property
    def in_memory(self) -> "Family":
        """The family with its experts' tensors and names as transformers 5 holds them."""
        if self.mixture is None or self.mixture.layout != APART:
            return self
        return dataclasses.replace(self, mixture=self.mixture.in_memory)

    def text_config(self, config: Config, file: str | os.PathLike[str] = "config.json") -> Config:
        """The fields of the text model; of two words on whether its head is tied transformers takes the outer one.

        Raises:
            ConvertError: The section is missing.
        """
        if self.section is None:
            return config
        inner = config.get(self.section)
        if not isinstance(inner, dict):
            raise unexpected(str(file), self.section, "an object with the fields of the text model", inner)
        return inner if config.get(_TIED) is None else {**inner, _TIED: config[_TIED]}

    def with_text(self, config: Config, file: str | os.PathLike[str] = "config.json") -> "Family":
        """The family of `texts` that a config.json is of, or this one where it has none.

        Raises:
            ConvertError: The text model's type is none of these.
        """
        if not self.texts:
            return self
        kind = self.text_config(config, file).get("model_type", next(iter(self.texts)))
        if not isinstance(kind, str) or kind not in self.texts:
            raise unexpected(str(file), f"{self.section}.model_type", f"one of {', '.join(self.texts)}", kind)
        return self.texts[kind]

    def reader(self, config: Config, file: str | os.PathLike[str] = "config.json") -> Reader:
        """Look-ups in the text model's fields, with the family's defaults."""
        return Reader(self.text_config(config, file), str(file), self.defaults)

    def specs(self, config: Config, file: str | os.PathLike[str] = "config.json") -> tuple[WeightSpec, ...]:
        """All tensors of a model, in order: embeddings, layer by layer, norm, head.

        Args:
            config: Contents of config.json.
            file: Its path, for messages.

        Raises:
            ConvertError: A size or a flag is missing or of the wrong type; the message names it.
        """
        get = self.reader(config, file)
        sizes, flags, layers = dimensions(**self.read_sizes(get)), self._flags(get), get.layers()
        kinds = [Layer(mixer) for mixer in self.mixers(get, layers)] if self.mixers else [Layer()] * layers
        if self.mixture is not None:
            moe, sparse = self.mixture.read(get, layers)
            sizes, flags = sizes | moe.sizes, flags | moe.flags
            kinds = [Layer(kind.mixer, MOE if one else DENSE) for kind, one in zip(kinds, sparse, strict=True)]
        return fill_table(self.table, sizes, flags, kinds)

    def tensors(self, config: Config, file: str | os.PathLike[str] = "config.json") -> dict[str, TensorSpec]:
        """The tensors of a checkpoint, by name; as `specs`."""
        return tensors_of(self.specs(config, file))

    def read_sizes(self, get: Reader) -> dict[str, int]:
        """The sizes of a decoder, by their names in `ModelConfig`.

        Raises:
            ConvertError: A size is missing or wrong.
        """
        width, heads = get.integer("hidden_size"), get.integer("num_attention_heads")
        return {
            "hidden_size": width,
            "intermediate_size": get.integer("intermediate_size"),
            "num_attention_heads": heads,
            "num_key_value_heads": get.integer("num_key_value_heads", heads),
            "head_dim": get.integer(self.name("head_dim"), max(1, width // heads)),
            "vocab_size": get.integer("vocab_size"),
        }

    def ignores(self, name: str, config: Config, file: str | os.PathLike[str] = "config.json") -> Ignored | None:
        """The rule that ignores a checkpoint name, or None."""
        get = self.reader(config, file)
        flags, layers = self._flags(get), str(get.layers())
        for rule in self.ignored:
            pattern = rule.pattern.replace("{layers}", layers)
            if (rule.when is None or rule.when in flags) and re.fullmatch(pattern, name):
                return rule
        return None

    def module_name(self, path: str) -> str:
        """A module's name in transformers and PEFT: "layers.0.mlp.up_proj" -> "model.layers.0.mlp.up_proj".

        Raises:
            ConvertError: The family has no such module.
        """
        module = WeightPath.parse(path)
        name = self._modules.get(module.in_layer(None if module.layer is None else 0))
        if name is None:
            raise self._no_module(path)
        return name.format(i=module.layer)

    def module_path(self, name: str) -> WeightPath:
        """The inverse of `module_name`; experts' parameters of all experts are modules here too.

        Args:
            name: The module's; also as another version of transformers, or a model around this one, has it.

        Raises:
            ConvertError: The family has no such module.
        """
        template, layer = _template(self.own_name(name))
        path = self._paths.get(template)
        if path is None:
            raise self._no_module(name)
        return path.in_layer(layer)

    def own_name(self, name: str) -> str:
        """A module's name with this family's prefix: "language_model.model.norm" -> "model.norm" of a text model.

        Args:
            name: The module's, with the prefix that it has here or that of a text model inside another model.
        """
        return _begun(_begun(_text_name(name), self.starts), self.modules)

    def expert_of(self, name: str) -> tuple[WeightPath, int] | None:
        """A projection of an expert by itself, which is a module before transformers 5.

        Args:
            name: The module's: "model.layers.0.mlp.experts.3.gate_proj".

        Returns:
            The projection's path, and the expert's number; None for other modules.
        """
        matched, mixture = _EXPERT.fullmatch(_text_name(name)), self.mixture
        if matched is None or mixture is None or mixture.layout == INTERLEAVED or matched[3] not in mixture.projections:
            return None
        part = PROJECTIONS[mixture.projections.index(matched[3])]
        return WeightPath(int(matched[1]), EXPERTS, part, ""), int(matched[2])

    def unquantized(self, paths: Iterable[str]) -> list[str]:
        """Names of the unquantised modules of a quantised folder, for ``llm_int8_skip_modules``.

        Args:
            paths: The unquantised matrices of the layers.

        Returns:
            Sorted: these, the head, and the modules beside the text model, which other libraries know without "model.".
        """
        modules = (WeightPath.parse(path).module for path in paths)
        named = (self.module_name(module).removesuffix(_together(module)).removesuffix(".") for module in modules)
        return sorted({*named, HEAD, *self.beside, *(name.removeprefix("model.") for name in self.beside)})

    def is_layer_linear(self, name: str) -> bool:
        """Whether a module, by its name in PEFT, is a matrix inside a layer (what PEFT calls "all-linear")."""
        return _template(self.own_name(name))[0] in self._matrices

    @functools.cached_property
    def _modules(self) -> dict[WeightPath, str]:
        names: dict[WeightPath, str] = {}
        for row in self.in_memory.table:
            name = _begun(row.name.removesuffix(f".{row.path.leaf}"), self.modules)
            names.setdefault(row.path.module, name)
        for path, name in list(names.items()):
            if path.of_experts:  # last, as the path of this name
                names[WeightPath(path.layer, path.block, _together(path), "")] = name
        return names

    @functools.cached_property
    def _paths(self) -> dict[str, WeightPath]:
        in_files = {row.name.removesuffix(f".{row.path.leaf}"): row.path.module for row in self.table}
        named = {_begun(name, self.modules): path for name, path in in_files.items() if not path.of_experts}
        return named | {name: path for path, name in self._modules.items()}

    @functools.cached_property
    def _matrices(self) -> frozenset[str]:
        return frozenset(self._modules[row.path.module] for row in self.table if row.kind in LINEAR)

    def _flags(self, get: Reader) -> frozenset[str]:
        raised = {flag for name, flags in self.switches.items() if get.flag(name) for flag in flags}
        head = head_flag(scored=is_scored(get.config), tied=get.flag("tie_word_embeddings"))
        return frozenset({*raised, *self.constants.get("biases", ()), head})

    def _no_module(self, name: str) -> ConvertError:
        return ConvertError(f"{name}: no such module in the table of {self.model_type}")


def _norms(rows: Iterable[Row], leaves: Collection[str]) -> tuple[Row, ...]:
    """The arrays of the normalisations with these scales."""
    return tuple(leaf for row in rows for leaf in norm(f"{row.path.block}.{row.path.part}", leaves, *row.dims))


def _together(module: WeightPath) -> str:
    """The name of the parameter with an expert's projection of all experts, in transformers; "" for other modules."""
    if not module.of_experts:
        return ""
    return "down_proj" if module.part == "down_proj" else "gate_up_proj"


def is_scored(config: Config) -> bool:
    """Whether a config.json is of a model with a class of `Family.classifier`'s kind."""
    names = config.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name.endswith(_CLASSIFIER) for name in names)


def nested(
    family: Family,
    *,
    model_type: str,
    starts: Mapping[str, str],
    modules: Mapping[str, str],
    ignored: tuple[Ignored, ...],
    beside: tuple[str, ...] = (),
    others: tuple[Family, ...] = (),
) -> Family:
    """The family of checkpoints that contain a family's model as one part.

    Args:
        family: The part's family.
        model_type: The whole model's.
        starts: Prefix of tensor names in the family's own checkpoints -> prefix in these.
        modules: Prefix of module names in the family's own models -> prefix in these.
        ignored: Names of the other parts.
        beside: Modules of the other parts.
        others: The same family under other names.
    """
    rules = tuple(dataclasses.replace(rule, pattern=rf"(language_model\.)?{rule.pattern}") for rule in family.ignored)
    return dataclasses.replace(
        family,
        model_type=model_type,
        section="text_config",
        starts=starts,
        modules={starts[start]: modules.get(start, start) for start in starts},
        classifier=None,
        ignored=(*rules, *ignored),
        beside=beside,
        others=others,
    )


def _template(name: str) -> tuple[str, int | None]:
    """Split off the layer's number in a module's name: "layers.12.mlp" -> ("layers.{i}.mlp", 12)."""
    match = re.search(r"(?<=\.)\d{1,9}(?=\.)", name)
    if match is None:
        return name, None
    return f"{name[: match.start()]}{{i}}{name[match.end() :]}", int(match.group())


def _text_name(name: str) -> str:
    """A name in a text model by itself, of one that may be inside another model."""
    inside = _INSIDE.match(name)
    if inside is None:
        return name
    rest = name[inside.end() :]
    return rest if rest in (HEAD, SCORE) else f"model.{rest}"


def _begun(name: str, starts: Mapping[str, str]) -> str:
    """A name with its prefix replaced."""
    start = next((start for start in starts if name.startswith(start)), "")
    return starts.get(start, "") + name.removeprefix(start)
