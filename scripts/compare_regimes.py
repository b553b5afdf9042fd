"""Losses and memory of measured steps side by side, from what `fastjax bench step --output` wrote.

    fastjax bench step --steps 17 --checkpointing projections full offload offload_attention --output regimes.json
    fastjax bench step --steps 17 --checkpointing projections --seed 1 --output seed.json
    python scripts/compare_regimes.py regimes.json seed.json

The first case is the reference. Losses differ by at most the column's figure; of another seed they differ by the
spread. "plan" is what `fastjax plan` says of the same compiled step, "peak" what the allocator has had.
"""

import argparse
import json
from pathlib import Path

from fastjax.planning.memory import ALLOCATOR_BYTES

GIB = 2**30


def table(rows: list[dict]) -> str:
    """Markdown: a line for each case.

    Args:
        rows: of the files, one after the other.
    """
    head = ["case", "seed", "ms", "tokens/s", "plan GiB", "peak GiB", "off", "largest difference of a loss"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    reference = rows[0]["losses"]
    for row in rows:
        case = f"{row['batch']}×{row['seq']:,} `{row['checkpointing']}`, {row['layer_loop']}"
        if row["fault"] or row["error"]:
            lines.append([case, str(row["seed"]), row["fault"] or row["error"], *[""] * 5])
            continue
        same = len(row["losses"]) == len(reference) and (row["batch"], row["seq"]) == (rows[0]["batch"], rows[0]["seq"])
        difference = max(abs(a - b) for a, b in zip(row["losses"], reference, strict=True)) if same else None
        plan, peak = row["step_bytes"] + ALLOCATOR_BYTES, row["peak_bytes"]
        lines.append(
            [
                case,
                str(row["seed"]),
                f"{1e3 * row['step_seconds']:.1f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{plan / GIB:.2f}",
                "" if peak is None else f"{peak / GIB:.2f}",
                "" if peak is None else f"{plan / peak - 1:+.1%}",
                "" if difference is None else f"{difference:.2g} of {len(reference)}",
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    print(table([row for file in parser.parse_args().files for row in json.loads(file.read_text(encoding="utf-8"))]))


if __name__ == "__main__":
    main()
