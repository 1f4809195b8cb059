"""Other labels and test sets for ImageNet-1k models: ReaL, ImageNet-V2, ObjectNet."""
