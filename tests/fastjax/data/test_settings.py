import pytest

from fastjax.data import DataSource
from fastjax.errors import ConfigError
from fastjax.training.config import DataSection


@pytest.mark.parametrize("weights", [(1.0, None), (None, 2.0)])
@pytest.mark.parametrize("which", ["train", "eval"])
def test_weights_are_positive_and_everywhere(which, weights):
    sources = [DataSource(name, weight=weight) for name, weight in zip("ab", weights, strict=True)]
    with pytest.raises(ConfigError, match=f"data.{which}: weight: expected a positive number in every data set"):
        DataSection(**({"train": "a"} | {which: sources}))
    with pytest.raises(ConfigError, match=r"^data set.weight: expected a number greater than 0 or null, got 0.0$"):
        DataSource("a", weight=0.0)
    with pytest.raises(ConfigError, match=rf"^data.{which}\[1\].weight: expected a number greater than 0 or null"):
        DataSection(**({"train": "a"} | {which: ["a", {"path": "b", "weight": -1}]}))


def test_held_out_data_are_not_streamed():
    with pytest.raises(ConfigError, match="data.eval: streaming: expected false, got true"):
        DataSection("a", [DataSource("b", streaming=True)])
    with pytest.raises(ConfigError, match="data.train: expected at least one data set"):
        DataSection([])
