"""`fastjax generate`: let a model, with or without an adapter, answer prompts."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fastjax.commands import compilation_cache
from fastjax.commands.arguments import add_chat_template_kwargs, add_model, load_options
from fastjax.errors import ConfigError, DataError


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: its arguments.
    """
    arguments = _parser().parse_args(argv)
    prompts = _prompts(arguments)
    from fastjax.generation.options import GenerationOptions  # JAX is imported once the arguments are right
    from fastjax.generation.text import answer
    from fastjax.language_model.as_trained import load_as_trained

    compilation_cache.keep_programs(not arguments.no_compilation_cache)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    GenerationOptions(**{name: getattr(arguments, name) for name in names})
    model = load_as_trained(arguments.model, arguments.adapter, load_options(arguments))
    answers = answer(
        model,
        prompts,
        chat=not arguments.raw,
        special_tokens=arguments.special_tokens,
        chat_template_kwargs=arguments.chat_template_kwargs,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    for prompt, text in zip(prompts, answers, strict=True):
        if arguments.json:
            print(json.dumps({"prompt": prompt, "answer": text}, ensure_ascii=False))
        else:
            print(text if len(prompts) == 1 else f"> {prompt}\n{text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastjax generate", description="Let a model answer prompts.")
    add_model(parser)
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--file", metavar="FILE", help="prompts, one a line; - is standard input")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    parser.add_argument(
        "--special_tokens",
        choices=("control", "text"),
        default="control",
        help="what special tokens in prompts are read as, as data.special_tokens of training (default: %(default)s)",
    )
    add_chat_template_kwargs(parser)
    parser.add_argument("--max_new_tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    parser.add_argument("--top_k", type=int, metavar="N", help="sample among the N likeliest tokens")
    parser.add_argument("--top_p", type=float, metavar="P", help="sample among the tokens that sum to probability P")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    compilation_cache.add_option(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object a prompt")
    return parser


def _prompts(arguments: argparse.Namespace) -> list[str]:
    from fastjax.data.encoding import check_characters

    prompts = list(arguments.prompt)
    for prompt in prompts:
        try:
            check_characters(prompt, "--prompt")
        except DataError as error:
            raise ConfigError(str(error)) from error
    if arguments.file is not None:
        try:
            text = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{arguments.file}: not valid UTF-8 at byte {error.start}") from error
        check_characters(text, "standard input" if arguments.file == "-" else arguments.file)
        # Lines end as in a file of JSON lines: U+2028 and its like may stand in a prompt.
        prompts += [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise ConfigError("--prompt: expected at least one prompt, got none; use --prompt TEXT or --file FILE")
    return prompts
