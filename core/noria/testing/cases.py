"""The cases of the ops: types and shapes. What is done with them is in `noria.testing.suite`."""

from __future__ import annotations

from dataclasses import dataclass

from noria.api import Gating, RopeParams, RouterParams
from noria.gguf import SUPPORTED_TYPES

WEIGHT_TYPES = SUPPORTED_TYPES
KV_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
FEW_TYPES = ("F32", "F16", "Q8_0", "Q4_K")  # where the layout of rows and tables matters, and not that of blocks
N_ROWS = (1, 7, 33, 130)  # a decode step, less than a tile, more than one, several


@dataclass(frozen=True, kw_only=True)
class MatmulCase:
    type: str
    n_rows: int
    n_out: int = 72
    n_in: int = 512
    bias: bool = False
    accumulate: bool = False
    out_f32: bool = False  # as logits are, whatever the type of the activations

    def __str__(self) -> str:
        flags = "".join(f"-{name}" for name in ("bias", "accumulate", "out_f32") if getattr(self, name))
        return f"{self.type}-{self.n_rows}x{self.n_out}x{self.n_in}{flags}"


MATMUL = (
    *(MatmulCase(type=t, n_rows=n) for t in WEIGHT_TYPES for n in N_ROWS),
    *(
        MatmulCase(type=t, n_rows=n, n_out=33, n_in=96)
        for t in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "MXFP4")
        for n in (1, 33)
    ),
    *(MatmulCase(type=t, n_rows=n, bias=True) for t in FEW_TYPES for n in (1, 33)),
    *(MatmulCase(type=t, n_rows=n, accumulate=True) for t in FEW_TYPES for n in (1, 33)),
    *(MatmulCase(type=t, n_rows=n, bias=True, accumulate=True, out_f32=True) for t in FEW_TYPES for n in (1, 33)),
    MatmulCase(type="F16", n_rows=3, n_out=1, n_in=256),
    MatmulCase(type="Q4_K", n_rows=2, n_out=3000, n_in=256, out_f32=True),
)


@dataclass(frozen=True, kw_only=True)
class NormCase:
    shape: tuple[int, ...]
    weight: bool = True
    f32_in: bool = False  # the residual stream may be f32 where activations are not
    in_place: bool = False

    def __str__(self) -> str:
        flags = "".join(f"-{name}" for name in ("weight", "f32_in", "in_place") if getattr(self, name))
        return "x".join(map(str, self.shape)) + flags


RMS_NORM = (
    *(NormCase(shape=(n, 512)) for n in N_ROWS),
    NormCase(shape=(5, 2880), f32_in=True),
    NormCase(shape=(3, 4, 128)),
    NormCase(shape=(3, 4, 64), in_place=True),
    NormCase(shape=(4, 100), weight=False),
    NormCase(shape=(1, 5120), weight=False, in_place=True),
)


@dataclass(frozen=True, kw_only=True)
class RopeCase:
    n_rows: int
    n_head: int
    head_dim: int
    params: RopeParams
    first: int = 0  # position of the first row
    freq_factors: bool = False

    def __str__(self) -> str:
        kind = "neox" if self.params.neox else "pairs"
        text = f"{self.n_rows}x{self.n_head}x{self.head_dim}-{kind}{self.params.n_dims}-at{self.first}"
        return text + ("-factors" if self.freq_factors else "") + ("-scaled" if self.params.scale != 1 else "")


