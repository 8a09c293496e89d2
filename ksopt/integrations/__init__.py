"""Integrations with other libraries, which are imported only here and need not be installed.

- `ksopt.integrations.transformers`: `KSConfig`, chains through ``from_pretrained``;
- `ksopt.integrations.peft`: LoRA beside chains.

timm's models, like any others, need no integration: use `ksopt.optimize` or `ksopt.convert`.
"""
