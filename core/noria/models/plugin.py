"""The built-in architectures, offered through the same hook as anyone else's."""

from __future__ import annotations

from collections.abc import Iterable

from noria.models import llama, qwen3moe
from noria.plugins import ArchitectureSpec, hookimpl


@hookimpl
def noria_architectures() -> Iterable[ArchitectureSpec]:
    yield ArchitectureSpec(name="qwen3moe", build=qwen3moe.build, summary="Qwen3 MoE: 30B-A3B, 235B-A22B, Coder")
    yield ArchitectureSpec(name="llama", build=llama.build, summary="Llama 2/3, Mistral, Mixtral")
