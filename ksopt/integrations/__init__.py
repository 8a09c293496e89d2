"""ksopt inside other libraries, which are imported only here and need not be installed.

- `ksopt.integrations.transformers`: `KSConfig`, chains through ``from_pretrained``;
- `ksopt.integrations.peft`: LoRA beside chains.

timm's models, as any others, need nothing of their own: `ksopt.optimize`, `ksopt.convert`.
"""
