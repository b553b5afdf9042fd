"""What a measurement found, as a JSON file."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console


def save(output: Path | None, results: Sequence[Any], console: Console, **about: Any) -> None:
    """Write results, with the device and JAX's version, and say so.

    Args:
        output: the file; None: none is written.
        results: lines of the table, dataclasses.
        console: for the message.
        **about: what else the file says.
    """
    if output is None:
        return
    facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, **about}
    facts["results"] = [dataclasses.asdict(line) for line in results]
    output.write_text(json.dumps(facts, indent=1, default=str) + "\n", encoding="utf-8")
    console.print(f"written to {output}", highlight=False)
