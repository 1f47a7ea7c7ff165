"""The ops: their names, how support for them is asked, and their parameters. `kernels` says what each one means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """Every op of the contract. A backend may have a part of them; the rest runs on the reference through the host."""

    GET_ROWS = "get_rows"
    RMS_NORM = "rms_norm"
    ADD = "add"
    SCALE = "scale"
    MATMUL = "matmul"
    ROPE = "rope"
    KV_STORE = "kv_store"
    ATTENTION = "attention"
    ROUTE_TOPK = "route_topk"
    SORT_ROWS = "sort_rows"
    MUL_MAT_ID = "mul_mat_id"
    GLU = "glu"
    COMBINE = "combine"
    TOP_K = "top_k"
    # Composites, which have defaults in terms of the others.
    MATMULS = "matmuls"
    ROPE_STORE = "rope_store"
    EXPERT_FFN = "expert_ffn"


class Support(StrEnum):
    """How a backend answers an `OpQuery`."""

    NATIVE = "native"  # a kernel reads these types as they are
    CONVERTED = "converted"  # works, after converting the weights into scratch
    MISSING = "missing"  # nobody has written it: it runs on the reference
    IMPOSSIBLE = "impossible"  # this hardware cannot do it

    @property
    def usable(self) -> bool:
        return self in (Support.NATIVE, Support.CONVERTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpQuery:
    """One op with the types and sizes it would run with. Hashable: answers may be cached.

    Attributes:
        type: of the weights (get_rows, matmul, matmuls, mul_mat_id, expert_ffn), of K (kv_store, attention,
            rope_store), else of the input.
        type2: second type: of V (kv_store, attention, rope_store), of `down` (expert_ffn).
        activation: type of the activations that go in.
        n_rows: tokens or rows that go in.
        dims: get_rows (n_vocab, n_embd); matmul, matmuls (n_out, n_in); attention, kv_store (n_head, n_head_kv, d_k,
            d_v, n_kv); rope (n_head, head_dim); rope_store (n_head, n_head_kv, d_k, d_v, n_dims of RoPE); route_topk,
            sort_rows (n_expert, n_expert_used); mul_mat_id (n_expert, n_out, n_in); expert_ffn (n_expert, n_ff,
            n_embd); top_k (n_vocab, k); others (width,).
    """

    op: Op
    type: str = "F32"
    type2: str = ""
    activation: str = "F32"
    n_rows: int = 1
    dims: tuple[int, ...] = ()

    def __str__(self) -> str:
        types = "/".join(t for t in (self.type, self.type2, self.activation) if t)
        return f"{self.op}[{types}] rows={self.n_rows} dims={'x'.join(map(str, self.dims))}"


class Gating(StrEnum):
    """How router logits become the weights of the chosen experts."""

    SOFTMAX = "softmax"  # over all experts, before choosing
    SIGMOID = "sigmoid"  # of each expert, before choosing
    TOPK_SOFTMAX = "topk_softmax"  # over the chosen ones only


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParams:
    """Attributes:
    normalize: divide the chosen weights by their sum.
    scale: factor on the chosen weights.
    """

    gating: Gating = Gating.SOFTMAX
    normalize: bool = True
    scale: float = 1.0


class Glu(StrEnum):
    """Gated activations: out = f(gate) * up."""

    SWIGLU = "swiglu"  # f(x) = x * sigmoid(x)
    GEGLU = "geglu"  # f(x) = gelu(x), tanh form


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParams:
    """Rotary position embedding.

    The pair (a, b) of dimension i < n_dims/2 turns by `position * scale * base**(-2i/n_dims) / freq_factors[i]`.

    Attributes:
        n_dims: leading numbers of a head that turn; the rest stays.
        neox: pairs are (i, i + n_dims/2); otherwise (2i, 2i + 1).
        scale: factor on positions (1 / the model's linear scaling factor).
    """

    n_dims: int
    base: float
    neox: bool
    scale: float = 1.0
