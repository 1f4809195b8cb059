"""Speed and memory of models."""
