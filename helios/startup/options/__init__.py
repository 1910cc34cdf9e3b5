"""The options of a trainer, its plugins and its loops: checked before anything starts."""
