"""What the log says at the start: versions, device, level of reproducibility."""
