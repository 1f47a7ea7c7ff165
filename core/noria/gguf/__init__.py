"""Model files: metadata, tensor table, expert slabs as byte ranges, and synthetic models of any size."""

from noria.gguf.header import TensorInfo
from noria.gguf.metadata import Metadata, StringArray
from noria.gguf.model_file import ModelFile, open_model
from noria.gguf.quants import SUPPORTED_TYPES, block_facts, dequantize, row_nbytes

__all__ = [
    "SUPPORTED_TYPES",
    "Metadata",
    "ModelFile",
    "StringArray",
    "TensorInfo",
    "block_facts",
    "dequantize",
    "open_model",
    "row_nbytes",
]
