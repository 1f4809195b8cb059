"""Models as files that run without Vitrail: ONNX, torch.export, Hugging Face hub."""
