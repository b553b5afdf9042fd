"""Settings of other tools' fine-tuning runs as settings of `fastjax train`.

A tool is a table of its keys (`rows.Row`) and a few functions for keys that belong together, such as those of its data
sets. All write into one `Job`, in which every key of the file ends up in one of four lists: carried over, not needed,
not carried over, or refused, which ends the import. The names and defaults are those that the tools document.
"""

from fastjax.config_import.job import Job, import_settings
from fastjax.config_import.tools import TOOLS, tool_of

__all__ = ["TOOLS", "Job", "import_settings", "tool_of"]
