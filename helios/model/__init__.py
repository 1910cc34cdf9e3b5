"""``Model``, the class that users subclass, and the discovery of its state."""

from helios.model.model import MODEL_REGISTRY, Model, create_model, find_pretrained_file
from helios.model.processor import BatchProcessor, Processed

__all__ = [
    "BatchProcessor",
    "MODEL_REGISTRY",
    "Model",
    "Processed",
    "create_model",
    "find_pretrained_file",
]
