"""Low-rank adapters beside a frozen W: W + s·B·A (LoRA, arXiv 2106.09685), and DoRA (arXiv 2402.09353).

An adapter computes what PEFT's does, option by option. Settings (`settings`) say which modules get one (`sites`) and
which rows of the vocabulary are trained (`tables`), by PEFT's rules in `convert.adapters`; `attach` makes the modules
(`params`, `token_rows`), `export` the named arrays of a folder. Projections with their adapters are differentiable
units: `linear` for projections of one input, `mlp` for a whole gated block; `reference` has the plain sums that they
equal.
"""
