"""Model + data + objective → a better model: the only loop."""