ROPE = tuple(
    RopeCase(n_rows=n, n_head=4, head_dim=head_dim, params=params, first=first, freq_factors=factors)
    for n, head_dim, params, first, factors in (
        (1, 128, RopeParams(n_dims=128, base=1e6, neox=True), 77, False),
        (33, 128, RopeParams(n_dims=128, base=1e6, neox=True), 0, False),
        (130, 64, RopeParams(n_dims=64, base=1e4, neox=False), 0, False),
        (7, 64, RopeParams(n_dims=64, base=1e4, neox=False), 500, False),
        (7, 96, RopeParams(n_dims=32, base=1e4, neox=True), 20, False),
        (7, 96, RopeParams(n_dims=32, base=1e4, neox=False), 20, False),
        (7, 64, RopeParams(n_dims=64, base=5e5, neox=False), 20, True),
        (7, 64, RopeParams(n_dims=64, base=5e5, neox=True), 20, True),
        (7, 64, RopeParams(n_dims=64, base=1e4, neox=True, scale=0.25), 400, False),
    )
)


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """`n_cached` cells were there before the `n_rows` new ones; `n_kv` bounds both, by default exactly."""

    n_rows: int
    n_cached: int = 0
    n_head: int = 4
    n_head_kv: int = 2
    d_k: int = 64
    d_v: int = 64
    k_type: str = "F16"
    v_type: str = "F16"
    window: int | None = None
    sinks: bool = False
    v_in_k: bool = False  # V is a prefix of K
    slack: int = 0  # how much larger than needed the bound n_kv is

    def __str__(self) -> str:
        types = self.k_type if self.k_type == self.v_type else f"{self.k_type}+{self.v_type}"
        text = f"{types}-{self.n_rows}of{self.n_rows + self.n_cached}-h{self.n_head}x{self.n_head_kv}"
        text += f"-d{self.d_k}x{self.d_v}" + (f"-w{self.window}" if self.window else "")
        return (
            text
            + "".join(f"-{name}" for name in ("sinks", "v_in_k") if getattr(self, name))
            + (f"-slack{self.slack}" if self.slack else "")
        )


ATTENTION = (
    *(
        AttentionCase(n_rows=n, n_cached=c, k_type=t, v_type=t)
        for t in KV_TYPES
        for n, c in ((1, 40), (7, 0), (33, 60))
    ),
    AttentionCase(n_rows=1),
    AttentionCase(n_rows=130),
    AttentionCase(n_rows=1, n_cached=699),
    AttentionCase(n_rows=33, n_cached=667),
    AttentionCase(n_rows=1, n_cached=30, slack=200),
    AttentionCase(n_rows=33, n_cached=10, slack=300),
    AttentionCase(n_rows=1, n_cached=300, n_head=8, n_head_kv=1),
    AttentionCase(n_rows=7, n_cached=50, n_head=8, n_head_kv=8, d_k=128, d_v=128),
    AttentionCase(n_rows=7, n_cached=50, n_head=6, n_head_kv=2, d_k=96, d_v=96),
    AttentionCase(n_rows=33, n_cached=20, d_k=192, d_v=128),
    AttentionCase(n_rows=1, n_cached=20, d_k=192, d_v=128),
    AttentionCase(n_rows=1, n_cached=90, n_head_kv=1, d_k=288, d_v=256, v_in_k=True),
    AttentionCase(n_rows=33, n_cached=90, n_head_kv=1, d_k=288, d_v=256, v_in_k=True),
    *(AttentionCase(n_rows=n, n_cached=200, window=w) for n, w in ((1, 128), (33, 128), (33, 5), (7, 1), (1, 4096))),
    *(AttentionCase(n_rows=n, n_cached=60, sinks=True) for n in (1, 33)),
    AttentionCase(n_rows=33, n_cached=100, window=32, sinks=True, slack=50),
    AttentionCase(n_rows=7, n_cached=40, k_type="Q8_0", v_type="F16"),
    AttentionCase(n_rows=7, n_cached=40, k_type="Q8_0", v_type="Q4_0"),
)

KV_STORE = (
    *(AttentionCase(n_rows=n, k_type=t, v_type=t) for t in KV_TYPES for n in (1, 33)),
    AttentionCase(n_rows=5, n_head_kv=1, d_k=192, d_v=128),
    AttentionCase(n_rows=5, n_head_kv=1, d_k=288, d_v=256, v_in_k=True),
    AttentionCase(n_rows=5, k_type="Q8_0", v_type="F16"),
)


