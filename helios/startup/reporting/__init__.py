"""What is logged at the start: versions, device, level of reproducibility."""
