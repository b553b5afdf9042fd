"""One description of every weight, from which the layers' groups follow."""

import pytest

from convert.families import FAMILIES
from convert.model.config import ModelConfig
from convert.model.spec import AXES
from tests.support.families import CONFIGS, NESTED

ALL = {**CONFIGS, "gemma3": NESTED}


@pytest.mark.parametrize("family", ALL)
def test_every_weight_says_what_it_is(family):
    config = ModelConfig.from_hf(ALL[family])
    assert config.specs == FAMILIES[family].specs(ALL[family])
    assert [spec.path for spec in config.specs][0] == "embed_tokens.weight"
    for spec in config.specs:
        dimensions = {"matrix": 2, "table": 2, "bias": 1}.get(spec.kind, len(spec.shape))
        assert len(spec.shape) == len(spec.axes) == dimensions and set(spec.axes) <= set(AXES.values())
        assert (spec.kind == "bias") == (spec.path.leaf == "bias") == (spec.init == "zeros")
        assert (spec.group is not None) == (spec.kind in ("matrix", "bias"))
        assert (spec.path.layer is None) == (spec.path.part in ("embed_tokens", "norm", "lm_head"))
    layers = {spec.path.layer for spec in config.specs}
    assert layers == {None, *range(config.num_hidden_layers)}
    assert config.tie_word_embeddings == ("lm_head.weight" not in [spec.path for spec in config.specs])


@pytest.mark.parametrize("family", ALL)
def test_groups_hold_every_projection_once(family):
    config = ModelConfig.from_hf(ALL[family])
    parts = {
        f"{group.block}.{part}": (rows, group.columns) for group in config.groups.values() for part, rows in group.parts
    }
    assert parts == {spec.path.module: spec.shape for spec in config.layer_specs if spec.kind == "matrix"}
    assert {name for name, group in config.groups.items() if group.bias} == config.biases
    for group in config.groups.values():
        places = [group.place(part) for part, _ in group.parts]
        assert [number for number, _ in places] == list(range(len(places)))
        assert places[0][1].start == 0 and places[-1][1].stop == group.rows
        assert all(first.stop == second.start for (_, first), (_, second) in zip(places, places[1:], strict=False))
        assert all(config.group_of(spec.path) for spec in config.layer_specs if spec.kind == "matrix")
