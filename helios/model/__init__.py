"""What users subclass, and which of its attributes are state.

Nothing here may open a file or decide when something happens.
"""

from helios.model.model import MODEL_REGISTRY, Model, create_model, find_pretrained_file

__all__ = ["MODEL_REGISTRY", "Model", "create_model", "find_pretrained_file"]
