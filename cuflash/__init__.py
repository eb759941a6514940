"""Exact attention for NumPy and CuPy arrays: tiled forward, recomputation backward, memory linear in the sequence.

>>> import numpy as np, cuflash
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))      # 2 heads, 5 positions, 4 features
>>> o = cuflash.attention(q, k, v, causal=True)
>>> o.shape, bool(np.allclose(o[:, 0], v[:, 0]))                            # the first row sees the first key alone
((2, 5, 4), True)
>>> o, vjp = cuflash.attention_vjp(q, k, v)
>>> dq, dk, dv = vjp(np.ones_like(o))
>>> bool(np.allclose(dv.sum(axis=1), 5))                                    # the weights of each row sum to 1
True
"""

from cuflash import lineage
from cuflash.api import (
    LseVjp,
    Options,
    Vjp,
    attention,
    attention_backward,
    attention_lse,
    attention_lse_vjp,
    attention_merge,
    attention_vjp,
    workspace_nbytes,
)
from cuflash.compile import CompileError
from cuflash.traffic import memory_traffic

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "LseVjp",
    "Options",
    "Vjp",
    "attention",
    "attention_backward",
    "attention_lse",
    "attention_lse_vjp",
    "attention_merge",
    "attention_vjp",
    "lineage",
    "memory_traffic",
    "workspace_nbytes",
]
