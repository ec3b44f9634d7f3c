"""Sources of examples, one module or package for each kind."""
