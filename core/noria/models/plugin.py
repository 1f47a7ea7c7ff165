"""The built-in architectures, offered through the same hook as anyone else's."""

from __future__ import annotations

from collections.abc import Iterable

from noria.models import llama, olmoe, qwen2moe, qwen3, qwen3moe
from noria.plugins import ArchitectureSpec, hookimpl


@hookimpl
def noria_architectures() -> Iterable[ArchitectureSpec]:
    yield ArchitectureSpec(name="qwen3moe", build=qwen3moe.build, summary="Qwen3 MoE: 30B-A3B, 235B-A22B, Coder")
    yield ArchitectureSpec(name="qwen3", build=qwen3.build, summary="Qwen3, dense")
    yield ArchitectureSpec(name="qwen2moe", build=qwen2moe.build, summary="Qwen2 MoE: 57B-A14B, Qwen1.5-MoE-A2.7B")
    yield ArchitectureSpec(name="olmoe", build=olmoe.build, summary="OLMoE 1B-7B")
    yield ArchitectureSpec(name="llama", build=llama.build, summary="Llama 2/3, Mistral, Mixtral")
