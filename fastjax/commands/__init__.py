"""The subcommands of `fastjax`: one module each, with `main(argv) -> None`, imported when it is asked for."""
