"""Ops: every type and shape of `noria.testing.cases`, against the definitions of `noria.testing.expected`."""

from __future__ import annotations

from noria.testing.suite.attention import AttentionCases
from noria.testing.suite.dense import DenseCases
from noria.testing.suite.experts import ExpertCases
from noria.testing.suite.routing import RoutingCases


class OpsSuite(DenseCases, AttentionCases, RoutingCases, ExpertCases):
    """An op that a backend does not have is skipped as MISSING; one that it has must be right everywhere."""
