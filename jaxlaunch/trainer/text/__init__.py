"""Documents, tokenizers and packed rows."""
