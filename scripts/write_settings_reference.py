"""Write docs/settings.md from the fields of the settings.

python3 scripts/write_settings_reference.py
"""

from pathlib import Path

from fastjax.commands.reference import markdown

FILE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
INTRODUCTION = """# Settings

What `fastjax train --config FILE` reads, section by section. On the command line a key is `--section.key value`, with
the value as YAML (`--data.train '[a.jsonl, b.jsonl]'`). Unknown keys, wrong types and values out of range are errors.
Paths are relative to the current folder.

This page is written by `scripts/write_settings_reference.py` from the fields in `fastjax/training/config`.

"""


def page() -> str:
    """The whole page."""
    return INTRODUCTION + markdown()


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
