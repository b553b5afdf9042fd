"""Settings of other tools' fine-tuning runs as settings of `fastjax train`.

A tool is a table of its keys (`job.Tool`) and a few functions for keys that belong together, such as those of its
data sets; `reasons` has the keys of all tools without a setting here. All write into one `Job`, in which every key of
the file ends up in one of four lists: carried over, not needed, not carried over, or refused, which ends the import.
The names and defaults are those that the tools document.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastjax.config_import.axolotl import AXOLOTL
from fastjax.config_import.engine import import_settings
from fastjax.config_import.job import Job, Tool
from fastjax.config_import.llama_factory import LLAMA_FACTORY
from fastjax.config_import.llama_factory_v1 import LLAMA_FACTORY_V1
from fastjax.config_import.torchtune import TORCHTUNE
from fastjax.errors import ConfigError

__all__ = ["TOOLS", "Job", "import_settings", "tool_of"]

TOOLS: dict[str, Tool] = {tool.name: tool for tool in (AXOLOTL, LLAMA_FACTORY, LLAMA_FACTORY_V1, TORCHTUNE)}


def tool_of(content: Mapping[Any, Any], file: Path) -> Tool:
    """The tool whose settings a file holds; a file with the keys of none, or of several, is a ConfigError."""
    marks_of = {name: [mark for mark in tool.marks.split() if mark in content] for name, tool in TOOLS.items()}
    most = max(map(len, marks_of.values()))
    best = [name for name, marks in marks_of.items() if len(marks) == most]
    if most and len(best) == 1:
        return TOOLS[best[0]]
    wanted = "; ".join(f"{name}'s ({', '.join(tool.marks.split())})" for name, tool in TOOLS.items())
    given = "; ".join(f"{name}'s {', '.join(marks)}" for name, marks in marks_of.items() if marks) or "none of them"
    raise ConfigError(f"{file}: expected the keys of one tool, {wanted}, got {given}; --from names the tool")
