"""What users attach to a training: plugins.

Nothing here may import more than hooks and what lies below.
"""
