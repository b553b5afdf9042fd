"""`fastjax serve`: an HTTP server with OpenAI's routes over a model and adapters."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fastjax.commands import compilation_cache
from fastjax.commands.arguments import add_model, load_options, positive
from fastjax.errors import ConfigError

#: The environment variable with the key.
KEY = "FASTJAX_API_KEY"


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: its arguments.
    """
    arguments = _parser().parse_args(argv)
    try:
        import uvicorn  # noqa: F401
    except ImportError:
        raise ConfigError("serve: expected starlette and uvicorn, got neither; pip install starlette uvicorn") from None
    from fastjax.serving.settings import ServerSettings

    if arguments.adapter is not None and arguments.adapters:
        raise ConfigError("--adapter: expected --adapters alone, got both; put the adapter's folder there")
    name = arguments.name or Path(arguments.model).absolute().name
    settings = ServerSettings(
        name=name,
        host=arguments.host,
        port=arguments.port,
        key=_key(arguments.api_key_file),
        allowed_hosts=arguments.allowed_host,
        adapters=arguments.adapters,
        special_tokens=arguments.special_tokens,
        run=arguments.run,
        queue=arguments.queue,
    )
    import jax  # once the arguments are right

    from fastjax.generation.engine import Engine
    from fastjax.generation.engines import Engines
    from fastjax.generation.fitting import tokens_that_fit
    from fastjax.language_model.as_trained import load_as_trained
    from fastjax.serving.server import Server
    from fastjax.serving.worker import Worker

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    compilation_cache.keep_programs(not arguments.no_compilation_cache)
    devices = jax.local_devices()[: arguments.data]
    if len(devices) < arguments.data:
        raise ConfigError(f"--data: expected at most the {len(devices)} devices there are, got {arguments.data}")
    # Unrolled layers take longer to compile and answer faster by half (docs/lab/generation.md).
    options = load_options(arguments, {"layer_loop": "unroll"})
    model = load_as_trained(arguments.model, arguments.adapter, options)
    slots = {"adapter_slots": arguments.adapter_slots, "adapter_rank": arguments.adapter_rank}
    tokens = arguments.tokens or tokens_that_fit(model, arguments.rows, model.max_seq_length)
    sizes = {"rows": arguments.rows, "tokens": tokens, **(slots if arguments.adapters else {})}
    engine = Engine(model, **sizes) if len(devices) == 1 else Engines(model, devices, **sizes)
    print("compiling the engine's programs, once a model and card", file=sys.stderr, flush=True)
    engine.warm_up()
    worker = Worker(engine, model, queue=settings.queue)
    server = Server(worker, settings)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"serving {name} on http://{host}:{settings.port}", file=sys.stderr, flush=True)
    if not server.run_to_end():
        sys.exit(1)


def _key(file: str | None) -> str | None:
    """The key, of the environment or of a file's first line; never of the command line, which others can read."""
    if file is None:
        return os.environ.get(KEY) or None
    if os.environ.get(KEY):
        raise ConfigError(f"--api_key_file: expected the key in one place, got a file and the variable {KEY}")
    key = Path(file).read_text(encoding="utf-8").strip()
    if not key:
        raise ConfigError(f"--api_key_file: expected a key in {file}, got an empty file")
    return key


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastjax serve", description="Serve a model with OpenAI's routes over HTTP.")
    add_model(parser)
    parser.add_argument("--name", metavar="NAME", help="its name in requests (default: the folder's)")
    parser.add_argument("--host", default="127.0.0.1", help=f"another than this machine's own needs a key ({KEY})")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="default: %(default)s")
    parser.add_argument("--api_key_file", metavar="FILE", help=f"file with the key, in place of {KEY}")
    parser.add_argument(
        "--allowed_host",
        action="append",
        default=[],
        metavar="NAME",
        help="name by which clients reach this machine, besides addresses and localhost; may be given several times",
    )
    parser.add_argument(
        "--adapters",
        action="append",
        default=[],
        metavar="DIR",
        help="folder of PEFT adapters, each under its folder's name; may be given several times",
    )
    parser.add_argument(
        "--adapter_slots", type=positive, default=4, metavar="N", help="adapters at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--adapter_rank", type=positive, default=16, metavar="R", help="their largest rank (default: %(default)s)"
    )
    parser.add_argument(
        "--special_tokens",
        choices=("text", "control"),
        default="text",
        help="what special tokens in requests are read as; control is for texts that one trusts (default: %(default)s)",
    )
    parser.add_argument(
        "--data", type=positive, default=1, metavar="N", help="GPUs that have the whole model (default: %(default)s)"
    )
    parser.add_argument("--run", metavar="DIR", help="folder of a run whose curves the page shows")
    parser.add_argument(
        "--rows", type=positive, default=64, metavar="N", help="answers at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help="of prompts and answers in the cache (default: all rows', or what fits)",
    )
    parser.add_argument("--queue", type=int, default=256, metavar="N", help="answers that wait (default: %(default)s)")
    compilation_cache.add_option(parser)
    return parser
