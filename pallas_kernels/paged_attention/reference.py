"""Attention to pages in plain NumPy, a row and a head at a time: the oracle."""

import numpy as np


def paged_attention(
    q, keys, values, table, lengths, *, layer=0, sliding_window=None, logits_soft_cap=None, sinks=None, scale=None
):
    """Arguments as in ``api.paged_attention``; computed in float64, whatever the inputs' dtype."""
    values = keys[layer][..., :values] if isinstance(values, int) else values[layer]
    q, keys, values = (np.asarray(array).astype(np.float64) for array in (q, keys[layer], values))
    rows, heads, size = q.shape
    scale = size**-0.5 if scale is None else scale
    groups = heads // keys.shape[1]
    out = np.zeros((rows, heads, values.shape[-1]))
    for row in range(rows):
        length = int(lengths[row])
        if length == 0:
            continue
        pages = np.asarray(table[row])[: -(-length // keys.shape[2])]
        first = 0 if sliding_window is None else max(length - sliding_window, 0)
        for head in range(heads):
            k, v = (a[pages, head // groups].reshape(-1, a.shape[-1])[first:length] for a in (keys, values))
            logits = k @ q[row, head] * scale
            if logits_soft_cap is not None:
                logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
            sink = -np.inf if sinks is None else float(sinks[head])
            maximum = max(logits.max(), sink)
            weights = np.exp(logits - maximum)
            out[row, head] = weights @ v / (weights.sum() + np.exp(sink - maximum))
    return out
