"""Adapters: LoRA, peft's format, and the frozen base."""
