"""How models/tiny-glm was made: `python -m scripts.tiny_glm` reproduces it. Needs the extra `tiny-glm` (PyTorch).

Read in this order: corpus (what it learns), tokenizer, model (GLM-5.2's architecture), train, export, compare.
"""
