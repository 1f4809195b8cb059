"""Pixels → batches."""
