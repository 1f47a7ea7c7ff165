"""What an architecture provides: its tensors, and each part of a layer in terms of the ops.

The scheduler decides what runs when and where. It calls attention tile by tile, then the feed-forward block: a dense
one tile by tile, a mixture of experts for the whole batch at once, with the experts wherever they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from noria.api import Glu, KVView, RouterParams, Tensor
from noria.gguf import ModelFile
from noria.models.graph import Graph
from noria.models.hparams import HParams


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """A tensor the model reads.

    Attributes:
        name: GGUF name, verbatim.
        shape: NumPy order; an expert tensor is [n_expert, n_out, n_in].
        layer: whose device it goes to; None = with the first layer, `n_layer` = with the output.
        optional: applied when present.
        experts: a routed-expert tensor, which may stay in host RAM.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    optional: bool = False
    experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """The routed experts of one layer.

    Attributes:
        gate, up, down: names of the expert tensors.
        router: how scores become weights.
        kind: the activation between them.
    """

    gate: str
    up: str
    down: str
    router: RouterParams
    kind: Glu


class Model(ABC):
    """One architecture with one file's hyperparameters. Holds no weights and no state."""

    def __init__(self, file: ModelFile, hparams: HParams) -> None:
        self.file = file
        self.hparams = hparams

    @abstractmethod
    def weights(self) -> list[WeightSpec]:
        """Every tensor the model may read."""

    def constants(self) -> dict[str, npt.NDArray[np.float32]]:
        """F32 tensors that are computed and not read, by name, for every device; they come before the file's."""
        return {}

    @abstractmethod
    def embed(self, g: Graph, h: Tensor, ids: Tensor) -> None:
        """h = embeddings of the tokens. h: F32 [n, n_embd]; ids: I32 [n]."""

    @abstractmethod
    def attention(self, g: Graph, layer: int, h: Tensor, positions: Tensor, kv: KVView, n_kv: int) -> None:
        """h += attention(norm(h)). h: F32 [n, n_embd]; positions: I32 [n]; no position is n_kv or more."""

    @abstractmethod
    def moe(self, layer: int) -> MoeSpec | None:
        """The routed experts of this layer; None where its feed-forward block is dense."""

    @abstractmethod
    def ffn(self, g: Graph, layer: int, h: Tensor) -> None:
        """h += ffn(norm(h)), where dense. h: F32 [n, n_embd]."""

    @abstractmethod
    def route(self, g: Graph, layer: int, h: Tensor, x: Tensor, ids: Tensor, weights: Tensor, *, forced: bool) -> None:
        """x = the experts' input; choose experts for it (or only weigh the `forced` ids).

        h: F32 [n, n_embd]; x: activations [n, n_embd]; ids: I32, weights: F32 [n, n_expert_used].
        """

    @abstractmethod
    def output(self, g: Graph, h: Tensor) -> Tensor:
        """Logits F32 [n, n_vocab] of h: F32 [n, n_embd]."""

    def kv_shape(self, layer: int) -> tuple[int, int, int]:
        """(n_head_kv, d_k, d_v) of this layer's cache."""
        p = self.hparams
        return p.n_head_kv, p.head_dim, p.head_dim_v
