"""Names of activations in config.json: transformers has several for one function."""

#: transformers' names (`ACT2FN`) of a supported function -> its name here.
ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(
        ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "gelu_pytorch_tanh"
    ),
    "relu": "relu",
    "relu2": "relu2",
}
