"""Settings of other tools with values replaced: each file is imported or refused, and no key of it is dropped."""

import json
import re
from pathlib import Path

import yaml

from fastjax import strict_yaml
from fastjax.commands.import_config import written
from fastjax.config_import import TOOLS, import_settings, tool_of
from fastjax.config_import.reasons import REASONS
from fastjax.errors import ConfigError
from fastjax.strict_yaml import YamlError
from tests.support import hostile
from tests.support import other_tools as files
from tests.support.fuzz import fuzz

RIGHT = [
    yaml.safe_load(text)
    for text in (
        *(files.AXOLOTL, files.LLAMA_FACTORY, files.TORCHTUNE),
        *(files.AXOLOTL_DPO, files.LLAMA_FACTORY_SIMPO, files.TORCHTUNE_DPO),
    )
]
ROWS = [
    [name for name in (*tool.becomes, *REASONS) if "*" not in name and "." not in name]
    for tool in TOOLS.values()
    if tool.name != "llama-factory-v1"
]


def test_import(tmp_path, pytestconfig):
    """A fourth as many: each is read, written and read again."""
    (tmp_path / "dataset_info.json").write_text(json.dumps(files.INFO))

    def make(draw, number):
        settings = dict(RIGHT[number % 6])
        if draw.random() < 0.3:
            settings[draw.choice(ROWS[number % 3])] = hostile.value(draw)
        return json.dumps(hostile.changed(draw, settings)).encode()

    def read(raw):
        content = strict_yaml.parse(raw.decode(errors="replace"))
        if not isinstance(content, dict):
            return False
        job = import_settings(tool_of(content, tmp_path), content, Path(tmp_path / "theirs.yml"))
        assert isinstance(strict_yaml.parse(written(job)), dict)
        listed = [*(line.key for line in job.carried.values()), *job.not_needed, *job.not_carried]
        named = {part for key in listed for part in (key, *re.split(r"[.,:\[ ]+", key))}
        assert {str(key) for key in content} <= named

    known = [json.dumps(settings).encode() for settings in RIGHT]
    fuzz("imports", pytestconfig.getoption("--fuzz") // 4, make, read, (ConfigError, YamlError), known)
