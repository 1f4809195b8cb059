"""What to learn: one idea per file, all of them plugged into the one training loop."""
