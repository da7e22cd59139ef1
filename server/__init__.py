"""glmserve: a self-contained inference server for GLM models on llama.cpp."""

__version__ = "0.1.0"
