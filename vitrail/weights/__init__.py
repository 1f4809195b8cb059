"""Published checkpoints ↔ our names: any known format in, any known format out."""
