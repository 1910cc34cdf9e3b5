"""What users subclass, and which of its attributes are state.

Nothing here may open a file or decide when something happens.
"""

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