@dataclass(frozen=True, kw_only=True)
class RopeStoreCase:
    cells: AttentionCase
    params: RopeParams
    norm: bool = True
    factors: bool = False

    def __str__(self) -> str:
        text = f"{self.cells}-rope{self.params.n_dims}{'neox' if self.params.neox else ''}"
        return text + "".join(f"-{name}" for name in ("norm", "factors") if getattr(self, name))


_NEOX, _PAIRS = (RopeParams(n_dims=64, base=1e6, neox=neox) for neox in (True, False))
MATMULS = (("Q4_K", "Q4_K", "Q6_K"), ("F16", "IQ4_XS", "Q8_0"), ("Q5_K", "Q5_K"))
ROPE_STORE = (
    *(RopeStoreCase(cells=AttentionCase(n_rows=n), params=params) for n in (1, 33) for params in (_NEOX, _PAIRS)),
    *(RopeStoreCase(cells=AttentionCase(n_rows=1, k_type=t, v_type=t), params=_NEOX) for t in KV_TYPES),
    RopeStoreCase(
        cells=AttentionCase(n_rows=3, n_head=32, n_head_kv=4, d_k=128, d_v=128),
        params=RopeParams(n_dims=128, base=1e6, neox=True),
    ),
    RopeStoreCase(cells=AttentionCase(n_rows=3, d_k=192, d_v=128), params=_NEOX, norm=False, factors=True),
    RopeStoreCase(cells=AttentionCase(n_rows=3, d_k=96, d_v=96), params=_PAIRS, norm=False, factors=True),
    RopeStoreCase(cells=AttentionCase(n_rows=3), params=RopeParams(n_dims=32, base=1e4, neox=True, scale=0.25)),
)


@dataclass(frozen=True, kw_only=True)
class RouterCase:
    n_tokens: int
    n_expert: int
    n_expert_used: int
    params: RouterParams

    def __str__(self) -> str:
        text = f"{self.n_tokens}x{self.n_expert}top{self.n_expert_used}-{self.params.gating}"
        return text + ("-normalized" if self.params.normalize else "") + ("-scaled" if self.params.scale != 1 else "")


ROUTER = tuple(
    RouterCase(n_tokens=n, n_expert=e, n_expert_used=k, params=RouterParams(gating=g, normalize=norm, scale=scale))
    for n, e, k in ((1, 128, 8), (33, 8, 2), (7, 256, 8), (130, 60, 4))
    for g, norm, scale in (
        (Gating.SOFTMAX, True, 1.0),
        (Gating.SOFTMAX, False, 1.0),
        (Gating.SIGMOID, True, 2.5),
        (Gating.TOPK_SOFTMAX, False, 1.0),
    )
) + tuple(  # the weight of a shared expert: a mixture of one
    RouterCase(n_tokens=n, n_expert=1, n_expert_used=1, params=RouterParams(gating=Gating.SIGMOID, normalize=False))
    for n in (1, 33)
)

# (n_tokens, n_expert, n_expert_used)
ROUTED = ((1, 8, 2), (7, 8, 2), (33, 8, 4), (130, 16, 2))
SORTED = (*ROUTED, (1, 128, 8), (5, 256, 8), (300, 60, 4), (2000, 128, 8), (3, 4, 4), (40, 8, 1), (1, 1, 1), (33, 1, 1))
FFN_TYPES = (*((t, t) for t in WEIGHT_TYPES), ("Q4_K", "Q6_K"), ("Q5_0", "Q8_0"), ("IQ3_S", "IQ4_NL"))
TOP_K = ((1, 32, 1), (3, 5000, 40), (1, 152_064, 64), (2, 3000, 1024), (1, 100, 100))  # (n, n_vocab, k)
