"""`fastjax convert`: model folders in, model folders out. Only comparing logits and checkpoints of runs need JAX."""

import argparse
import collections
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from convert.errors import ConvertError, shorten

if TYPE_CHECKING:
    from convert.verify import Comparison

_DTYPES = ("bfloat16", "float16", "float32")
#: A merge rounds each weight to 16 bits, by up to 2⁻⁹ of it; another base (4 bits or 16) differs by more than this.
_LOGIT_TOLERANCE = 0.03
_SCHEMES = (
    *("nf4", "int4-32", "int4-128", "int4-32-zeros", "int4-128-zeros"),
    *("int8", "fp8-row", "fp8-tensor", "fp8-block", "nvfp4", "mxfp4"),
)
_ACTIVATIONS = ("none", "int8", "fp8", "fp8-128")
_GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: the subcommand, and its arguments.
    """
    arguments = vars(_parser().parse_args(argv))
    arguments.pop("run")(**arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastjax convert",
        description="Convert and examine model folders. MODEL, BASE and ADAPTER are folders, or names on the Hugging "
        "Face hub (NAME@REVISION for a revision).",
    )
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    for run, text, options in _COMMANDS:
        name = run.__name__.lstrip("_")
        command = commands.add_parser(name, help=text.split(";")[0], description=f"{text[0].upper()}{text[1:]}.")
        command.set_defaults(run=run)
        for option, how in options.items():
            command.add_argument(option, **how)
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {shorten(text)}")
    return value


def _folder(text: str) -> Path:
    """A folder, or a name on the hub with or without a revision."""
    from convert.hub import fetch

    source = fetch(text)
    if source.revision is not None:
        print(f"{source.name} at {source.revision}", file=sys.stderr)
    return source.folder


def _inspect(folder: str, as_json: bool) -> None:
    from convert.inspect import inspect
    from fastjax.runs.opening import with_refusals

    contents = with_refusals(inspect(_folder(folder)))
    if as_json:
        print(json.dumps(vars(contents) | {"folder": str(contents.folder)}, ensure_ascii=False, indent=2))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("kind", contents.kind)
    table.add_row("family" if contents.kind == "model" else "base", str(contents.family))
    table.add_row("parameters", "unknown" if contents.parameters is None else f"{contents.parameters:,}")
    for kind, (count, size) in sorted(contents.formats.items()):
        table.add_row(kind, f"{count} tensors, {_bytes(size)}")
    table.add_row("files", str(contents.files))
    if contents.tied is not None:
        table.add_row("head", "tied to the embedding" if contents.tied else "its own")
    table.add_row("tokenizer", "none that can be counted" if contents.tokens is None else f"{contents.tokens:,} tokens")
    table.add_row("chat template", "yes" if contents.chat_template else "no")
    for name, value in contents.settings.items():
        table.add_row(name, str(value))
    for reason, count in sorted(collections.Counter(contents.ignored.values()).items()):
        table.add_row("read past", f"{count} tensors: {reason}")
    console = Console(soft_wrap=True)
    console.print(table)
    for problem in contents.unsupported:
        console.print(f"unsupported: {problem}", markup=False, highlight=False)
    if not contents.unsupported:
        console.print("everything in it is supported")


def _merge(base: str, adapter: str, out: Path, max_shard_gib: float, **options: Any) -> None:
    from convert.merge import merge

    model, adapters = _folder(base), _folder(adapter)
    with _progress("merging") as monitor:
        options |= {"max_shard_bytes": int(max_shard_gib * 2**30), "monitor": monitor}
        merged = merge(model, adapters, out, **options)
    for note in merged.notes:
        print(f"note: {note}")
    _report(merged.written, f"{merged.changed} tensors merged, {merged.copied} as they were")


def _quantize(model: str, out: Path, scheme: str, plain_scales: bool, max_shard_gib: float, **options: Any) -> None:
    from convert.quantization_aware import QuantizationAware
    from convert.quantize import loading_note, quantize, writer_for
    from convert.weights import open_weights

    folder = _folder(model)
    if (trained := QuantizationAware.read(folder)) is not None:
        served = writer_for(scheme, options["activations"], trained, out).activations
        for each in trained.differences(scheme, served, options["skip"]):
            print(f"note: {folder.name} was {each}")
    with _progress("quantising") as monitor:
        options |= {"nested": not plain_scales, "max_shard_bytes": int(max_shard_gib * 2**30), "monitor": monitor}
        written = quantize(folder, out, scheme=scheme, **options)
    if (note := loading_note(open_weights(written.folder).family, scheme)) is not None:
        print(f"note: {note}")
    _report(written, f"{written.tensors} tensors")


def _gguf(model: str, out: Path, **options: Any) -> None:
    from convert.gguf import export_gguf, require_gguf
    from fastjax.data.modelfile import write_modelfile

    require_gguf()  # before a model is downloaded
    folder = _folder(model)
    with _progress("exporting") as monitor:
        exported = export_gguf(folder, out, monitor=monitor, **options)
    for note in exported.notes:
        print(f"note: {note}")
    if exported.kept:
        print(f"{exported.kept} tensors were there from an interrupted conversion")
    kinds = ", ".join(f"{count} tensors in {name}" for name, count in exported.types.items())
    print(f"{exported.file}: {kinds}, {_bytes(exported.bytes)}, read back and compared")
    written = write_modelfile(exported.file, folder, force=options["force"])
    kept = exported.file.with_suffix(".Modelfile")
    print(f"for Ollama: {written}" if written else f"note: {kept} is there already and stays; --force replaces it")


def _adapter(source: str, out: Path, step: int | None, force: bool, config: str | None) -> None:
    from fastjax.commands.settings import parse_train_config

    settings = Path(source) / "config.yaml"
    if settings.is_file():
        if config is not None:
            raise ConvertError(f"--config: expected none, since {source} is a run with its own, got {config}")
        run = parse_train_config([str(settings), "--output.output_dir", source])
        from fastjax.runs.adapter_export import export_checkpoint  # JAX is imported once the settings are right

        step = export_checkpoint(run, out, step=step, force=force)
        print(f"{out}: what {source} had learnt after step {step}")
        return
    adapter = _folder(source)
    if not (adapter / "adapter_config.json").is_file():
        expected = "the output folder of a run, with config.yaml, or an adapter, with adapter_config.json"
        raise ConvertError(f"{source}: expected {expected}, got none of them")
    if config is None:
        raise ConvertError(f"--config: expected the settings of the run that is to begin with {source}, got none")
    if step is not None or force:
        raise ConvertError(f"--step, --force: expected none, since {source} is an adapter")
    run = parse_train_config([config, "--output.output_dir", str(out)])
    from fastjax.runs.adapter_import import import_adapter

    import_adapter(run, adapter, Console())
    print(f"{out}: a run that begins with {source}: fastjax train --config {out / 'config.yaml'} --resume")


def _report(written, what: str) -> None:
    if written.kept:
        print(f"{written.kept} of {written.shards} files were there from an interrupted conversion")
    for name in written.nonfinite:
        print(f"warning: {name} has NaN or infinity")
    print(f"{written.folder}: {what}, {_bytes(written.bytes)} in {written.shards} files, read back and compared")


def _verify(
    first: str, second: str, tolerance: float | None, text: list[str], logit_tolerance: float | None, **asked: Any
) -> None:
    from convert.verify import compare

    for name, value in {"logit_tolerance": logit_tolerance, **asked}.items():
        if value not in (None, False) and not text:
            raise ConvertError(f"--{name}: expected --text with it: it is about logits alone")
    folders = _folder(first), _folder(second)
    console = Console(soft_wrap=True)
    with console.status("comparing") as status:
        comparison = compare(*folders, monitor=lambda done, total: status.update(f"comparing {done} of {total}"))
    _show_tensors(comparison, console)
    if text:
        same = f"{folders[1]}: not the same as {folders[0]}"
        _compare_logits(folders, text, logit_tolerance, asked, same, console)
        if tolerance is None:
            return
    shapes_fit = (
        all(tensor.largest is not None for tensor in comparison.tensors)
        and not comparison.missing
        and not comparison.added
    )
    if not (comparison.fits if tolerance is None else shapes_fit and comparison.largest <= tolerance):
        raise ConvertError(f"{folders[1]}: not the same as {folders[0]}")


def _show_tensors(comparison: "Comparison", console: Console) -> None:
    """Print the tensors in which two folders differ, and how many are equal."""
    different = [tensor for tensor in comparison.tensors if not tensor.equal]
    for tensor in sorted(different, key=lambda tensor: -(tensor.relative or 0.0))[:20]:
        shapes = " / ".join(str(list(shape)) for shape in dict.fromkeys(tensor.shapes))
        line = f"{tensor.name}  {shapes}  {' / '.join(dict.fromkeys(tensor.formats))}"
        if tensor.largest is not None:
            line += f"  differs by up to {tensor.largest:.3g}, in all by {tensor.relative:.3g} of its size"
        console.print(line, markup=False, highlight=False)
    if len(different) > 20:
        console.print(f"and {len(different) - 20} more")
    for names, where in ((comparison.missing, "A"), (comparison.added, "B")):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            console.print(f"only in {where}: {', '.join(names[:8])}{more}", markup=False, highlight=False)
    same = len(comparison.tensors) - len(different)
    console.print(f"{same} of {len(comparison.tensors)} tensors are equal; largest difference {comparison.largest:.6g}")
    rounded = [tensor for tensor in different if tensor.rounding]
    for kind in sorted({tensor.formats for tensor in rounded}):
        alike = [tensor for tensor in rounded if tensor.formats == kind]
        count = f"{sum(tensor.fits for tensor in alike)} of {len(alike)} tensors"
        console.print(
            f"{' / '.join(kind)}: {count} differ by no more than these formats round, {alike[0].rounding:.3g} of a "
            "tensor's largest value"
        )


def _compare_logits(
    folders: tuple[Path, Path], text: list[str], tolerance: float | None, asked: dict, same: str, console: Console
) -> None:
    """Print how far the logits of two folders differ on texts; more than the tolerance is an error."""
    from fastjax.runs.comparison import compare_logits  # JAX is imported for this alone

    adapter = asked["adapter"] and _folder(asked["adapter"])
    logits = compare_logits(*folders, text, adapter=adapter, base_in_nf4=asked["base_in_nf4"])
    console.print(
        f"logits on {logits.tokens} tokens: largest difference {logits.largest:.6g}, "
        f"{logits.largest / logits.scale:.2%} of the largest, mean KL divergence "
        f"{logits.divergence:.3g}, the likeliest token is the same on {logits.agreement:.1%}"
    )
    if tolerance is None:
        tolerance = _LOGIT_TOLERANCE + 3 * logits.rounding
    if not logits.largest <= tolerance * logits.scale:
        raise ConvertError(
            f"{same}: logits differ by up to {logits.largest:.6g}, more than {tolerance:g} (--logit_tolerance) of the "
            f"largest, {logits.scale:.6g}"
        )


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with bytes and remaining time, on standard error."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


_FLAG: dict[str, Any] = {"action": "store_true"}
_SKIP: dict[str, Any] = {"nargs": "+", "default": [], "metavar": "NAME"}
_NONFINITE = _FLAG | {"help": "write NaN and infinity instead of refusing"}
#: Options of the commands that write a model folder.
_WRITING: dict[str, dict[str, Any]] = {
    "--skip": _SKIP | {"help": "modules that are not quantised"},
    "--activations": {
        "choices": _ACTIVATIONS,
        "help": "what servers are told to quantise the matrices' inputs to, token by token (default: what training was "
        "for; else none for 4 bits, and the same 8 bits for 8)",
    },
    "--force": _FLAG | {"help": "replace a model folder that is there"},
    "--allow_nonfinite": _NONFINITE,
    "--max_shard_gib": {"type": _positive, "default": 4.0, "metavar": "N", "help": "default: %(default)s"},
}
#: The function of each subcommand, its description (the help ends at a semicolon), and its arguments.
_COMMANDS: tuple[tuple[Callable[..., None], str, dict[str, dict[str, Any]]], ...] = (
    (
        _inspect,
        "say what is in a folder; no weights are read",
        {
            "folder": {"metavar": "MODEL", "help": "model or adapter"},
            "--json": _FLAG | {"dest": "as_json", "help": "print a JSON object"},
        },
    ),
    (
        _merge,
        "merge an adapter into its base; the result is a plain model folder",
        {
            "base": {"metavar": "BASE", "help": "the model to add to; a 4-bit folder is decoded first"},
            "adapter": {"metavar": "ADAPTER", "help": "PEFT adapter"},
            "out": {"metavar": "OUT", "type": Path, "help": "folder to write"},
            "--dtype": {
                "choices": (*_DTYPES, *_SCHEMES),
                "help": "of the result (default: as the base's tensors)",
            },
            "--base_in_nf4": _FLAG
            | {
                "help": "the base has 16 bits, but the adapter was trained over it in 4 bits: quantise and decode it "
                "first"
            },
            "--unsloth_expert_layout": _FLAG
            | {
                "help": "the adapter is on experts and from an Unsloth before September 2026, which ordered them "
                "otherwise"
            },
            **_WRITING,
        },
    ),
    (
        _quantize,
        "quantise a model; the result loads with bitsandbytes (nf4) or compressed-tensors",
        {
            "model": {"metavar": "MODEL", "help": "16 or 32 bits, or FP8"},
            "out": {"metavar": "OUT", "type": Path, "help": "folder to write"},
            "--scheme": {"choices": _SCHEMES, "default": "nf4", "help": "default: %(default)s"},
            "--dtype": {"choices": _DTYPES, "help": "that the weights decode to (default: their own)"},
            "--plain_scales": _FLAG | {"help": "nf4: leave the scales in float32"},
            **_WRITING,
        },
    ),
    (
        _verify,
        "compare two model folders; names, shapes, dtypes, values",
        {
            "first": {"metavar": "A", "help": "model"},
            "second": {"metavar": "B", "help": "model"},
            "--tolerance": {
                "type": float,
                "metavar": "X",
                "help": "accept differences up to X, and other dtypes (default: equal, or what another format of 4 or "
                "8 bits rounds; with --text: the logits alone decide)",
            },
            "--text": {"action": "append", "default": [], "help": "compare logits on it too; several are possible"},
            "--logit_tolerance": {
                "type": float,
                "metavar": "X",
                "help": "with --text: accept logits that differ by up to X of the largest (default: "
                f"{_LOGIT_TOLERANCE}, and more where B has 4 or 8 bits)",
            },
            "--adapter": {"metavar": "ADAPTER", "help": "with --text: put this adapter on A first"},
            "--base_in_nf4": _FLAG | {"help": "with --text: quantise A to NF4 first, as merge does"},
        },
    ),
    (
        _gguf,
        "write a GGUF file for llama.cpp; needs the gguf library (pip install gguf)",
        {
            "model": {"metavar": "MODEL", "help": "model; merge an adapter first"},
            "out": {"metavar": "FILE", "type": Path, "help": "file to write"},
            "--type": {"choices": _GGUF_TYPES, "default": "bf16", "help": "of the matrices (default: %(default)s)"},
            "--skip": _SKIP | {"help": "modules whose matrices keep their dtype"},
            "--pre_tokenizer": {"metavar": "NAME", "help": "llama.cpp's name of it, where it is not known"},
            "--force": _FLAG | {"help": "replace a file that is there"},
            "--allow_nonfinite": _NONFINITE,
        },
    ),
    (
        _adapter,
        "turn a run's checkpoint into an adapter for PEFT, or an adapter into the first checkpoint of a run; which of "
        "the two, SOURCE says",
        {
            "source": {"metavar": "SOURCE", "help": "output folder of a run; or a PEFT adapter"},
            "out": {"metavar": "OUT", "type": Path, "help": "folder to write, for PEFT; or of the run"},
            "--step": {"type": int, "metavar": "N", "help": "of a run: of its checkpoint (default: the newest)"},
            "--force": _FLAG | {"help": "of a run: replace an adapter that is there"},
            "--config": {"metavar": "FILE", "help": "of an adapter: YAML with the settings of the run"},
        },
    ),
)
