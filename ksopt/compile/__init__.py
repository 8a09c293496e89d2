"""The torch.compile backend: ``torch.compile(model, backend="ksopt")``."""
