"""Architectures: one file each, written in terms of the ops."""

from noria.models.base import Model, MoeSpec, WeightSpec
from noria.models.graph import Graph, Workspace
from noria.models.hparams import HParams, read_hparams

__all__ = ["Graph", "HParams", "Model", "MoeSpec", "WeightSpec", "Workspace", "read_hparams"]
