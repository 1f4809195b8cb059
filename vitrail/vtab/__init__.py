"""VTAB-1k: 19 tasks of 1,000 training images."""
