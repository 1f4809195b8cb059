"""What a model has learned: filters, position embeddings, attention, features."""
