"""PyTorch modules of transformers as JAX functions, by torchax."""
